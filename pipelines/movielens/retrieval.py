"""Retrieval of a user's next item from the ones before it: one model, three losses.

A query is a Dense layer over the sum of the last items' rows ÷ the root of their number, and
candidates are the rows of the same table. An example is a position of a user: the items before it,
and the item. A user's last item judges.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import keras
import ml_collections
import numpy as np

import dp_sparse
from pipelines.methods import NON_PRIVATE, calibrated, optimizer_under
from pipelines.movielens.interactions import SequenceDataError, read
from pipelines.optimizers import optimizer_of

CUTOFFS = (10, 100)
LOSSES = ("sampled", "in_batch", "full")


@dataclasses.dataclass(frozen=True)
class Examples:
    """What trains, and what judges.

    Attributes:
        histories: int32 `[examples, history]`; 0 is padding.
        items: int32 `[examples]`.
        queries: int32 `[users, history]`, before the last item of each user.
        answers: int32 `[users]`, that item.
        earlier: The items of each user before it.
        num_items: The largest item's number.
    """

    histories: np.ndarray
    items: np.ndarray
    queries: np.ndarray
    answers: np.ndarray
    earlier: list[np.ndarray]
    num_items: int


def examples_of(config: ml_collections.ConfigDict) -> Examples:
    """The examples of the first `config.users` of all users, a fraction.

    Raises:
        SequenceDataError: The file cannot be read, or no user has two items.
    """
    found = read(Path(config.path))
    sequences = found.sequences()
    kept = [own for own in sequences[: math.ceil(config.users * len(sequences))] if len(own) > 1]
    if not kept:
        raise SequenceDataError(
            f"Expected users with two items or more in {config.path}, got none."
        )
    windows = [_windows(own, config.history) for own in kept]
    return Examples(
        np.concatenate([own[:-1] for own in windows]),
        np.concatenate([own[:-1] for own in kept]).astype(np.int32),
        np.stack([own[-1] for own in windows]),
        np.array([own[-1] for own in kept], np.int32),
        [own[:-1] for own in kept],
        int(found.items.max()),
    )


def _windows(sequence: np.ndarray, history: int) -> np.ndarray:
    """The items before each one, int32 `[items, history]`."""
    padded = np.concatenate([np.zeros(history, np.int64), sequence])
    windows = np.lib.stride_tricks.sliding_window_view(padded, history)
    return windows[: len(sequence)].astype(np.int32)


class Retrieval(keras.Model):
    """Queries against items.

    Args:
        num_items: The largest item's number.
        config: `model` of the run.
        log_chances: For in-batch negatives, log of how often each item is the answer,
            `[num_items + 1]`, float32.
    """

    def __init__(
        self, num_items: int, config: ml_collections.ConfigDict, log_chances: np.ndarray
    ) -> None:
        super().__init__()
        if config.loss not in LOSSES:
            raise ValueError(f"Expected model.loss among {LOSSES}, got model.loss={config.loss!r}.")
        kind = keras.layers.ReversibleEmbedding if config.loss == "full" else keras.layers.Embedding
        self.items = kind(num_items + 1, config.width, name="items")
        self.dense = keras.layers.Dense(config.width)
        self.kind, self.log_chances = config.loss, log_chances
        if config.loss == "full":
            self.softmax = dp_sparse.losses.FullSoftmax(self.items)
        elif config.loss == "sampled":
            self.softmax = dp_sparse.losses.SampledSoftmax(self.items, config.negatives)

    def call(self, histories: Any) -> Any:
        ops = keras.ops
        rows = self.items(histories)
        there = ops.cast(ops.not_equal(histories, 0), rows.dtype)[..., None]
        count = ops.maximum(ops.sum(there, axis=1), 1.0)
        return self.dense(ops.sum(rows * there, axis=1) / ops.sqrt(count))

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        if self.kind != "in_batch":
            return self.softmax(y_pred, y)
        return in_batch_loss(y_pred, self.items(y), y, self.log_chances)


def in_batch_loss(queries: Any, vectors: Any, ids: Any, log_chances: np.ndarray) -> Any:
    """The mean over the batch, against the items of its other examples, log-q corrected."""
    ops = keras.ops
    scores = ops.matmul(queries, ops.transpose(vectors)) - ops.take(log_chances, ids)[None, :]
    own = ops.eye(ops.shape(ids)[0]) > 0
    again = ops.logical_and(ops.equal(ids[:, None], ids[None, :]), ops.logical_not(own))
    scores = ops.where(again, -1e9, scores)
    right = ops.arange(ops.shape(ids)[0])
    losses = keras.losses.sparse_categorical_crossentropy(right, scores, from_logits=True)
    return ops.mean(losses)


def train(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """One run: its recalls in percent, with those of popularity, and its rows of a step."""
    keras.utils.set_random_seed(config.seed)
    data = examples_of(config.data)
    counts = np.bincount(data.items, minlength=data.num_items + 1)
    log_chances = np.log(np.maximum(counts, 1) / counts.sum()).astype(np.float32)
    model = Retrieval(data.num_items, config.model, log_chances)
    size, batch_size = len(data.items), config.training.batch_size
    steps = max(1, round(config.training.epochs * size / batch_size))
    rows = None
    if config.method == NON_PRIVATE:
        model.compile(optimizer_of(config, steps=steps))
        epochs = math.ceil(config.training.epochs)
        model.fit(data.histories, data.items, batch_size=batch_size, epochs=epochs, verbose=0)
    else:
        sampling = dp_sparse.PoissonSampling(size, batch_size, steps=steps)
        plan, _ = calibrated(config, sampling, _nothing, lambda plan, rows: None)
        model.compile(optimizer_under(config, plan, None))
        model.fit(plan.sampling.batches((data.histories, data.items)), verbose=0)
        if config.method == "dp_adafest":
            rows = float(model.optimizer.diagnostics.rows.numpy().sum() / steps)
    scores = model.predict(data.queries, batch_size=1024, verbose=0)
    scores = scores @ np.asarray(model.items.weights[0]).T
    return {
        "recall": recalls(scores, data),
        "popularity": recalls(np.tile(counts.astype(float), (len(data.answers), 1)), data),
        "examples": size,
        "users": len(data.answers),
        "items": data.num_items,
        "rows": rows,
        "steps": steps,
    }


def _nothing(plan: dp_sparse.PrivacyPlan) -> dp_sparse.SelectedRows:
    raise ValueError("Expected a method that selects no rows before training.")


def recalls(scores: np.ndarray, data: Examples) -> dict[str, float]:
    """Of users whose answer is among the best that they have not had, in percent, by cutoff."""
    scores, every = np.array(scores, np.float64), np.arange(len(data.answers))
    answers = scores[every, data.answers]
    for user, earlier in enumerate(data.earlier):
        scores[user, earlier] = -np.inf
    scores[:, 0], scores[every, data.answers] = -np.inf, answers
    ranks = np.count_nonzero(scores >= answers[:, np.newaxis], axis=1)
    return {str(k): round(100 * float(np.mean(ranks <= k)), 3) for k in CUTOFFS}

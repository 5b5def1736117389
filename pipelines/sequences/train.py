"""Trains one next-item model privately, or without privacy, with a score every few epochs.

Adam with weight decay on normalised gradients (Ding et al., ICML 2024, D.3 and D.6). Weight decay
is applied by Adam to the weights after noise: it is computed from what was released.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import keras
import ml_collections
import tensorflow as tf

import dp_sparse
from models.sequence_transformer import Encoder, sequence_model
from pipelines.runs import Run
from pipelines.schedules import WarmUpAndDecay
from pipelines.sequences.examples import SequenceExamples
from pipelines.sequences.plans import Accounted, accounted, steps_of, unpaid
from pipelines.steps import steps_taken

Score = Callable[[keras.Model], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model after its run.

    Attributes:
        model: The model.
        curve: Scores by epochs done, from where this process began.
        steps: Steps taken; of a private run those that are spent, also if their weights were lost.
        seconds: The time of training in this process, without that of scores.
        plan: What was paid; None without privacy.
    """

    model: keras.Model
    curve: dict[int, dict[str, float]]
    steps: int
    seconds: float
    plan: dp_sparse.PrivacyPlan | None


def train(
    config: ml_collections.ConfigDict,
    examples: SequenceExamples,
    score: Score,
    protected: str,
    frequencies: dp_sparse.RowFrequencies | None = None,
    run: Run | None = None,
) -> Trained:
    """Trains `config.model` on the examples; a private run goes on where its directory is.

    Args:
        config: The experiment, which `check` has passed.
        examples: What it is trained on.
        score: Called after every `training.score_every` epochs, and at the end.
        protected: Whom a private run's statement speaks of, for its report.
        frequencies: Of the tokens, if they were counted already.
        run: What is kept of a private run; None to keep nothing.

    Raises:
        ValueError: No noise meets the budget of `config.privacy`.
    """
    keras.utils.set_random_seed(config.seed)  # initial weights alone
    steps = steps_of(config, len(examples))
    every = _epochs_of_a_score(config, steps)
    paid, callbacks = None, []
    if config.privacy.method == "dp_sgd":
        paid = accounted(config, examples, frequencies, run)
        callbacks = _private_callbacks(config, protected, run)
    model, batches = _compiled(config, examples, paid)
    done = run.restore(model) if run is not None else 0
    scores = _Scores(score, every, config.report.verbose)
    parts = config.training.epochs // every
    if done < steps:
        model.fit(
            batches,
            epochs=parts,
            initial_epoch=done * parts // steps,
            steps_per_epoch=steps // parts if paid is None else None,  # shares of what is left
            verbose=config.report.verbose,
            callbacks=[*callbacks, scores],
        )
    if config.training.epochs not in scores.curve:  # all steps were taken before
        scores.curve[config.training.epochs] = score(model)
    taken = steps_taken(model.optimizer)
    return Trained(model, scores.curve, taken, scores.seconds, None if paid is None else paid.plan)


def check(config: ml_collections.ConfigDict, examples: SequenceExamples) -> None:
    """Refuses settings; called before anything of the examples is counted, which would be spent.

    Raises:
        ValueError: A setting that the model, the plan or the optimizer refuses.
    """
    if config.privacy.method not in ("dp_sgd", "none"):
        raise ValueError(
            f"Expected privacy.method 'dp_sgd' or 'none', got {config.privacy.method!r}."
        )
    _epochs_of_a_score(config, steps_of(config, len(examples)))
    if config.privacy.method == "dp_sgd":
        _compiled(config, examples, unpaid(config, examples))


def _epochs_of_a_score(config: ml_collections.ConfigDict, steps: int) -> int:
    """How many epochs there are from one score to the next."""
    epochs, wanted = config.training.epochs, config.training.score_every
    every = min(wanted, epochs) or epochs
    if wanted < 0 or epochs % every:
        raise ValueError(
            f"Expected training.score_every that divides training.epochs={epochs}, or 0 for one "
            f"score at the end, got training.score_every={wanted}."
        )
    if steps < epochs // every:
        raise ValueError(
            f"Expected a step or more for each score, got {steps} steps and {epochs // every} "
            f"scores: raise training.score_every={wanted}, or lower training.batch_size="
            f"{config.training.batch_size}."
        )
    return every


def _compiled(
    config: ml_collections.ConfigDict, examples: SequenceExamples, paid: Accounted | None
) -> tuple[keras.Model, tf.data.Dataset]:
    """The model and its batches."""
    model = sequence_model(_encoder(config, examples, paid), examples.y.shape[1])
    steps = steps_of(config, len(examples))
    rate = WarmUpAndDecay(config.optimizer.learning_rate, steps, config.optimizer.warm_up)
    decay = config.optimizer.weight_decay
    if not 0 <= decay < 1:
        raise ValueError(
            f"Expected 0 <= optimizer.weight_decay < 1, got optimizer.weight_decay={decay!r}."
        )
    optimizer = keras.optimizers.Adam(rate, weight_decay=decay or None)
    data = examples.x, examples.y
    if paid is None:
        batches = _shuffled(data, len(examples), config.training.batch_size)
    else:
        optimizer = dp_sparse.DPSGDOptimizer(
            optimizer,
            paid.plan,
            config.privacy.clip_norm,
            clipping=dp_sparse.AutomaticClipping(),
            microbatch_size=config.training.microbatch_size or None,
        )
        batches = paid.plan.sampling.batches(data)
    # A padded position has no item to come, and no loss.
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    model.compile(optimizer, loss)
    return model, batches


def _encoder(
    config: ml_collections.ConfigDict, examples: SequenceExamples, paid: Accounted | None
) -> Encoder:
    errors = None
    if config.model.kind == "re_attention":
        if paid is None or paid.frequencies is None:
            raise ValueError(
                "Expected model.kind without Re-Attention for privacy.method='none', got "
                "model.kind='re_attention': without noise there are no errors to correct."
            )
        errors = dp_sparse.layers.effective_errors(
            paid.plan, config.privacy.clip_norm, paid.frequencies
        )
    return Encoder(examples.num_tokens, examples.x.shape[1], errors=errors, **config.model)


def _private_callbacks(
    config: ml_collections.ConfigDict, protected: str, run: Run | None
) -> list[keras.callbacks.Callback]:
    """What keeps a private run, and its report."""
    kept = [] if run is None else run.callbacks()
    if not config.report.directory:
        return kept
    page = f"{config.report.directory}/report.html"
    return [dp_sparse.PrivacyReport(page, note=protected), *kept]


class _Scores(keras.callbacks.Callback):
    """Scores the model after each of Keras' epochs, which are `every` of ours.

    Attributes:
        curve: The scores by epochs done.
        seconds: The time of `fit` without that of scores.
    """

    def __init__(self, score: Score, every: int, verbose: int) -> None:
        super().__init__()
        self._score, self._every, self._verbose = score, every, verbose
        self.curve: dict[int, dict[str, float]] = {}
        self.seconds = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        self._since = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds += time.perf_counter() - self._since
        done = (epoch + 1) * self._every
        found = self.curve[done] = self._score(self.model)
        if self._verbose:
            print(f"epoch {done}:", *(f"{name} {value:.4f}" for name, value in found.items()))
        self._since = time.perf_counter()

    def on_train_end(self, logs: Any = None) -> None:
        self.seconds += time.perf_counter() - self._since


def _shuffled(data: tuple[object, ...], examples: int, batch_size: int) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(examples).repeat()
    return dataset.batch(batch_size, drop_remainder=True).prefetch(2)

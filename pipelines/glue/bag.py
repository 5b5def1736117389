"""A bag of words: a word table, the sum of a phrase's rows over √words, and one logit.

Nearly all of its numbers are in the table, so what private methods do to the table is what one
sees. `model.words` freezes the table, or puts LoRA on it: then a frozen random table plus A·B of
rank r is trained, and DP-AdaFEST chooses rows of A.
"""

import dataclasses
import functools
import math
from typing import Any

import keras
import ml_collections
import numpy as np
from keras import ops

import dp_sparse
from models.lora import LowRankWords
from pipelines.glue.data import HELD_OUT, load
from pipelines.glue.records import Tokens
from pipelines.glue.settings import METHODS, steps_of
from pipelines.glue.tasks import task_of
from pipelines.glue.tokens import tokenizer_of
from pipelines.glue.words import selected_rows
from pipelines.methods import NON_PRIVATE, calibrated, optimizer_under
from pipelines.optimizers import optimizer_of
from pipelines.resampling import resampled_accuracy
from pipelines.scores import exact_auc
from pipelines.steps import stock_batches

WORDS = ("trained", "frozen", "lora")
_DEVIATION = 0.03  # of the first table: words that no step has trained hardly count


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a run.

    Attributes:
        accuracy: The part of the examples that were classified correctly, by what judged.
        auc: Likewise the area under the ROC curve.
        entries: Entries of the table, or of LoRA on it, that got noise in a step, on average.
        reduction: Entries of the whole table ÷ `entries`; infinite if it is frozen.
        steps: Steps taken.
        training_rows: Examples that trained.
        words: Rows of the whole table.
        resampled: The accuracy of each draw of held-out examples; empty if none are held out.
    """

    accuracy: dict[str, float]
    auc: dict[str, float]
    entries: float
    reduction: float
    steps: int
    training_rows: int
    words: int
    resampled: list[float]


def bag_of_words(rows: int, width: int, length: int, words: str, rank: int) -> keras.Model:
    """The model, from `token_ids` and `padding_mask` `[batch, length]` to logits `[batch, 1]`.

    Raises:
        ValueError: `words` is none of `WORDS`, or a rank without LoRA.
    """
    if words not in WORDS or (words == "lora") != (rank > 0):
        raise ValueError(
            f"Expected model.words in {WORDS}, with model.word_rank > 0 for lora alone, got "
            f"model.words={words!r} and model.word_rank={rank}."
        )
    ids = keras.Input((length,), dtype="int32", name="token_ids")
    mask = keras.Input((length,), dtype="int32", name="padding_mask")
    initial = keras.initializers.RandomNormal(stddev=_DEVIATION)
    table = keras.layers.Embedding(rows, width, embeddings_initializer=initial, name="words")
    table.trainable = words == "trained"
    if words == "lora":
        table.build((None, length))
    lookup = LowRankWords(table, rank, name="words_lora") if words == "lora" else table
    there = ops.expand_dims(ops.cast(mask, "float32"), -1)
    pooled = ops.sum(lookup(ids) * there, axis=1) / ops.sqrt(ops.sum(there, axis=1))
    return keras.Model(
        {"token_ids": ids, "padding_mask": mask}, keras.layers.Dense(1, name="logit")(pooled)
    )


def train(config: ml_collections.ConfigDict) -> Result:
    """Trains and judges one bag of words.

    Raises:
        GlueDataError: The text or the tokenizer cannot be used.
        ValueError: A setting cannot be used.
    """
    if config.method not in METHODS:
        raise ValueError(f"Expected method to be one of {METHODS}, got method={config.method!r}.")
    keras.utils.set_random_seed(config.seed)  # initial weights; noise and sampling have own keys
    tokenizer = tokenizer_of(config.model.tokenizer)
    data = load(config, task_of(config), tokenizer, segments=False)
    steps = steps_of(config, len(data.training))
    model = bag_of_words(
        tokenizer.size,
        config.model.width,
        config.data.length,
        config.model.words,
        config.model.word_rank,
    )
    report = None
    if config.method == NON_PRIVATE:
        optimizer = optimizer_of(config, steps=steps)
        batches = stock_batches(data.training, config.training.batch_size, steps)
    else:
        report = dp_sparse.PrivacyReport(None)
        optimizer = _private_optimizer(config, data.training, tokenizer, steps)
        batches = optimizer.plan.sampling.batches(data.training)
    model.compile(optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True))
    own = [] if report is None else [report]
    model.fit(batches, callbacks=own, verbose=config.report.verbose)
    scores = {name: _scores(model, part) for name, part in data.judging.items()}
    right = {name: (s > 0) == (y > 0) for name, (s, y) in scores.items()}
    entries = _entries(model, report)
    return Result(
        accuracy={name: float(np.mean(own)) for name, own in right.items()},
        auc={name: exact_auc(y, s) for name, (s, y) in scores.items()},
        entries=entries,
        reduction=tokenizer.size * config.model.width / entries if entries else math.inf,
        steps=steps,
        training_rows=len(data.training),
        words=tokenizer.size,
        resampled=resampled_accuracy(right[HELD_OUT]) if HELD_OUT in right else [],
    )


def _private_optimizer(
    config: ml_collections.ConfigDict, training: Tokens, tokenizer: Any, steps: int
) -> keras.optimizers.Optimizer:
    sampling = dp_sparse.PoissonSampling(
        num_examples=len(training), expected_batch_size=config.training.batch_size, steps=steps
    )
    table = "down" if config.model.words == "lora" else "words"
    select = functools.partial(selected_rows, config, table, tokenizer.size, training, tokenizer)
    build = functools.partial(optimizer_under, config)
    return build(*calibrated(config, sampling, select, build))


def _scores(model: keras.Model, examples: Tokens) -> tuple[np.ndarray, np.ndarray]:
    """Logits and labels, `[examples]` each."""
    x, y = examples.all()
    return model.predict(x, batch_size=4096, verbose=0)[:, 0], y


def _entries(model: keras.Model, report: dp_sparse.PrivacyReport | None) -> float:
    """Entries of the words' weights that get noise in a step, on average."""
    sizes = [math.prod(v.shape) for v in model.trainable_variables if "words" in v.path]
    if report is None or not report.history.rows:
        return float(sum(sizes))
    (table,) = model.optimizer.noised_tables
    dense = sum(sizes) - math.prod(table.shape)
    return float(np.mean(report.history.rows)) * table.shape[1] + dense

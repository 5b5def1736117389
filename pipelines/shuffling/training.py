"""A small ViT and a small BERT, trained with and without shuffling, in turns.

Without noise both must end with the same loss (Table II); with it they have different noise, since
nothing tells their keys. Epochs are timed (Table VIII).
"""

import csv
import gzip
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

import dp_sparse

Examples = tuple[np.ndarray, np.ndarray]

EXAMPLES, TESTED, BATCH, EPOCHS = 4000, 2000, 200, 3
WORDS, LENGTH, SEED = 5000, 32, 7
WARM_UP = 5  # steps that are not timed: the first ones are traced and checked
EPSILON, DELTA = 8.0, 1e-5
_TINY = 1e-9  # a noise multiplier
_WIDTHS = {"num_layers": 2, "num_heads": 2, "hidden_dim": 64}


def vit() -> keras.Model:
    """From images `[batch, 28, 28, 1]` to logits of digits."""
    from keras_hub import models

    backbone = models.ViTBackbone((28, 28, 1), (7, 7), mlp_dim=128, **_WIDTHS)
    images = keras.Input((28, 28, 1))
    return keras.Model(images, keras.layers.Dense(10)(backbone(images)[:, 0]))


def bert() -> keras.Model:
    """From words `[batch, 32]`, 0 behind the last, to logits of two classes."""
    from keras_hub import models

    backbone = models.BertBackbone(
        WORDS, intermediate_dim=128, max_sequence_length=LENGTH, dropout=0.0, **_WIDTHS
    )
    words = keras.Input((LENGTH,), dtype="int32")
    present = keras.ops.cast(words != 0, "int32")
    given = {"token_ids": words, "padding_mask": present, "segment_ids": 0 * words}
    return keras.Model(words, keras.layers.Dense(2)(backbone(given)["pooled_output"]))


def mnist(path: Path) -> tuple[Examples, Examples]:
    """The first images of the training and the test split of Keras' mnist.npz."""
    with np.load(path) as arrays:
        return (
            _images(arrays["x_train"][:EXAMPLES], arrays["y_train"][:EXAMPLES]),
            _images(arrays["x_test"][:TESTED], arrays["y_test"][:TESTED]),
        )


def _images(x: np.ndarray, y: np.ndarray) -> Examples:
    return (x[..., np.newaxis] / 255).astype(np.float32), y.astype(np.int32)


def sst2(folder: Path) -> tuple[Examples, Examples]:
    """The first sentences of SST-2; words are numbered by a checksum, which needs no vocabulary."""
    return _sentences(folder / "train.tsv.gz", EXAMPLES), _sentences(folder / "dev.tsv.gz", TESTED)


def _sentences(path: Path, count: int) -> Examples:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[:count]
    words = np.zeros((len(rows), LENGTH), np.int32)
    for row, given in zip(words, rows, strict=True):
        for place, word in enumerate(given["sentence"].split()[:LENGTH]):
            row[place] = 1 + zlib.crc32(word.encode()) % (WORDS - 1)
    return words, np.array([int(given["label"]) for given in rows], np.int32)


def compared(
    build: Callable[[], keras.Model], training: Examples, test: Examples, private: bool
) -> dict[str, Any]:
    """Trains both in turns, step by step.

    Args:
        build: The model.
        training: Examples and labels.
        test: Likewise.
        private: With noise for `EPSILON`; without, both have the same batches and no noise.

    Returns:
        Of each the test loss and accuracy and the seconds of an epoch; how far their weights are
        apart, and how far their logits.
    """
    names = {"plain": dp_sparse.DPSGDOptimizer, "shuffled": dp_sparse.ShuffledDPSGDOptimizer}
    models = {
        name: _compiled(build, kind, len(training[1]), private) for name, kind in names.items()
    }
    batches = [m.optimizer.plan.sampling.batches(training) for m in models.values()]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for both in zip(*batches, strict=True):
        for (name, model), batch in zip(models.items(), both, strict=True):
            begun = time.perf_counter()
            model.train_on_batch(*batch)
            seconds[name].append(time.perf_counter() - begun)
    steps = len(training[1]) // BATCH
    found: dict[str, Any] = {
        name: _evaluated(model, test)
        | {"epoch_seconds": steps * statistics.median(seconds[name][WARM_UP:])}
        for name, model in models.items()
    }
    logits = [model.predict(test[0], verbose=0) for model in models.values()]
    pairs = zip(*(model.get_weights() for model in models.values()), strict=True)
    found["weights_apart"] = float(np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs)))
    found["logits_apart"] = float(np.abs(logits[0] - logits[1]).max())
    return found


def _compiled(
    build: Callable[[], keras.Model], kind: Any, examples: int, private: bool
) -> keras.Model:
    sampling = dp_sparse.PoissonSampling(examples, BATCH, epochs=EPOCHS)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(EPSILON, DELTA), sampling).calibrate()
    if not private:
        plan = dp_sparse.not_private_plan(plan, SEED).with_noise(_TINY)
    keras.utils.set_random_seed(SEED)
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = kind(keras.optimizers.Adam(2e-3), plan, clip_norm=1.0)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def _evaluated(model: keras.Model, test: Examples) -> dict[str, float]:
    loss, accuracy = model.evaluate(*test, batch_size=500, verbose=0)
    return {"loss": float(loss), "accuracy": float(accuracy)}

"""Honest models pass the comparison with other batches, in float32 and in mixed precision."""

from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from models import classifiers, dlrm, pctr, vision

SIZE = 48
VOCABULARIES = (50, 1000, 7, 300)
_rng = np.random.default_rng(0)


def click_rows() -> dict[str, np.ndarray]:
    ids = [_rng.integers(0, size, SIZE) for size in VOCABULARIES]
    return {
        "integers": _rng.normal(size=(SIZE, 13)).astype(np.float32),
        "categories": np.stack(ids, 1).astype(np.int32),
    }


def images(*shape: int) -> np.ndarray:
    return _rng.normal(size=(SIZE, *shape)).astype(np.float32)


def words(length: int, vocabulary: int) -> np.ndarray:
    return _rng.integers(1, vocabulary, (SIZE, length)).astype(np.int32)


def bert() -> keras.Model:
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=90,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=12,
    )
    pooled = keras.layers.Dense(2)(backbone.output["pooled_output"])
    return keras.Model(backbone.input, pooled)


def bert_inputs() -> dict[str, np.ndarray]:
    lengths = _rng.integers(3, 13, SIZE)
    return {
        "token_ids": words(12, 90),
        "segment_ids": np.zeros((SIZE, 12), np.int32),
        "padding_mask": (np.arange(12) < lengths[:, None]).astype(np.int32),
    }


MODELS: dict[str, tuple[Callable[[], keras.Model], Callable[[], Any]]] = {
    "pctr": (lambda: pctr.pctr(VOCABULARIES), click_rows),
    "dlrm": (lambda: dlrm.dlrm(VOCABULARIES, 13), click_rows),
    "dcn": (lambda: dlrm.dcn(VOCABULARIES, 13), click_rows),
    "mlp": (lambda: classifiers.mlp(), lambda: images(28, 28)),
    "cnn": (lambda: classifiers.cnn(activation="relu"), lambda: images(28, 28)),
    "rnn": (lambda: classifiers.rnn((12, 12)), lambda: images(12, 12)),
    "lstm": (lambda: classifiers.lstm((12, 12)), lambda: images(12, 12)),
    "transformer": (
        lambda: classifiers.transformer(sequence_length=24, vocabulary=500, width=32),
        lambda: words(24, 500),
    ),
    "resnet18": (
        lambda: vision.resnet18((32, 32, 3), 5, width=8, groups=4),
        lambda: images(32, 32, 3),
    ),
    "vgg16": (
        lambda: vision.vgg16((32, 32, 3), 5, width=8, groups=4, hidden=(16, 16)),
        lambda: images(32, 32, 3),
    ),
    "bert": (bert, bert_inputs),
}


SLOW = [
    pytest.param(name, "mixed_bfloat16", marks=pytest.mark.slow) for name in ("resnet18", "vgg16")
]
MIXED = [
    *((name, "mixed_bfloat16") for name in MODELS if name not in ("resnet18", "vgg16")),
    *((name, "mixed_float16") for name in ("pctr", "mlp", "cnn", "transformer", "bert")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy"), [*((name, "float32") for name in MODELS), *MIXED, *SLOW]
)
def test_an_honest_model_passes(name: str, policy: str) -> None:
    make, inputs = MODELS[name]
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        keras.utils.set_random_seed(0)
        model = make()
    finally:
        keras.config.set_dtype_policy(before)
    classes = model.output_shape[-1]
    one = classes == 1
    kind = keras.losses.BinaryCrossentropy if one else keras.losses.SparseCategoricalCrossentropy
    model.compile(loss=kind(from_logits=True))
    y = _rng.integers(0, max(2, classes), (SIZE, 1)).astype(np.float32)
    check = dp_sparse.check_model(model, (inputs(), y))
    assert check.ok and check.compared, str(check)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_what_mixes_a_little_does_not(policy: str) -> None:
    """The companion: a hundredth of the batch's mean in the middle of the same kind of model."""
    inputs = keras.Input((12,))
    hidden = keras.layers.Dense(16, activation="relu", dtype=policy)(inputs)
    mixed = keras.layers.Lambda(lambda x: x + 1e-2 * tf.reduce_mean(x, 0), dtype=policy)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1, dtype=policy)(mixed))
    check = dp_sparse.check_model(model, images(12))
    assert not check.ok and "depends on another example" in check.problems[0]

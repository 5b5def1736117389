"""Layers with low-rank adapters: only A and B train, exact against brute force."""

import keras
import numpy as np
import pytest

from dp_sparse import clipping
from tests.clipping.brute_force import assert_as_brute_force, clipped, values


def adapted(layer: keras.layers.Layer, name: str) -> None:
    """Adapters with random B, as after some training."""
    layer.enable_lora(2, lora_alpha=3.0)
    b = getattr(layer, f"lora_{name}_b")
    b.assign(values(*b.shape, seed=7))


@pytest.mark.parametrize("inner", [(), (4,), (2, 3)])
def test_dense(inner: tuple[int, ...]) -> None:
    layer = keras.layers.Dense(6, activation="tanh")
    model = keras.Sequential([keras.Input((*inner, 5)), layer, keras.layers.Dense(2)])
    adapted(layer, "kernel")
    assert len(model.trainable_variables) == 5
    assert_as_brute_force(model, values(3, *inner, 5))


@pytest.mark.parametrize(
    ("equation", "shape", "output"),
    [
        ("abc,cde->abde", (4, 5), (None, 2, 3)),
        ("abcd,cde->abe", (4, 2, 3), (None, 6)),
        ("abc,bcd->abd", (4, 5), (4, 6)),
        ("abc,dc->abd", (4, 5), (None, 6)),  # ends with an input: the fallback
    ],
)
def test_einsum_dense(
    equation: str, shape: tuple[int, ...], output: tuple[int | None, ...]
) -> None:
    layer = keras.layers.EinsumDense(equation, output, bias_axes=equation[-1])
    model = keras.Sequential([keras.Input(shape), layer])
    adapted(layer, "kernel")
    assert_as_brute_force(model, values(3, *shape))


def test_attention() -> None:
    attention = keras.layers.MultiHeadAttention(2, 3)
    x = keras.Input((4, 6))
    model = keras.Model(x, attention(x, x))
    for layer in (attention._query_dense, attention._value_dense):
        adapted(layer, "kernel")
    assert_as_brute_force(model, values(3, 4, 6))


@pytest.mark.parametrize("masked", [False, True])
def test_embedding(masked: bool) -> None:
    layer = keras.layers.Embedding(7, 4, mask_zero=masked)
    ids = keras.Input((5,), dtype="int32")
    model = keras.Model(ids, keras.layers.Dense(3)(keras.layers.Flatten()(layer(ids))))
    adapted(layer, "embeddings")
    low, high = (1, 7) if masked else (0, 7)
    assert_as_brute_force(model, np.random.default_rng(0).integers(low, high, (4, 5)))
    tables = clipping.embedding_tables(model)
    assert [table.path for table in tables] == [layer.lora_embeddings_a.path]


def test_masked_lookups_train_neither_adapter_of_a_table() -> None:
    layer = keras.layers.Embedding(5, 3, mask_zero=True)
    model = keras.Sequential([keras.Input((2,), dtype="int32"), layer, keras.layers.Flatten()])
    adapted(layer, "embeddings")
    for ids, trained in (([[0, 0]], False), ([[0, 4]], True)):
        found = clipped(model, np.array(ids, np.int32), np.ones(1, np.float32), 1e3)
        assert [bool(np.any(total)) for total in found.sums] == [trained, trained]
        assert not np.any(found.sums[0][0])

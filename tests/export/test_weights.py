"""A table is read by parts: no array that an export makes is as large as it."""

import pathlib
import tracemalloc

import keras
import numpy as np
import pytest

import dp_sparse
from dp_sparse.export import weights
from tests.export import exported


@pytest.mark.parametrize("shape", [(), (5,), (3, 2), (2, 0), (4, 3, 2)])
@pytest.mark.parametrize("at_once", [1, 4, 100])
def test_parts_are_all_of_a_weight(
    shape: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "ENTRIES_AT_ONCE", at_once)
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    strategy = keras.Model(i := keras.Input(()), i).distribute_strategy
    variable = keras.Variable(values)
    for of in (weights.of_array("a", values), weights.of_variable("a", variable, strategy)):
        parts = list(of.parts())
        assert [start for start, _, _ in parts] == [0, *(stop for _, stop, _ in parts[:-1])]
        assert np.concatenate([rows for _, _, rows in parts]).tobytes() == values.tobytes()
        for _, _, rows in parts:
            assert len(rows) == 1 or rows.size <= at_once
        assert weights.sha256(of) == weights.sha256(weights.of_array("b", values))


def test_bytes_tell_what_numbers_do_not() -> None:
    values = np.array([0.0, -0.0, np.nan], np.float32)
    rows = weights.bytes_of(values)
    assert rows.shape == (3, 4) and len(np.unique(rows, axis=0)) == 3
    assert (rows == weights.bytes_of(values.copy())).all()


def test_numpy_never_has_a_table(tmp_path: pathlib.Path) -> None:
    """Of 128 MB, exported, compared and patched; TensorFlow's own memory is the benchmark's."""
    rows, width = 2**19, 64
    ids = keras.Input((), dtype="int32")
    table = keras.layers.Embedding(rows, width, embeddings_initializer="zeros")
    model = exported.compiled(keras.Model(ids, keras.layers.Dense(1)(table(ids))), "adafest")
    base, delta, made = (tmp_path / name for name in ("base", "delta", "made"))
    tracemalloc.start()
    for work in (
        lambda: dp_sparse.export_model(model, base),
        lambda: dp_sparse.export_delta(model, delta, base=base),
        lambda: dp_sparse.apply_deltas(base, [delta], made),
    ):
        tracemalloc.reset_peak()
        work()
        assert tracemalloc.get_traced_memory()[1] < rows * width * 4 / 2
    tracemalloc.stop()

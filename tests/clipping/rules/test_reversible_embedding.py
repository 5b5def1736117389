"""Tied and untied output layers: exact against brute force, and nothing of [batch, rows, width]."""

import math
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_sparse
from dp_sparse import clipping
from dp_sparse.clipping.gradient_terms import Tied, joined, numerics
from dp_sparse.core import UnsupportedLayerError
from tests.clipping.brute_force import assert_as_brute_force, values
from tests.subprocesses import run_python
from tests.training_cases import marked_dataset, plan_for


def language_model(
    rows: int, width: int, length: int, *, tied: bool, last: bool, masked: bool, cap: float | None
) -> keras.Model:
    ids = keras.Input((length,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(
        rows, width, tie_weights=tied, mask_zero=masked, logit_soft_cap=cap
    )
    hidden = keras.layers.Dense(width, activation="tanh")(table(ids))
    if last:
        hidden = hidden[:, -1]
    return keras.Model(ids, table(hidden, reverse=True))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(2, 9),
    width=st.integers(1, 4),
    length=st.integers(1, 5),
    tied=st.booleans(),
    last=st.booleans(),
    masked=st.booleans(),
    cap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 99),
)
def test_language_models(
    rows: int,
    width: int,
    length: int,
    tied: bool,
    last: bool,
    masked: bool,
    cap: float | None,
    seed: int,
) -> None:
    keras.utils.set_random_seed(seed)
    model = language_model(rows, width, length, tied=tied, last=last, masked=masked, cap=cap)
    ids = np.random.default_rng(seed).integers(1 if masked else 0, rows, (4, length))
    assert_as_brute_force(model, ids)


def test_looked_up_by_two_features_and_tied() -> None:
    one, two = (keras.Input((3,), dtype="int32") for _ in range(2))
    table = keras.layers.ReversibleEmbedding(6, 4)
    hidden = keras.layers.Dense(4)(keras.layers.Concatenate(axis=1)([table(one), table(two)]))
    model = keras.Model([one, two], table(hidden, reverse=True))
    rng = np.random.default_rng(0)
    assert_as_brute_force(model, [rng.integers(0, 6, (4, 3)) for _ in range(2)])


def test_a_tied_table_is_dense_and_an_untied_one_a_table() -> None:
    for tied in (True, False):
        model = language_model(6, 4, 3, tied=tied, last=False, masked=False, cap=None)
        assert len(clipping.embedding_tables(model)) == (not tied)


@keras.saving.register_keras_serializable("tests")
class Words(keras.layers.Layer):
    """A tied layer inside another, as in keras-hub; its shape is known without a call."""

    def __init__(self, reverse: bool, **options: Any) -> None:
        super().__init__(**options)
        self.reverse, self.words = reverse, keras.layers.ReversibleEmbedding(6, 4)

    def build(self, input_shape: Any) -> None:
        self.words.build(input_shape)

    def call(self, inputs: Any) -> Any:
        rows = self.words(inputs)
        return self.words(rows, reverse=True) if self.reverse else rows

    def compute_output_shape(self, input_shape: Any) -> Any:
        return (*input_shape, 6 if self.reverse else 4)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "reverse": self.reverse}


class Subclassed(keras.Model):
    """A model without known inputs."""

    def __init__(self, reverse: bool) -> None:
        super().__init__()
        self.words = Words(reverse)

    def call(self, inputs: Any) -> Any:
        return self.words(inputs)


def test_only_looked_up() -> None:
    ids = keras.Input((3,), dtype="int32")
    model = keras.Model(ids, keras.layers.ReversibleEmbedding(6, 4)(ids))
    assert len(clipping.embedding_tables(model)) == 1
    assert clipping.tables_read_whole(model) == []
    assert_as_brute_force(model, np.random.default_rng(0).integers(0, 6, (4, 3)))


@pytest.mark.parametrize("reverse", [False, True])
def test_inside_another_layer(reverse: bool) -> None:
    ids = keras.Input((3,), dtype="int32")
    model = keras.Model(ids, Words(reverse)(ids))
    assert len(clipping.embedding_tables(model)) == (not reverse)
    assert len(clipping.tables_read_whole(model)) == reverse
    assert_as_brute_force(model, np.random.default_rng(0).integers(0, 6, (4, 3)))


@pytest.mark.parametrize("reverse", [False, True])
def test_a_subclassed_model(reverse: bool) -> None:
    model = Subclassed(reverse)
    model(np.zeros((2, 3), np.int32))
    assert len(clipping.embedding_tables(model)) == (not reverse)


def test_calls_stay_as_they_were() -> None:
    ids = keras.Input((3,), dtype="int32")
    layer = keras.layers.ReversibleEmbedding(6, 4)
    clipping.embedding_tables(keras.Model(ids, layer(ids)))
    assert "call" not in vars(layer)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [dp_sparse.DPAdaFESTOptimizer, dp_sparse.DPSGDOptimizer])
def test_rows_of_a_layer_only_looked_up(optimizer: Any, tmp_path: pathlib.Path) -> None:
    """With DP-AdaFEST few rows change; also after saving and loading."""
    ids = keras.Input((3,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(500, 4)
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table(ids))))
    plan = plan_for(4, steps=2)
    few = {"expected_false_rows": 5} if optimizer is dp_sparse.DPAdaFESTOptimizer else {}
    model.compile(optimizer=optimizer(keras.optimizers.SGD(1.0), plan, 1.0, **few), loss="mse")
    x, y = np.zeros((4, 3), np.int32), np.zeros((4, 1), np.float32)
    for _ in range(2):
        before = model.get_layer(table.name).embeddings.numpy()
        model.fit(marked_dataset(plan, x, y), verbose=0)
        after = model.get_layer(table.name).embeddings.numpy()
        changed = np.any(before != after, axis=1).sum()
        assert changed < 100 if few else changed == 500
        assert model.optimizer.tables == [model.get_layer(table.name).embeddings]
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")


def test_a_table_that_is_read_whole_after_all() -> None:
    """What decides must not change once the optimizer has its slots."""
    ids = keras.Input((3,), dtype="int32")
    words = Words(False)
    model = keras.Model(ids, keras.layers.Dense(6)(words(ids)))
    plan = plan_for(4)
    sgd = keras.optimizers.SGD(1.0)
    model.compile(optimizer=dp_sparse.DPSGDOptimizer(sgd, plan, 1.0), loss="mse")
    model.optimizer.build(model.trainable_variables)
    words.call = lambda inputs: words.words(words.words(inputs), reverse=True)[..., :4]
    data = marked_dataset(plan, np.zeros((4, 3), np.int32), np.zeros((4, 3, 6), np.float32))
    with pytest.raises(UnsupportedLayerError, match="in some calls and as a matrix in others"):
        model.fit(data, verbose=0)


def random_use(
    batch: int, lookups: int, positions: int, rows: int = 7, width: int = 3, masked: float = 0.3
) -> Tied:
    rng = np.random.default_rng(lookups)
    return Tied(
        rows,
        tf.constant(rng.integers(0, rows, (batch, lookups))),
        tf.constant(rng.random((batch, lookups)) >= masked),
        tf.constant(values(batch, lookups, width)),
        tf.constant(values(batch, positions, width, seed=1)),
        tf.constant(values(batch, positions, rows, seed=2)),
    )


def gradients_of(term: Tied) -> np.ndarray:
    """Float64 `[batch, rows, width]`."""
    as_output = np.einsum("btv,btd->bvd", term.logit_cotangents, term.hidden, dtype=np.float64)
    one_hot = np.eye(term.num_rows)[term.row_ids] * term.valid.numpy()[..., np.newaxis]
    return as_output + np.einsum("blv,bld->bvd", one_hot, term.row_cotangents)


@pytest.mark.parametrize("entries", [1, 21, 50, 1000])
@pytest.mark.parametrize("batch", [0, 1, 5, 6])
def test_parts_cover_every_example(
    monkeypatch: pytest.MonkeyPatch, entries: int, batch: int
) -> None:
    """From one example at a time to all at once."""
    monkeypatch.setattr(numerics, "PART_ENTRIES", entries)
    term = random_use(batch, lookups=5, positions=2)
    norms = tf.function(lambda: term.squared_norms(), autograph=False)()
    np.testing.assert_allclose(norms, (gradients_of(term) ** 2).sum((1, 2)), rtol=1e-5)


@pytest.mark.parametrize("lookups", [0, 1, 9])
@pytest.mark.parametrize("positions", [0, 1, 2])
def test_norms_and_clipped_sum(lookups: int, positions: int) -> None:
    term = random_use(4, lookups, positions)
    factors = np.random.default_rng(1).random(4).astype(np.float32)
    gradients = gradients_of(term)
    squared = (gradients**2).sum((1, 2))
    np.testing.assert_allclose(term.squared_norms(), squared, rtol=1e-5, atol=1e-12)
    total = term.clipped_sum(tf.constant(factors))
    assert total.dtype == tf.float64
    np.testing.assert_allclose(total, np.tensordot(factors, gradients, 1), atol=1e-5)


def test_joining_lookups_with_an_output_copies_no_logits() -> None:
    lookups, output = random_use(4, 3, 0), random_use(4, 0, 2)
    for parts in ([lookups, output], [output, lookups]):
        whole = joined(parts)
        assert whole.logit_cotangents is output.logit_cotangents
        assert whole.row_cotangents is lookups.row_cotangents


@pytest.mark.parametrize("positions", [1, 2])
@pytest.mark.parametrize("scale", [1e-8, 1.0])
def test_terms_that_cancel_are_not_taken_for_nothing(scale: float, positions: int) -> None:
    """As a table and as a matrix the gradients of one row cancel but for a little."""
    hidden = np.full((1, positions, 2), 1000.0 / positions, np.float32)
    logits = np.zeros((1, positions, 5), np.float32)
    logits[..., 3] = 1.0
    rows = -1000.0 * np.ones((1, 1, 2), np.float32) + np.float32(scale)
    term = Tied(
        5,
        tf.constant([[3]], tf.int64),
        tf.constant([[True]]),
        *map(tf.constant, (rows, hidden, logits)),
    )
    [norm] = np.sqrt(term.squared_norms())
    exact = np.linalg.norm(hidden[0].sum(0).astype(np.float64) + rows[0, 0])
    assert norm >= exact
    assert norm <= max(exact, 2 * 1000 * math.sqrt(2) / 1000) * 1.01


@pytest.mark.slow
def test_memory_is_far_below_batch_times_rows_times_width() -> None:
    code = """
        import os
        os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
        import tensorflow as tf
        from benchmarks.clipping import added_memory
        from dp_sparse.clipping.gradient_terms.lookups import Tied

        batch, rows, width, lookups = 64, 40_009, 16, 3
        for positions in (1, 2):
            ids = tf.zeros([batch, lookups], tf.int64)
            shapes = [(batch, lookups, width), (batch, positions, width), (batch, positions, rows)]
            use = Tied(rows, ids, tf.ones_like(ids, tf.bool), *map(tf.ones, shapes))
            step = tf.function(lambda: (use.squared_norms(), use.clipped_sum(tf.ones([batch]))))
            step()
            print(added_memory(step) / (4 * batch * rows * width))
    """
    shares = [float(line) for line in run_python(code).split()]
    assert len(shares) == 2 and all(0 < share < 0.25 for share in shares)

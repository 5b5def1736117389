"""EmbedReduce: combiners, weights, repeated and padded ids, types; by name and not imported."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_sparse
from dp_sparse import clipping
from dp_sparse.clipping import rules
from tests.clipping.brute_force import assert_as_brute_force, clipped, ids
from tests.subprocesses import run_python
from tests.training_cases import checks_of, plan_for, weights_of

keras_rs = pytest.importorskip("keras_rs")
COMBINERS = ["sum", "mean", "sqrtn"]


def some_weights(*shape: int, seed: int = 0) -> np.ndarray:
    """Positive ones, and a few zeros."""
    rng = np.random.default_rng(seed)
    values = rng.uniform(0.3, 2, shape) * (rng.uniform(size=shape) > 0.2)
    return values.astype(np.float32)


def reduced(
    layer: keras.layers.Layer, ids_shape: tuple[int, ...], weights_shape: Any = None
) -> keras.Model:
    """A Dense layer on the reduced rows; the weights, if there are any, are the second input."""
    inputs = [keras.Input(ids_shape, dtype="int32")]
    if weights_shape is not None:
        inputs.append(keras.Input(weights_shape))
    return keras.Model(inputs, keras.layers.Dense(2)(layer(*inputs)))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    combiner=st.sampled_from(COMBINERS),
    lookups=st.integers(1, 6),
    rows=st.integers(1, 5),
    width=st.integers(1, 4),
    features=st.integers(1, 3),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_several_features_on_one_table(
    combiner: str,
    lookups: int,
    rows: int,
    width: int,
    features: int,
    weighted: bool,
    seed: int,
) -> None:
    """Fewer rows than lookups, so ids repeat inside an example and between calls."""
    keras.utils.set_random_seed(seed)
    table = keras_rs.layers.EmbedReduce(rows, width, combiner=combiner)
    inputs = [keras.Input((lookups,), dtype="int32") for _ in range(features)]
    given_weights = [keras.Input((lookups,)) for _ in range(features)]
    joined = keras.layers.Concatenate()(
        [
            table(feature, weights=weights) if weighted else table(feature)
            for feature, weights in zip(inputs, given_weights, strict=True)
        ]
        + [keras.layers.Dense(1)(weights) for weights in given_weights]
    )
    model = keras.Model([*inputs, *given_weights], keras.layers.Dense(2)(joined))
    x = [ids(4, lookups, rows=rows, seed=seed + i) for i in range(features)]
    x += [some_weights(4, lookups, seed=seed + i) for i in range(features)]
    assert_as_brute_force(model, x, seed=seed)
    assert clipping.embedding_tables(model) == [table.embeddings]


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize(
    ("ids_shape", "weights_shape"),
    [
        ((), None),
        ((), ()),
        ((), (3,)),
        ((4,), ()),
        ((4,), (4,)),
        ((4,), (4, 3)),
        ((2, 4), None),
        ((2, 4), (2,)),
        ((2, 4), (2, 4)),
    ],
)
def test_every_shape_that_keras_rs_takes(
    combiner: str, ids_shape: tuple[int, ...], weights_shape: tuple[int, ...] | None
) -> None:
    model = reduced(keras_rs.layers.EmbedReduce(6, 3, combiner=combiner), ids_shape, weights_shape)
    x = [ids(5, *ids_shape)]
    if weights_shape is not None:
        x.append(some_weights(5, *weights_shape))
    assert_as_brute_force(model, x)


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "bfloat16", "float64"])
@pytest.mark.parametrize("weighted", [False, True])
def test_outputs_are_those_of_keras_rs(combiner: str, dtype: str, weighted: bool) -> None:
    layer = keras_rs.layers.EmbedReduce(6, 3, combiner=combiner, dtype=dtype)
    model = reduced(layer, (4,), (4,) if weighted else None)
    x = [ids(5, 4), *([some_weights(5, 4)] if weighted else [])]
    x = tf.nest.map_structure(tf.convert_to_tensor, x)
    own = keras.Model(model.inputs, model.layers[-1].input)
    expected = own(x)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        found = clipping.record(own, x, tape, batch_capacity=5).outputs
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(tf.cast(found, tf.float64), tf.cast(expected, tf.float64))


@pytest.mark.parametrize("combiner", COMBINERS)
def test_mixed_precision(combiner: str) -> None:
    layer = keras_rs.layers.EmbedReduce(6, 3, combiner=combiner, dtype="mixed_bfloat16")
    assert_as_brute_force(
        reduced(layer, (4,), (4,)), [ids(5, 4), some_weights(5, 4)], tolerance=2e-2
    )


def test_weights_that_are_learned() -> None:
    """The tape leads through the weights to the layers that make them."""
    x, values = keras.Input((4,), dtype="int32"), keras.Input((4,))
    attention = keras.layers.Dense(4, activation="softmax")(values)
    rows = keras_rs.layers.EmbedReduce(6, 3, combiner="sqrtn")(x, attention)
    model = keras.Model([x, values], keras.layers.Dense(2)(rows))
    assert_as_brute_force(model, [ids(5, 4), some_weights(5, 4)], padding=2)


def test_weight_0_is_padding_and_claims_no_row() -> None:
    model = reduced(keras_rs.layers.EmbedReduce(6, 3), (3,), (3,))
    x = [tf.constant([[1, 0, 0], [2, 4, 2]]), tf.constant([[1.0, 0, 0], [0.5, 0, 2]])]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        recording = clipping.record(model, x, tape, batch_capacity=2)
        total = tf.reduce_sum(recording.outputs)
    [table] = [
        term
        for variable, term in recording.terms(tape.gradient(total, recording.targets))
        if isinstance(term, clipping.Rows)
    ]
    np.testing.assert_array_equal(table.valid, [[True, False, False], [True, False, True]])


def test_no_weight_at_all() -> None:
    """The mean over nothing is 0, and so is its gradient."""
    model = reduced(keras_rs.layers.EmbedReduce(6, 3), (3,), (3,))
    weights = some_weights(4, 3)
    weights[1] = 0
    assert_as_brute_force(model, [ids(4, 3), weights])


@pytest.mark.parametrize("combiner", COMBINERS)
def test_mask_zero_takes_nothing_out_of_the_reduction(combiner: str) -> None:
    layer = keras_rs.layers.EmbedReduce(5, 3, combiner=combiner, mask_zero=True)
    model, x = reduced(layer, (4,)), ids(6, 4, rows=5)
    assert (x == 0).any()
    assert_as_brute_force(model, x)
    row_0 = clipped(model, x, np.ones(6, np.float32), 10.0).sums[0][0]
    assert np.any(row_0 != 0)


def test_frozen() -> None:
    frozen, words = (keras_rs.layers.EmbedReduce(6, 3) for _ in range(2))
    frozen.trainable = False
    x = keras.Input((4,), dtype="int32")
    model = keras.Model(x, keras.layers.Add()([frozen(x), words(x)]))
    assert clipping.embedding_tables(model) == [words.embeddings]
    assert_as_brute_force(model, ids(5, 4))


@pytest.mark.parametrize("kind", ["sparse", "ragged"])
def test_sparse_and_ragged_ids_are_refused_by_path(kind: str) -> None:
    class Bag(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.words = keras_rs.layers.EmbedReduce(6, 3, name="words")

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            if kind == "sparse":
                return self.words(tf.sparse.from_dense(inputs))
            return self.words(tf.RaggedTensor.from_tensor(inputs))

    model = Bag()
    model(ids(2, 3))
    with pytest.raises(dp_sparse.UnsupportedLayerError, match="words .* weights with 0 at the pad"):
        clipped(model, ids(2, 3), np.ones(2, np.float32), 1.0)


def test_weights_that_do_not_fit_the_ids() -> None:
    model = reduced(keras_rs.layers.EmbedReduce(6, 3, name="words"), (4,), (1,))
    with pytest.raises(ValueError, match=r"\(2, 4\) at layer \S*words, got \(2, 1\)"):
        clipped(model, [ids(2, 4), some_weights(2, 1)], np.ones(2, np.float32), 1.0)


def test_ids_out_of_range() -> None:
    model = reduced(keras_rs.layers.EmbedReduce(6, 3, name="words"), (4,))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[0, 6\) at layer \S*words"):
        clipped(model, ids(2, 4) - 1, np.ones(2, np.float32), 1.0)


def test_the_embedding_of_every_feature_on_a_cpu() -> None:
    """DistributedEmbedding off a TPU is made of EmbedReduce layers."""
    table = keras_rs.layers.TableConfig(
        "words", vocabulary_size=6, embedding_dim=3, placement="default_device"
    )
    configs = {
        name: keras_rs.layers.FeatureConfig(name, table, (None, 4), (None, 3)) for name in "ab"
    }
    inputs = {name: keras.Input((4,), dtype="int32", name=name) for name in "ab"}
    rows = keras_rs.layers.DistributedEmbedding(configs)(inputs)
    model = keras.Model(inputs, keras.layers.Concatenate()([rows["a"], rows["b"]]))
    assert len(clipping.embedding_tables(model)) == 1
    assert_as_brute_force(model, {"a": ids(5, 4), "b": ids(5, 4, seed=1)})


def test_a_rule_is_for_exactly_this_class() -> None:
    class Scaled(keras_rs.layers.EmbedReduce):
        def call(self, inputs: Any, weights: Any = None) -> Any:
            return 3.0 * super().call(inputs, weights)

    class EmbedReduce(keras.layers.Embedding):
        __module__ = keras_rs.layers.EmbedReduce.__module__

    model = keras.Sequential([keras.Input((2,), dtype="int32"), Scaled(6, 3)])
    assert clipping.embedding_tables(model) == []
    assert_as_brute_force(model, ids(4, 2))
    assert rules.rule_for(keras_rs.layers.EmbedReduce(6, 3)) is not None
    assert rules.rule_for(EmbedReduce(6, 3)) is None


@pytest.mark.slow
def test_optional_packages_are_not_imported() -> None:
    code = """
    import sys
    import keras
    import dp_sparse
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    assert dp_sparse.check_model(model).ok
    print([name for name in sys.modules if name.split(".")[0] in ("keras_rs", "keras_hub")])
    """
    assert run_python(code).strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("microbatch_size", [None, 7])
def test_fit(microbatch_size: int | None) -> None:
    keras.utils.set_random_seed(1)
    table = keras_rs.layers.EmbedReduce(1000, 4, combiner="sum")
    model = reduced(table, (5,), (5,))
    examples = 24
    plan = plan_for(examples, steps=4)
    optimizer = dp_sparse.DPAdaFESTOptimizer(
        keras.optimizers.SGD(0.1), plan, clip_norm=0.1, microbatch_size=microbatch_size
    )
    x = (ids(examples, 5, rows=50), some_weights(examples, 5))
    y = np.random.default_rng(0).normal(size=(examples, 2)).astype(np.float32)
    assert dp_sparse.check_model(model).rules[table.embeddings.path] == "embed reduce"
    model.compile(optimizer=optimizer, loss="mse")
    before, rows = weights_of(model), np.array(table.embeddings)
    history = model.fit(plan.sampling.batches((x, y)), verbose=0)
    assert np.all(np.isfinite(history.history["loss"]))
    for old, weight in zip(before, model.trainable_variables, strict=True):
        assert not np.array_equal(old, weight), weight.path
    moved = np.any(np.array(table.embeddings) != rows, axis=1)
    assert moved.sum() < 200 and moved[:50].any()  # a table: rows were selected
    assert checks_of(model) == 3

"""Clipped sums beside tensorflow-privacy 0.9 on what both support, and where it is wrong.

`make parity` installs it; elsewhere these tests are left out.
"""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from tests.clipping.brute_force import clipped

parity = pytest.importorskip(
    "tests.parity.twins", reason="tensorflow-privacy is not here: make parity", exc_type=ImportError
)

BATCH = 8


def dense(k: Any) -> tuple[Any, Any]:
    inputs = k.Input((6,))
    hidden = k.layers.Dense(5, activation="tanh")(inputs)
    return inputs, k.layers.Dense(3, activation="sigmoid", use_bias=False)(hidden)


def dense_over_positions(k: Any) -> tuple[Any, Any]:
    inputs = k.Input((4, 6))
    hidden = k.layers.Dense(5, activation="tanh")(inputs)
    return inputs, k.layers.Dense(3)(k.layers.Flatten()(hidden))


def layer_normalization(k: Any) -> tuple[Any, Any]:
    inputs = k.Input((4, 6))
    hidden = k.layers.LayerNormalization()(k.layers.Dense(5)(inputs))
    return inputs, k.layers.Dense(2)(k.layers.Flatten()(hidden))


def attention(k: Any) -> tuple[Any, Any]:
    inputs = k.Input((4, 6))
    hidden = k.layers.MultiHeadAttention(2, 3)(inputs, inputs)
    return inputs, k.layers.Dense(2)(k.layers.Flatten()(hidden))


def embedding(k: Any) -> tuple[Any, Any]:
    inputs = k.Input((5,), dtype="int32")
    hidden = k.layers.Embedding(7, 4)(inputs)
    return inputs, k.layers.Dense(2)(k.layers.Flatten()(hidden))


def encoder(k: Any) -> tuple[Any, Any]:
    inputs = k.Input((5,), dtype="int32")
    values = k.layers.Embedding(7, 4)(inputs)
    attended = k.layers.MultiHeadAttention(2, 2, use_bias=False)(values, values)
    values = k.layers.LayerNormalization()(k.layers.Add()([values, attended]))
    return inputs, k.layers.Dense(2)(k.layers.GlobalAveragePooling1D()(values))


def dropout(k: Any) -> tuple[Any, Any]:
    inputs = k.Input((50,))
    return inputs, k.layers.Dense(3)(k.layers.Dropout(0.5)(inputs))


def nothing_dropped(k: Any) -> tuple[Any, Any]:
    inputs = k.Input((50,))
    return inputs, k.layers.Dense(3)(inputs)


def one_layer_four_times(k: Any) -> tuple[Any, Any]:
    inputs = k.Input((6,))
    layer = k.layers.Dense(3)
    return inputs, k.layers.Add()([layer(inputs) for _ in range(4)])


def one_table_twice(k: Any) -> tuple[Any, Any]:
    inputs = k.Input((5,), dtype="int32")
    table = k.layers.Embedding(7, 4)
    return inputs, k.layers.Flatten()(k.layers.Add()([table(inputs), table(inputs)]))


SUPPORTED_BY_BOTH = [
    dense,
    dense_over_positions,
    layer_normalization,
    attention,
    embedding,
    encoder,
]


def examples(pair: Any, count: int = BATCH, seed: int = 0) -> tuple[tf.Tensor, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (count, *pair.ours.input_shape[1:])
    ids = keras.backend.standardize_dtype(pair.ours.inputs[0].dtype) == "int32"
    x = rng.integers(0, 7, shape) if ids else rng.normal(size=shape).astype(np.float32)
    return tf.cast(x, pair.ours.inputs[0].dtype), rng.normal(size=count).astype(np.float32)


@pytest.mark.parametrize("build", SUPPORTED_BY_BOTH)
def test_norms_and_clipped_sums_are_equal(build: Any) -> None:
    keras.utils.set_random_seed(1)
    pair = parity.twins(build)
    x, y = examples(pair)
    norms = parity.their_norms(pair.theirs, x, y)
    clip_norm = float(np.median(norms))  # binds for half of the examples
    ours = clipped(pair.ours, x, y, clip_norm)
    np.testing.assert_allclose(ours.norms, norms, rtol=1e-5)
    theirs = parity.their_clipped_sums(pair.theirs, x, y, clip_norm)
    for variable, our_sum, their_sum in zip(
        pair.ours.trainable_variables, ours.sums, theirs, strict=True
    ):
        np.testing.assert_allclose(
            our_sum, their_sum, rtol=0, atol=1e-5 * clip_norm, err_msg=variable.path
        )


@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("build", [dense_over_positions, embedding])
def test_one_step_of_fit_is_equal(build: Any) -> None:
    keras.utils.set_random_seed(1)
    pair = parity.twins(build, l2_norm_clip=0.01, noise_multiplier=0.0, use_xla=False)
    assert pair.theirs._enable_fast_peg_computation
    x, _ = examples(pair)
    y = np.arange(BATCH, dtype=np.int32) % 2
    before = pair.ours.get_weights()
    fit_ours(pair.ours, x, y)
    parity.fit_one_step(pair.theirs, x, y)
    for old, ours, theirs in zip(
        before, pair.ours.get_weights(), pair.theirs.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours - old, theirs - old, rtol=0, atol=1e-5)
        assert np.any(ours != old)


def fit_ours(model: keras.Model, x: tf.Tensor, y: np.ndarray) -> None:
    sampling = dp_sparse.StreamSampling(num_examples=BATCH, batch_size=BATCH)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-3), sampling).calibrate()
    model.compile(
        dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(100.0), plan, clip_norm=0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(sampling.batches(tf.data.Dataset.from_tensor_slices((x, y))), verbose=0)


def test_with_dropout_their_norms_are_of_a_pass_without_it() -> None:
    """Norms come from one forward pass and gradients from another, with other masks.

    The first drops nothing at all. Clipped to 1, one example alone then moves the sum by more than
    1.5, where ours moves it by 1.
    """
    keras.utils.set_random_seed(1)
    pair = parity.twins(dropout)
    x, y = examples(pair, count=1)
    undropped = keras.Model(*nothing_dropped(keras))
    undropped.set_weights(pair.ours.get_weights())
    np.testing.assert_allclose(
        parity.their_norms(pair.theirs, x, y), clipped(undropped, x, y, 1.0).norms, rtol=1e-5
    )
    theirs = [parity.norm(parity.their_clipped_sums(pair.theirs, x, y, 1.0)) for _ in range(20)]
    ours = [parity.norm(clipped(pair.ours, x, y, 1.0).sums) for _ in range(20)]
    assert max(theirs) > 1.5
    assert max(ours) < 1 + 1e-5


def test_a_layer_used_four_times_moves_their_sum_by_twice_the_clip_norm() -> None:
    """The squared norms of its calls are added, as if each had a variable of its own.

    Four equal gradients g make a gradient 4g, which is taken for one of norm √4·‖g‖.
    """
    keras.utils.set_random_seed(1)
    pair = parity.twins(one_layer_four_times)
    x, y = examples(pair, count=1)
    ours = clipped(pair.ours, x, y, 1.0)
    np.testing.assert_allclose(parity.their_norms(pair.theirs, x, y), ours.norms / 2, rtol=1e-5)
    assert parity.norm(parity.their_clipped_sums(pair.theirs, x, y, 1.0)) == pytest.approx(
        2.0, rel=1e-5
    )
    assert parity.norm(ours.sums) == pytest.approx(1.0, rel=1e-5)


def test_a_table_used_twice_fails_there_and_is_clipped_here() -> None:
    keras.utils.set_random_seed(1)
    pair = parity.twins(one_table_twice)
    x, y = examples(pair, count=1)
    with pytest.raises(tf.errors.InvalidArgumentError):
        parity.their_norms(pair.theirs, x, y)
    assert parity.norm(clipped(pair.ours, x, y, 0.1).sums) == pytest.approx(0.1, rel=1e-5)

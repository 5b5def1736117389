"""Random changes of examples: one at a time, by secret seeds, wherever batches come from."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse.core import PrivacyError
from dp_sparse.sampling import check_batches, offline_sampling
from tests.sampling import offline_folders

SIZE = 6
DATA = np.zeros((SIZE, 3), np.float32), np.arange(SIZE, dtype=np.int32)


def noisy(x: Any, y: Any, seed: tf.Tensor) -> Any:
    return x + tf.random.stateless_normal([3], seed), y


def poisson(**fields: Any) -> tf.data.Dataset:
    return dp_sparse.PoissonSampling(SIZE, SIZE, steps=3).batches(DATA, **fields)


def stream(source: Any) -> tf.data.Dataset:
    return dp_sparse.StreamSampling(SIZE, 2).batches(source, augment=noisy)


def numbers(batches: tf.data.Dataset) -> np.ndarray:
    """All x of a pass, `[examples of all batches, ...]`."""
    return np.concatenate([x.numpy() for x, *_ in batches])


@pytest.mark.parametrize(
    "batches",
    [
        lambda: poisson(augment=noisy),
        lambda: stream(DATA),
        lambda: stream(tf.data.Dataset.from_tensor_slices(DATA)),
    ],
    ids=["poisson", "arrays as a stream", "a dataset as a stream"],
)
def test_each_example_has_numbers_of_its_own_in_each_reading(batches: Any) -> None:
    keras.utils.set_random_seed(42)
    made = batches()
    once, again = numbers(made), numbers(made)
    assert len(np.unique([*once, *again])) == once.size + again.size
    keras.utils.set_random_seed(42)
    assert not np.isin(numbers(batches()), once).any()


def test_fit_knows_how_many_batches_there_are() -> None:
    assert poisson(augment=noisy).cardinality() == poisson().cardinality() == 3


def test_batches_drawn_before_training(tmp_path: Path) -> None:
    offline_folders.prepared(tmp_path)
    source = dp_sparse.OfflineBatches(str(tmp_path), lambda r: (r["y"], r["x"]))
    scaled = lambda x, y, seed: (x + tf.random.stateless_normal([], seed), y)  # noqa: E731
    batches = offline_sampling(source, shared=True).batches(source, augment=scaled)
    found = numbers(batches)
    assert len(np.unique(found)) == found.size


def test_a_plan_that_is_not_private_repeats_itself() -> None:
    plan = dp_sparse.PrivacyPlan(
        dp_sparse.PrivacyBudget(1.0, 1e-3), dp_sparse.PoissonSampling(SIZE, SIZE, steps=3)
    ).calibrate()
    runs = [dp_sparse.not_private_plan(plan, seed=3).sampling for _ in range(2)]
    one, other = (numbers(sampling.batches(DATA, augment=noisy)) for sampling in runs)
    assert np.array_equal(one, other)
    assert not np.isin(numbers(runs[0].batches(DATA, augment=noisy)), one).any()


def test_shapes_may_change_and_labels_with_them() -> None:
    def cropped(x: Any, y: Any, seed: tf.Tensor) -> Any:
        if tf.random.stateless_uniform([], seed) < 2.0:  # as in any function of TensorFlow
            x = x[:2]
        return {"x": tf.ensure_shape(x, [2])}, tf.cast(y, tf.float32) + 1

    batches = poisson(augment=cropped)
    x, y, weights = next(iter(batches))
    assert batches.element_spec[0]["x"].shape == [SIZE, 2] == x["x"].shape
    assert y.numpy().tolist() == [1, 2, 3, 4, 5, 6]
    assert weights["marker"].shape == [SIZE, 4]
    check_batches(batches)


@pytest.mark.parametrize(
    ("words", "augment"),
    [
        ("draws random numbers", lambda x, y, seed: (x + tf.random.normal([3], seed=1), y)),
        ("draws random", lambda x, y, seed: (x + tf.random.stateless_normal([3], [1, 2]), y)),
        ("draws random", lambda x, y, seed: (x + tf.random.stateless_normal([3], [y, y]), y)),
        ("runs Python", lambda x, y, seed: (tf.numpy_function(np.copy, [x], tf.float32), y)),
    ],
)
def test_other_seeds_are_refused(words: str, augment: Any) -> None:
    with pytest.raises(PrivacyError, match=f"augment.*{words}"):
        poisson(augment=augment)


@pytest.mark.parametrize(
    ("words", "augment"),
    [
        ("a function f", lambda x, seed: x),
        ("a function f", "flip"),
        (r"\(x, y\) from augment", lambda x, y, seed: x),
        ("one fixed shape", lambda x, y, seed: (x[: seed[0]], y)),
    ],
)
def test_functions_that_do_not_fit(words: str, augment: Any) -> None:
    with pytest.raises(ValueError, match=f"Expected .*{words}"):
        poisson(augment=augment)


def test_trains_and_sees_one_example_at_a_time() -> None:
    seen: list[Any] = []

    def watched(x: Any, y: Any, seed: tf.Tensor) -> Any:
        seen.append((x.shape, y.shape, seed.shape))
        return noisy(x, y, seed)

    plan = dp_sparse.PrivacyPlan(
        dp_sparse.PrivacyBudget(1.0, 1e-3), dp_sparse.PoissonSampling(SIZE, SIZE, steps=2)
    ).calibrate()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0)
    model.compile(optimizer, loss="mse", jit_compile=True)
    model.fit(plan.sampling.batches(DATA, augment=watched), verbose=0)
    assert seen == [([3], [], [2])] and int(optimizer.steps_spent) == 2


def test_our_own_training_loop_takes_it() -> None:
    plan = dp_sparse.PrivacyPlan(
        dp_sparse.PrivacyBudget(1.0, 1e-3), dp_sparse.StreamSampling(SIZE, 2)
    ).calibrate()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0)
    model.compile(optimizer, loss="mse")
    with pytest.raises(PrivacyError, match="augment.*draws random"):
        dp_sparse.distribution.train(
            model, DATA, augment=lambda x, y, seed: (x + tf.random.normal([3], seed=1), y)
        )
    assert int(optimizer.steps_spent) == 0
    dp_sparse.distribution.train(model, DATA, augment=noisy)
    assert int(optimizer.steps_spent) == 3


def test_rows_of_all_examples_are_none_of_one() -> None:
    """MixUp with the training rows, captured or looked up in a function of its own."""
    x, y = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32), np.zeros(40)
    sampling = dp_sparse.PoissonSampling(40, 4, steps=3)

    def mixed(rows: Any, one: Any, seed: tf.Tensor) -> tf.Tensor:
        place = tf.random.stateless_uniform([], seed, maxval=len(rows), dtype=tf.int32)
        return one + tf.gather(rows, place)

    inside = tf.function(mixed)
    for of in (lambda *a: mixed(x, *a), lambda *a: inside(tf.constant(x), *a)):
        augment = lambda one, label, seed, of=of: (of(one, seed), label)  # noqa: E731
        with pytest.raises(PrivacyError, match="holds 40 rows"):
            sampling.batches((x, y), augment=augment)
    public = lambda one, label, seed: (mixed(x[:39], one, seed), label)  # noqa: E731
    assert len(list(sampling.batches((x, y), augment=public))) == 3

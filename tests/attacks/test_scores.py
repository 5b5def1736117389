"""What an attacker may try on the histogram of scores, beside the plan that pays for one."""

import concurrent.futures
import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse.core import PrivacyError
from dp_sparse.probabilities.score_histogram import UNITS
from tests.probabilities.test_calibration import (
    NOISE,
    compiled,
    examples,
    paying_plan,
    scaled_model,
)
from tests.training_cases import plan_for

NO_NOISE = 1e-9


def counts(data: tuple[Any, ...], model: keras.Model | None = None, **options: Any) -> np.ndarray:
    """The histogram of data, in whole counts, under noise that rounds to nothing."""
    own = scaled_model() if model is None else model
    compiled(own, plan=paying_plan(NO_NOISE, len(data[0])))
    found = dp_sparse.calibrate_probabilities(own, data, **options)
    return found.histogram.counts / UNITS


def influence(data: tuple[np.ndarray, ...], removed: int, **options: Any) -> float:
    fewer = tuple(np.delete(leaf, removed, axis=0) for leaf in data)
    return float(np.linalg.norm(counts(data, **options) - counts(fewer, **options)))


@pytest.mark.parametrize("label", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("weight", [1.0, 1e9])
def test_one_example_has_an_influence_of_one_at_most(label: float, weight: float) -> None:
    """Also with a weight beyond the cap, a label between the classes, an extreme feature."""
    x, y = (leaf[:60].copy() for leaf in examples())
    x[5], y[5], weights = 1e4, label, np.ones(60)
    weights[5] = weight
    assert influence((x, y, weights), 5) <= 1
    assert influence((x, y, weights), 5, weight_cap=3.0) <= 1


def test_a_second_histogram_of_one_plan_is_refused_or_the_same() -> None:
    """The mean of many would have no noise."""
    model, data = compiled(scaled_model()), examples()
    first = dp_sparse.calibrate_probabilities(model, data)
    assert dp_sparse.calibrate_probabilities(model, data).histogram is first.histogram
    assert dp_sparse.probabilities.draw_histogram(model, data) is first.histogram
    with pytest.raises(PrivacyError, match=r"drawn with weight_cap=1.0, got weight_cap=7.0"):
        dp_sparse.calibrate_probabilities(model, data, weight_cap=7.0)
    again = scaled_model()  # another model under the same plan
    again.compile(dp_sparse.DPSGDOptimizer("sgd", model.optimizer.plan, 1.0), "mse")
    with pytest.raises(PrivacyError, match="another model's predictions"):
        dp_sparse.calibrate_probabilities(again, data)


def test_of_several_threads_one_draws() -> None:
    model, data = compiled(scaled_model()), examples()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        drawn = list(
            pool.map(lambda _: dp_sparse.probabilities.draw_histogram(model, data), range(3))
        )
    assert len({histogram.histogram_id for histogram in drawn}) == 1


def mixing_sources() -> dict[str, Any]:
    """In each of them an example changes others, or counts more than once."""
    x, y = examples()
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    long = tf.data.Dataset.from_generator(
        lambda: ((np.ones(1 + i % 3, np.int32), 1.0) for i in range(3000)),
        output_signature=(tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.float32)),
    )

    def standardised(a: tf.Tensor, b: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return (a - tf.reduce_mean(a, 0)) / tf.math.reduce_std(a, 0), b

    return {
        "a map over batches": rows.batch(1000).map(standardised),
        "as long as the longest": long.padded_batch(1000),
        "repeated": rows.repeat(5).batch(500),
        "twice": [(x, y), (x, y)],
        "of other lengths": [(x[:1500], y[:1500]), (np.repeat(x[1500:], 2, axis=1), y[1500:])],
    }


@pytest.mark.parametrize("name", mixing_sources())
def test_sources_that_mix_or_repeat_are_refused(name: str) -> None:
    model = compiled(scaled_model(), plan=paying_plan(NO_NOISE))
    with pytest.raises((PrivacyError, ValueError)):
        dp_sparse.calibrate_probabilities(model, mixing_sources()[name])


def test_examples_of_other_days_are_not_those_of_the_plan_that_pays() -> None:
    """If there are two plans on disjoint parts, each pays for its own part alone."""
    model = compiled(scaled_model(), plan=paying_plan(NOISE, 1500))
    with pytest.raises(ValueError, match="Expected the 1500 examples of the plan that pays"):
        dp_sparse.calibrate_probabilities(model, examples())


def test_bins_and_cap_do_not_follow_from_the_data() -> None:
    x, y = examples()
    one, other = (counts((x[:n], y[:n])) for n in (40, 41))
    assert one.shape == other.shape and np.linalg.norm(other - one) <= 1
    with pytest.raises(TypeError):
        dp_sparse.calibrate_probabilities(compiled(scaled_model()), (x, y), bins=[0.1])  # type: ignore[call-arg]


class Standardised(keras.layers.Layer):
    """Subtracts the batch's mean when it predicts, and not when it trains."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs if training else inputs - keras.ops.mean(inputs, axis=0)


class RareMean(keras.layers.Layer):
    """Subtracts the batch's largest value once it is above what the data reach."""

    def call(self, inputs: Any) -> Any:
        largest = keras.ops.max(inputs)
        return inputs - keras.ops.where(largest > 1000.0, largest, 0.0)


@pytest.mark.parametrize("mixing", [Standardised, RareMean])
def test_predictions_that_mix_examples_are_refused(mixing: type[keras.layers.Layer]) -> None:
    """Training did not look at them, or saw no such batch; one example could move all scores."""
    model = keras.Sequential([keras.Input((1,)), mixing(), keras.layers.Dense(1, "sigmoid")])
    compiled(model)
    with pytest.raises(PrivacyError, match="depends on another example"):
        dp_sparse.calibrate_probabilities(model, examples())


class LongestRow(keras.layers.Layer):
    """The mean of a row's embeddings, over the length of the batch's longest row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(9, 2)

    def call(self, ids: Any) -> Any:
        there = keras.ops.cast(keras.ops.not_equal(ids, 0), "float32")
        longest = keras.ops.max(keras.ops.sum(there, axis=1))
        return keras.ops.sum(self.table(ids) * there[..., None], axis=1) / longest


def test_mixing_that_long_rows_of_ids_show_is_refused() -> None:
    ids = np.zeros((3000, 6), np.int32)
    ids[:, :2] = np.random.default_rng(0).integers(1, 9, (3000, 2))
    inputs = keras.Input((6,), dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(LongestRow()(inputs)))
    with pytest.raises(PrivacyError, match="integers of others are extreme"):
        dp_sparse.calibrate_probabilities(compiled(model), (ids, np.ones(3000)))


def test_a_first_chunk_of_one_example_does_not_hide_mixing() -> None:
    model = compiled(
        keras.Sequential([keras.Input((1,)), Standardised(), keras.layers.Dense(1, "sigmoid")])
    )
    x, y = examples()
    chunks = ((x[a:b], y[a:b]) for a, b in ((0, 1), (1, 3000)))
    with pytest.raises(PrivacyError, match="depends on another example"):
        dp_sparse.calibrate_probabilities(model, chunks)


@pytest.mark.parametrize("way", ["itself", "composed", "compiled anew"])
def test_the_histogram_of_another_plan_does_not_leave_with_a_model(
    way: str, tmp_path: Path
) -> None:
    """Its statement would leave out what the histogram cost."""
    calibration = dp_sparse.calibrate_probabilities(compiled(scaled_model()), examples())
    other, as_model = compiled(scaled_model(), plan=plan_for(3000)), None
    if way == "itself":
        as_model = calibration
    elif way == "composed":
        as_model = lambda model: calibration(model)  # noqa: E731
    else:
        other = compiled(calibration(other), plan=plan_for(3000))
    with pytest.raises(PrivacyError, match="that another plan pays for"):
        dp_sparse.export_model(other, tmp_path / "export", as_model=as_model)
    assert not (tmp_path / "export").exists()


def test_a_run_draws_nothing_that_its_plan_does_not_pay(tmp_path: Path) -> None:
    data = examples()
    sampling = dp_sparse.StreamSampling(3000, 1000)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(2.0, 1e-3), sampling)
    run = dp_sparse.Run(tmp_path / "run", dp_sparse.reserve_calibration(plan, share=0.1))
    model = compiled(scaled_model(), plan=run.plan)
    budget = dp_sparse.PrivacyBudget(50.0, 1e-2)
    with pytest.raises(TypeError):
        run.calibrate_probabilities(model, data, budget=budget)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="Expected method in"):
        run.calibrate_probabilities(model, data, method="beta")
    loud = dp_sparse.probabilities.score_histogram.release_of(0.001)
    other = compiled(scaled_model(), plan=dataclasses.replace(run.plan, releases=(loud,)))
    with pytest.raises(PrivacyError, match="another plan than the run"):
        run.calibrate_probabilities(other, data)
    assert not (tmp_path / "run" / "scores.npz").exists()
    run.calibrate_probabilities(model, data)
    with pytest.raises(PrivacyError, match="drawn with weight_cap=1.0"):
        run.calibrate_probabilities(model, data, weight_cap=2.0)
    run.close()
    with pytest.raises(PrivacyError, match="was closed"):
        run.calibrate_probabilities(model, data)


def test_the_histogram_of_a_run_is_drawn_once(tmp_path: Path) -> None:
    """A later process finds it, whatever else it is asked."""
    x, y = examples()
    sampling = dp_sparse.StreamSampling(3000, 1000)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(2.0, 1e-3), sampling)
    plan = dp_sparse.reserve_calibration(plan, share=0.1)
    found = []
    for _ in range(2):
        run = dp_sparse.Run(tmp_path / "run", plan)
        model = scaled_model()
        model.compile(dp_sparse.DPSGDOptimizer("sgd", run.plan, 1.0), "binary_crossentropy")
        if not run.finished:
            model.fit(run.batches((x, y)), callbacks=run.callbacks(), verbose=0)
        run.restore(model)
        with pytest.raises(PrivacyError, match="Call run.calibrate_probabilities"):
            dp_sparse.calibrate_probabilities(model, (x, y))
        found.append(run.calibrate_probabilities(model, (x, y)).histogram)
        run.close()
    assert found[0].histogram_id == found[1].histogram_id and found[0].steps == 3
    (tmp_path / "run" / "scores.npz").unlink()
    run = dp_sparse.Run(tmp_path / "run", plan)
    model = scaled_model()
    model.compile(dp_sparse.DPSGDOptimizer("sgd", run.plan, 1.0), "binary_crossentropy")
    run.restore(model)
    with pytest.raises(ValueError, match=r"scores.npz is missing, which this run has released"):
        run.calibrate_probabilities(model, (x, y))
    run.close()

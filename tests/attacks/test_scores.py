"""What an attacker may try on the histogram of scores, beside the plan that pays for one."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from dp_sparse.core import PrivacyError
from dp_sparse.probabilities.score_histogram import UNITS
from tests.probabilities.test_calibration import compiled, examples, paying_plan, scaled_model
from tests.training_cases import plan_for

NO_NOISE = 1e-9


def counts(data: tuple[Any, ...], model: keras.Model | None = None, **options: Any) -> np.ndarray:
    """The histogram of data, in whole counts, under noise that rounds to nothing."""
    own = scaled_model() if model is None else model
    compiled(own, plan=paying_plan(NO_NOISE))
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


def test_a_second_histogram_of_one_plan_is_refused() -> None:
    """The mean of many would have no noise."""
    model, data = compiled(scaled_model()), examples()
    dp_sparse.calibrate_probabilities(model, data)
    with pytest.raises(PrivacyError, match="a second one would cost as much again"):
        dp_sparse.calibrate_probabilities(model, data)
    again = scaled_model()  # another model under the same plan
    again.compile(dp_sparse.DPSGDOptimizer("sgd", model.optimizer.plan, 1.0), "mse")
    with pytest.raises(PrivacyError, match="a second one would cost as much again"):
        dp_sparse.calibrate_probabilities(again, data)


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


def test_the_histogram_of_another_plan_does_not_leave_with_a_model(tmp_path: Path) -> None:
    """Its statement would leave out what the histogram cost."""
    calibration = dp_sparse.calibrate_probabilities(compiled(scaled_model()), examples())
    other = compiled(scaled_model(), plan=plan_for(3000))
    with pytest.raises(PrivacyError, match="that another plan pays for"):
        dp_sparse.export_model(other, tmp_path / "export", as_model=calibration)
    assert not (tmp_path / "export").exists()


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

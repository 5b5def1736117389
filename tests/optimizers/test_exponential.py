"""Exponential selection: exact steps on the selected rows, noise on those alone, refusals."""

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
from scipy import stats

import dp_sparse
from tests.reference import clipping as brute
from tests.reference import step as numpy_step
from tests.training_cases import (
    BINARY,
    VOCABULARIES,
    click_model,
    clicks,
    fit_on,
    plan_for,
    weights_of,
)


def selecting(plan: Any, rows: int, noise_ratio: float = 1.0) -> Any:
    mechanism = dp_sparse.ExponentialSelection(rows, noise_ratio)
    return dataclasses.replace(plan, mechanism=mechanism)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("count", [1, 4, 9, 18])
@pytest.mark.parametrize("row_clip_norm", [0.02, 10.0])
def test_a_noise_free_step_is_clip_of_the_best_rows(count: int, row_clip_norm: float) -> None:
    """The rows with the largest clipped norms; others are zeroed before clipping."""
    x, y = clicks(9, VOCABULARIES, seed=3)
    model = click_model(VOCABULARIES)
    gradients = brute.example_gradients(model, brute.keras_loss(BINARY), x, y[:, None])
    norms = [np.concatenate([np.linalg.norm(t, axis=1) for t in e[:2]]) for e in gradients]
    scores = sum(n * min(1.0, row_clip_norm / n.max()) for n in norms)
    order = np.argsort(-scores)
    while count < 18 and scores[order[count - 1]] < 1.001 * scores[order[count]]:
        count += 1  # noise, however small, would decide between equal scores
    chosen = np.split(np.isin(np.arange(18), order[:count]), [11])
    for example in gradients:
        for table, kept in zip(example, chosen, strict=False):
            table[~kept] = 0
    expected = weights_of(model)
    mean = numpy_step.dpsgd_mean_gradient(gradients, 0.1, 9, np.ones(9))
    numpy_step.SGD(0.5).apply(expected, mean)
    plan = selecting(plan_for(9), count, noise_ratio=1e-9)
    optimizer = dp_sparse.ExponentialSelectionOptimizer(
        keras.optimizers.SGD(0.5), plan, 0.1, row_clip_norm
    )
    fit_on(model, optimizer, plan, x, y)
    for found, wanted in zip(weights_of(model), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_k_rows_are_noised_even_on_a_batch_of_padding() -> None:
    model = click_model((400, 300), width=16)
    base = plan_for(100, expected_batch_size=10, capacity=4, noise_multiplier=1.5)
    plan = selecting(base, 120)
    optimizer = dp_sparse.ExponentialSelectionOptimizer(keras.optimizers.SGD(1.0), plan, 0.7)
    before = weights_of(model)
    fit_on(model, optimizer, plan, *clicks(4, (400, 300)), present=[0, 0, 0, 0])
    moved = [new - old for new, old in zip(weights_of(model), before, strict=True)][:2]
    rows = [np.flatnonzero(np.any(table != 0, axis=1)) for table in moved]
    assert sum(map(len, rows)) == 120 and min(map(len, rows)) > 20
    noise = np.concatenate([table[r].ravel() for table, r in zip(moved, rows, strict=True)])
    deviation = 0.7 * 1.5 / 10
    assert stats.kstest(noise, stats.norm(0, deviation).cdf).pvalue > 1e-5
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(noise, stats.norm(0, wrong * deviation).cdf).pvalue < 1e-9


@pytest.mark.slow
def test_a_calibrated_plan_and_its_statement() -> None:
    sampling = dp_sparse.PoissonSampling(num_examples=10_000, expected_batch_size=100, steps=50)
    budget = dp_sparse.PrivacyBudget(epsilon=1.0, delta=1e-5)
    plans = [
        dp_sparse.PrivacyPlan(budget, sampling, mechanism).calibrate()
        for mechanism in (
            dp_sparse.ExponentialSelection(300, noise_ratio=1.0),
            dp_sparse.ExponentialSelection(300, noise_ratio=50.0),
            dp_sparse.GaussianMechanism(),
        )
    ]
    even, cheap, gaussian = (plan.noise_multiplier for plan in plans)
    assert even == pytest.approx(gaussian * np.sqrt(2), rel=0.05)  # two equal parts of one budget
    assert gaussian <= cheap <= 1.01 * gaussian
    assert 0.99 < plans[0].spent(50).epsilon <= 1.0
    assert "300 exponential mechanisms of epsilon" in plans[0].statement()
    assert dp_sparse.PrivacyPlan.from_config(plans[0].get_config()) == plans[0]
    assert len({plan.fingerprint for plan in plans}) == 3


def test_plans_and_optimizers_must_agree() -> None:
    gaussian, plan = plan_for(8), selecting(plan_for(8), 3)
    for make in (dp_sparse.DPSGDOptimizer, dp_sparse.DPAdaFESTOptimizer):
        with pytest.raises(ValueError, match=r"Expected a plan with mechanism=GaussianMechanism"):
            make("sgd", plan, 1.0)
    with pytest.raises(ValueError, match=r"mechanism=ExponentialSelection\(\.\.\.\), got"):
        dp_sparse.ExponentialSelectionOptimizer("sgd", gaussian, 1.0)
    with pytest.raises(ValueError, match="row_clip_norm=-1"):
        dp_sparse.ExponentialSelectionOptimizer("sgd", plan, 1.0, -1)
    with pytest.raises(ValueError, match="no microbatch_size, got 2"):
        dp_sparse.ExponentialSelectionOptimizer("sgd", plan, 1.0, microbatch_size=2)


def test_more_rows_than_there_are_is_refused() -> None:
    model, plan = click_model(), selecting(plan_for(8), 10_000)
    model.compile(dp_sparse.ExponentialSelectionOptimizer("sgd", plan, 1.0), "mse")
    with pytest.raises(ValueError, match="rows_per_step <= .*got rows_per_step=10000"):
        model.fit(plan.sampling.batches(clicks(8)), steps_per_epoch=1, verbose=0)


def test_it_is_saved_with_its_config() -> None:
    plan = selecting(plan_for(8), 3, 2.0)
    optimizer = dp_sparse.ExponentialSelectionOptimizer("adagrad", plan, 0.5, 0.2)
    config = optimizer.get_config()
    again = dp_sparse.ExponentialSelectionOptimizer.from_config(config)
    assert again.get_config() == config and again.plan == plan

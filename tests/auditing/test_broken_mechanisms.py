"""Each audit finds the fault that it is for, and finds nothing where the fault is taken out."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import PrivacyBudget, PrivacyPlan, StreamSampling
from dp_sparse.auditing import CanaryScores, GaussianTradeOff, best_threshold, repeated_runs_bound
from tests.auditing import faults
from tests.auditing.audited import CLIP, DELTA, audit_of, bounds_in_parts, sound, stream_plan
from tests.auditing.faults import Fault

SURE = 1 - 1e-5

Experiment = Callable[[], tuple[float, float]]  # to the bound and the claim


def with_fault_or_not(fault: Fault, experiment: Experiment) -> None:
    """The bound exceeds the claim with the fault, and does not without."""
    for context, exceeds in ((fault, True), (faults.none, False)):
        with context():
            bound, claim = experiment()
        assert (bound > claim) == exceeds, (context.__name__, bound, claim)


@pytest.mark.parametrize(
    ("name", "fault"),
    [("dpsgd", faults.half_the_noise), ("adafest", faults.noise_on_touched_rows_only)],
)
def test_half_the_noise_and_noise_on_touched_rows_only(name: str, fault: Fault) -> None:
    with fault():
        (broken,) = bounds_in_parts(audit_of(name, stream_plan(4.0), 8000), 2)
    assert sound(name) <= 4.0 < broken


def test_the_square_of_the_map_noise() -> None:
    """σ1·C1 = 0.4: as printed, 1 of 1000 untouched rows survives, where 106 should."""

    def make(plan: PrivacyPlan) -> Any:
        return dp_sparse.DPAdaFESTOptimizer(
            "sgd", plan, CLIP, noise_ratio=1.0, contribution_clip_norm=0.2, threshold=0.5
        )

    plan = PrivacyPlan(PrivacyBudget(1.0, DELTA), StreamSampling(64, 512)).with_noise(2**0.5)

    def experiment() -> tuple[float, float]:
        audit = audit_of("adafest", plan, 8000, optimizer=make, confidence=SURE)
        (bound,) = bounds_in_parts(audit, 2)
        return bound, plan.budget.epsilon

    with_fault_or_not(faults.squared_map_noise, experiment)


def linear(y: Any, prediction: Any) -> tf.Tensor:
    """Its gradient is −1000 times the features, whatever the weights are."""
    return -1000.0 * prediction[:, 0]


def linear_model(size: int, optimizer: Any) -> keras.Model:
    head = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((size,)), head])
    model.compile(optimizer, loss=linear)
    return model


def against_another(runs: int) -> CanaryScores:
    """A step a run: one example pushes a weight up, and the canary, if it is there, pulls."""
    present = np.random.default_rng().random(runs) < 0.5
    pulls = np.tile(np.array([1.0, -1.0], np.float32), runs)[:, np.newaxis]
    weights = np.stack([np.ones(runs), present], axis=1).astype(np.float32).ravel()
    plan = PrivacyPlan(PrivacyBudget(1.0, DELTA), StreamSampling(2 * runs, 2)).with_noise(1.0)
    model = linear_model(1, dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1.0), plan, 1.0))
    weight, scores = 0.0, []
    for batch in plan.sampling.batches((pulls, np.zeros_like(pulls), weights)):
        model.train_on_batch(*batch)
        after = float(model.get_weights()[0][0, 0])
        scores.append(weight - after)
        weight = after
    return CanaryScores.of_coins(scores, present)


def test_the_realised_batch_size_as_divisor() -> None:
    claim = GaussianTradeOff(1.0, DELTA)
    bound_of = functools.partial(repeated_runs_bound, claim=claim, confidence=SURE)

    def experiment() -> tuple[float, float]:
        pilot, judged = against_another(500), against_another(1500)
        return bound_of(judged, best_threshold(pilot, bound_of)), claim.epsilon(1)

    with_fault_or_not(faults.realised_batch_size, experiment)


def resumed(canaries: int = 2000) -> CanaryScores:
    """A step with the canaries, a coordinate each, then a restored optimizer and a step of others.

    An example is in one of the two steps, so both together cost what one does. The attacker
    subtracts one released gradient from the other.
    """
    present = np.random.default_rng().random(canaries) < 0.5
    x = np.concatenate([np.eye(canaries), np.zeros((canaries, canaries))]).astype(np.float32)
    weights = np.concatenate([present, np.ones(canaries)]).astype(np.float32)
    sampling = StreamSampling(2 * canaries, canaries)
    plan = PrivacyPlan(PrivacyBudget(1.0, DELTA), sampling).with_noise(1.0)
    model = linear_model(canaries, dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1.0), plan, 1.0))
    released, before = [], np.zeros(canaries)
    for batch in plan.sampling.batches((x, np.zeros((2 * canaries, 1), np.float32), weights)):
        model.train_on_batch(*batch)
        after = model.get_weights()[0][:, 0].astype(np.float64)
        released.append(after - before)
        before = after
        saved: dict[str, Any] = {}
        model.optimizer.save_own_variables(saved)
        model.optimizer.load_own_variables(saved)
    return CanaryScores.of_coins(released[0] - released[1], present)


def test_the_same_noise_twice_after_a_resume() -> None:
    claim = GaussianTradeOff(1.0, DELTA)

    def experiment() -> tuple[float, float]:
        pilot, judged = resumed(), resumed()
        at = float(pilot.held_in.mean() + pilot.held_out.mean()) / 2
        return repeated_runs_bound(judged, at, claim, SURE), claim.epsilon(1)

    with_fault_or_not(faults.the_same_noise_after_a_resume, experiment)


def selected(canaries: np.ndarray, noise_multiplier: float) -> np.ndarray:
    """Whether the canary's row is among the top two of four, in each run; it is nobody else's."""
    source = dp_sparse.GaussianTopK(noise_multiplier)
    found = []
    for present in canaries:
        ids = np.array([0, 0, 1, 3][: 4 if present else 3])
        rows = dp_sparse.select_top_k(
            ({"t": ids}, np.zeros(len(ids))), {"t": 4}, 2, source, progress=False
        )
        found.append(3 in rows.row_ids["t"])
    return np.array(found, float)


@pytest.mark.parametrize(("part", "exceeds"), [(1.0, False), (0.25, True)])
def test_the_selection_of_rows_before_training(part: float, exceeds: bool) -> None:
    """DP-FEST's; with a quarter of the noise that its release claims, the audit sees it."""
    claim = GaussianTradeOff(1.0, DELTA)
    present = np.random.default_rng().random(1200) < 0.5
    scores = CanaryScores.of_coins(selected(present, part), present)
    bound = repeated_runs_bound(scores, 0.5, claim, SURE)
    assert (bound > claim.epsilon(1)) == exceeds, bound
    assert bound > 0.3


def test_a_fault_ends_with_its_context() -> None:
    with contextlib.ExitStack() as stack:
        for fault in (faults.half_the_noise, faults.realised_batch_size):
            stack.enter_context(fault())
    assert dp_sparse.noise.noisy_means.__module__ == "dp_sparse.noise.gaussian"

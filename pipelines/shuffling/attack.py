"""An attacker who undoes the permutation of `ShuffledDPSGDOptimizer` from released weights.

One step moves weights by far less than hidden units differ, so each released unit is most like
itself before the step. The canaries are examples, each with an input feature of its own, whose
gradients have a known direction among the hidden units. They are in the data or not by a coin.
"""

import dataclasses
import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from scipy.optimize import linear_sum_assignment

import dp_sparse
from dp_sparse.auditing import CanaryScores, GaussianTradeOff, best_threshold, repeated_runs_bound

UNITS, BATCH, RATE = 50, 400, 1e-3
CLIP, RATIO = 1.0, 250**0.5
CONFIDENCE = 0.999


@dataclasses.dataclass(frozen=True)
class Found:
    """What the attack shows.

    Attributes:
        claimed: ε of Theorem 6.
        guaranteed: ε of DP-SGD at the same noise.
        bound: What ε is at least.
        sigma: The noise multiplier.
        units_found: The part of hidden units that were matched rightly, of all steps.
        canaries: How many were judged.
        weights: How many are permuted.
    """

    claimed: float
    guaranteed: float
    bound: float
    sigma: float
    units_found: float
    canaries: int
    weights: int = (BATCH + 1) * UNITS


def plan_of(epsilon: float, delta: float, canaries: int) -> dp_sparse.PrivacyPlan:
    """Each canary is in one step, whose noise is that of Theorem 6 for the weights there are."""
    sampling = dp_sparse.StreamSampling(num_examples=canaries, batch_size=BATCH)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(epsilon, delta), sampling)
    return dp_sparse.theorem6_plan_not_a_guarantee(plan, Found.weights, CLIP, RATIO * CLIP)


def matched(before: list[np.ndarray], after: list[np.ndarray]) -> np.ndarray:
    """For each hidden unit before a step, which one it is after it, int64 `[units]`.

    Args:
        before: The kernels into the units, `[inputs, units]`, and out of them, `[units, outputs]`.
        after: The same after it.
    """
    of_units = [np.concatenate([first, second.T]) for first, second in (before, after)]
    products = of_units[0].T @ of_units[1]
    squares = [np.sum(each**2, axis=0) for each in of_units]
    return linear_sum_assignment(squares[0][:, None] + squares[1] - 2 * products)[1]


def attacked(plan: dp_sparse.PrivacyPlan, rng: np.random.Generator) -> tuple[CanaryScores, float]:
    """Scores of the plan's canaries, and the part of units that were found."""
    count = plan.sampling.num_examples
    present = rng.random(count) < 0.5
    x = np.tile(np.eye(BATCH, dtype=np.float32), (count // BATCH, 1))
    model = _model(plan, rng)
    scores, right = [], []
    for batch in plan.sampling.batches((x, np.zeros((count, 1), np.float32), present)):
        before = model.get_weights()
        model.train_on_batch(*batch)
        after = model.get_weights()
        places = matched(before, after)
        moved = before[0].astype(np.float64) - after[0][:, places]
        direction = before[1][:, 0] / np.linalg.norm(before[1])
        scores.append(moved @ direction * BATCH / (RATE * CLIP))
        right.append(np.mean(np.abs(after[1][places, 0] - before[1][:, 0]) < 0.1))
    return CanaryScores.of_coins(np.concatenate(scores), present), float(np.mean(right))


def _model(plan: dp_sparse.PrivacyPlan, rng: np.random.Generator) -> keras.Model:
    """One hidden layer whose weights out are large, so that gradients lie on those into it."""
    dense = functools.partial(keras.layers.Dense, use_bias=False)
    model = keras.Sequential([keras.Input((BATCH,)), dense(UNITS), dense(1)])
    spread = rng.permutation(np.linspace(-100, 100, UNITS))[:, None]
    model.set_weights([rng.normal(0, 0.01, (BATCH, UNITS)), spread])
    optimizer = dp_sparse.ShuffledDPSGDOptimizer(
        keras.optimizers.SGD(RATE), plan, CLIP, RATIO * CLIP, heuristic=True
    )
    model.compile(optimizer, loss=_steep)
    return model


def _steep(y: Any, prediction: Any) -> tf.Tensor:
    """Its gradient is clipped whatever the weights are; descent makes the score grow."""
    del y
    return 1000.0 * prediction[:, 0]


def audit(epsilon: float = 0.25, delta: float = 5e-6, canaries: int = 8000) -> Found:
    """The bound on other canaries than those that chose the threshold."""
    rng = np.random.default_rng()
    plan = plan_of(epsilon, delta, canaries)
    assert plan.noise_multiplier is not None
    claim = GaussianTradeOff(plan.noise_multiplier, delta)
    bound_of = functools.partial(repeated_runs_bound, claim=claim, confidence=CONFIDENCE)
    pilot, _ = attacked(plan_of(epsilon, delta, canaries), rng)
    judged, part = attacked(plan, rng)
    bound = bound_of(judged, best_threshold(pilot, bound_of))
    return Found(epsilon, plan.budget.epsilon, bound, plan.noise_multiplier, part, judged.count)

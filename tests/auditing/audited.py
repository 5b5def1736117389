"""Models, plans and audits of every mechanism, small enough to be run often."""

import functools
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np

import dp_sparse
from dp_sparse import Audit, GradientCanaries, PrivacyBudget, PrivacyPlan, StreamSampling
from dp_sparse.auditing import CanaryScores, repeated_runs_bound
from dp_sparse.auditing.canaries import Placement

EXAMPLES, ROWS, CLIP, DELTA = 64, 40, 0.5, 1e-5
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, ROWS, (EXAMPLES, 2)).astype(np.int32)
LABELS = RNG.normal(size=(EXAMPLES, 1)).astype(np.float32)

audit_module = importlib.import_module("dp_sparse.auditing.audit")

Make = Callable[[PrivacyPlan], Any]


def model() -> keras.Model:
    """Two lookups in a table, and two dense layers, whose hidden units can be permuted."""
    ids = keras.Input((2,), dtype="int32")
    rows = keras.layers.Embedding(ROWS, 3, name="words")(ids)
    hidden = keras.layers.Dense(4, "relu")(keras.layers.Flatten()(rows))
    return keras.Model(ids, keras.layers.Dense(1)(hidden))


@functools.cache
def stream_plan(epsilon: float, batch_size: int = 512) -> PrivacyPlan:
    sampling = StreamSampling(EXAMPLES, batch_size)
    return PrivacyPlan(PrivacyBudget(epsilon, DELTA), sampling).calibrate()


def dpsgd(plan: PrivacyPlan) -> Any:
    return dp_sparse.DPSGDOptimizer(keras.optimizers.Adam(0.01), plan, CLIP)


def adafest(plan: PrivacyPlan) -> Any:
    """Half of all rows survive on noise alone: the map tells what it can."""
    return dp_sparse.DPAdaFESTOptimizer("adagrad", plan, CLIP, noise_ratio=1.0, threshold=0.0)


def fest(plan: PrivacyPlan) -> Any:
    rows = dp_sparse.SelectedRows.public({"words": range(0, ROWS, 2)}, {"words": ROWS})
    return dp_sparse.DPFESTOptimizer("adam", plan, CLIP, rows)


def lazy(plan: PrivacyPlan) -> Any:
    return dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(0.1), plan, CLIP)


def shuffled(plan: PrivacyPlan) -> Any:
    return dp_sparse.ShuffledDPSGDOptimizer(keras.optimizers.Adam(0.01), plan, CLIP)


MECHANISMS: dict[str, tuple[Make, bool | None]] = {  # and whether canaries act on rows
    "dpsgd": (dpsgd, None),
    "adafest": (adafest, None),
    "fest": (fest, None),
    "lazy": (lazy, True),
    "shuffled": (shuffled, None),
}


def audit_of(name: str, plan: PrivacyPlan, count: int = 4000, **fields: Any) -> Audit:
    make, rows = MECHANISMS[name]
    canaries = GradientCanaries(count, rows)
    given = {"optimizer": make, "canaries": canaries, "confidence": 0.99999, **fields}
    return Audit(model, (IDS, LABELS), "mse", plan, **given)


def bounds_in_parts(audit: Audit, parts: int) -> list[float]:
    """The bounds of all parts of the canaries but the first one, which chooses thresholds.

    Scores are independent, so that parts of one run say what as many runs of it do, which would
    take as long as they are many. Of the estimators the strongest one alone: the one for f-DP in
    one run takes the most time, and shows less.
    """
    placement = Placement.of(audit.plan.sampling, audit.canaries.number)
    attacks = audit.canaries.attacked(audit._trained(), placement, audit._plan_of(placement))
    split = {attack: _parts_of(scores, parts) for attack, scores in attacks.items()}
    pilot, *judged = ({attack: each[i] for attack, each in split.items()} for i in range(parts))
    strongest = {audit_module._INDEPENDENT: repeated_runs_bound}
    with mock.patch.object(audit_module, "_ESTIMATORS", strongest):
        return [bound.epsilon for one in judged for bound in audit._judged(pilot, one)]


def _parts_of(scores: CanaryScores, count: int) -> list[CanaryScores]:
    held = (np.array_split(each, count) for each in (scores.held_in, scores.held_out))
    return [CanaryScores(*pair) for pair in zip(*held, strict=True)]


@functools.cache
def sound(name: str) -> float:
    """The bound on a mechanism as it is, at ε = 4; several tests look at it."""
    (bound,) = bounds_in_parts(audit_of(name, stream_plan(4.0), 8000), 2)
    return bound

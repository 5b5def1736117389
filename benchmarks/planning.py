"""How long a user waits before the first step: calibration, a table of plans, the first step.

The first step of the pCTR model (26 tables, 1e5 rows, batch 2,048) traces the model and checks that
examples do not mix; it is compared with the first step of stock Keras, each on a model of its own.
"""

import functools
import statistics
import time
from collections.abc import Callable

import keras

import dp_sparse
from benchmarks import harness, pctr_step

_EXAMPLES, _STEPS, _BATCH = 1_000_000, 20_000, 2048
_ROWS = 10**5


def calibrate(turn: int) -> object:
    """The plan of README, calibrated; each turn a step longer, since losses are kept."""
    sampling = dp_sparse.PoissonSampling(_EXAMPLES, _BATCH, steps=_STEPS + turn)
    budget = dp_sparse.PrivacyBudget(epsilon=1.0, delta=1 / _EXAMPLES)
    return dp_sparse.PrivacyPlan(budget, sampling).calibrate()


def table() -> dp_sparse.PlanTable:
    """Eighteen plans."""
    return dp_sparse.plan_table(_EXAMPLES, epsilon=3.0)


def seconds_of(function: Callable[[], object]) -> float:
    """How long one call takes."""
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def first_step(make: Callable[..., Callable[[], object]]) -> float:
    """The first step of a new model."""
    keras.backend.clear_session()
    return seconds_of(make(pctr_step.vocabularies(_ROWS), 4, "zeros"))


def main() -> None:
    """Prints seconds, and the ratio of the first steps."""
    options = harness.arguments(__doc__ or "")
    rounds = 1 if options.quick else 3
    first: dict[str, list[float]] = {"private": [], "stock": []}
    for _ in range(rounds):  # in turns
        first["private"].append(first_step(pctr_step.private_step))
        first["stock"].append(first_step(pctr_step.stock_step))
    calibrated = [seconds_of(functools.partial(calibrate, turn)) for turn in range(rounds)]
    metrics = {
        "calibrate_seconds_median": statistics.median(calibrated),
        "plan_table_seconds_18": seconds_of(table),
        "first_step_over_stock": statistics.median(first["private"])
        / statistics.median(first["stock"]),
    }
    rows = [(name, value) for name, value in metrics.items()]
    harness.report("planning", ("", "seconds or ratio"), rows, metrics, options)


if __name__ == "__main__":
    main()

"""How long a user waits before the first step: calibration, a table of plans, the first step.

The first step of the pCTR model (26 tables, 1e5 rows, batch 2,048) looks at its batch and traces
the model twice. It is compared with the first step of stock Keras: in a process of its own each,
and that of a further model in the same process.
"""

import argparse
import functools
import statistics
import subprocess
import sys
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


def first_steps(kind: str) -> tuple[float, float]:
    """Those of two models, one after the other, in a new process."""
    command = [sys.executable, "-m", "benchmarks.planning", "--first-steps", kind, str(_ROWS)]
    made = subprocess.run(command, cwd=harness.ROOT, check=True, capture_output=True, text=True)
    first, second = map(float, made.stdout.split()[-2:])
    return first, second


def print_first_steps(kind: str, rows: str) -> None:
    """What `first_steps` reads."""
    global _ROWS
    _ROWS = int(rows)
    make = {"private": pctr_step.private_step, "stock": pctr_step.stock_step}[kind]
    print(first_step(make), first_step(make))


def main() -> None:
    """Prints seconds, and the ratio of the first steps."""
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--first-steps", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_steps:
        print_first_steps(*options.first_steps)
        return
    rounds = 1 if options.quick else 3
    turns = [(first_steps("private"), first_steps("stock")) for _ in range(rounds)]
    first, second = (
        [statistics.median(turn[kind][place] for turn in turns) for kind in (0, 1)]
        for place in (0, 1)
    )
    calibrated = [seconds_of(functools.partial(calibrate, turn)) for turn in range(rounds)]
    metrics = {
        "calibrate_seconds_median": statistics.median(calibrated),
        "plan_table_seconds_18": seconds_of(table),
        "first_step_over_stock": first[0] / first[1],
        "second_fit_over_stock": second[0] / second[1],
    }
    rows = [(name, value) for name, value in metrics.items()]
    harness.report("planning", ("", "seconds or ratio"), rows, metrics, options)


if __name__ == "__main__":
    main()

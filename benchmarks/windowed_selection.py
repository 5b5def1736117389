"""What DP-AdaFEST's selection over windows of 64 steps costs beside that of each step.

One call is a whole window, so that its end, where the sum of maps is merged and thresholded, counts
in. The pCTR model has a million rows in 26 tables; one table alone has 1e5 and 1e7 rows. Memory is
that of the sum before its window ends, over 16 bytes for each row that was looked up in the window.
"""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from benchmarks import harness, one_table, pctr_step
from dp_sparse import noise
from dp_sparse.optimizers.window import Selection, SelectionWindow
from dp_sparse.selection import TableLookups, contribution_map, unit_of

WINDOW, ROUNDS, QUICK_ROUNDS = 64, 3, 1
ROWS = 10**6
TABLES = {"1e5": 10**5, "1e7": 10**7}
BYTES = 16  # of a row and its sum


def whole_windows(step: Callable[[], object], steps: int) -> Callable[[], object]:
    """One call is so many steps."""

    def run() -> object:
        return [step() for _ in range(steps)][-1]

    return run


def pctr_seconds(rounds: int) -> dict[str, float]:
    """Seconds of a step of the pCTR model, by the window."""
    sizes, steps = pctr_step.vocabularies(ROWS), WINDOW * (rounds + 1)
    candidates = {
        f"pCTR, window {window}": whole_windows(
            pctr_step.private_step(sizes, steps, "zeros", window=window), WINDOW
        )
        for window in (1, WINDOW)
    }
    return harness.in_turns(candidates, rounds, warm_up=1)


def table_seconds(rounds: int) -> dict[str, float]:
    """Seconds of a step on one table, by its size."""

    def step(size: int, window: int) -> Callable[[], object]:
        def make(plan: dp_sparse.PrivacyPlan) -> keras.optimizers.Optimizer:
            sgd = keras.optimizers.SGD(one_table.RATE)
            return dp_sparse.DPAdaFESTOptimizer(sgd, plan, clip_norm=1.0, window=window)

        return whole_windows(one_table.private_step(size, WINDOW * (rounds + 1), make), WINDOW)

    settings = [("1e5", 1), *((name, WINDOW) for name in TABLES)]
    candidates = {
        f"one table of {name} rows, window {window}": step(TABLES[name], window)
        for name, window in settings
    }
    return harness.in_turns(candidates, rounds, warm_up=1)


def memory_over_touched_rows() -> float:
    """Bytes of the sum after all steps of a window but one, over `BYTES` for each of its rows."""
    sizes = pctr_step.vocabularies(ROWS)
    x, _ = pctr_step.examples(sizes, pctr_step.BATCH * (WINDOW - 1))
    ids = x["categories"].astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    window, key = SelectionWindow(WINDOW), noise.NoiseKey()
    window.start([np.zeros(0, np.int64)] * len(sizes), offsets, ended=31)  # the longest is next
    by = Selection(offsets, unit_of(1.0), threshold=1.0, deviation=1.0)

    @tf.function(reduce_retracing=True)
    def add(ids: tf.Tensor, step: tf.Tensor) -> None:
        there = tf.ones([tf.shape(ids)[0], 1], tf.bool)
        lookups = [
            TableLookups(size, ids[:, place : place + 1], there) for place, size in enumerate(sizes)
        ]
        found = contribution_map(lookups, 1.0)
        assert found.units is not None
        window.add(found.row_ids, found.units, step, key.next_draw(), by)

    for step, batch in enumerate(np.split(ids, WINDOW - 1)):
        add(tf.constant(batch), tf.constant(step, tf.int64))
    held = sum(variable.numpy().nbytes for variable in window.non_private_variables())
    return held / (BYTES * len(np.unique(ids + offsets[:-1])))


def main() -> None:
    """Prints ms a step and the ratios."""
    options = harness.arguments(__doc__ or "")
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    seconds = pctr_seconds(rounds)
    harness.forget()
    seconds |= table_seconds(rounds)
    memory = memory_over_touched_rows()
    rows = [(name, 1000 * each / WINDOW) for name, each in seconds.items()]
    plain, windowed, small_plain, small, large = seconds.values()
    metrics = {
        "window_over_plain_step": windowed / plain,
        "window_over_plain_step_one_table": small / small_plain,
        "window_flatness_1e7_over_1e5": large / small,
        "window_memory_over_touched_rows": memory,
    }
    harness.report("windowed_selection", ("", "ms a step"), rows, metrics, options)


if __name__ == "__main__":
    main()

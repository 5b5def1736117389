"""What a run's released values say of how it went, in words."""

import math

import numpy as np

from dp_sparse.optimizers import DPAdaFESTOptimizer, PrivateOptimizer

_DEVIATIONS = 3.0  # of the number of false rows


def hardly_trained(optimizer: PrivateOptimizer, steps: int, rows: np.ndarray) -> list[str]:
    """A sentence for each table of which no more rows were updated than noise alone explains.

    The rows of every step are released, and how many of them survive on noise alone is a public
    expectation. Only DP-AdaFEST has such rows.

    Args:
        optimizer: What trained.
        steps: Steps of the run.
        rows: Rows noised in all of them, `[tables]`.
    """
    if not isinstance(optimizer, DPAdaFESTOptimizer) or not steps:
        return []
    return [
        f"{table.path}: {noised / steps:.3g} rows a step were updated, and {false:.3g} would be by "
        "noise alone."
        for table, noised, false in zip(
            optimizer.noised_tables, rows, optimizer.false_rows_per_step, strict=True
        )
        if noised <= steps * false + _DEVIATIONS * math.sqrt(steps * false)
    ]

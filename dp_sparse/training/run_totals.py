"""The running totals of an optimizer at one time, and what two times tell of the steps between.

Rows that were noised are released. The other counts are covered by no ε, and have functions of
their own here, so that nobody writes them by accident.
"""

import dataclasses

import keras
import numpy as np

from dp_sparse.core import validate
from dp_sparse.optimizers import PrivateOptimizer


@dataclasses.dataclass(frozen=True)
class RunTotals:
    """`StepDiagnostics` at one time.

    Attributes:
        steps: Steps taken by this process.
        rows: Rows noised, `[tables]`; empty before the first step.
        examples: Real examples of all batches; not private.
        clipped: How many of them were clipped; not private.
        not_finite: How many of them did not train; not private.
    """

    steps: int
    rows: np.ndarray
    examples: int
    clipped: int
    not_finite: int


def totals(optimizer: PrivateOptimizer) -> RunTotals:
    """Those of now; it waits for the step to end."""
    counts = optimizer.diagnostics
    return RunTotals(
        int(counts.steps.numpy()),
        counts.rows.numpy(),
        int(counts.examples.numpy()),
        int(counts.clipped.numpy()),
        int(counts.not_finite.numpy()),
    )


def rows_per_step(before: RunTotals, after: RunTotals) -> list[float]:
    """Rows noised a step in each table, on average."""
    start = before.rows if before.rows.size else np.zeros_like(after.rows)
    return ((after.rows - start) / _steps(before, after)).tolist()


def counts_without_noise(before: RunTotals, after: RunTotals) -> dict[str, float]:
    """What no ε covers: mean size of batches, part that was clipped, how many did not train."""
    examples = after.examples - before.examples
    return {
        "mean_batch_size": examples / _steps(before, after),
        "clip_fraction": (after.clipped - before.clipped) / max(1, examples),
        "quarantined_examples": float(after.not_finite - before.not_finite),
    }


def private_optimizer_of(model: keras.Model, name: str) -> PrivateOptimizer:
    """The model's private optimizer.

    Raises:
        ValueError: It has none, so the callback of this name has nothing to report.
    """
    validate.of_keras_3("a model", model)
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, PrivateOptimizer):
        raise ValueError(
            f"Expected a model compiled with a private optimizer, got {type(optimizer).__name__}: "
            f"{name} has nothing to report."
        )
    return optimizer


def _steps(before: RunTotals, after: RunTotals) -> int:
    return max(1, after.steps - before.steps)

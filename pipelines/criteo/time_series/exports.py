"""Exports of a model that trains day by day: the first one whole, then what each period changed.

In the folder are `period-000`, the whole model after the first period; `delta-001`, `delta-002`, …,
what each later period changed; and the whole model after the last period that has ended. Each has
the statement of all periods up to it.
"""

import shutil
from pathlib import Path

import keras

import dp_sparse
from pipelines.criteo.time_series.days import Period


class PeriodExports:
    """Writes what is missing after a period, so a run that was stopped goes on with it.

    Args:
        folder: Where to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def require_none(self) -> None:
        """Raises ValueError if there are exports, which another run has made."""
        there = sorted([*self._folder.glob("period-*"), *self._folder.glob("delta-*")])
        if there:
            raise ValueError(
                f"Expected a folder without exports for a run that begins, got export="
                f"{str(self._folder)!r} with {there[0].name}: name another one."
            )

    def write(self, model: keras.Model, period: Period, plans: dp_sparse.DisjointPlans) -> None:
        """Writes the exports of a period that has ended.

        Args:
            model: Compiled with the optimizer of the period.
            period: Which one.
            plans: Of all periods up to it.
        """
        whole, base = self._whole(period.number), self._whole(period.number - 1)
        if not whole.exists():
            if base.exists() and not model.optimizer.delays_noise:
                delta = self._folder / f"delta-{period.number:03d}"
                if not delta.exists():
                    dp_sparse.export_delta(model, delta, base, plans=plans)
                dp_sparse.apply_deltas(base, [delta], whole)
            else:
                dp_sparse.export_model(model, whole, plans=plans)
        if period.number > 1:
            shutil.rmtree(base, ignore_errors=True)

    def _whole(self, number: int) -> Path:
        return self._folder / f"period-{number:03d}"

"""Exports of a model that trains day by day: the first one whole, then what each period changed.

In the folder are `period-000`, the whole model after the first period; `delta-001`, `delta-002`, …,
what each later period changed; and the whole model after the last period that has ended. Each has
the statement of all periods up to it. `run.txt` says whose exports these are.
"""

import contextlib
import shutil
import uuid
from pathlib import Path

import keras

import dp_sparse
from pipelines.criteo.time_series.days import Period
from pipelines.files import whole_file


class PeriodExports:
    """Writes what is missing after a period, so a run that was stopped goes on with it.

    Args:
        folder: Where to. From now on it belongs to the run, whoever else begins at the same time.
        run: The folder of the run, which is alone in it.

    Raises:
        ValueError: Another run has exports in the folder, or will have.
    """

    def __init__(self, folder: Path, run: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        owner, own = folder / "run.txt", _name_of(run)
        there = sorted([*folder.glob("period-*"), *folder.glob("delta-*")])
        if not owner.exists() and not there:
            with contextlib.suppress(FileExistsError), owner.open("x") as file:
                file.write(own)
        if not owner.exists() or owner.read_text() != own:
            seen = (there or [owner])[0].name
            raise ValueError(
                f"Expected a folder without exports of another run, got export={str(folder)!r} "
                f"with {seen}: name another one."
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


def _name_of(run: Path) -> str:
    """Drawn once, so that a run that begins in a folder of the same name has another one."""
    path = run / "exports.txt"
    if not path.exists():
        with whole_file(path) as file:
            file.write(uuid.uuid4().hex.encode())
    return path.read_text()

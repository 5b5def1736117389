"""Exports of a model that trains day by day: the first one whole, then what each period changed.

In the folder are `period-000`, the whole model after the first period; `delta-001`, `delta-002`, …,
what each later period changed; and the whole model after the last period that has ended. Each has
the statement of all periods up to it. `run.txt` says whose exports these are.
"""

import shutil
import uuid
from pathlib import Path

import keras

import dp_sparse
from pipelines.criteo.time_series.days import Period
from pipelines.files import only_one, whole_file


class PeriodExports:
    """Writes what is missing after a period, so a run that was stopped goes on with it.

    Args:
        folder: Where to. It belongs to one run from its begin on, and nobody else is in it.
        run: The folder of the run, which is alone in it.
        trained: Whether the first period has been trained on there, to its last step.

    Raises:
        ValueError: The folder is another run's, or has exports while this one has yet to write any.
    """

    def __init__(self, folder: Path, run: Path, trained: bool) -> None:
        if folder.resolve() == run.resolve():
            raise ValueError(
                f"Expected a folder for exports alone, got export={str(folder)!r}, the folder of "
                "the run: name another one."
            )
        self._folder, self._owner, self._own = folder, folder / "run.txt", _name_of(run)
        self._lock = only_one(folder)
        there = sorted([*folder.glob("period-*"), *folder.glob("delta-*")])
        if there and not trained:
            raise ValueError(
                f"Expected a folder without exports for a run that begins, got export="
                f"{str(folder)!r} with {there[0].name}: name another one."
            )
        if not self._owner.exists():
            with whole_file(self._owner) as file:
                file.write(f"{self._own}\nof the run in {run.resolve()}\n".encode())
        self._require_own()

    def _require_own(self) -> None:
        words = self._owner.read_text().splitlines() if self._owner.exists() else []
        if words[:1] != [self._own]:
            whose = " ".join(words[1:]) or "which has lost its run.txt"
            raise ValueError(
                f"Expected a folder for the exports of this run, got export={str(self._folder)!r}, "
                f"{whose}: name another one, or remove it if nobody needs it and start again."
            )

    def write(self, model: keras.Model, period: Period, plans: dp_sparse.DisjointPlans) -> None:
        """Writes the exports of a period that has ended.

        Args:
            model: Compiled with the optimizer of the period.
            period: Which one.
            plans: Of all periods up to it.

        Raises:
            ValueError: The folder was taken from the run.
        """
        self._require_own()
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

"""`Run`: training that survives a kill, in three lines."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.accounting import BudgetAccount, PrivacyPlan, note_folder
from dp_sparse.core import PrivacyError, local_form
from dp_sparse.export import Export, export_model
from dp_sparse.optimizers import private_optimizer_of
from dp_sparse.probabilities import (
    Calibration,
    ScoreHistogram,
    calibration_of,
    draw_histogram,
    require_asked,
    require_method,
    warn_if_trained_on,
)
from dp_sparse.reports import PrivacyMonitor
from dp_sparse.runs.run_checkpoint import RunCheckpoint
from dp_sparse.runs.run_folder import RunFolder, T, locked
from dp_sparse.runs.same_run import as_text, refuse_other
from dp_sparse.selection import (
    PrivateVocabulary,
    SelectedRows,
    TopKTable,
    asked_for,
    calibrate_top_k,
    draw_vocabulary,
    select_top_k,
)

_OPEN: dict[Path, "Run"] = {}  # of this process
_ROWS, _SCORES, _WORDS = "rows.npz", "scores.npz", "vocabulary.npz"
_OF_ANOTHER = (
    "{} was released by another run.\nRestore its own one, or use another folder, which spends "
    "again."
)


class Run:
    """One private training run and its folder; the same script resumes it after a kill.

    The folder holds the plan, releases that were paid for, checkpoints and the log. Each is made
    once: a later process reads it. Pass `run.plan` to the optimizer.

    Args:
        folder: A local folder of this run alone.
        plan: The plan, calibrated or not. A resumed run uses the saved one; this one must have the
            same budget, sampling and mechanism.
        account: A `BudgetAccount`, or the path of its file, that the plan is charged to, once.
        settings: What else the run depends on; resuming with other ones is an error.
        every_seconds: How often to save a checkpoint, beside one at the end of each epoch.
        log_every: Steps between two lines of the log; None for no log.
        diagnostics: As in `PrivacyMonitor`.

    Raises:
        ValueError: Another process uses the folder, its run began with other settings or another
            account, `run.json` is lost, or an argument is out of its range.
        PrivacyError: `run.json` is damaged.

    Examples:
        >>> import dp_sparse, keras, numpy as np, tempfile
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=2)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-3), sampling)
        >>> folder = tempfile.TemporaryDirectory()
        >>> run = dp_sparse.Run(folder.name, plan)
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(dp_sparse.DPSGDOptimizer("sgd", run.plan, clip_norm=1.0), loss="mse")
        >>> data = np.ones((8, 1)), np.ones(8)
        >>> history = model.fit(run.batches(data), callbacks=run.callbacks(), verbose=0)
        >>> run.steps_spent, run.log[-1]["step"]
        (4, 4)

    ### Formal Guarantees
    Those of the plan, and of `PrivateCheckpoint`: a step that a checkpoint holds stays spent, and
    steps that nobody has seen run again with fresh noise. Selected rows and the plan are on the
    disk before anything that follows from them. A folder that has lost a part which was paid for is
    an error, since making it again would spend again; restoring an old copy of the whole folder is
    not found.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        plan: PrivacyPlan | None = None,
        *,
        account: BudgetAccount | str | os.PathLike[str] | None = None,
        settings: Mapping[str, Any] | None = None,
        every_seconds: float = 600.0,
        log_every: int | None = 100,
        diagnostics: str = "private",
    ) -> None:
        path = Path(local_form(folder)).expanduser().absolute()
        if "://" in str(local_form(folder)):
            raise ValueError(
                f"Expected a local folder, got {str(folder)!r}.\nUse PrivateCheckpoint and "
                "PrivacyMonitor, which write to remote ones, and keep the plan yourself."
            )
        if plan is not None and not isinstance(plan, PrivacyPlan):
            raise ValueError(f"Expected a PrivacyPlan, got plan={plan!r}: Run(folder, plan).")
        if account is not None and not isinstance(account, BudgetAccount):
            account = BudgetAccount(account)
        self._given, self._account = plan, account
        self._plan: PrivacyPlan | None = None
        self._rows: SelectedRows | None = None
        if path in _OPEN:  # a cell of a notebook that runs again
            _OPEN[path].close()
        self._lock = locked(path)
        try:
            self._folder = RunFolder(path, as_text(settings, account))
            self._checkpoint = RunCheckpoint(self._folder, every_seconds)
            self._monitor = None
            if log_every is not None:
                self._monitor = PrivacyMonitor(
                    str(path / "log"), every_steps=log_every, diagnostics=diagnostics
                )
        except Exception:
            self._lock.close()
            raise
        self._resumed = self._folder.resumes
        _OPEN[path] = self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._folder.path

    @property
    def resumed(self) -> bool:
        """Whether the folder had a run when this object was made."""
        return self._resumed

    @property
    def finished(self) -> bool:
        """Whether all steps of the plan are spent; `restore` then loads the weights."""
        return self._folder.has_plan and self.steps_spent >= self.plan.sampling.steps

    @property
    def plan(self) -> PrivacyPlan:
        """The calibrated plan of the run, with what `select_top_k` released.

        It is calibrated, written and charged at its first use, so select rows before.

        Raises:
            ValueError: The run was given none, or one that differs from that of the folder, or
                the plan of a run that took steps is lost.
            PrivacyError: The account has not enough left, another run was charged for the plan, or
                it is damaged.
        """
        return self.plan_once(self._calibrated)

    def plan_once(self, make: Callable[[], PrivacyPlan]) -> PrivacyPlan:
        """As `plan`, for a plan that is made only now; `make` is called when the run begins."""
        if self._plan is None:
            is_new = not self._folder.has_plan
            plan = self._folder.plan(lambda: self._paying(make()))
            if self._given is not None:
                refuse_other(self._given, plan, self.folder)
            self._charge(plan, is_new)
            note_folder(plan.run_id)
            self._plan = self._checkpoint.plan = plan
        return self._plan

    def _paying(self, plan: PrivacyPlan) -> PrivacyPlan:
        """A plan as it is made; raises ValueError if rows were selected that it does not pay."""
        path = self.folder / _ROWS
        rows = SelectedRows.load(path) if path.exists() else None
        if rows is not None and rows.costs and rows.release not in plan.releases:
            raise ValueError(
                f"{path} was selected in this run, and the plan does not pay for it.\nCall "
                "run.select_top_k, with the same arguments, before the first use of run.plan."
            )
        return plan

    def _charge(self, plan: PrivacyPlan, is_new: bool) -> None:
        """Charges the account once for the folder; a new plan that is refused is forgotten."""
        if self._account is None:
            return
        self._folder.begin()
        before = self._folder.is_charged(plan.run_id)
        try:
            if not before:
                self._refuse_charged(plan)
                self._folder.note_charge(plan.run_id)
            self._account.charge(
                plan,
                note=self.folder.name,
                resumed=before,
                reserved=self._folder.reservation(),
            )
        except Exception:
            if is_new:
                self._folder.forget()
            raise

    def _refuse_charged(self, plan: PrivacyPlan) -> None:
        assert self._account is not None
        if plan.run_id in [charge.run_id for charge in self._account.charges]:
            raise PrivacyError(
                f"{self._account.path} has a charge for the plan of {self.folder}, which another "
                "run made: one plan pays for one run.\nGive each Run a plan of its own, by "
                "plan.calibrate(), and leave account.charge to it."
            )

    def select_top_k(
        self,
        examples: Any,
        tables: Mapping[str, int | TopKTable],
        k: int,
        *,
        share: float = 0.01,
        source: Any = None,
        **options: Any,
    ) -> SelectedRows:
        """Selects the rows that the run trains, once; a resumed run reads them. The plan pays.

        A plan that was calibrated is calibrated again, with room for the selection.

        Args:
            examples: Each example once, as in `dp_sparse.select_top_k`: `({table: ids}, y)`.
            tables: The tables by name, each its number of rows or a `TopKTable`.
            k: Rows to select over all tables.
            share: The part of ε for the selection, if no `source` is given.
            source: A noise source of your own.
            **options: Further arguments of `dp_sparse.select_top_k`.

        Raises:
            ValueError: The plan was made before, the rows of a run that has one are lost, or the
                run selected with another k or from other tables.
            PrivacyError: The account has not enough left for the plan.
        """
        if self._plan is not None:
            raise ValueError(
                "Expected select_top_k before the first use of run.plan, which pays for the rows: "
                "call it first."
            )

        asked = {"k": k, "tables": {name: _rows_of(table) for name, table in tables.items()}}

        def make() -> SelectedRows:
            noise = source or calibrate_top_k(self._require_given(), tables, k, share=share).source
            return select_top_k(examples, tables, k, noise, **options)

        rows = self.release(_ROWS, make, SelectedRows.load)
        self._folder.same("rows.json", asked)
        self._rows = rows
        return rows

    def calibrate_probabilities(
        self,
        model: keras.Model,
        examples: Any,
        *,
        method: str = "platt",
        label_range: tuple[float, float] | None = None,
        output: str | int | None = None,
        weight_cap: float = 1.0,
        num_examples: int | None = None,
    ) -> Calibration:
        """Calibrates the trained model's predictions by a histogram that is drawn once and kept.

        Reserve it in the plan that the run is given: `reserve_calibration(plan)`.

        Args: as of `dp_sparse.calibrate_probabilities`.

        Raises:
            ValueError: As there, or the file of the histogram is lost or another run's.
            PrivacyError: As there, or the run was closed.

        Warns: as there.
        """
        self._refuse_closed()
        private_optimizer_of(model, "calibrate the model of the run")
        require_method(method)
        run_id = self.plan.run_id
        self._checkpoint.refuse_other_plan(model)

        def draw() -> ScoreHistogram:
            return draw_histogram(
                model,
                examples,
                label_range=label_range,
                output=output,
                weight_cap=weight_cap,
                num_examples=num_examples,
                kept=True,
            )

        made = self._folder.paid_release(_SCORES, draw)
        histogram = ScoreHistogram.load(self.folder / _SCORES) if made is None else made
        if histogram.paid_by != run_id:
            raise ValueError(_OF_ANOTHER.format(self.folder / _SCORES))
        require_asked(histogram, label_range, output, weight_cap)
        warn_if_trained_on(histogram, model, stacklevel=2)
        return calibration_of(histogram, examples, method)

    def private_vocabulary(
        self,
        examples: Any,
        columns: str | Sequence[str],
        *,
        max_values: int | None = None,
        padding_value: int | None = None,
        progress: bool = True,
    ) -> PrivateVocabulary:
        """The vocabulary of columns, which is drawn once and kept.

        Reserve it in the plan that the run is given: `reserve_vocabulary(plan)`.

        Args: as of `dp_sparse.private_vocabulary`.

        Raises:
            ValueError: As there, or the file of the vocabulary is lost, another run's, or of other
                columns.
            BadExampleError: As there.
            PrivacyError: As there, or the run was closed.
        """
        self._refuse_closed()
        asked, run_plan = asked_for(columns, max_values, padding_value), self.plan

        def draw() -> PrivateVocabulary:
            drawn = draw_vocabulary(
                examples,
                asked,
                run_plan,
                one_value_each=max_values is None,
                progress=progress,
                kept=True,
            )
            self._folder.note("vocabulary.json", asked.described())
            return drawn

        made = self._folder.paid_release(_WORDS, draw)
        words = PrivateVocabulary.load(self.folder / _WORDS) if made is None else made
        if words.draws[-1].paid_by != run_plan.run_id:
            raise ValueError(_OF_ANOTHER.format(self.folder / _WORDS))
        self._folder.same("vocabulary.json", asked.described())
        return words

    def release(self, name: str, make: Callable[[], T], load: Callable[[Path], T]) -> T:
        """Makes a release once, such as counts of your own; later processes load it.

        Args:
            name: Its file in the folder, which ends with ".npz".
            make: Makes it; the result has `save(path)`, which writes the file whole or not at all.
                Add its cost to the plan.
            load: Reads it.

        Raises:
            ValueError: Another name, or the run has a plan and the file is lost.
        """
        if self._plan is not None and not (self.folder / name).exists():
            raise ValueError(
                f"Expected release({name!r}) before the first use of run.plan, which pays for it: "
                "call it first."
            )
        if self._account is not None and not self._folder.has_plan:
            self._folder.begin()
            self._account.reserve(
                self._require_given(), self._folder.reservation(), self.folder.name
            )
        made = self._folder.release(name, make)
        return load(self.folder / name) if made is None else made

    def batches(self, source: Any, **options: Any) -> tf.data.Dataset:
        """The batches that are left of the run, a dataset for `fit`.

        Args:
            source: As in `plan.sampling.batches`.
            **options: Further arguments of it, such as `augment` or `class_weight`.

        Raises:
            ValueError: As `plan` and `plan.sampling.batches`.
            PrivacyError: Likewise.
        """
        sampling = self.plan.sampling
        done = max(self.steps_spent, self._checkpoint.steps_here)
        if sampling.steps_per_pass is not None and done < sampling.steps:
            options = {"first_step": done, **options}
        return self.timed(sampling.batches(source, **options))

    def timed(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """The batches, with a clock on how long steps wait for them if the log has times."""
        if self._monitor is None or self._monitor.diagnostics == "private":
            return batches
        return self._monitor.timed(batches)

    def callbacks(self) -> list[keras.callbacks.Callback]:
        """What `fit` needs: it restores the run when training begins, saves it and writes its log.

        Put callbacks of your own behind these.
        """
        return [self._checkpoint, *([] if self._monitor is None else [self._monitor])]

    def restore(self, model: keras.Model) -> int:
        """Restores the model now, which `fit` otherwise does; returns the steps spent.

        Args:
            model: Built, and compiled with an optimizer of `run.plan`.

        Raises:
            PrivacyError: As in `PrivateCheckpoint.restore`.
            ValueError: Likewise.
        """
        return self._checkpoint.restore(model)

    @property
    def steps_spent(self) -> int:
        """The steps that a checkpoint holds, in this process or before; 0 before the plan is made.

        Raises:
            PrivacyError: The checkpoints or the plan are lost or damaged.
        """
        if not self._folder.has_plan:
            return 0
        return self._checkpoint.published(self._folder.saved_plan())

    @property
    def log(self) -> list[dict[str, Any]]:
        """The lines of the log so far, each a dictionary, as in `PrivacyMonitor`."""
        path = self.folder / "log" / "log.jsonl"
        return [*map(json.loads, path.read_text().splitlines())] if path.exists() else []

    def statement(self, *, format: str = "text") -> str:
        """What the run guarantees after the steps that it has spent; "json" for the same as data.

        Raises:
            ValueError: Another format.
        """
        return self.plan.statement(self.steps_spent, format=format)

    def export(
        self, model: keras.Model, path: str | os.PathLike[str] | None = None, **options: Any
    ) -> Export:
        """Writes the model for serving, by default to `export` in the folder.

        Args:
            model: The trained model.
            path: A local folder that is not there yet.
            **options: Further arguments of `dp_sparse.export_model`, whose errors are raised.
        """
        return export_model(model, self.folder / "export" if path is None else path, **options)

    def close(self) -> None:
        """Saves what is not saved, and lets another process into the folder.

        Otherwise that happens when this process ends. Make a new `Run` to resume.
        """
        if _OPEN.get(self.folder) is self:
            del _OPEN[self.folder]
        self._checkpoint.close()
        if self._monitor is not None:
            self._monitor.close()
        self._lock.close()

    def _refuse_closed(self) -> None:
        if _OPEN.get(self.folder) is not self:
            raise PrivacyError(f"The run in {self.folder} was closed.\nMake it again to resume it.")

    def _require_given(self) -> PrivacyPlan:
        if self._given is None:
            raise ValueError("Expected Run(folder, plan), got no plan: pass a PrivacyPlan.")
        return self._given

    def _calibrated(self) -> PrivacyPlan:
        given = self._require_given()
        if self._rows is not None and self._rows.costs:
            given = dataclasses.replace(
                given, releases=(*given.releases, self._rows.release), noise_multiplier=None
            )
        return given.calibrate() if given.noise_multiplier is None else given


def _rows_of(table: int | TopKTable) -> int:
    return table.num_rows if isinstance(table, TopKTable) else int(table)

"""Trains on one period after the other, evaluates on the days behind them, goes on after a stop.

Each period is a `dp_sparse.Run` in a folder of its own, and leaves `done.json` there when it has
ended. A run over all periods that goes on skips those that have ended, loads the last one of them,
and takes the checkpoint of the one it was in.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import ml_collections
import numpy as np
import tensorflow as tf

import dp_sparse
from models.pctr import pctr
from pipelines.criteo.days import check_different
from pipelines.criteo.records import PrepareError
from pipelines.criteo.time_series.days import Period, day_files, periods_of
from pipelines.criteo.time_series.exports import PeriodExports
from pipelines.criteo.time_series.periods import PeriodPlans, PeriodRuns
from pipelines.criteo.time_series.reading import (
    READERS,
    JoinedRecords,
    Reader,
    RecordReader,
    refuse_repeated,
)
from pipelines.exports import require_private
from pipelines.files import StateFile, only_one, state_file
from pipelines.methods import METHODS, NON_PRIVATE, optimizer_under, stand_in, stand_in_rows
from pipelines.optimizers import optimizer_of
from pipelines.scores import exact_auc, log_loss, mean_prediction
from pipelines.steps import stock_batches


@dataclasses.dataclass(frozen=True)
class TimeSeriesResult:
    """What a run ends with.

    Attributes:
        auc: Exact AUC on the days of evaluation, after the last period.
        log_loss: Mean log loss on them; NaN where the last period was trained by a version that
            did not measure it.
        mean_prediction: Mean probability of a click that is predicted for them; NaN likewise.
        curve: (name, AUC) after each period.
        epsilon: The largest ε of a period; infinite without privacy.
        delta: The δ of all; 1 without privacy.
        reduction: Table parameters ÷ mean table entries noised a step, over all steps.
        steps: Steps of all periods.
        statement: What all periods guarantee together.
    """

    auc: float
    log_loss: float
    mean_prediction: float
    curve: list[tuple[str, float]]
    epsilon: float
    delta: float
    reduction: float
    steps: int
    statement: str


def train(config: ml_collections.ConfigDict, folder: Path) -> TimeSeriesResult:
    """Trains and evaluates, or goes on where the run in `folder` stopped.

    Raises:
        ValueError: As `Run.of`.
        PrivacyError: What a period trained is lost, or another run has its batches.
    """
    return Run.of(config, folder).result()


def _check(config: ml_collections.ConfigDict) -> None:
    if config.method not in METHODS:
        raise ValueError(f"Expected method to be one of {METHODS}, got method={config.method!r}.")
    if config.data.reading not in READERS:
        raise ValueError(
            f"Expected data.reading to be one of {tuple(READERS)}, got {config.data.reading!r}."
        )
    if config.export:
        require_private(config.method)
    if config.method != NON_PRIVATE:
        _check_private(config)


def _check_private(config: ml_collections.ConfigDict) -> None:
    """Builds what each period will need, of stand-ins: its histogram is spent before them."""
    budget = dp_sparse.PrivacyBudget(config.privacy.epsilon, config.privacy.delta or 0.5)
    sampling = dp_sparse.PoissonSampling(num_examples=2, expected_batch_size=1, steps=1)
    plan = stand_in(dp_sparse.PrivacyPlan(budget, sampling))
    optimizer_under(config, plan, stand_in_rows(config))
    dp_sparse.PrivateCheckpoint("unused", every_seconds=config.checkpoint_seconds)


class Run:
    """One run over all periods."""

    @classmethod
    def of(cls, config: ml_collections.ConfigDict, folder: Path) -> "Run":
        """A run in `folder`, checked; it may have begun there before.

        Raises:
            ValueError: An unknown method or reader, days that are missing, empty or begin with the
                same rows, an export without privacy, exports of another run, or a number out of
                its range.
        """
        _check(config)
        files = day_files(config.data.days)
        check_different([str(path) for path in files])  # also those that evaluate
        last = config.data.train_days
        if not 1 <= last < len(files):
            raise ValueError(
                f"Expected 1 <= data.train_days < {len(files)}, the days there are, got {last}."
            )
        keras.utils.set_random_seed(config.seed)  # of the initial weights alone
        return cls(config, folder, periods_of(files[:last], config.period), files[last:])

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        folder: Path,
        periods: Sequence[Period],
        held_out: Sequence[Path],
    ) -> None:
        self._config, self._folder, self._periods = config, folder, periods
        self._lock = only_one(folder)
        self._reader: Reader = READERS[config.data.reading](config, folder)
        self._runs = PeriodRuns(config, self._reader)
        self._model = pctr(config.data.vocabularies, hidden=config.hidden)
        self._digests: dict[str, list[str]] = {}
        self._exports = None
        if config.export:
            trained = self._runs.of(periods[0]).finished
            self._runs.close()
            self._exports = PeriodExports(Path(config.export), folder, trained)
        self._held_out = _held_out(config, folder, held_out)

    def result(self) -> TimeSeriesResult:
        """Trains on what is left, and evaluates."""
        return self.without_privacy() if self._config.method == NON_PRIVATE else self.private()

    def private(self) -> TimeSeriesResult:
        """A run and an optimizer for each period."""
        total = sum(self._reader.count(period) for period in self._periods)
        delta = self._config.privacy.delta or 1 / total
        plans = PeriodPlans(self._config, self._reader, self._runs, self._periods, delta)
        ended = [period for period in self._periods if self._done(period).exists()]
        previous = None
        for period in self._periods[max(0, len(ended) - 1) :]:
            previous = self._trained(period, plans, previous, period in ended)
        result = self._result({p.name: plans.found(p) for p in self._periods})
        self._runs.close()
        return result

    def _trained(
        self, period: Period, plans: PeriodPlans, previous: Any, ended: bool
    ) -> dp_sparse.DPSGDOptimizer:
        """Trains on a period, or loads what training on it ended with; returns its optimizer."""
        if not ended:
            plans.prepare(period)
            self._refuse_repeated([*self._periods[: period.number], *plans.read_for(period)])
        plan, rows = plans.of(period)
        wrapped = optimizer_of(self._config, steps=self._steps())
        optimizer = optimizer_under(self._going_on(previous), plan, rows, wrapped)
        self._compile(optimizer)
        if previous is not None:
            optimizer.take_slots(previous)
        run = self._runs.of(period)
        spent = run.restore(self._model)
        report = dp_sparse.PrivacyReport(points=1)
        if spent < plan.sampling.steps:
            self._model.fit(
                self._batches(period, run, spent),
                steps_per_epoch=plan.sampling.steps - spent,
                callbacks=[*run.callbacks(), report],
                verbose=self._config.verbose,
            )
        if not ended:
            self._export(period, plans)
            self._end(period, plan.sampling.steps, report.reduction() if report.model else None)
        self._runs.close()
        return optimizer

    def _going_on(self, previous: Any) -> ml_collections.ConfigDict:
        """The config, with the clip norm where the one of the period before has moved to."""
        config = self._config.copy_and_resolve_references()
        if previous is not None and config.privacy.clip_quantile:
            config.privacy.clip_norm = float(previous.current_clip_norm)
        return config

    def _batches(self, period: Period, run: dp_sparse.Run, spent: int) -> tf.data.Dataset:
        """The batches that are left of a period's run, which is restored.

        The run keeps its claim on batches that were drawn before: if it is killed before a step is
        published, nobody has seen anything of it, and it may have them anew. The claim lies among
        the checkpoints, so that both are lost together: without them, steps are not known.
        """
        kept = state_file(run.folder / "checkpoints" / "claim.json")
        if kept.exists() and not spent:
            self._reader.begin_anew(period, kept.read(str))
        batches = self._reader.batches(period, run.plan, spent)
        claim = self._reader.claim(period)
        if claim is not None:
            kept.write(claim)
        return batches

    def _export(self, period: Period, plans: PeriodPlans) -> None:
        if self._exports is not None:
            shown = {p.number: p for p in self._periods[: period.number + 1]}
            shown |= {p.number: p for p in plans.read_for(period)}  # also by their histograms alone
            so_far = {p.name: plans.of(p)[0] for p in shown.values()}
            self._exports.write(self._model, period, dp_sparse.DisjointPlans(so_far))

    def without_privacy(self) -> TimeSeriesResult:
        """The same periods and epochs with shuffled batches, neither clipped nor noised."""
        if not isinstance(self._reader, RecordReader):
            raise ValueError("Expected data.reading=records for method=non_private.")
        self._compile(optimizer_of(self._config, steps=self._steps(), noisy=False))
        for period in self._periods:
            source, steps = self._reader.source(period), self._steps(period)
            batch = int(self._reader.steps(len(source))["expected_batch_size"])
            self._model.fit(
                stock_batches(source, batch, steps),
                steps_per_epoch=steps,
                verbose=self._config.verbose,
            )
            self._end(period, steps, None)
        return self._result({})

    def _steps(self, *periods: Period) -> int:
        """Steps of some periods, by default of all: over them a learning rate falls that decays."""
        counts = [self._reader.count(period) for period in periods or self._periods]
        plans = [dp_sparse.PoissonSampling(n, **self._reader.steps(n)) for n in counts]
        return sum(sampling.steps for sampling in plans)

    def _compile(self, optimizer: keras.optimizers.Optimizer) -> None:
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        self._model.compile(optimizer=optimizer, loss=loss)

    def _refuse_repeated(self, periods: Sequence[Period]) -> None:
        """Compares the rows of all that was read, also by earlier processes."""
        for other in periods:
            self._digests[other.name] = self._digests_of(other)
        for other in periods:
            refuse_repeated(self._digests, other)

    def _digests_of(self, period: Period) -> list[str]:
        """Those of the files that were read when the period was; they must still be the same."""
        kept = state_file(self._reader.folder_of(period) / "digests.json")
        files = [[file.stat().st_size, file.stat().st_mtime_ns] for file in period.files]
        found = kept.read(dict) if kept.exists() else None
        if found is not None and found["files"] == files:
            return list(found["digests"])
        digests = self._reader.digests(period)
        if found is not None and found["digests"] != digests:
            raise PrepareError(
                f"Expected the rows that {period.name} had when it was read, got others in "
                f"{', '.join(map(str, period.files))}: rows of one period could train in another "
                "one, too. Put the files back under their names, or begin anew in another folder."
            )
        kept.write({"files": files, "digests": digests})
        return digests

    def _end(self, period: Period, steps: int, reduction: float | None) -> None:
        """Evaluates, and writes that the period has ended.

        Args:
            period: Which one.
            steps: Of its plan.
            reduction: Of gradients in this process; None if it took no step.
        """
        x, labels = self._held_out
        scores = self._model.predict(x, batch_size=8192, verbose=0)[:, 0]
        done = {
            "auc": exact_auc(labels, scores),
            "log_loss": log_loss(labels, scores),
            "mean_prediction": mean_prediction(scores),
            "steps": steps,
            "reduction": reduction,
        }
        self._done(period).write(done)

    def _done(self, period: Period) -> StateFile:
        """What a period has ended with."""
        return state_file(self._reader.folder_of(period) / "done.json")

    def _result(self, plans: Mapping[str, dp_sparse.PrivacyPlan]) -> TimeSeriesResult:
        done: dict[str, Any] = {p.name: self._done(p).read(dict) for p in self._periods}
        last, steps = list(done.values())[-1], sum(period["steps"] for period in done.values())
        common = {
            "auc": last["auc"],
            "log_loss": last.get("log_loss", math.nan),
            "mean_prediction": last.get("mean_prediction", math.nan),
            "curve": [(name, period["auc"]) for name, period in done.items()],
            "steps": steps,
        }
        if not plans:
            statement = "No guarantee: gradients were neither clipped nor noised."
            return TimeSeriesResult(
                **common, epsilon=math.inf, delta=1.0, reduction=1.0, statement=statement
            )
        together = dp_sparse.DisjointPlans(plans)
        spent = together.guaranteed()
        known = [period for period in done.values() if period["reduction"] is not None]
        noised = sum(period["steps"] / period["reduction"] for period in known)
        return TimeSeriesResult(
            **common,
            epsilon=spent.epsilon,
            delta=spent.delta,
            reduction=sum(period["steps"] for period in known) / noised if known else math.nan,
            statement=together.statement(),
        )


def _held_out(
    config: ml_collections.ConfigDict, folder: Path, files: Sequence[Path]
) -> tuple[Any, np.ndarray]:
    """The first `evaluation.rows_per_day` rows of each day of evaluation."""
    reader = RecordReader(config, folder)
    x: list[Any] = []
    labels: list[np.ndarray] = []
    for day in periods_of(files, 1):
        records: JoinedRecords = reader.source(day)
        count = min(len(records), config.evaluation.rows_per_day)
        of_day, clicked = records.gather(np.arange(count))
        x.append(of_day)
        labels.append(clicked)
    joined = {name: np.concatenate([of_day[name] for of_day in x]) for name in x[0]}
    return joined, np.concatenate(labels)

"""The plan and the rows of a period, and the `dp_sparse.Run` that keeps them.

Every period has a plan of its own, of the whole budget: its N, q, T and σ, and for DP-FEST the
noisy histogram of its examples. Plan, histogram, rows and checkpoints are those of a run in the
period's folder, so that a process which goes on pays for nothing twice.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import ml_collections

import dp_sparse
from pipelines.criteo.methods import table_names
from pipelines.criteo.prepare.job import HISTOGRAM
from pipelines.criteo.time_series.days import Period
from pipelines.criteo.time_series.reading import Reader
from pipelines.files import state_file
from pipelines.methods import WITH_ROWS
from pipelines.runs import settings_of

FIRST_DAY, ALL_DAYS, RUNNING = FREQUENCIES = ("first_day", "all_days", "running")


@dataclasses.dataclass(frozen=True)
class Frequencies:
    """Where DP-FEST's rows come from.

    Attributes:
        kind: `first_day`: the histogram of the first day; `all_days`: those of all periods, also
            of later ones, which a stream does not know yet; `running`: those so far, summed.
        periods: All periods.
    """

    kind: str
    periods: Sequence[Period]

    def __post_init__(self) -> None:
        if self.kind not in FREQUENCIES:
            raise ValueError(
                f"Expected selection.frequencies to be one of {FREQUENCIES}, got {self.kind!r}."
            )

    def counted(self, period: Period) -> int | None:
        """How many of a period's days its histogram counts; None for all."""
        return 1 if self.kind == FIRST_DAY else None

    def has_histogram(self, period: Period) -> bool:
        """Whether the period's examples are counted at all."""
        return self.kind != FIRST_DAY or period.number == 0

    def of(self, period: Period) -> list[Period]:
        """The periods whose histograms a period's rows come from."""
        if self.kind == FIRST_DAY:
            return [self.periods[0]]
        return list(self.periods if self.kind == ALL_DAYS else self.periods[: period.number + 1])


class PeriodRuns:
    """The run of each period, which is opened when it is first asked for.

    Args:
        config: Of the run over all periods.
        reader: How it reads periods; their folders are those of their runs.
    """

    def __init__(self, config: ml_collections.ConfigDict, reader: Reader) -> None:
        self._config, self._reader = config, reader
        self._open: dict[int, dp_sparse.Run] = {}

    def of(self, period: Period) -> dp_sparse.Run:
        """The run of a period.

        Raises:
            ValueError: Another process is at it, or it has lost its `run.json`.
            PrivacyError: That file is damaged.
        """
        if period.number not in self._open:
            self._open[period.number] = dp_sparse.Run(
                self._reader.folder_of(period),
                settings=settings_of(self._config.privacy, ()) | self._of_rows(),
                every_seconds=self._config.checkpoint_seconds,
                log_every=None,
            )
        return self._open[period.number]

    def _of_rows(self) -> dict[str, str]:
        """What decides which histograms a period needs, and what its plan pays for."""
        return {"method": self._config.method, **settings_of(self._config.selection, ())}

    def close(self) -> None:
        """Closes those that are open, and with them the optimizers that they hold."""
        while self._open:
            self._open.popitem()[1].close()


class PeriodPlans:
    """Makes plans and rows of periods, or finds them.

    Args:
        config: Of the run over all periods.
        reader: How it reads periods.
        runs: Those of the periods.
        periods: All of them.
        delta: Of the budget of every period.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        reader: Reader,
        runs: PeriodRuns,
        periods: Sequence[Period],
        delta: float,
    ) -> None:
        self._config, self._reader, self._runs = config, reader, runs
        self._budget = dp_sparse.PrivacyBudget(config.privacy.epsilon, delta)
        self._with_rows = config.method in WITH_ROWS
        self._frequencies = Frequencies(config.selection.frequencies, periods)
        self._found: dict[tuple[object, ...], float] = {}  # noise of periods that are alike

    def read_for(self, period: Period) -> list[Period]:
        """The period, and all whose histograms its rows come from, each once."""
        counted = self._frequencies.of(period) if self._with_rows else []
        return list({p.number: p for p in [*counted, period]}.values())

    def prepare(self, period: Period) -> None:
        """Makes the period's examples ready, and every histogram that its rows come from."""
        for other in self.read_for(period):
            if self._with_rows and self._frequencies.has_histogram(other):
                noise = self._noise_of(other)
                self._reader.prepare(other, noise, self._frequencies.counted(other))
                self._histogram(other)
            else:
                self._reader.prepare(other, None, None)

    def _noise_of(self, period: Period) -> float:
        """The noise multiplier of the period's histogram, calibrated once."""
        kept = state_file(self._reader.folder_of(period) / "histogram_noise.json")
        if not kept.exists():
            kept.write(self._histogram_noise(period))
        return kept.read(float)

    def _histogram(self, period: Period) -> dp_sparse.NoisyHistogram:
        """That of a prepared period, drawn once; the period's plan pays for it."""

        def drawn() -> dp_sparse.NoisyHistogram:
            counted = self._frequencies.counted(period)
            return self._reader.histogram(period, self._noise_of(period), counted)

        return self._runs.of(period).release(HISTOGRAM, drawn, dp_sparse.NoisyHistogram.load)

    def found(self, period: Period) -> dp_sparse.PrivacyPlan:
        """The plan of a period that has begun.

        Raises:
            ValueError: It has not, or its plan is lost.
            PrivacyError: The plan is damaged.
        """
        return self._runs.of(period).plan

    def of(self, period: Period) -> tuple[dp_sparse.PrivacyPlan, dp_sparse.SelectedRows | None]:
        """The plan and the rows of a prepared period, made once.

        Raises:
            ValueError: One of them is lost, and was paid for.
            PrivacyError: The plan is damaged.
        """
        rows = self._rows(period) if self._with_rows else None

        def made() -> dp_sparse.PrivacyPlan:
            releases = (rows.release,) if rows is not None and rows.costs else ()
            sampling = self._reader.sampling(period)
            plan = dp_sparse.PrivacyPlan(self._budget, sampling, releases=releases)
            return self._calibrated(plan)

        return self._runs.of(period).plan_once(made), rows

    def _rows(self, period: Period) -> dp_sparse.SelectedRows:
        def selected() -> dp_sparse.SelectedRows:
            histograms = {p.number: self._histogram(p) for p in self._frequencies.of(period)}
            return dp_sparse.select_from_histograms(
                list(histograms.values()),
                self._config.selection.rows,
                own=histograms.get(period.number),
            )

        return self._runs.of(period).release("rows.npz", selected, dp_sparse.SelectedRows.load)

    def _calibrated(self, plan: dp_sparse.PrivacyPlan) -> dp_sparse.PrivacyPlan:
        """The plan with its noise, which periods of the same size and releases have alike."""
        key = (*_size(plan.sampling), *(str(release.event) for release in plan.releases))
        if key in self._found:
            return plan.with_noise(self._found[key])
        calibrated = plan.calibrate()
        assert calibrated.noise_multiplier is not None
        self._found[key] = calibrated.noise_multiplier
        return calibrated

    def _histogram_noise(self, period: Period) -> float:
        """The noise multiplier for which training and histogram meet the budget."""
        count = self._reader.count(period)
        sampling = dp_sparse.PoissonSampling(count, **self._reader.steps(count))
        key = ("histogram", *_size(sampling))
        if key not in self._found:
            sizes = self._config.data.vocabularies
            calibrated = dp_sparse.calibrate_top_k(
                dp_sparse.PrivacyPlan(self._budget, sampling),
                dict(zip(table_names(len(sizes)), sizes, strict=True)),
                self._config.selection.rows,
                dp_sparse.GaussianTopK,
                share=self._config.selection.share,
            )
            noise: dp_sparse.GaussianTopK = calibrated.source  # type: ignore[assignment]
            self._found[key] = noise.noise_multiplier
        return self._found[key]


def _size(sampling: Any) -> tuple[object, ...]:
    return sampling.num_examples, sampling.expected_batch_size, sampling.steps

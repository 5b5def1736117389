"""The plan, the rows and the optimizer of a period.

Every period has a plan of its own, of the whole budget: its N, q, T and σ, and for DP-FEST the
noisy histogram of its examples. Plan and rows are kept in the period's folder, so that a run which
goes on pays for nothing twice.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections

import dp_sparse
from pipelines.criteo.methods import table_names
from pipelines.criteo.time_series.days import Period
from pipelines.criteo.time_series.reading import Reader
from pipelines.files import whole_file
from pipelines.methods import WITH_ROWS

FIRST_DAY, ALL_DAYS, RUNNING = FREQUENCIES = ("first_day", "all_days", "running")
_PLAN, _ROWS = "plan.json", "rows.npz"


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


class PeriodPlans:
    """Makes plans and rows of periods, or finds them.

    Args:
        config: Of the run.
        reader: How it reads periods.
        periods: All of them.
        delta: Of the budget of every period.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        reader: Reader,
        periods: Sequence[Period],
        delta: float,
    ) -> None:
        self._config, self._reader = config, reader
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
            self._reader.prepare(other, self._noise_of(other), self._frequencies.counted(other))

    def _noise_of(self, period: Period) -> float | None:
        """That of the period's histogram, drawn once; None if it has none."""
        if not self._with_rows or not self._frequencies.has_histogram(period):
            return None
        path = self._reader.folder_of(period) / "histogram_noise.json"
        if not path.exists():
            _write_json(path, self._histogram_noise(period))
        return float(json.loads(path.read_text()))

    def found(self, period: Period) -> dp_sparse.PrivacyPlan:
        """The plan of a period that has begun.

        Raises:
            FileNotFoundError: It has not.
        """
        path = self._reader.folder_of(period) / _PLAN
        return dp_sparse.PrivacyPlan.from_config(json.loads(path.read_text()))

    def of(self, period: Period) -> tuple[dp_sparse.PrivacyPlan, dp_sparse.SelectedRows | None]:
        """The plan and the rows of a prepared period."""
        rows = self._rows(period) if self._with_rows else None
        path = self._reader.folder_of(period) / _PLAN
        if not path.exists():
            releases = (rows.release,) if rows is not None and rows.costs else ()
            sampling = self._reader.sampling(period)
            plan = dp_sparse.PrivacyPlan(self._budget, sampling, releases=releases)
            _write_json(path, self._calibrated(plan).get_config())
        return self.found(period), rows

    def _rows(self, period: Period) -> dp_sparse.SelectedRows:
        path = self._reader.folder_of(period) / _ROWS
        if not path.exists():
            summed = self._frequencies.of(period)
            histograms = {p.number: self._reader.histogram(p) for p in summed}
            own = histograms.get(period.number)
            rows = dp_sparse.select_from_histograms(
                list(histograms.values()), self._config.selection.rows, own=own
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            rows.save(path)
        return dp_sparse.SelectedRows.load(path)

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


def _write_json(path: Path, content: object) -> None:
    with whole_file(path) as file:
        file.write(json.dumps(content).encode())

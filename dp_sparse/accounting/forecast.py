"""What DP-AdaFEST will do with a plan, before anything is trained: noise, threshold, rows a step.

A row that an example looks up with probability f is looked up K ~ Poisson(B·f) times in a batch,
and survives if s·K + N(0, (σ1·C1)²) reaches τ, with s = min(1, C1/√p) for p lookups an example.
Expected numbers of rows are sums of these probabilities, which are computed on a grid of B·f. Of a
lookup, the same holds with K + 1 lookups of its row in the batch. Time O(rows), or O(1) of a table
whose frequencies are assumed.

With a window of L steps and n rounds (docs/windowed_selection.md) K ~ Poisson(L·B·f), the noise has
deviation √n·σ1·C1, the threshold is √n·τ, and a lookup trains if its row survived before.

It needs how often an example looks up each row of a table: as given, or by Zipf's law.

Zipf's law says that the row of rank r is looked up in proportion to 1/r^s. Words, items and clicked
categories follow it roughly, with s near 1 (Newman 2005, Contemporary Physics 46).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import scipy.optimize
import scipy.stats

from dp_sparse.accounting.mechanisms import (
    FALSE_ROWS,
    NOISE_RATIO,
    default_threshold,
    split_noise,
    survival_probability,
)
from dp_sparse.core import validate

ZIPF_EXPONENT = 1.1
_EXACT = 10_000  # ranks that stand for themselves; those behind them share some hundred groups
_GROUPS = 400
_NEARLY = 0.98  # of the lookups that the best window trains: a shorter one follows drift sooner
_GRID = np.concatenate([[0.0], np.geomspace(1e-9, 1e9, 1801)])  # of B·f
_SUMMED = 200.0  # means of K up to this are summed exactly; beyond, K is taken as normal
_COUNTS = np.arange(400)
_ASSUMED = (
    f"* assumed: rows are looked up by Zipf's law, exponent {ZIPF_EXPONENT:g}. Give frequencies of "
    "public data in place of the number of rows to know better."
)


@dataclasses.dataclass(frozen=True)
class LookupFrequencies:
    """The rows of one table in groups of equal frequency.

    Attributes:
        frequencies: The probability that an example looks up a row of the group, `[groups]`.
        counts: Rows of each group, `[groups]`.
        assumed: Whether they follow from Zipf's law, and not from data.
    """

    frequencies: np.ndarray
    counts: np.ndarray
    assumed: bool

    @property
    def rows(self) -> int:
        """All rows of the table."""
        return round(float(self.counts.sum()))

    @functools.cached_property
    def lookups(self) -> float:
        """Expected lookups of an example."""
        return float(self.frequencies @ self.counts)


def frequencies_of(name: str, table: Any, lookups: float) -> LookupFrequencies:
    """Those of a table that is given as its number of rows, or as each row's frequency.

    Args:
        name: Of the table, for errors.
        table: As `PrivacyPlan.explain` takes it.
        lookups: Lookups of an example, of a table given by its number of rows.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(table, int | np.integer):
        return zipf(validate.positive_integer(f"tables[{name!r}]", table), lookups)
    pair = as_pair(name, table)
    if pair is not None:
        return zipf(*pair)
    values = np.asarray(table, np.float64)
    if values.ndim != 1 or not values.size or not np.all((values >= 0) & (values <= 1)):
        raise ValueError(
            f"Expected tables[{name!r}] to be a number of rows, or (rows, lookups), or the "
            f"probability of each row to be looked up by an example, `[rows]` in [0, 1], got "
            f"{values!r}."
        )
    return LookupFrequencies(values, np.ones_like(values), assumed=False)


def as_pair(name: str, table: Any) -> tuple[int, int] | None:
    """Rows and lookups of an example, of a table that is given as a pair of whole numbers.

    Raises:
        ValueError: The rows are not above 0, or the lookups are below 0.
    """
    whole = int | np.integer
    if not (isinstance(table, tuple) and len(table) == 2 and isinstance(table[0], whole)):
        return None
    rows, lookups = table
    rows = validate.positive_integer(f"tables[{name!r}]", rows)
    return rows, 0 if lookups == 0 else validate.positive_integer(f"tables[{name!r}]", lookups)


def zipf(rows: int, lookups: float = 1.0) -> LookupFrequencies:
    """Zipf's law over `rows` ranks; the time does not depend on their number."""
    exact = np.arange(1, min(rows, _EXACT) + 1, dtype=np.float64)
    ends = np.unique(np.geomspace(len(exact), rows, _GROUPS).round())
    begins, ends = ends[:-1] + 0.5, ends[1:] + 0.5
    power = 1 - ZIPF_EXPONENT
    masses = np.concatenate([exact**-ZIPF_EXPONENT, (ends**power - begins**power) / power])
    counts = np.concatenate([np.ones_like(exact), ends - begins])
    frequencies = np.minimum(lookups * masses / masses.sum() / counts, 1.0)
    return LookupFrequencies(frequencies, counts, assumed=True)


@dataclasses.dataclass(frozen=True)
class TableForecast:
    """What a step is expected to do to one table.

    Attributes:
        rows: All rows of the table.
        looked_up: Rows that a batch looks up; with a window, all batches of the window.
        survivors: The looked-up rows that survive.
        false_rows: Rows that survive though they were not looked up.
        trained_share: The part of the lookups whose row survives, so that it trains.
        lookups: Of an example, expected.
        assumed: Whether frequencies follow from Zipf's law, for want of given ones.
    """

    rows: int
    looked_up: float
    survivors: float
    false_rows: float
    trained_share: float
    lookups: float
    assumed: bool

    @property
    def noised(self) -> float:
        """Rows that get noise and an update."""
        return self.survivors + self.false_rows


@dataclasses.dataclass(frozen=True)
class Forecast:
    """DP-AdaFEST with a plan's noise on tables of given sizes; `print` shows it.

    Attributes:
        noise_multiplier: σ of a step.
        contribution_noise_multiplier: σ1 of the contribution map.
        gradient_noise_multiplier: σ2 of the clipped sum.
        contribution_clip_norm: C1.
        threshold: τ.
        lookups: p, the most lookups of one example.
        tables: What a step does to each table.
        window: W; the forecast is that of a window of this length.
    """

    noise_multiplier: float
    contribution_noise_multiplier: float
    gradient_noise_multiplier: float
    contribution_clip_norm: float
    threshold: float
    lookups: int
    tables: dict[str, TableForecast]
    window: int = 1

    @property
    def expected_false_rows(self) -> float:
        """λ, which has this threshold."""
        deviation = self.contribution_noise_multiplier * self.contribution_clip_norm
        rows = sum(table.rows for table in self.tables.values())
        return rows * survival_probability(self.threshold, deviation)

    @property
    def trained_share(self) -> float:
        """The part of an example's lookups whose row trains, over all tables."""
        lookups = {name: table.lookups for name, table in self.tables.items()}
        trained = sum(self.tables[name].trained_share * own for name, own in lookups.items())
        return trained / max(sum(lookups.values()), 1e-300)

    @property
    def rows_per_step(self) -> float:
        """Rows that get noise and an update, over all tables."""
        return sum(table.noised for table in self.tables.values())

    @property
    def row_reduction(self) -> float:
        """Rows of all tables over those of a step; `PrivacyReport.reduction` counts entries."""
        return sum(table.rows for table in self.tables.values()) / max(self.rows_per_step, 1e-12)

    def __str__(self) -> str:
        added = min(1.0, self.contribution_clip_norm / math.sqrt(self.lookups))
        deviation = self.contribution_noise_multiplier * self.contribution_clip_norm
        return "\n".join(
            [
                f"sigma = {self.noise_multiplier:.4g}: sigma1 = "
                f"{self.contribution_noise_multiplier:.4g} for the contribution map, sigma2 = "
                f"{self.gradient_noise_multiplier:.4g} for the gradient",
                f"threshold = {self.threshold:.4g}; an example adds {added:.4g} to each of its "
                f"{self.lookups} rows, noise has deviation {deviation:.4g}",
                f"window = {self.window}, expected_false_rows = {self.expected_false_rows:.4g}: "
                f"{self.trained_share:.1%} of all lookups train their row",
                f"rows noised a step: {self.rows_per_step:,.4g}, {self.row_reduction:,.4g} times "
                "fewer than all",
                *_aligned(self.tables),
                *([_ASSUMED] if any(table.assumed for table in self.tables.values()) else []),
            ]
        )


def forecast(
    noise_multiplier: float,
    expected_batch_size: float,
    tables: Mapping[str, Any],
    *,
    lookups: int | None = None,
    contribution_clip_norm: float = 1.0,
    noise_ratio: float = NOISE_RATIO,
    threshold: float | None = None,
    expected_false_rows: float | None = None,
    false_positive_rate: float | None = None,
    rows_per_step: float | None = None,
    window: int = 1,
    steps_per_round: int = 1,
) -> Forecast:
    """What `DPAdaFESTOptimizer` would do; see `PrivacyPlan.explain` for the arguments."""
    window = validate.positive_integer("window", window)
    ways = {
        "threshold": threshold,
        "expected_false_rows": expected_false_rows,
        "false_positive_rate": false_positive_rate,
        "rows_per_step": rows_per_step,
    }
    given = {name: value for name, value in ways.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"Expected one way to choose the threshold, got {given}: leave one.")
    lookups, frequencies = _frequencies(tables, lookups)
    clip_norm = validate.clip_norm("contribution_clip_norm", contribution_clip_norm)
    of_map, of_gradient = split_noise(
        noise_multiplier, validate.positive("noise_ratio", noise_ratio)
    )
    deviation, added = of_map * clip_norm, min(1.0, clip_norm / math.sqrt(lookups))

    scale = math.sqrt(math.ceil(window / steps_per_round))

    def at(threshold: float) -> Forecast:
        survival = _survival_of_means(scale * threshold, added, scale * deviation, window > 1)
        chance = survival_probability(threshold, deviation)
        found = {
            name: _of_table(f, window * expected_batch_size, survival, chance)
            for name, f in frequencies.items()
        }
        return Forecast(
            noise_multiplier, of_map, of_gradient, clip_norm, threshold, lookups, found, window
        )

    rows = sum(f.rows for f in frequencies.values())
    return at(_threshold(given, rows, deviation, at))


def forecast_of_noised_rows(noised_rows: float, most_steps: int, **asked: Any) -> Forecast:
    """The forecast of the window that trains most lookups with `noised_rows` rows a step.

    Args:
        noised_rows: Rows of a step, over all tables.
        most_steps: The longest window to consider.
        **asked: As `forecast` takes it, without a threshold and a window.
    """
    wanted = validate.positive("noised_rows", noised_rows)
    rows = sum(f.rows for f in _frequencies(asked["tables"], asked["lookups"])[1].values())
    if wanted >= rows / 2:
        raise ValueError(
            f"Expected noised_rows < {rows / 2:g}, half of all rows, got noised_rows={wanted:g}: "
            "DPSGDOptimizer, which gives noise to all of them, trains every lookup."
        )
    windows = [2**bits for bits in range(int(math.log2(most_steps)) + 1)]
    found = [forecast(**asked, rows_per_step=wanted, window=window) for window in windows]
    best = max(each.trained_share for each in found)
    return next(each for each in found if each.trained_share >= _NEARLY * best)


def _frequencies(
    tables: Mapping[str, Any], lookups: int | None
) -> tuple[int, dict[str, LookupFrequencies]]:
    """The most lookups of an example, and those of each table."""
    if not isinstance(tables, Mapping):
        raise ValueError(f"Expected tables={{name: rows or frequencies}}, got tables={tables!r}.")
    if not tables:
        raise ValueError("Expected tables={name: rows or frequencies}, got none.")
    pairs = {name: pair for name, table in tables.items() if (pair := as_pair(name, table))}
    own, others = [lookups for _, lookups in pairs.values()], len(tables) - len(pairs)
    lookups = max(1, sum(own) + others) if lookups is None else lookups
    lookups = validate.positive_integer("lookups", lookups)
    each = max(1.0, (lookups - sum(own)) / max(1, others))
    frequencies = {name: frequencies_of(name, table, each) for name, table in tables.items()}
    total = sum(f.lookups for f in frequencies.values() if not f.assumed)
    if total > lookups * (1 + 1e-6):
        raise ValueError(
            f"Expected probabilities that add up to lookups={lookups} at most, got {total:g}: pass "
            "lookups=, the most lookups of one example."
        )
    return lookups, frequencies


def _threshold(
    given: dict[str, float], rows: int, deviation: float, at: Callable[[float], Forecast]
) -> float:
    if "threshold" in given:
        return validate.finite("threshold", given["threshold"])
    if "false_positive_rate" in given:
        rate = validate.probability("false_positive_rate", given["false_positive_rate"])
        if rate > 0.5:
            raise ValueError(
                f"Expected false_positive_rate <= 0.5, a threshold >= 0, got {rate:g}."
            )
        return default_threshold(rate * rows, rows, deviation)
    if "rows_per_step" not in given:
        wanted = given.get("expected_false_rows", FALSE_ROWS)
        wanted = validate.positive("expected_false_rows", wanted)
        if "expected_false_rows" in given and wanted > rows / 2:
            raise ValueError(
                f"Expected expected_false_rows <= {rows / 2:g}, half of all rows, got {wanted:g}."
            )
        return default_threshold(wanted, rows, deviation)
    wanted = validate.positive("rows_per_step", given["rows_per_step"])
    if wanted >= rows:
        raise ValueError(
            f"Expected rows_per_step < {rows}, all rows, got rows_per_step={wanted:g}."
        )
    low, high = -10 * deviation, 10 * deviation
    while at(high).rows_per_step > wanted:
        high *= 2
    return float(
        scipy.optimize.brentq(lambda t: at(t).rows_per_step - wanted, low, high, xtol=1e-9)
    )


def _survival_of_means(
    threshold: float, added: float, deviation: float, beforehand: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each mean number of lookups of the grid, three probabilities of a row.

    That it is looked up and survives, that it is looked up, and that it survives with one more
    lookup; if rows are chosen `beforehand`, with or without. An example adds `added` to a row that
    it looks up.
    """
    many = _GRID[_GRID > _SUMMED]

    def survives(more: int, fewest: int) -> np.ndarray:
        of_count = scipy.stats.norm.sf((threshold - added * (_COUNTS[fewest:] + more)) / deviation)
        spread = np.sqrt(added**2 * many + deviation**2)
        of_many = scipy.stats.norm.sf((threshold - added * (many + more)) / spread)
        return np.concatenate([_chances_of_counts()[:, fewest:] @ of_count, of_many])

    trained = survives(0 if beforehand else 1, fewest=0)
    return survives(0, fewest=1), -np.expm1(-_GRID), trained


@functools.cache
def _chances_of_counts() -> np.ndarray:
    """Of each count, for each mean of the grid that is summed exactly."""
    return scipy.stats.poisson.pmf(_COUNTS, _GRID[_GRID <= _SUMMED, np.newaxis])


def _of_table(
    table: LookupFrequencies,
    examples: float,
    survival: tuple[np.ndarray, np.ndarray, np.ndarray],
    false_chance: float,
) -> TableForecast:
    means, weights = examples * table.frequencies, table.counts
    true, looked_up, trained = (np.interp(means, _GRID, values) for values in survival)
    of_lookups = weights * table.frequencies
    unseen = table.rows - float(looked_up @ weights)
    return TableForecast(
        rows=table.rows,
        looked_up=float(looked_up @ weights),
        survivors=float(true @ weights),
        false_rows=unseen * false_chance,
        trained_share=float(trained @ of_lookups / max(of_lookups.sum(), 1e-300)),
        lookups=table.lookups,
        assumed=table.assumed,
    )


def _aligned(tables: Mapping[str, TableForecast]) -> list[str]:
    lines = [
        ["table", "rows", "looked up", "survivors", "false rows", "lookups trained"],
        *(
            [
                f"{name}{'*' if t.assumed else ''}",
                f"{t.rows:,}",
                *(f"{value:,.4g}" for value in (t.looked_up, t.survivors, t.false_rows)),
                f"{t.trained_share:.1%}",
            ]
            for name, t in tables.items()
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
        for name, *cells in lines
    ]

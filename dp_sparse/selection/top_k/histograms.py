"""Noisy histograms of lookups: released once, then summed and selected from at no further cost.

DP-FEST on data that come in periods of time (Ghazi et al., NeurIPS 2023, section 4.3) needs one
fresh noisy histogram for each period. The rows of a period are the largest entries of the sum of
all histograms so far, which is post-processing. Counts are whole numbers, and so is their noise: a
Gaussian value rounded to the next integer, which is post-processing of the unrounded sum, and
leaves no trace of floating-point arithmetic. Time and memory are those of the tables' rows, 8 bytes
each, once a period.

`select_from_histograms` takes the rows with the largest sums, and says what training pays.
"""

import dataclasses
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import IO, Any

import dp_accounting
import numpy as np

from dp_sparse.accounting import Release
from dp_sparse.core import (
    PrivacyError,
    damage_told,
    read_arrays,
    validate,
    whole_file,
    write_arrays,
)
from dp_sparse.selection.top_k.counting import RowCounts, TopKTable, as_tables, count_rows
from dp_sparse.selection.top_k.noise_sources import (
    GaussianTopK,
    NoiseSource,
    Quantile,
    random_quantiles,
    secret_generator,
)
from dp_sparse.selection.top_k.select import allocate_rows
from dp_sparse.selection.top_k.selected_rows import SelectedRows

_FORMAT = "dp-sparse-histogram-1"
_BLOCK = 2**20  # counts that get their noise at once


@dataclasses.dataclass(frozen=True, eq=False)
class NoisyHistogram:
    """How many examples look up each row of each table, plus noise.

    `noisy_histogram` and `histogram_of_counts` make it.

    Attributes:
        counts: int64 `[rows]` of each table by name, with noise and read-only; some are negative.
        noise_multiplier: Standard deviation of the noise over the L2 sensitivity √p.
        lookups: p, the most counts that one example takes part in, over all tables.
        data: What was counted, in the words of the statement, such as "day 3".
        histogram_id: A random name: another draw of noise on the same data has another one.

    Examples:
        >>> import dp_sparse, numpy as np, tempfile
        >>> counts = {"users": np.array([0, 5, 2])}
        >>> histogram = dp_sparse.histogram_of_counts(counts, {"users": 3}, 0.05, data="Monday")
        >>> folder = tempfile.TemporaryDirectory()
        >>> histogram.save(f"{folder.name}/monday.npz")
        >>> dp_sparse.NoisyHistogram.load(f"{folder.name}/monday.npz").counts["users"]
        array([0, 5, 2])

    ### Formal Guarantees
    One Gaussian mechanism of `noise_multiplier` on the examples that were counted, of which one is
    added, removed or zeroed out. It changes at most p counts by 1 each.
    """

    counts: Mapping[str, np.ndarray]
    noise_multiplier: float
    lookups: int
    data: str
    histogram_id: str

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows of each table."""
        return {name: len(counts) for name, counts in self.counts.items()}

    @property
    def release(self) -> Release:
        """What publishing the histogram itself costs, for `PrivacyPlan(releases=(..., ))`."""
        return Release(
            f"noisy histogram of {self.data} over {len(self.counts)} tables (histogram "
            f"{self.histogram_id[:12]})",
            dp_accounting.GaussianDpEvent(self.noise_multiplier),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one file, whole or not at all, in place of what was there."""
        with whole_file(path) as file:
            self.write(file)

    def write(self, file: IO[bytes]) -> None:
        """Writes what `load` reads, to an open file."""
        header = {
            "tables": list(self.counts),
            "noise_multiplier": self.noise_multiplier,
            "lookups": self.lookups,
            "data": self.data,
            "histogram_id": self.histogram_id,
        }
        counts = {f"counts_{i}": each for i, each in enumerate(self.counts.values())}
        write_arrays(file, _FORMAT, header, counts)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | IO[bytes]) -> "NoisyHistogram":
        """The histogram that `save` wrote, from a path or an open file.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is of another kind, or damaged.
        """
        told = (
            f"Expected {path} to be a histogram that NoisyHistogram.save wrote, got another or a "
            "damaged file: draw a new one, and give its release to the plan, too."
        )
        with damage_told(told):
            header, arrays = read_arrays(path, _FORMAT)
            names = header.pop("tables")
            counts = {name: arrays[f"counts_{i}"] for i, name in enumerate(names)}
            return cls(_read_only(counts), **header)


def noisy_histogram(
    examples: Any,
    tables: Mapping[str, int | TopKTable],
    noise_multiplier: float,
    *,
    data: str,
    num_examples: int | None = None,
    quarantine: bool = False,
    progress: bool = True,
) -> NoisyHistogram:
    """Counts the examples that look up each row of each table, and adds noise.

    Args:
        examples: As `select_top_k`: each example once, and not the batches of a sampler.
        tables: As `select_top_k`.
        noise_multiplier: Standard deviation over the sensitivity √p; > 0.
        data: What is counted, for the statement, such as "day 3".
        num_examples: As `select_top_k`.
        quarantine: As `select_top_k`.
        progress: As `select_top_k`.

    Raises:
        ValueError: An argument out of its range, or as `select_top_k`.
        BadExampleError, PrivacyError: As `select_top_k`.

    Examples:
        >>> import dp_sparse, numpy as np
        >>> monday = {"users": np.array([3, 3, 7])}, np.ones(3)
        >>> histogram = dp_sparse.noisy_histogram(
        ...     monday, {"users": 10}, 0.05, data="Monday", progress=False)
        >>> histogram.counts["users"][[0, 3, 7]]
        array([0, 2, 1])

    ### Formal Guarantees
    As `NoisyHistogram`. Each call takes a fresh key from the operating system. Public: `tables`,
    `noise_multiplier`, the number of examples, and that no bad value stopped the count.
    """
    counted = as_tables(tables)
    found = count_rows(
        examples, counted, num_examples=num_examples, quarantine=quarantine, progress=progress
    )
    whole = {name: _whole(counts) for name, counts in found.items()}
    return histogram_of_counts(whole, counted, noise_multiplier, data=data)


def histogram_of_counts(
    counts: Mapping[str, np.ndarray],
    tables: Mapping[str, int | TopKTable],
    noise_multiplier: float,
    *,
    data: str,
) -> NoisyHistogram:
    """Adds noise to exact counts, for anyone who has counted while reading data for something else.

    Args:
        counts: Integers `[rows]` of each table: how many examples look each row up. An example
            counts for at most `max_lookups` different rows of a table, for each of them once.
        tables: Each table by its name, as a `TopKTable`, or as its number of rows if an example
            looks up one row of it.
        noise_multiplier: Standard deviation over the sensitivity √p; > 0.
        data: What was counted, for the statement.

    Raises:
        ValueError: Counts of other tables or sizes, or a noise multiplier that is not positive.

    Examples:
        >>> import dp_sparse, numpy as np
        >>> counts = {"users": np.array([0, 5, 2])}
        >>> dp_sparse.histogram_of_counts(counts, {"users": 3}, 0.05, data="Monday").lookups
        1

    ### Formal Guarantees
    As `NoisyHistogram`, if the counts are as said.
    """
    source, sizes = GaussianTopK(noise_multiplier), as_tables(tables)
    given = {name: np.shape(array) for name, array in counts.items()}
    if given != {name: (table.num_rows,) for name, table in sizes.items()}:
        raise ValueError(
            "Expected counts [rows] of the tables "
            f"{ {n: t.num_rows for n, t in sizes.items()} }, got shapes {given}."
        )
    lookups, rng = sum(table.max_lookups for table in sizes.values()), secret_generator()
    noisy = {
        name: noisy_counts(np.asarray(array), source, source.scale_of(lookups), rng)
        for name, array in counts.items()
    }
    return NoisyHistogram(
        _read_only(noisy), source.noise_multiplier, lookups, data, secrets.token_hex(16)
    )


def _whole(counts: RowCounts) -> np.ndarray:
    whole = np.zeros(counts.num_rows, np.int64)
    whole[counts.row_ids] = counts.counts
    return whole


def noisy_counts(
    counts: np.ndarray, source: GaussianTopK, scale: float, rng: np.random.Generator
) -> np.ndarray:
    """int64 `[rows]`: whole counts and whole noise.

    Args:
        counts: Integers `[rows]`.
        source: The distribution of the noise.
        scale: The factor of a standard noise value, which is then rounded.
        rng: Secret randomness.
    """
    found = np.array(counts, np.int64)
    for start in range(0, len(found), _BLOCK):
        block = found[start : start + _BLOCK]
        block += np.rint(scale * source.quantiles(random_quantiles(len(block), rng))).astype(
            np.int64
        )
    return found


def _read_only(counts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    for array in counts.values():
        array.flags.writeable = False
    return dict(counts)


@dataclasses.dataclass(frozen=True)
class HistogramRows(NoiseSource):
    """Rows with the largest sums of noisy histograms.

    Attributes:
        noise_multiplier: That of the histogram which counted the examples that are trained on; None
            if none did, so that training on these examples pays nothing.
        histograms: The names of all that were summed.
    """

    noise_multiplier: float | None
    histograms: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.noise_multiplier is not None:
            value = validate.positive("noise_multiplier", self.noise_multiplier)
            object.__setattr__(self, "noise_multiplier", value)
        object.__setattr__(self, "histograms", tuple(self.histograms))

    def scale_of(self, lookups: int) -> float:
        """The standard deviation of one of the histograms; 0 if none is paid for."""
        del lookups
        return 0.0 if self.noise_multiplier is None else self.noise_multiplier

    def quantiles(self, levels: Quantile) -> np.ndarray:
        """Never drawn again: the noise is in the histograms."""
        raise PrivacyError("Expected rows from select_from_histograms, which draws no noise.")

    def event(self, lookups: int, selected: int) -> dp_accounting.DpEvent:
        """That of the own histogram, or none."""
        del lookups, selected
        if self.noise_multiplier is None:
            return dp_accounting.NoOpDpEvent()
        return dp_accounting.GaussianDpEvent(self.noise_multiplier)

    def description(self, lookups: int) -> str:
        """Which histograms, and which of them this plan pays for."""
        del lookups
        summed = f"sum of {len(self.histograms)} noisy histograms"
        if self.noise_multiplier is None:
            return f"{summed} of other examples, whose plans pay for them"
        others = "" if len(self.histograms) == 1 else "; the plans of the others' examples pay"
        return (
            f"{summed}, that of these examples with noise multiplier "
            f"{self.noise_multiplier:.4g}{others}"
        )


def select_from_histograms(
    histograms: Sequence[NoisyHistogram],
    k: int,
    *,
    own: NoisyHistogram | None,
    weights: Mapping[str, float] | None = None,
) -> SelectedRows:
    """Selects `k` rows over all tables by the sums of noisy histograms of disjoint examples.

    Where sums are equal, the lower rows are selected.

    Args:
        histograms: Of disjoint sets of examples, such as periods of time; at least one.
        k: Rows to select over all tables, >= 0.
        own: That of the histograms which counted the examples that will be trained on; None if none
            of them did. The plan of the training pays for it.
        weights: As `select_top_k`.

    Raises:
        ValueError: No histogram, one twice, other tables, or `own` is none of them.

    Examples:
        >>> import dp_sparse, numpy as np
        >>> days = [
        ...     dp_sparse.histogram_of_counts({"users": np.array(c)}, {"users": 4}, 0.05, data=day)
        ...     for day, c in [("Monday", [9, 0, 5, 0]), ("Tuesday", [0, 9, 5, 0])]
        ... ]
        >>> rows = dp_sparse.select_from_histograms(days, k=1, own=days[1])
        >>> rows.row_ids["users"], rows.costs  # Tuesday's plan has rows.release
        (array([2]), True)

    ### Formal Guarantees
    Post-processing of the histograms. An example of `own` pays for that one, by `release` of the
    result, in the plan of its training; examples of the other histograms pay in the plans of
    theirs, provided no example is in two histograms. If training goes on with rows to which an
    example of its own contributed, and `own` does not say so, nothing pays for it.
    """
    sizes = _same_tables(histograms)
    names = tuple(histogram.histogram_id for histogram in histograms)
    if own is not None and own.histogram_id not in names:
        raise ValueError(
            f"Expected own to be one of the {len(names)} histograms, got that of {own.data}: add "
            "it, or pass own=None if none of them counted the examples to train on."
        )
    wanted = allocate_rows(k, as_tables(sizes), weights)
    selected = {}
    for name, number in wanted.rows.items():
        total = np.sum([histogram.counts[name] for histogram in histograms], axis=0)
        selected[name] = np.sort(np.argsort(-total, kind="stable")[:number])
    noise = None if own is None else own.noise_multiplier
    return SelectedRows(
        selected, wanted.num_rows, HistogramRows(noise, names), histograms[0].lookups
    )


def _same_tables(histograms: Sequence[NoisyHistogram]) -> dict[str, int]:
    if not histograms:
        raise ValueError("Expected at least one histogram to select from, got none.")
    first, ids = histograms[0], [histogram.histogram_id for histogram in histograms]
    for histogram in histograms:
        if ids.count(histogram.histogram_id) > 1:
            raise ValueError(f"Expected each histogram once, got that of {histogram.data} twice.")
        if histogram.num_rows != first.num_rows:
            raise ValueError(
                f"Expected histograms of the same tables, got {first.num_rows} of {first.data} "
                f"and {histogram.num_rows} of {histogram.data}."
            )
    return first.num_rows

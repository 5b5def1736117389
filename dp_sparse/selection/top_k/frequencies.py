"""How often examples look up each row of a table: known in public, or one noisy histogram.

The noisy histogram costs what `select_top_k` with Gaussian noise does: that selection is a
post-processing of one. O(rows of the table), once before training.
"""

import dataclasses
import hashlib
import os
from typing import Any

import numpy as np

from dp_sparse.accounting import Release
from dp_sparse.core import damage_told, validate, whole_file
from dp_sparse.selection.top_k.counting import TopKTable
from dp_sparse.selection.top_k.histograms import noisy_histogram
from dp_sparse.selection.top_k.noise_sources import GaussianTopK


@dataclasses.dataclass(frozen=True, eq=False)
class RowFrequencies:
    """The fraction of examples that look up each row.

    Attributes:
        table: The table's name.
        values: float64 `[rows]`, each in (0, 1], read-only.
        source: The noise that was added to the counts; None for public frequencies.
        lookups: The most rows for which one example counted; 0 for public frequencies.

    Raises:
        ValueError: A frequency is not in (0, 1].

    Examples:
        >>> import dp_sparse
        >>> known = dp_sparse.RowFrequencies.public("words", [0.9, 0.01])
        >>> known.costs, known.values
        (False, array([0.9 , 0.01]))

    ### Formal Guarantees
    Those of `release.event`, which belongs into the plan of every run that uses them.
    """

    table: str
    values: np.ndarray
    source: GaussianTopK | None = None
    lookups: int = 0

    def __post_init__(self) -> None:
        values = np.array(self.values, np.float64)
        if values.ndim != 1 or not ((values > 0) & (values <= 1)).all():
            raise ValueError(
                f"Expected frequencies of table {self.table!r} in (0, 1], of shape [rows], got "
                f"{values!r}: give rows that are never looked up a small one, such as 1/examples."
            )
        values.setflags(write=False)
        object.__setattr__(self, "values", values)
        if self.source is not None:
            validate.positive_integer("lookups", self.lookups)

    @classmethod
    def public(cls, table: str, values: Any) -> "RowFrequencies":
        """Frequencies that do not depend on private data, `[rows]`, at no cost."""
        return cls(table, np.asarray(values))

    @property
    def costs(self) -> bool:
        """Whether private data was read, so that a plan must have the release."""
        return self.source is not None

    @property
    def release(self) -> Release:
        """The release for `PrivacyPlan(releases=(..., ))`.

        Raises:
            ValueError: The frequencies are public.
        """
        if self.source is None:
            raise ValueError(f"Expected noisy frequencies of {self.table!r}, got public ones.")
        name = (
            f"frequencies of the {len(self.values)} rows of {self.table} "
            f"({self.source.description(self.lookups)}; histogram {self._fingerprint()})"
        )
        return Release(name, self.source.event(self.lookups, len(self.values)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one file, whole or not at all: counting again would spend again."""
        noise = [] if self.source is None else [self.source.noise_multiplier, float(self.lookups)]
        with whole_file(path) as file:
            np.savez_compressed(file, table=self.table, frequencies=self.values, noise=noise)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "RowFrequencies":
        """The frequencies that `save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is of another kind, or damaged.
        """
        told = (
            f"Expected {path} to be frequencies that RowFrequencies.save wrote, got another or a "
            "damaged file: restore it, since counting again spends again."
        )
        with damage_told(told), np.load(path) as file:
            table, values = str(file["table"]), file["frequencies"]
            noise = file["noise"].tolist()
        if not noise:
            return cls.public(table, values)
        return cls(table, values, GaussianTopK(noise[0]), int(noise[1]))

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description."""
        noise = None if self.source is None else self.source.noise_multiplier
        own = {"table": self.table, "values": self.values.tolist()}
        return {**own, "noise_multiplier": noise, "lookups": self.lookups}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "RowFrequencies":
        """The frequencies that `get_config` described."""
        own = dict(config)
        noise = own.pop("noise_multiplier")
        return cls(**own, source=None if noise is None else GaussianTopK(noise))

    def _fingerprint(self) -> str:
        return hashlib.sha256(self.values.tobytes()).hexdigest()[:12]


def noisy_frequencies(
    examples: Any,
    table: str,
    rows: TopKTable,
    source: GaussianTopK,
    *,
    num_examples: int | None = None,
    progress: bool = True,
) -> RowFrequencies:
    """The noisy fraction of examples that look up each row of a table.

    Noisy counts are rounded to whole numbers, and at least the deviation of their noise: below it
    they tell nothing.

    Args:
        examples: As `select_top_k`: each example once.
        table: The table's name in x.
        rows: The table, and how an example looks it up.
        source: The noise; `calibrate_top_k(plan, {table: rows}, k=1).source` has that of a share
            of ε.
        num_examples: How many examples there are, which is public; by default their `len`.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: `source` is of another class, or as `select_top_k`.
        BadExampleError, PrivacyError: As `select_top_k`.

    Examples:
        >>> import dp_sparse, numpy as np
        >>> words = dp_sparse.TopKTable(num_rows=3, max_lookups=2)
        >>> examples = {"words": np.tile([0, 1], (10_000, 1))}, np.ones(10_000)
        >>> found = dp_sparse.noisy_frequencies(
        ...     examples, "words", words, dp_sparse.GaussianTopK(5.0), progress=False
        ... )
        >>> found.values.round(1), found.release.event  # a plan pays for `found.release`
        (array([1., 1., 0.]), GaussianDpEvent(noise_multiplier=5.0))

    ### Formal Guarantees
    Neighbouring datasets differ by one example added, removed or zeroed out, which changes at most
    p = `max_lookups` counts by 1 each: L2 sensitivity √p. One Gaussian mechanism of
    `source.noise_multiplier`, with a fresh key of the operating system. Rounding to whole counts
    hides the last bits of float64 sums. Public: the table, `source` and the number of examples.
    """
    if not isinstance(source, GaussianTopK):
        raise ValueError(f"Expected source to be GaussianTopK(...), got source={source!r}.")
    examples_in_all = len(examples[0][table]) if num_examples is None else num_examples
    total = validate.positive_integer("num_examples", examples_in_all)
    histogram = noisy_histogram(
        examples,
        {table: rows},
        source.noise_multiplier,
        data=table,
        num_examples=total,
        progress=progress,
    )
    least = max(1.0, source.scale_of(rows.max_lookups))
    noisy = np.clip(histogram.counts[table], least, total)
    return RowFrequencies(table, noisy / total, source, rows.max_lookups)

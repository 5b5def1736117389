"""How often an example looks each row of a table up: as given, or by Zipf's law.

Zipf's law says that the row of rank r is looked up in proportion to 1/r^s. Words, items and clicked
categories follow it roughly, with s near 1 (Newman 2005, Contemporary Physics 46).
"""

import dataclasses
from typing import Any

import numpy as np

from dp_sparse.core import validate

ZIPF_EXPONENT = 1.1
_EXACT = 10_000  # ranks that stand for themselves; those behind them share some hundred groups
_GROUPS = 400


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

    @property
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

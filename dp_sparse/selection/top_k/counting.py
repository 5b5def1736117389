"""How many examples look up each row of each table: exact counts of the rows that were seen.

An example counts once for each distinct row, however often it looks the row up (presence, as in
DP-AdaFEST's contribution map), and for at most `max_lookups` rows of a table. Examples stream in
chunks. Memory is O(rows seen), at most about 60 bytes each, for any number of examples and any size
of the tables. An example with 26 lookups takes less than 0.5 µs on one core.

### Formal Guarantees
One example changes at most `max_lookups` counts of a table, each by 1. Bad ids are refused or left
out, examples of weight 0 (padding) count nothing, and ids `[batch]` are refused where
`[batch, lookups]` is expected. Each example must be given once: `num_examples` checks the number.
The counts themselves are private data.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from dp_sparse.core import BadExampleError, validate
from dp_sparse.sampling import checked_number, chunks_of, has_weight, parts_of

_PENDING = (
    2**18
)  # lookups counted at once; tables that small are counted by index, larger by sorting
_NO_ROWS = np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True)
class TopKTable:
    """A table to select rows from, and how examples look it up. Everything here is public.

    Attributes:
        num_rows: Rows of the table.
        max_lookups: The most distinct rows for which one example counts. An example with more
            counts for its first ones. 1 for a one-hot feature.
        padding_id: The id that means "no lookup", if there is one; it may be outside the table.

    Examples:
        >>> import dp_sparse, numpy as np
        >>> words = dp_sparse.TopKTable(num_rows=50, max_lookups=3, padding_id=0)
        >>> examples = {"words": np.array([[7, 7, 0], [7, 9, 0]])}, np.ones(2)
        >>> dp_sparse.select_top_k(
        ...     examples, {"words": words}, k=2, source=dp_sparse.PublicRows(), progress=False
        ... ).row_ids
        {'words': array([7, 9])}
    """

    num_rows: int
    max_lookups: int = 1
    padding_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_rows", "max_lookups"):
            value = validate.positive_integer(name, getattr(self, name))
            object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True)
class RowCounts:
    """The counts of one table: private data.

    Attributes:
        num_rows: Rows of the table.
        row_ids: int64 `[seen]`, sorted and unique: the rows whose count is not zero.
        counts: int64 `[seen]`: the number of examples that look each one up.
    """

    num_rows: int
    row_ids: np.ndarray
    counts: np.ndarray


def as_tables(tables: Mapping[str, int | TopKTable]) -> dict[str, TopKTable]:
    """The tables; a number of rows becomes a table with one lookup an example."""
    return {n: t if isinstance(t, TopKTable) else TopKTable(t) for n, t in tables.items()}


def count_rows(
    examples: Any,
    tables: Mapping[str, TopKTable],
    *,
    num_examples: int | None = None,
    quarantine: bool = False,
    progress: bool = True,
) -> dict[str, RowCounts]:
    """Counts, for each row of each table, the examples that look it up.

    Args:
        examples: A `dp_sparse.RecordFile` or another data source with `len` and `gather`, a list of
            them, arrays `(x, y[, sample_weight])`, or a `tf.data.Dataset` or another iterable of
            batches `x`, `(x, y)` or `(x, y, sample_weight)`. x maps each table's name to integer
            ids, `[batch]` for a table of max_lookups=1 or `[batch, lookups]`.
        tables: The tables by name.
        num_examples: How many examples there are; by default the `len` of the data source, if it
            has one.
        quarantine: Whether to leave out ids outside their table, and warn how many, instead of
            raising.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: Another number of examples, an endless dataset, or batches of other shapes.
        BadExampleError: An id that is outside its table or not an integer.
        PrivacyError: Batches of a sampler, in which examples may occur more than once.

    Warns:
        UserWarning: Ids were left out, examples had more than `max_lookups` distinct rows, or there
            was no example. These numbers are not private.
    """
    expected = checked_number(examples, num_examples)
    tallies = {name: _Tally(name, table, quarantine) for name, table in tables.items()}
    seen = 0
    with tqdm(
        total=expected, unit="examples", unit_scale=True, desc="counting", disable=not progress
    ) as bar:
        for batch in chunks_of(examples):
            size = _count_batch(batch, tallies, seen)
            seen += size
            bar.update(size)
            if expected is not None and seen > expected:
                break
    if expected not in (None, seen):
        raise ValueError(
            f"Expected num_examples={expected} examples, each once, got "
            f"{'more' if seen > expected else seen}: a selection pays for one pass."
        )
    _tell(tallies, seen)
    return {name: tally.result() for name, tally in tallies.items()}


class _Tally:
    """The counts of one table so far, and how many ids and examples were not as expected."""

    def __init__(self, name: str, table: TopKTable, quarantine: bool) -> None:
        self.quarantined = 0  # ids left out
        self.truncated = 0  # examples with more than max_lookups rows
        self._name, self._table, self._quarantine = name, table, quarantine
        self._pending, self._size = [_NO_ROWS], 0  # lookups not yet in the counts
        self._row_ids, self._counts = _NO_ROWS, _NO_ROWS

    def checked(self, ids: np.ndarray) -> np.ndarray:
        """Integer ids as int64 `[batch, lookups]`."""
        if ids.dtype.kind not in "iu":
            bad = ids[~np.isfinite(ids)] if ids.dtype.kind == "f" else ids[:0]
            raise BadExampleError(
                f"Expected integer ids of table {self._name!r} in [0, {self._table.num_rows}), got "
                f"{ids.dtype}{f' with {bad[0]}' if bad.size else ''}: cast them, pad ragged ones."
            )
        if ids.ndim not in (1, 2) or (ids.ndim == 1 and self._table.max_lookups > 1):
            raise ValueError(
                f"Expected ids of table {self._name!r}, of max_lookups={self._table.max_lookups}, "
                f"as [batch, lookups]{'' if self._table.max_lookups > 1 else ' or [batch]'}, got "
                f"shape {ids.shape}: batch the dataset, each example with its own ids."
            )
        ids = ids.astype(np.int64)  # a copy, so that the batch can be freed
        return ids[:, None] if ids.ndim == 1 else ids

    def add(self, ids: np.ndarray, present: np.ndarray | None, first_example: int) -> None:
        """Counts the lookups of a batch.

        Args:
            ids: int64 `[batch, lookups]`.
            present: bool `[batch]`, or None if all examples are.
            first_example: The number of the batch's first example, for error messages.
        """
        valid = self._valid(ids, present, first_example)
        if ids.shape[1] == 1:
            row_ids = ids[:, 0] if valid is None else ids[valid]
        else:
            ids = ids if valid is None else np.where(valid, ids, -1)
            row_ids = self._distinct(ids)
        self._pending.append(row_ids)
        self._size += len(row_ids)
        if self._size > max(_PENDING, len(self._row_ids)):
            self._merge()

    def result(self) -> RowCounts:
        """All counts."""
        self._merge()
        return RowCounts(self._table.num_rows, self._row_ids, self._counts)

    def _valid(
        self, ids: np.ndarray, present: np.ndarray | None, first_example: int
    ) -> np.ndarray | None:
        """bool `[batch, lookups]`: which lookups count; None if all do."""
        num_rows, padding = self._table.num_rows, self._table.padding_id
        if padding is None and present is None and _within(ids, num_rows):
            return None
        valid = np.ones(ids.shape, bool) if padding is None else ids != padding
        if present is not None:
            valid &= present[:, None]
        bad = valid & ((ids < 0) | (ids >= num_rows))
        if bad.any() and not self._quarantine:
            example, position = np.argwhere(bad)[0]
            raise BadExampleError(
                f"Expected ids of table {self._name!r} in [0, {num_rows}), got "
                f"{ids[example, position]} in example {first_example + example}. Fix the data, "
                "set padding_id, or leave such ids out with quarantine=True."
            )
        self.quarantined += int(np.count_nonzero(bad))
        return valid & ~bad

    def _distinct(self, ids: np.ndarray) -> np.ndarray:
        """Each example's distinct ids, at most `max_lookups`, of `[batch, lookups]`; -1 is none."""
        ordered = np.sort(ids, axis=1)
        first = ordered >= 0
        first[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
        too_many = np.count_nonzero(first, axis=1) > self._table.max_lookups
        if not too_many.any():
            return ordered[first]
        self.truncated += int(np.count_nonzero(too_many))
        capped = first_distinct(ids[too_many], self._table.max_lookups)
        return np.concatenate([ordered[first & ~too_many[:, None]], capped])

    def _merge(self) -> None:
        """Counts the pending lookups, and adds them to the sorted rows in one copy."""
        row_ids, counts = unique_counts(np.concatenate(self._pending), self._table.num_rows)
        self._pending, self._size = [_NO_ROWS], 0
        places = np.searchsorted(self._row_ids, row_ids)
        known = np.append(self._row_ids, -1)[places] == row_ids
        self._counts[places[known]] += counts[known]
        self._counts = np.insert(self._counts, places[~known], counts[~known])
        self._row_ids = np.insert(self._row_ids, places[~known], row_ids[~known])


def unique_counts(row_ids: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values of int64 `[n]`, sorted, and how often each occurs."""
    if num_rows > _PENDING:
        return np.unique(row_ids, return_counts=True)
    counts = np.bincount(row_ids, minlength=num_rows)
    unique = np.flatnonzero(counts)
    return unique, counts[unique]


def first_distinct(ids: np.ndarray, limit: int) -> np.ndarray:
    """Each example's first `limit` distinct ids, of ids `[batch, lookups]`; -1 is none."""
    order = np.argsort(ids, axis=1, kind="stable")
    ordered = np.take_along_axis(ids, order, axis=1)
    first = ordered >= 0
    first[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    by_position = np.empty_like(first)
    np.put_along_axis(by_position, order, first, axis=1)
    return ids[by_position & (np.cumsum(by_position, axis=1) <= limit)]


def _within(ids: np.ndarray, num_rows: int) -> bool:
    return ids.size == 0 or bool(ids.min() >= 0 and ids.max() < num_rows)


def _count_batch(batch: Any, tallies: Mapping[str, _Tally], first_example: int) -> int:
    """Counts the lookups of a batch; returns how many examples it has."""
    x, y, weights = parts_of(batch)
    missing = sorted(set(tallies) - set(x))
    if missing:
        raise ValueError(f"Expected x with ids of tables {missing}, got x with {sorted(x)}.")
    columns = {name: tally.checked(np.asarray(x[name])) for name, tally in tallies.items()}
    others = [np.asarray(leaf) for leaf in tf.nest.flatten((y, weights)) if leaf is not None]
    shapes = [leaf.shape for leaf in [*columns.values(), *others]]
    if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
        raise ValueError(
            f"Expected batches of one leading dimension, got shapes {shapes}: batch the dataset."
        )
    present = has_weight(weights)
    for name, tally in tallies.items():
        tally.add(columns[name], present, first_example)
    return int(shapes[0][0])


def _tell(tallies: Mapping[str, _Tally], seen: int) -> None:
    """Warns of what was not as expected."""
    told = [] if seen else ["there was no example"]
    for name, tally in tallies.items():
        if tally.quarantined:
            told.append(f"{tally.quarantined} ids outside table {name!r} were left out")
        if tally.truncated:
            told.append(
                f"{tally.truncated} examples had more than max_lookups distinct rows of table "
                f"{name!r} and counted for their first ones"
            )
    if told:
        warnings.warn(f"{'; '.join(told)}. These numbers are not private.", stacklevel=3)

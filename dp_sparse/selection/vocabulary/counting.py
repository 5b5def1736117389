"""How many examples have each value of columns whose values nobody knows beforehand.

An example has a vote of 1 for each of its distinct values, at most `max_values` over all columns
together. If it has more, its first ones count: the first of each column, then the second of each,
and so on. Values that are missing have no vote and no place in this order, so which ones count
follows from the example alone, wherever its values stand between padding.

Each value gets a place in the order of appearance, from a dictionary that the interpreter's own
loops fill and read. From there on all is NumPy. Memory is that of a batch and of the distinct
values.

### Formal Guarantees
One example changes at most `max_values` counts, each by 1, and values without a vote are left out:
it adds at most as many candidates, however long it is. A text is its UTF-8 bytes, so the same
text as `str` and as `bytes` is one value. Examples of weight 0 (padding) count nothing. Counts,
their number and the order of places are private data.
"""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from dp_sparse.core import BadExampleError
from dp_sparse.sampling import check_source, checked_number, chunks_of, has_weight, parts_of
from dp_sparse.selection.top_k.counting import first_distinct, unique_counts

_PENDING = 2**18  # votes that are counted at once
_NO_VOTES = np.zeros(0, np.int64)
_ARRAYS = "biufcOSUT"  # kinds of arrays whose entries are Python objects in a list
_INT64 = np.iinfo(np.int64)
_SHOWN = 40  # characters of a bad value


@dataclasses.dataclass(frozen=True, eq=False)
class ValueCounts:
    """The distinct values of one column: private data.

    Attributes:
        values: Texts as UTF-8 bytes, or integers, in the order of appearance.
        counts: int64 `[values]`, each > 0: how many examples have a vote for it.
    """

    values: list[bytes] | list[int]
    counts: np.ndarray


def count_values(
    examples: Any,
    columns: Sequence[str],
    max_values: int | None,
    *,
    num_examples: int,
    padding_value: int | None,
    progress: bool,
) -> dict[str, ValueCounts]:
    """Counts the examples that have each value of each column.

    Args:
        examples: As `private_vocabulary`.
        columns: Names in x.
        max_values: m, at least one for each column; None if each has one value of an example, which
            is then checked.
        num_examples: How many examples there must be.
        padding_value: The integer that means no value.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: Another number of examples, a column that is missing, arrays of other shapes, or
            several integers of an example without `padding_value`.
        BadExampleError: A value that is neither text nor an integer, or both in one column.
        PrivacyError: Batches of a sampler, or a dataset that mixes examples.
    """
    if isinstance(examples, tf.data.Dataset):
        check_source(examples)
    source = _with_columns(examples, columns)
    if (given := checked_number(source, None)) not in (None, num_examples):
        raise ValueError(_other_number(num_examples, given))
    tallies = {name: _Column(name, padding_value) for name in columns}
    seen = 0
    bar = tqdm(total=num_examples, unit="examples", unit_scale=True, disable=not progress)
    with bar:
        for batch in chunks_of(source):
            size = _count_batch(batch, tallies, max_values, seen)
            seen += size
            bar.update(size)
            if seen > num_examples:
                break
    if seen != num_examples:
        raise ValueError(_other_number(num_examples, "more" if seen > num_examples else seen))
    return {name: column.result() for name, column in tallies.items()}


def _other_number(expected: int, got: Any) -> str:
    return (
        f"Expected the {expected} examples of the plan that pays, each once, got {got}.\nOther "
        "examples need a plan of their own."
    )


class _Arrays:
    """Columns of arrays as a data source, which passes on what is missing."""

    def __init__(self, columns: Mapping[str, np.ndarray], others: Sequence[Any]) -> None:
        self._columns, self._others = columns, others

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def gather(self, indices: np.ndarray) -> tuple[Any, ...]:
        """The examples at these indices."""
        x = {name: values[indices] for name, values in self._columns.items()}
        return (x, *(tf.nest.map_structure(lambda leaf: leaf[indices], p) for p in self._others))


def _with_columns(examples: Any, columns: Sequence[str]) -> Any:
    """Arrays as a data source with the columns alone; other examples as they are."""
    x, *others = examples if isinstance(examples, tuple) else (examples,)
    if isinstance(x, Mapping):
        _require_columns(x, columns)
        arrays = {name: _as_array(x[name]) for name in columns}
        rest = [tf.nest.map_structure(np.asarray, () if p is None else p) for p in others]
        leaves = [*arrays.values(), *tf.nest.flatten(rest)]
        if len({leaf.shape[:1] for leaf in leaves}) != 1 or not leaves[0].ndim:
            raise ValueError(
                "Expected arrays of one common length, got shapes "
                f"{[leaf.shape for leaf in leaves[:8]]}."
            )
        return _Arrays(arrays, rest)
    if isinstance(examples, tuple):
        raise ValueError(
            f"Expected arrays by their names, got x of type {type(x).__name__}: pass dict(frame) "
            "of a DataFrame, or {'city': values}."
        )
    return examples


def _as_array(values: Any) -> np.ndarray:
    """The values as an array; those of a list as they are, whatever stands beside them.

    NumPy makes one kind of the values of a list: a text of None and NaN beside texts, for example.
    """
    return np.asarray(values, dtype=None if hasattr(values, "dtype") else object)


def _require_columns(x: Mapping[str, Any], columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in x]
    if missing:
        raise ValueError(f"Expected columns among {sorted(x)}, got columns={missing}.")


class _Column:
    """The distinct values of one column so far, and the votes for each; place 0 is no value."""

    def __init__(self, name: str, padding_value: int | None) -> None:
        self._name, self._padding = name, padding_value
        self._kind: Any = None  # bytes or int, once there is a value
        self._places: dict[Any, int] = collections.defaultdict(itertools.count().__next__)
        self._pending, self._size = [_NO_VOTES], 0
        self._counts = np.zeros(1, np.int64)

    def places(self, values: np.ndarray) -> np.ndarray:
        """The place of each value, int64 of the shape of `values`.

        Raises:
            ValueError: As `count_values`.
            BadExampleError: As `count_values`.
        """
        items = values.ravel().tolist()
        types = {*map(type, items)}
        if missing := {kind for kind in types if _may_be_missing(kind)}:
            items = [None if type(i) in missing and _is_missing(i) else i for i in items]
            types = {*map(type, items)} - {type(None)}
        if not types:
            return np.zeros(values.shape, np.int64)
        kind = self._kind_of(types, values, items)
        if kind is int and self._padding is None and values.shape[1] > 1:
            raise ValueError(
                f"Expected padding_value= with column {self._name!r}, of which an example has "
                f"{values.shape[1]} integers, got None.\nGive the integer that stands for no "
                "value, or one that never occurs, such as -1."
            )
        no_value = b"" if kind is bytes else self._padding
        if missing:
            items = [no_value if i is None else i for i in items]
        if kind is bytes and types != {bytes}:
            items = self._encoded(items)
        found = np.fromiter(map(self._places.__getitem__, items), np.int64, len(items))
        return found.reshape(values.shape)

    def add(self, places: np.ndarray) -> None:
        """Counts a vote for each place, int64 `[votes]`; those for place 0 are no votes."""
        self._pending.append(places)
        self._size += len(places)
        if self._size > _PENDING:
            self._merge()

    def result(self) -> ValueCounts:
        """The values that have a vote: one that a cap left out is no candidate.

        Raises:
            BadExampleError: A text that is not UTF-8, or an integer beyond 64 bits.
        """
        self._merge()
        values = list(self._places)[1:]
        if self._kind is bytes:
            try:
                collections.deque(map(bytes.decode, values), maxlen=0)
            except UnicodeDecodeError:
                self._refuse("bytes that are not UTF-8")
        elif values and not _INT64.min <= min(values) <= max(values) <= _INT64.max:
            self._refuse("an integer beyond 64 bits")
        counts = self._counts[1 : len(self._places)]
        voted = np.flatnonzero(counts)
        return ValueCounts([values[at] for at in voted], counts[voted])

    def _kind_of(self, types: set[type], values: np.ndarray, items: list[Any]) -> Any:
        """The kind of a column, which its first values decide, and with it what has place 0."""
        kinds = {_kind_of_type(each) for each in types}
        if values.dtype.kind not in _ARRAYS or None in kinds:
            others = (i for i in items if i is not None and _kind_of_type(type(i)) is None)
            bad = next(others, values.dtype)
            self._refuse(f"{str(bad)[:_SHOWN]} ({type(bad).__name__})")
        if self._kind is None and len(kinds) == 1:
            (self._kind,) = kinds
            self._places[b"" if self._kind is bytes else self._padding]  # place 0
        if kinds != {self._kind}:
            self._refuse("both")
        return self._kind

    def _encoded(self, items: list[Any]) -> list[bytes]:
        try:
            if {*map(type, items)} == {str}:
                return [*map(str.encode, items)]
            return [i.encode() if isinstance(i, str) else i for i in items]
        except UnicodeEncodeError:
            self._refuse("text that is not Unicode")

    def _merge(self) -> None:
        """Counts the pending votes."""
        room = len(self._places) - len(self._counts)
        if room > 0:
            more = np.zeros(max(room, len(self._counts)), np.int64)
            self._counts = np.concatenate([self._counts, more])
        places, votes = unique_counts(np.concatenate(self._pending), len(self._places))
        self._counts[places] += votes
        self._pending, self._size = [_NO_VOTES], 0

    def _refuse(self, got: str) -> NoReturn:
        raise BadExampleError(
            f"Expected text or integers in column {self._name!r}, one of the two, got {got}.\nFill "
            "what is missing by '' or padding_value, cast by astype(str) or astype('int64'), and "
            "pad lists."
        )


def _kind_of_type(kind: type) -> type[bytes] | type[int] | None:
    """bytes of text, int of integers, None of anything else."""
    if issubclass(kind, str | bytes):
        return bytes
    return int if issubclass(kind, int | np.integer) and kind is not bool else None


def _may_be_missing(kind: type) -> bool:
    """Whether something of this type may stand for a missing value: None, NaN or pandas' NA."""
    return issubclass(kind, float | np.floating | type(None)) or kind.__name__ == "NAType"


def _is_missing(item: Any) -> bool:
    return not isinstance(item, float | np.floating) or item != item


def _count_batch(
    batch: Any, tallies: Mapping[str, _Column], max_values: int | None, seen: int
) -> int:
    """Counts the votes of a batch; returns how many examples it has."""
    x, y, weights = parts_of(batch)
    _require_columns(x, list(tallies))
    values = {name: _as_array(x[name]) for name in tallies}
    others = [np.asarray(leaf) for leaf in tf.nest.flatten((y, weights)) if leaf is not None]
    shapes = [leaf.shape for leaf in [*values.values(), *others]]
    if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
        raise ValueError(
            f"Expected batches of one leading dimension, got shapes {shapes[:8]} behind example "
            f"{seen}: batch the dataset."
        )
    places = [tallies[name].places(_rows(name, each, max_values)) for name, each in values.items()]
    if (present := has_weight(weights)) is not None:
        places = [np.where(present[:, None], each, 0) for each in places]
    if any(each.shape[1] > 1 for each in places):
        places = _capped(places, max_values or len(places))
    for column, each in zip(tallies.values(), places, strict=True):
        column.add(each.ravel())
    return int(shapes[0][0])


def _rows(name: str, values: np.ndarray, max_values: int | None) -> np.ndarray:
    """Values as `[batch, values of an example]`."""
    if values.ndim not in (1, 2):
        raise ValueError(
            f"Expected column {name!r} as [batch] or [batch, values], got shape {values.shape}: "
            "pad lists of values, and flatten each example's."
        )
    if max_values is None and values.ndim == 2 and values.shape[1] > 1:
        raise ValueError(
            f"Expected max_values= with column {name!r}, of which an example has up to "
            f"{values.shape[1]} values, got max_values=None: say for how many an example votes."
        )
    return values[:, None] if values.ndim == 1 else values


def _capped(places: Sequence[np.ndarray], max_values: int) -> list[np.ndarray]:
    """Of each example its first distinct values: the places of each column, int64 `[votes]`.

    Args:
        places: Of each column, int64 `[batch, values]`.
        max_values: m, over all columns.
    """
    number = len(places)
    keys = [_in_front(np.where(each > 0, number * each + c, -1)) for c, each in enumerate(places)]
    order = sorted((at, c) for c, each in enumerate(keys) for at in range(each.shape[1]))
    kept = first_distinct(np.stack([keys[c][:, at] for at, c in order], axis=1), max_values)
    return [kept[kept % number == c] // number for c in range(number)]


def _in_front(keys: np.ndarray) -> np.ndarray:
    """The values of each example in their order, `[batch, values]`, with what is missing behind."""
    order = np.argsort(keys < 0, axis=1, kind="stable")
    return np.take_along_axis(keys, order, axis=1)

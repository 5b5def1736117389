"""Whether an example keeps its row, whatever other examples are asked for.

`gather`, `unpack` and maps over batches are code of users that sees several examples at once. If it
draws random numbers by their place, or mixes examples, one example less changes the rows of others.
So it is asked for each half of a batch once more, without the other half, and so in other places.
Sources are asked on the first batches of a pass, then ever more seldom, which costs one more
reading of such a batch. Maps are asked once, before the first batch, about rows that are made up.
What draws from TensorFlow's own entropy differs each time: of such a map NaN in half of the rows
may not reach the others.

### Formal Guarantees
None for rows that were not compared: it finds what differs for the rows that it sees.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dp_sparse.core import PrivacyError, require

_TOLERANCE = 1e-5  # of the largest entry of a feature: matrix products differ with their size
_DRAWS = 8  # of a map that draws anew each time
_OTHER_ROWS = (
    "Expected each example to keep its row whatever else is in its batch, got a different row from "
    "{}: it draws random numbers, mixes examples, or depends on their order.\n"
    "Compute a row from its own record alone. Draw random numbers in "
    "plan.sampling.batches(..., augment=f), whose f(x, y, seed) gets a secret seed for each "
    "example."
)


def due(batch: int) -> bool:
    """Whether a batch of a pass is compared: 0, 1, 2, 4, 8 and so on."""
    return batch & (batch - 1) == 0


def refuse_other_rows(
    gather: Callable[[np.ndarray], Any], indices: np.ndarray, rows: Any, what: str
) -> None:
    """Asks a source for the examples of a batch again, by halves.

    Args:
        gather: Gives examples by their indices, a nest of arrays `[n, ...]`.
        indices: Of the examples, int64 `[n]`.
        rows: What it gave for them.
        what: How a message calls it.

    Raises:
        PrivacyError: A row is another one now.
    """
    for part in _halves(len(indices)):
        again = gather(indices[part])
        pairs = zip(tf.nest.flatten(rows), tf.nest.flatten(again), strict=True)
        for one, other in ((np.asarray(a), np.asarray(b)) for a, b in pairs if a is not None):
            if not _same_rows(one[part], other):
                raise PrivacyError(_OTHER_ROWS.format(what))


def same_rows_of(
    unpack: Callable[[Any], Any], records: Any, rows: Any, batch: tf.Tensor
) -> tf.Operation:
    """Fails if `unpack` gives an example another row beside zeros, which are padding.

    Args:
        unpack: A function of the records of a batch.
        records: A nest of tensors `[capacity, ...]`.
        rows: What `unpack` gave for them.
        batch: The number of the batch in its pass, int64.
    """
    is_due = tf.equal(tf.bitwise.bitwise_and(batch, batch - 1), 0)
    same = tf.cond(is_due, lambda: _same_halves(unpack, records, rows), lambda: tf.constant(True))
    return require(same, PrivacyError, _OTHER_ROWS.format("unpack of OfflineBatches"))


def refuse_mixing_map(
    function: Any, specs: Sequence[Any], capacity: int, what: str, any_size: bool = False
) -> None:
    """Tries a map over batches on made-up rows, by halves; what fails on these is not compared.

    Args:
        function: A concrete function of the leaves of a batch.
        specs: Of these.
        capacity: The leading dimension of leaves with a row for each example.
        what: How a message calls the map.
        any_size: Whether leaves of an unknown leading dimension have a row for each example, too.

    Raises:
        PrivacyError: A row depends on other rows, or on its place.
    """
    trial = _Trial(function, specs, capacity, any_size)
    rng = np.random.default_rng()
    for draw in (_made_up, _zeros) if trial.has_rows else ():  # some parse, and know padding
        given = trial.given(draw, rng)
        on = functools.partial(trial.run, given)
        rows = trial.rows(given)
        try:
            same = bool(_same_halves(on, rows, on(rows)))
        except tf.errors.OpError:
            continue
        if not same:
            raise PrivacyError(_OTHER_ROWS.format(what))
        return


def refuse_mixing_random_map(
    function: Any, specs: Sequence[Any], capacity: int, what: str, any_size: bool = False
) -> None:
    """Tries a map that draws anew each time: NaN in half of the rows may not reach the others.

    Args: as `refuse_mixing_map`.

    Raises:
        PrivacyError: It does.
    """
    trial, rng = _Trial(function, specs, capacity, any_size), np.random.default_rng()
    given = trial.given(_made_up, rng)
    rows = trial.rows(given)
    if not trial.has_rows or not any(row.dtype.is_floating for row in rows):
        return
    for _ in range(_DRAWS):
        own, _ = _halves(trial.capacity)
        lost = ~np.isin(np.arange(trial.capacity), own)
        holed = [_with_nan(row, lost) if row.dtype.is_floating else row for row in rows]
        try:
            whole, found = trial.run(given, rows), trial.run(given, holed)
        except tf.errors.OpError:
            return
        floats = [(a, b) for a, b in zip(whole, found, strict=True) if a.dtype.is_floating]
        if not all(bool(tf.reduce_all(tf.math.is_finite(leaf))) for leaf, _ in floats):
            return  # of its own
        if not all(bool(tf.reduce_all(tf.math.is_finite(tf.gather(b, own)))) for _, b in floats):
            raise PrivacyError(_OTHER_ROWS.format(what))


class _Trial:
    """A map over batches, as a function of those leaves that have a row for each example.

    Args: as `refuse_mixing_map`.
    """

    def __init__(self, function: Any, specs: Sequence[Any], capacity: int, any_size: bool) -> None:
        sizes = (None, capacity) if any_size else (capacity,)
        self.capacity, self._function = capacity, function
        self._of_rows = [_leads(sizes, spec.shape) for spec in specs]
        self._kept = [_leads(sizes, leaf.shape) for leaf in function.outputs]
        self._specs = [
            tf.TensorSpec([capacity, *spec.shape[1:]], spec.dtype) if own_row else spec
            for own_row, spec in zip(self._of_rows, specs, strict=True)
        ]
        self.has_rows = capacity > 1 and any(self._of_rows)

    def given(self, draw: Callable[..., tf.Tensor], rng: np.random.Generator) -> list[tf.Tensor]:
        """A made-up batch."""
        return [draw(rng, spec) for spec in self._specs]

    def rows(self, given: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Its leaves with a row for each example."""
        return [leaf for leaf, own_row in zip(given, self._of_rows, strict=True) if own_row]

    def run(self, given: Sequence[tf.Tensor], rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What the map makes of a batch with these rows, of leaves with a row for each example."""
        own = iter(rows)
        pairs = zip(self._of_rows, given, strict=True)
        found = self._function(*(next(own) if own_row else other for own_row, other in pairs))
        return [leaf for leaf, keep in zip(found, self._kept, strict=True) if keep]


def _with_nan(row: tf.Tensor, lost: np.ndarray) -> tf.Tensor:
    chosen = tf.reshape(tf.constant(lost), [-1, *([1] * (row.shape.rank - 1))])
    return tf.where(chosen, tf.constant(np.nan, row.dtype), row)


def _leads(sizes: Sequence[int | None], shape: tf.TensorShape) -> bool:
    """Whether a leaf has a row for each example."""
    return bool(shape.rank and shape[0] in sizes)


def _halves(count: int) -> tuple[np.ndarray, ...]:
    """Places of two halves, each in its order; none of one example.

    They are drawn until they part some neighbours 2i and 2i + 1, and some i and count - 1 - i: what
    mixes examples often mixes such pairs.
    """
    if count < 2:
        return ()
    places, rng = np.arange(count), np.random.default_rng()
    neighbours, mirrored = np.minimum(places ^ 1, count - 1), places[::-1]
    while True:
        first = rng.permutation(count) < count // 2
        if any(first != first[neighbours]) and any(first != first[mirrored]):
            return places[first], places[~first]


def _made_up(rng: np.random.Generator, spec: tf.TensorSpec) -> tf.Tensor:
    """Rows that differ; numbers that are ids in every table, and texts that are numbers."""
    shape = [size or 1 for size in spec.shape]
    if spec.dtype.is_floating:
        return tf.constant(rng.uniform(0.5, 1.5, shape), spec.dtype)
    coins = rng.integers(0, 2, shape)
    if spec.dtype == tf.string:
        return tf.strings.as_string(tf.constant(coins))
    return tf.cast(tf.constant(coins), spec.dtype)


def _zeros(rng: np.random.Generator, spec: tf.TensorSpec) -> tf.Tensor:
    """A batch of padding."""
    del rng
    return tf.zeros([size or 1 for size in spec.shape], spec.dtype)


def _same_halves(function: Callable[[Any], Any], records: Any, rows: Any) -> tf.Tensor:
    """Whether halves of a batch, in another order, have the same rows where zeros follow."""
    capacity = tf.nest.flatten(records)[0].shape[0]
    same = [tf.constant(True)]
    for half in _halves(capacity):
        part = np.random.default_rng().permutation(half)

        def first(leaf: tf.Tensor, part: np.ndarray = part) -> tf.Tensor:
            missing = tf.zeros([capacity - len(part), *leaf.shape[1:]], leaf.dtype)
            return tf.concat([tf.gather(leaf, part), missing], 0)

        again = function(tf.nest.map_structure(first, records))
        pairs = zip(tf.nest.flatten(rows), tf.nest.flatten(again), strict=True)
        for one, other in ((tf.convert_to_tensor(a), tf.convert_to_tensor(b)) for a, b in pairs):
            same.append(_equal(tf.gather(one, part), other[: len(part)]))
    return tf.reduce_all(tf.stack(same))


def _same_rows(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays `[n, ...]` are equal, floats up to rounding; NaN equals NaN."""
    if one.shape != other.shape or one.dtype.kind != other.dtype.kind:
        return False
    if one.dtype.kind not in "fc":
        return bool(np.array_equal(one, other))
    finite = np.where(np.isfinite(one), np.abs(one), 0)
    near = _TOLERANCE * finite.max(axis=0, initial=0)
    with np.errstate(invalid="ignore"):
        equal = (one == other) | (np.abs(one - other) <= near)
    return bool(np.all(equal | (np.isnan(one) & np.isnan(other))))


def _equal(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """`_same_rows` in a graph."""
    if not one.dtype.is_floating:
        return tf.reduce_all(tf.equal(one, other))
    finite = tf.where(tf.math.is_finite(one), tf.abs(one), tf.zeros_like(one))
    near = tf.cast(_TOLERANCE, one.dtype) * tf.reduce_max(finite, axis=0)
    equal = tf.equal(one, other) | (tf.abs(one - other) <= near)
    return tf.reduce_all(equal | (tf.math.is_nan(one) & tf.math.is_nan(other)))

"""Other batches of the same examples, in which what is recorded of an example must not change.

Each is compared with the batch that it was made from. All of it is NumPy on one batch at a time.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

_TIMES = 1e4  # larger than batches are by themselves
_SAME_SHAPE, _OTHER_SHAPE, _ALONE = 2.0**-16, 2.0**-6, 2.0**-3
FEW = 32


@dataclasses.dataclass(frozen=True)
class Rebatching:
    """Examples that are taken together, and how what is recorded of them is compared.

    Attributes:
        places: Theirs in the batch, int64 `[examples]`.
        compared: Which of them, bool `[examples]`.
        tolerance: Relative.
        least: How many must differ.
        replaced: Which of them hold `value` in place of their own numbers, bool `[examples]`.
        value: NaN, an infinity, 0, or a factor of numbers moved away from 0.
        seen: What an error says of it; empty if all examples hold their own numbers.
    """

    places: np.ndarray
    compared: np.ndarray
    tolerance: float
    least: int
    replaced: np.ndarray
    value: float = 1.0
    seen: str = ""


def order(present: np.ndarray, seed: int) -> np.ndarray:
    """Places, int64 `[batch]`: the first that is there, the others of them at random, padding."""
    there = present > 0
    keys = np.where(there, np.random.default_rng(seed).random(len(present)), 2.0)
    keys[np.argmax(there)] = -1.0
    return np.argsort(keys, kind="stable")


def of_the_data(
    places: np.ndarray, present: np.ndarray, random: bool, looser: float, halves: tuple[bool, ...]
) -> Iterator[Rebatching]:
    """Batches whose examples hold their own numbers.

    Args:
        places: The examples in the order in which they are taken, int64 `[batch]`.
        present: float32 `[batch]`, 0 for padding.
        random: Whether masks belong to places.
        looser: Factor of tolerances where batches of another size round in another way.
        halves: Which half stays in its places, the first or not, one after another.
    """
    for first in halves:
        yield half_replaced(places, present, first)
    yield _few(places, present, random, looser)
    yield _one_alone(places, random, looser)


def of_other_values(
    places: np.ndarray, present: np.ndarray, takes_nan: bool
) -> Iterator[Rebatching]:
    """Batches in which a half of the examples holds what the data need not hold.

    NaN survives nearly whatever reaches across the batch: sums, maxima, norms, and comparisons of
    them with a limit that no batch reaches by itself. The other values find branches that a NaN
    does not take: on a large value of either sign, on an infinity, on an example that is 0.
    """
    values = [
        (float("nan"), True, "once other examples hold NaN"),
        (_TIMES, False, "once others are 10,000 times as large"),
        (-_TIMES, True, "once others are 10,000 times as large with the other sign"),
        (0.0, False, "once others are 0"),
        (float("inf"), False, "once others are infinite"),
    ]
    for value, first, seen in values:
        if takes_nan or np.isfinite(value):
            kept = _kept(places, present, first)
            own, replaced = np.arange(len(places)), ~kept & (present > 0)
            yield Rebatching(own, kept, _SAME_SHAPE, 1, replaced, value, seen)


def half_kept(count: int, seen: str) -> Rebatching:
    """The first half stays beside others that the caller replaces, which an error calls `seen`."""
    kept = np.arange(count) < (count + 1) // 2
    return Rebatching(np.arange(count), kept, _SAME_SHAPE, 1, ~kept, seen=seen)


def half_replaced(places: np.ndarray, present: np.ndarray, first: bool) -> Rebatching:
    """A half of the examples stays in its places, copies of it fill those of the others."""
    own, kept = np.arange(len(places)), _kept(places, present, first)
    of_half = places[kept[places]]
    rank = np.argsort(places)
    copied = of_half[rank % len(of_half)] if len(of_half) else own
    filled = np.where(kept | (present <= 0), own, copied)
    return _unaltered(filled, kept, _SAME_SHAPE, 1)


def _kept(places: np.ndarray, present: np.ndarray, first: bool) -> np.ndarray:
    """Which examples are of the first half of those that are there, or of the second."""
    count = np.count_nonzero(present > 0)
    half = (count + 1) // 2
    rank = np.argsort(places)
    return rank < half if first else (rank >= half) & (rank < count)


def _few(places: np.ndarray, present: np.ndarray, random: bool, looser: float) -> Rebatching:
    """Few of the examples in another order, and one of them twice.

    With random layers they are the first ones in their places, which have their masks.
    """
    few = int(np.clip(len(places) // 2, 1, FEW))
    own = np.arange(few) if random else places[:few][::-1]
    again = np.append(own, own[0])
    compared = (present[again] > 0) & (not random or np.arange(few + 1) < few)
    count = np.count_nonzero(compared)
    tolerance = looser * (_OTHER_SHAPE if count > 1 else _ALONE)
    return _unaltered(again, compared, tolerance, 2 if count > 8 else 1)


def _one_alone(places: np.ndarray, random: bool, looser: float) -> Rebatching:
    """The first example that is there, alone; its mask may be that of another place."""
    compared = np.asarray([not (random and places[0] > 0)])
    return _unaltered(places[:1], compared, looser * _ALONE, 1)


def _unaltered(
    places: np.ndarray, compared: np.ndarray, tolerance: float, least: int
) -> Rebatching:
    return Rebatching(places, compared, tolerance, least, np.zeros(len(places), bool))


def taken(batch: Any, alterable: Any, rebatching: Rebatching) -> Any:
    """The examples of another batch.

    Args:
        batch: Nested arrays `[batch, ...]`.
        alterable: Of each leaf, whether its numbers are replaced as the other batch says.
        rebatching: The other batch.
    """

    def of_leaf(leaf: np.ndarray, may_change: bool) -> np.ndarray:
        own, replaced = leaf[rebatching.places], rebatching.replaced
        if may_change and replaced.any():
            own[replaced] = _altered(own[replaced], rebatching.value)
        return own

    return tf.nest.map_structure(of_leaf, batch, alterable)


def _altered(own: np.ndarray, value: float) -> np.ndarray:
    """The value itself, or so many times numbers that are 1 farther from 0, also where they are 0.

    Integers are never NaN or infinite; they end at the limits of their dtype, or at the numbers of
    float64 next to them.
    """
    floating = tf.as_dtype(own.dtype).is_floating
    if not np.isfinite(value):
        return np.full_like(own, value) if floating else own
    numbers = own.astype(np.float64)
    made = value * (numbers + np.where(numbers < 0, -1.0, 1.0)) if value else np.zeros_like(numbers)
    if floating:
        with np.errstate(over="ignore"):
            return made.astype(own.dtype)
    limits = np.iinfo(own.dtype)
    most = np.float64(limits.max)
    most = most if int(most) == limits.max else np.nextafter(most, 0)
    return np.clip(made, np.float64(limits.min), most).astype(own.dtype)


def with_holes(batch: Any, alterable: Any) -> Any:
    """The examples with NaN in a third of their floats: what fills holes is then seen to mix.

    Which third changes from example to example and from leaf to leaf.
    """
    flags = tf.nest.flatten(alterable)

    def of_leaf(leaf: np.ndarray, number: int) -> np.ndarray:
        if not flags[number] or not tf.as_dtype(leaf.dtype).is_floating:
            return leaf
        flat = leaf.reshape(len(leaf), -1).copy()
        counted = number + np.arange(len(leaf))[:, None] + np.arange(flat.shape[1])
        flat[counted % 3 == 0] = np.nan
        return flat.reshape(leaf.shape)

    made = [of_leaf(leaf, number) for number, leaf in enumerate(tf.nest.flatten(batch))]
    return tf.nest.pack_sequence_as(batch, made)

"""Companies that the isolation checks take examples of a batch in, and how their records compare.

Nothing here depends on the model, so each function is traced once in a process, however many
models it trains.
"""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from dp_sparse.clipping.observation import Observation

# Numbers of companies. Those in which the others hold what the data need not hold come last.
BOTH_HALVES, OF_THE_DATA = (0, 1), (0, 1, 2, 3)
NOT_A_NUMBER, EXTREME, OPPOSITE, ZERO, INFINITE = 4, 5, 6, 7, 8
HOLES = INFINITE + 2 - NOT_A_NUMBER  # the kind of company with holes; the first is 1
_TIMES = 1e4  # larger than batches are by themselves
_SAME_SHAPE, _OTHER_SHAPE, _ALONE = 2.0**-16, 2.0**-6, 2.0**-3
FEW = 32

_FLAG, _NUMBER = tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.int32)
_FLOAT, _FLOATS = tf.TensorSpec([], tf.float32), tf.TensorSpec([None], tf.float32)
_PLACES, _FLAGS = tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.bool)
_OBSERVATION = Observation(
    tf.TensorSpec([None, None, None], tf.float32),
    tf.TensorSpec([None, None], tf.float32),
    tf.TensorSpec([None, None], tf.float32),
    tf.TensorSpec([None], tf.int64),
    _FLAG,
)


class Company(NamedTuple):
    """Examples that are taken together, and how their observation is compared.

    Attributes:
        places: Theirs in the batch, int32 `[company]`.
        compared: Which of them, bool `[company]`.
        tolerance: Relative, float32 scalar.
        least: How many must differ, int32 scalar.
        replaced: Which of them hold `value` in place of their own numbers, bool `[company]`.
        value: NaN, an infinity, 0, or a factor of numbers moved away from 0; float32 scalar.
    """

    places: tf.Tensor
    compared: tf.Tensor
    tolerance: tf.Tensor
    least: tf.Tensor
    replaced: tf.Tensor
    value: tf.Tensor


@tf.function(autograph=False, input_signature=[_FLOATS, _NUMBER])
def order(present: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Places, int32 `[batch]`: the first that is there, the others of them at random, padding."""
    keys = tf.random.stateless_uniform(tf.shape(present), tf.stack([seed, 2]))
    first = tf.argmax(tf.cast(present > 0, tf.int32), output_type=tf.int32)
    keys = tf.where(tf.range(tf.size(keys)) == first, -1.0, tf.where(present > 0, keys, 2.0))
    return tf.argsort(keys, stable=True)


@tf.function(autograph=False, input_signature=[_NUMBER, _PLACES, _FLOATS, _FLAG, _FLAG, _FLOAT])
def company(
    number: tf.Tensor,
    order: tf.Tensor,
    present: tf.Tensor,
    first_stays: tf.Tensor,
    random: tf.Tensor,
    looser: tf.Tensor,
) -> Company:
    """One company of a batch; all but `_few` and `_one_alone` are as large as the batch.

    Args:
        number: Which, int32 scalar.
        order: The examples in the order in which companies take them, int32 `[batch]`.
        present: float32 `[batch]`, 0 for padding.
        first_stays: Which half stays in company 1, bool scalar; in company 0 the other one.
        random: Whether masks belong to places, bool scalar.
        looser: Factor of tolerances where batches of another size round in another way, float32.
    """
    return tf.switch_case(
        number,
        [
            lambda: _others_replaced(order, present, ~first_stays),
            lambda: _others_replaced(order, present, first_stays),
            lambda: _few(order, present, random, looser),
            lambda: _one_alone(order, random, looser),
            lambda: _others_hold(float("nan"), order, present, ~first_stays),
            lambda: _others_hold(_TIMES, order, present, first_stays),
            lambda: _others_hold(-_TIMES, order, present, ~first_stays),
            lambda: _others_hold(0.0, order, present, first_stays),
            lambda: _others_hold(float("inf"), order, present, first_stays),
        ],
    )


def _others_replaced(order: tf.Tensor, present: tf.Tensor, first_stays: tf.Tensor) -> Company:
    """A half of the examples stays in its places, copies of it fill those of the others.

    The first check keeps one half and then the other, so that every place is replaced and every
    example doubled before the first update; a later check keeps one half.
    """
    own, rank = tf.range(tf.size(order)), tf.argsort(order)
    begin, end = _half(present, first_stays)
    kept = (rank >= begin) & (rank < end)
    copied = tf.minimum(begin + rank % tf.maximum(end - begin, 1), tf.size(rank) - 1)
    places = tf.where(kept | (present <= 0), own, tf.gather(order, copied))
    return _unaltered(places, kept, tf.constant(_SAME_SHAPE), tf.constant(1))


def _half(present: tf.Tensor, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Where the first or the second half of those that are there begins in the order, and ends."""
    count = tf.math.count_nonzero(present > 0, dtype=tf.int32)
    half = (count + 1) // 2
    begin, end = tf.unstack(tf.where(first, [0, half], [half, count]))
    return begin, end


def _others_hold(
    value: float, order: tf.Tensor, present: tf.Tensor, first_stays: tf.Tensor
) -> Company:
    """A half of the examples stays, and each number of the others is replaced.

    NaN survives nearly whatever reaches across the batch: sums, maxima, norms, and comparisons of
    them with a limit that no batch reaches by itself. The other values find branches that a NaN
    does not take: on a large value of either sign, on an infinity, on an example that is 0.
    """
    rank = tf.argsort(order)
    begin, end = _half(present, first_stays)
    kept = (rank >= begin) & (rank < end)
    alike, replaced = tf.constant(_SAME_SHAPE), ~kept & (present > 0)
    return Company(
        tf.range(tf.size(order)), kept, alike, tf.constant(1), replaced, tf.constant(value)
    )


def _unaltered(
    places: tf.Tensor, compared: tf.Tensor, tolerance: tf.Tensor, least: tf.Tensor
) -> Company:
    """A company whose examples hold their own numbers."""
    none = tf.zeros_like(places, tf.bool)
    return Company(places, compared, tolerance, least, none, tf.constant(1.0))


def _few(order: tf.Tensor, present: tf.Tensor, random: tf.Tensor, looser: tf.Tensor) -> Company:
    """Few of the examples in another order, and one of them twice.

    With random layers they are the first ones in their places, which have their masks.
    """
    few = tf.clip_by_value(tf.size(order) // 2, 1, FEW)
    places = tf.where(random, tf.range(few), tf.reverse(order[:few], [0]))
    again = tf.concat([places, places[:1]], 0)
    comparable = tf.gather(present > 0, again) & (~random | (tf.range(few + 1) < few))
    count = tf.math.count_nonzero(comparable, dtype=tf.int32)
    tolerance = looser * tf.where(count > 1, _OTHER_SHAPE, _ALONE)
    least = tf.where(count > 8, 2, 1)
    return _unaltered(again, comparable, tolerance, least)


def _one_alone(order: tf.Tensor, random: tf.Tensor, looser: tf.Tensor) -> Company:
    """The first example that is there, alone."""
    other_mask = random & (order[0] > 0)
    compared, tolerance = ~other_mask[tf.newaxis], looser * _ALONE
    return _unaltered(order[:1], compared, tolerance, tf.constant(1))


def taken(batch: Any, alterable: Any, company: Company) -> Any:
    """The examples of a company.

    Args:
        batch: Nested tensors `[batch, ...]`.
        alterable: Of each leaf, whether its numbers are replaced as the company says.
        company: The company.
    """

    def of_leaf(leaf: tf.Tensor, may_change: bool) -> tf.Tensor:
        own = tf.gather(leaf, company.places)
        if not may_change:
            return own
        replaced = tf.reshape(company.replaced, [-1] + [1] * (leaf.shape.rank - 1))
        return tf.where(replaced, _altered(own, company.value), own)

    return tf.nest.map_structure(of_leaf, batch, alterable)


def _altered(own: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """The value itself, or so many times numbers that are 1 farther from 0, also where they are 0.

    Integers are never NaN or infinite; they end at the limits of their dtype, or at the numbers of
    float64 next to them.
    """
    numbers = own if own.dtype.is_floating else tf.cast(own, tf.float64)
    value = tf.cast(value, numbers.dtype)
    away = numbers + tf.where(numbers < 0, -tf.ones_like(numbers), tf.ones_like(numbers))
    times = tf.math.is_finite(value) & tf.not_equal(value, 0)
    made = tf.where(times, value * away, value)
    if own.dtype.is_floating:
        return made
    most = np.float64(own.dtype.max)
    most = most if int(most) == own.dtype.max else np.nextafter(most, 0)
    within = tf.clip_by_value(made, np.float64(own.dtype.min), most)
    return tf.where(tf.math.is_finite(value), tf.cast(within, own.dtype), own)


def with_holes(batch: Any, alterable: Any) -> Any:
    """The examples with NaN in a third of their floats: what fills holes is then seen to mix.

    Which third changes from example to example and from leaf to leaf.
    """
    leaves, flags = tf.nest.flatten(batch), tf.nest.flatten(alterable)

    def of_leaf(leaf: tf.Tensor, number: int) -> tf.Tensor:
        size = tf.shape(leaf)[0]
        entries = tf.size(leaf) // tf.maximum(size, 1)
        counted = number + tf.range(size)[:, tf.newaxis] + tf.range(entries)
        holes = tf.reshape(tf.equal(counted % 3, 0), tf.shape(leaf))
        return tf.where(holes, tf.constant(float("nan"), leaf.dtype), leaf)

    numbered = enumerate(zip(leaves, flags, strict=True))
    made = [
        of_leaf(leaf, number) if flag and leaf.dtype.is_floating else leaf
        for number, (leaf, flag) in numbered
    ]
    return tf.nest.pack_sequence_as(batch, made)


@tf.function(
    autograph=False,
    input_signature=[
        _OBSERVATION,
        _OBSERVATION,
        Company(_PLACES, _FLAGS, _FLOAT, _NUMBER, _FLAGS, _FLOAT),
    ],
)
def worst(reference: Observation, found: Observation, company: Company) -> tf.Tensor:
    """The tensor, or after all tensors the ids, in which most of the examples differ; else -1.

    An example's part of a tensor is compared relative to its own size and to a hundredth of what a
    tenth of the parts that are not 0 exceed (of a gradient also of the example's whole gradient),
    below which float32 cannot tell what is left of terms that cancel.

    Args:
        reference: What was recorded of the batch.
        found: What was recorded of the company.
        company: Its places, and how many that are compared must differ.
    """
    places = company.places
    totals = reference.totals
    totals = tf.where(tf.math.is_finite(totals), totals, 0.0)  # of an example to be left out
    sizes = reference.norms + 0.01 * (_exceeded_by_a_tenth(reference.norms) + totals)
    was, now = tf.gather(reference.projections, places), found.projections
    close = tf.abs(was - now) <= company.tolerance * tf.gather(sizes, places)[..., tf.newaxis]
    both_lost = ~tf.math.is_finite(was) & ~tf.math.is_finite(now)  # of a zeroed example
    other = ~tf.reduce_all(close | both_lost, 2)
    other_ids = tf.not_equal(tf.gather(reference.ids, places), found.ids)
    differ = tf.concat([other, other_ids[:, tf.newaxis]], 1) & company.compared[:, tf.newaxis]
    examples = tf.math.count_nonzero(tf.reduce_any(differ, 1), dtype=tf.int32)
    most = tf.argmax(tf.math.count_nonzero(differ, 0), output_type=tf.int32)
    return tf.where(examples >= company.least, most, -1)


def _exceeded_by_a_tenth(norms: tf.Tensor) -> tf.Tensor:
    """Of each tensor, float32 `[tensors]`: one example, however large, does not move it much."""
    ordered = tf.sort(tf.where(tf.math.is_finite(norms), norms, 0.0), 0, "DESCENDING")
    there = tf.math.count_nonzero(ordered > 0, 0, dtype=tf.int32)
    return tf.gather(tf.transpose(ordered), there // 10, axis=1, batch_dims=1)

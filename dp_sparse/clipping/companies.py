"""Companies that the isolation checks take examples of a batch in, and how their records compare.

Nothing here depends on the model, so each function is traced once in a process, however many
models it trains.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from dp_sparse.clipping.observation import Observation

# Numbers of companies. Those in which the others are extreme come last.
BOTH_HALVES, OF_THE_DATA, NOT_A_NUMBER, EXTREME = (0, 1), (0, 1, 2, 3), 4, 5
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
        factors: What the floats of each are multiplied by, float32 `[company]`.
    """

    places: tf.Tensor
    compared: tf.Tensor
    tolerance: tf.Tensor
    least: tf.Tensor
    factors: tf.Tensor


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
            lambda: _others_not_a_number(order, present, ~first_stays),
            lambda: _others_extreme(order, present, first_stays),
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
    return Company(places, kept, tf.constant(_SAME_SHAPE), tf.constant(1), tf.ones_like(present))


def _half(present: tf.Tensor, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Where the first or the second half of those that are there begins in the order, and ends."""
    count = tf.math.count_nonzero(present > 0, dtype=tf.int32)
    half = (count + 1) // 2
    begin, end = tf.unstack(tf.where(first, [0, half], [half, count]))
    return begin, end


def _others_not_a_number(order: tf.Tensor, present: tf.Tensor, first_stays: tf.Tensor) -> Company:
    """A half of the examples stays, and each float of the others is NaN.

    NaN survives nearly whatever reaches across the batch: sums, maxima, norms, and comparisons of
    them with a limit that no batch reaches by itself.
    """
    return _others_multiplied(order, present, first_stays, float("nan"))


def _others_extreme(order: tf.Tensor, present: tf.Tensor, first_stays: tf.Tensor) -> Company:
    """A half of the examples stays, and each float of the others is 10,000 times what it is.

    This finds a branch on a large value, which a NaN does not take.
    """
    return _others_multiplied(order, present, first_stays, _TIMES)


def _others_multiplied(
    order: tf.Tensor, present: tf.Tensor, first_stays: tf.Tensor, factor: float
) -> Company:
    own, rank = tf.range(tf.size(order)), tf.argsort(order)
    begin, end = _half(present, first_stays)
    kept = (rank >= begin) & (rank < end)
    factors = tf.where(kept | (present <= 0), 1.0, factor)
    return Company(own, kept, tf.constant(_SAME_SHAPE), tf.constant(1), factors)


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
    return Company(again, comparable, tolerance, least, tf.ones([few + 1]))


def _one_alone(order: tf.Tensor, random: tf.Tensor, looser: tf.Tensor) -> Company:
    """The first example that is there, alone."""
    other_mask = random & (order[0] > 0)
    compared, tolerance = ~other_mask[tf.newaxis], looser * _ALONE
    return Company(order[:1], compared, tolerance, tf.constant(1), tf.ones([1]))


def taken(batch: Any, alterable: Any, company: Company) -> Any:
    """The examples of a company.

    Args:
        batch: Nested tensors `[batch, ...]`.
        alterable: Of each leaf, whether it is multiplied by the company's factors.
        company: The company.
    """

    def of_leaf(leaf: tf.Tensor, may_change: bool) -> tf.Tensor:
        own = tf.gather(leaf, company.places)
        return own * _column(tf.cast(company.factors, own.dtype), own) if may_change else own

    return tf.nest.map_structure(of_leaf, batch, alterable)


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
    made = [of_leaf(leaf, number) if flag else leaf for number, (leaf, flag) in numbered]
    return tf.nest.pack_sequence_as(batch, made)


def _column(factors: tf.Tensor, leaf: tf.Tensor) -> tf.Tensor:
    """Factors `[batch]` with the axes of a leaf `[batch, ...]`."""
    return tf.reshape(factors, [-1] + [1] * (leaf.shape.rank - 1))


@tf.function(
    autograph=False,
    input_signature=[
        _OBSERVATION,
        _OBSERVATION,
        Company(_PLACES, _FLAGS, _FLOAT, _NUMBER, _FLOATS),
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

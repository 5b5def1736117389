"""Checks on real batches that what is measured of one example is its own.

Clipping bounds what one example adds to a sum; it bounds nothing if the example also changes what
is recorded of others. So what clipping reads (recorded inputs, cotangents, ids, losses) is compared
between the batch itself and other companies of its examples:

- half of the examples at their places, the others replaced by copies (in the first check also the
  other way round): what is recorded of those that stayed must be the same to 2⁻¹⁶ of its size,
  since kernels of one shape round alike;
- up to 32 examples and one of them again, in another order, without the rest: neither the size of
  the batch nor the place in it may matter. Other shapes round in another way, which may switch a
  unit on or off, so it takes two examples that differ by more than a sixty-fourth;
- one example alone;
- in the first check, and in that of a new tensor, both halves again in batches of training's own
  size, if the step is traced for a size that Python knows (XLA, embedding layers of TPUs).

The first three batches are checked, then the 257th, the 2,049th and so on, and each batch in which
a tensor that was 0 so far is not 0 any more: what it hides from a comparison shows only then. The
first check and those of such a batch take all of its examples, the others a quarter of them, drawn
at random, but 64 at least.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from dp_sparse.clipping.isolation_progress import IsolationProgress
from dp_sparse.clipping.observation import Observation, Observe, Observer
from dp_sparse.core import PrivacyError, require

COUPLED = (
    "What training measures of one example depends on another example of its batch, or on its "
    "place in it or on the batch's size (seen at {}), so clipping each example would not bound its "
    "influence. Remove what mixes examples (batch statistics, contrastive or in-batch losses), "
    "knows their order or number, or draws random numbers other than by keras.random with a seed "
    "generator."
)
_SAME_SHAPE, _OTHER_SHAPE, _ALONE = 2.0**-16, 2.0**-6, 2.0**-3
_HALF_PRECISION = 4  # times the latter two in bfloat16 or float16
_FEW = 32
_SHARE, _LEAST = 4, 64  # a later check takes one in so many examples, and so many at least


def checks(
    observer: Observer,
    batch: Any,
    present: tf.Tensor,
    progress: IsolationProgress,
    not_zero: tf.Tensor,
) -> list[tf.Operation]:
    """Operations that fail if, in this batch, what is recorded of an example is not its own.

    Args:
        observer: The model's recorded pass.
        batch: Its argument, nested tensors `[batch, ...]`.
        present: float32 `[batch]`; a batch without examples proves nothing.
        progress: What was checked so far.
        not_zero: bool `[tensors]`, of the pass that the step releases; needed as long as
            `progress.some_unseen()`.
    """
    there = tf.reduce_any(present > 0)
    scheduled, new = progress.scheduled() & there, progress.first_seen(not_zero) & there
    due = scheduled | new
    seed = tf.cast(progress.batches.read_value(), tf.int32)

    def checked() -> tf.Tensor:
        worst = coupled(observer, batch, present, seed, new)
        name = tf.gather(tf.constant(observer.names), tf.maximum(worst, 0))
        with tf.control_dependencies([require(worst < 0, PrivacyError, COUPLED, name)]):
            return tf.constant(True)

    required = [tf.cond(due, checked, lambda: tf.constant(False)).op]
    with tf.control_dependencies(required):
        progress.passed(there, scheduled, due, not_zero)
    return required


def coupled(
    observer: Observer, batch: Any, present: tf.Tensor, seed: tf.Tensor, whole: tf.Tensor | bool
) -> tf.Tensor:
    """The number of a tensor in which examples are seen to depend on their company, -1 for none.

    Args:
        observer: The pass; what it draws at random must be the same at every call.
        batch: Its argument, nested tensors `[batch, ...]`.
        present: float32 `[batch]`, 0 for padding; some example must be there.
        seed: int32 scalar: which examples stay; for 0 both halves are tried.
        whole: Whether to take all examples, as for seed 0, or a share of them.
    """
    taken = tf.cond(
        tf.equal(seed, 0) | whole,
        lambda: tf.range(tf.size(present)),
        lambda: _order(present, seed)[: tf.maximum(tf.size(present) // _SHARE, _LEAST)],
    )
    of_own_size = functools.partial(_of_own_size, observer, batch, present, seed)
    batch, present = tf.nest.map_structure(lambda leaf: tf.gather(leaf, taken), (batch, present))
    trial = _trial(observer, observer.observe, batch, present, seed // 2)
    first_stays = seed % 2 > 0
    companies = [
        lambda: _others_replaced(trial, ~first_stays),
        lambda: _others_replaced(trial, first_stays),
        lambda: _few(trial),
        lambda: _one_alone(trial),
    ]
    worst = _first_found(trial, companies, tf.where(tf.equal(seed, 0), 0, 1))
    if observer.observe_own_size is None:
        return worst
    due = tf.equal(seed, 0) | whole
    return tf.cond((worst < 0) & due, of_own_size, functools.partial(tf.identity, worst))


def _of_own_size(observer: Observer, batch: Any, present: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """As `coupled`, but with companies of the size of the batch, known while it is traced.

    A model may compute something else where Python sees how many examples there are.
    """
    assert observer.observe_own_size is not None
    trial = _trial(observer, observer.observe_own_size, batch, present, seed)
    companies = [
        lambda: _others_replaced(trial, tf.constant(True)),
        lambda: _others_replaced(trial, tf.constant(False)),
    ]
    worst = _first_found(trial, companies, tf.constant(0))
    return tf.where(worst < 0, worst, worst + observer.names_of_any_size)


class _Company(NamedTuple):
    """Examples that are taken together, and how their observation is compared.

    Attributes:
        places: Theirs in the batch, int32 `[company]`.
        compared: Which of them, bool `[company]`.
        tolerance: Relative, float32 scalar.
        least: How many must differ, int32 scalar.
    """

    places: tf.Tensor
    compared: tf.Tensor
    tolerance: tf.Tensor
    least: tf.Tensor


def _first_found(
    trial: "_Trial", companies: Sequence[Callable[[], _Company]], first: tf.Tensor
) -> tf.Tensor:
    """What `coupled` gives, of these companies in turn from the `first` on.

    A loop, so that what compares them is traced once.
    """

    def of_one(number: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        places, compared, tolerance, least = tf.switch_case(number, companies)
        differ = trial.differ(places, tolerance) & compared[:, tf.newaxis]
        return number + 1, _worst(differ, least)

    none = tf.constant(-1, tf.int32)
    until = lambda number, worst: (number < len(companies)) & (worst < 0)  # noqa: E731
    return tf.while_loop(until, of_one, (first, none), parallel_iterations=1)[1]


@dataclasses.dataclass(frozen=True)
class _Trial:
    """What the companies of one batch are made from.

    Attributes:
        observe: What is recorded of a company.
        batch: Nested tensors `[batch, ...]`.
        present: float32 `[batch]`, 0 for padding.
        order: The examples in the order in which companies take them, int32 `[batch]`.
        reference: What is recorded of the batch itself.
        looser: How much larger tolerances are where batches of another size round in another way.
    """

    observe: Observe
    batch: Any
    present: tf.Tensor
    order: tf.Tensor
    reference: Observation
    looser: float

    def differ(self, places: tf.Tensor, tolerance: tf.Tensor) -> tf.Tensor:
        """What is recorded of the examples at `places`, taken together, is not what it was.

        An example's part of a tensor is compared relative to its own size and to a hundredth of
        what a tenth of the parts that are not 0 exceed (of a gradient also of the example's whole
        gradient), below which float32 cannot tell what is left of terms that cancel.

        Returns:
            bool `[places, tensors + 1]`, the last column for ids.
        """
        company = self.observe(tf.nest.map_structure(lambda t: tf.gather(t, places), self.batch))
        norms = self.reference.norms
        was, now = tf.gather(self.reference.projections, places), company.projections
        totals = self.reference.totals
        totals = tf.where(tf.math.is_finite(totals), totals, 0.0)  # of an example to be left out
        sizes = tf.gather(norms + 0.01 * (_exceeded_by_a_tenth(norms) + totals), places)
        close = tf.abs(was - now) <= tolerance * sizes[..., tf.newaxis]
        both_lost = ~tf.math.is_finite(was) & ~tf.math.is_finite(now)  # of a zeroed example
        other = ~tf.reduce_all(close | both_lost, 2)
        other_ids = tf.not_equal(tf.gather(self.reference.ids, places), company.ids)
        return tf.concat([other, other_ids[:, tf.newaxis]], 1)


def _trial(
    observer: Observer, observe: Observe, batch: Any, present: tf.Tensor, seed: tf.Tensor
) -> _Trial:
    looser = _HALF_PRECISION if observer.half_precision else 1
    return _Trial(observe, batch, present, _order(present, seed), observe(batch), looser)


def _others_replaced(trial: _Trial, first_stays: tf.Tensor) -> _Company:
    """A half of the examples stays in its places, copies of it fill those of the others.

    The first check keeps one half and then the other, so that every place is replaced and every
    example doubled before the first update; a later check keeps one half.
    """
    own, rank = tf.range(tf.size(trial.order)), tf.argsort(trial.order)
    count = tf.math.count_nonzero(trial.present > 0, dtype=tf.int32)
    half = (count + 1) // 2
    begin, end = tf.unstack(tf.where(first_stays, [0, half], [half, count]))
    kept = (rank >= begin) & (rank < end)
    copied = tf.minimum(begin + rank % tf.maximum(end - begin, 1), tf.size(rank) - 1)
    copies = tf.gather(trial.order, copied)
    places = tf.where(kept | (trial.present <= 0), own, copies)
    return _Company(places, kept, tf.constant(_SAME_SHAPE), tf.constant(1))


def _few(trial: _Trial) -> _Company:
    """Few of the examples in another order, and one of them twice.

    With random layers they are the first ones in their places, which have their masks.
    """
    size, random = trial.order.shape[0], trial.reference.random
    few = tf.clip_by_value(tf.size(trial.order) // 2, 1, _FEW)
    few = few if size is None else min(max(size // 2, 1), _FEW)
    places = tf.where(random, tf.range(few), tf.reverse(trial.order[:few], [0]))
    again = tf.concat([places, places[:1]], 0)
    comparable = tf.gather(trial.present > 0, again) & (~random | (tf.range(few + 1) < few))
    several = tf.math.count_nonzero(comparable, dtype=tf.int32) > 1
    tolerance = trial.looser * tf.where(several, _OTHER_SHAPE, _ALONE)
    many = tf.math.count_nonzero(comparable, dtype=tf.int32) > 8
    return _Company(again, comparable, tolerance, tf.where(many, 2, 1))


def _one_alone(trial: _Trial) -> _Company:
    """The first example that is there, alone."""
    other_mask = trial.reference.random & (trial.order[0] > 0)
    tolerance = tf.constant(trial.looser * _ALONE)
    return _Company(trial.order[:1], ~other_mask[tf.newaxis], tolerance, tf.constant(1))


def _order(present: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Places `[batch]`: the first that is there, the others of them at random, padding."""
    keys = tf.random.stateless_uniform(tf.shape(present), tf.stack([seed, 2]))
    first = tf.argmax(tf.cast(present > 0, tf.int32), output_type=tf.int32)
    keys = tf.where(tf.range(tf.size(keys)) == first, -1.0, tf.where(present > 0, keys, 2.0))
    return tf.argsort(keys, stable=True)


def _exceeded_by_a_tenth(norms: tf.Tensor) -> tf.Tensor:
    """Of each tensor, float32 `[tensors]`: one example, however large, does not move it much."""
    ordered = tf.sort(tf.where(tf.math.is_finite(norms), norms, 0.0), 0, "DESCENDING")
    there = tf.math.count_nonzero(ordered > 0, 0, dtype=tf.int32)
    return tf.gather(tf.transpose(ordered), there // 10, axis=1, batch_dims=1)


def _worst(differ: tf.Tensor, least: int | tf.Tensor) -> tf.Tensor:
    """The column in which most examples differ, if at least so many differ in any; else -1."""
    examples = tf.math.count_nonzero(tf.reduce_any(differ, 1), dtype=tf.int32)
    most = tf.argmax(tf.math.count_nonzero(differ, 0), output_type=tf.int32)
    return tf.where(examples >= least, most, -1)

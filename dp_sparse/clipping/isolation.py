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
  size, if the step is traced for a size that Python knows (XLA, embedding layers of TPUs);
- in the first check, and in that of a new tensor, also what no example of the batch may hold: half
  of the examples at their places beside others whose numbers are all NaN, 10,000 times as large
  with either sign, 0 or infinite, and up to 32 examples with NaN in a third of their floats, in
  other companies. One such example may switch on what mixes: a limit that no batch reached, the
  mean that fills a hole. Ids, class labels and numbers of which the model asserts something stay
  as they are
  (`restricted_arguments`), and NaN and infinity are left out where products of this machine let
  them through (`machine_check`).

The first three batches are checked, then the 257th, the 2,049th and so on, and each batch in which
a tensor that was 0 so far is not 0 any more: what it hides from a comparison shows only then. The
first check and those of such a batch take all of its examples, the others a quarter of them, drawn
at random, but 64 at least. With micro-batches the former take all parts, the latter one of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dp_sparse.clipping import companies
from dp_sparse.clipping.isolation_progress import IsolationProgress
from dp_sparse.clipping.observation import Observation, Observe, Observer
from dp_sparse.core import PrivacyError, require, seldom

COUPLED = (
    "What training measures of one example depends on another example of its batch, or on its "
    "place in it or on the batch's size (seen at {}), so clipping each example would not bound its "
    "influence. Remove what mixes examples (batch statistics, contrastive or in-batch losses), "
    "knows their order or number, or draws random numbers other than by keras.random with a seed "
    "generator."
)
_HALF_PRECISION = 4.0  # times the tolerances of another shape in bfloat16 or float16
_SHARE, _LEAST = 4, 64  # a later check takes one in so many examples, and so many at least


def checks(
    observer: Observer,
    batch: Any,
    present: tf.Tensor,
    progress: IsolationProgress,
    not_zero: tf.Tensor,
    at_once: int | None = None,
) -> list[tf.Operation]:
    """Operations that fail if, in this batch, what is recorded of an example is not its own.

    Args:
        observer: The model's recorded pass.
        batch: Its argument, nested tensors `[batch, ...]`.
        present: float32 `[batch]`; a batch without examples proves nothing.
        progress: What was checked so far.
        not_zero: bool `[tensors]`, of the pass that the step releases; needed as long as
            `progress.some_unseen()`.
        at_once: The most examples of one pass; by default all. More are checked in parts, of which
            a check that does not take all examples takes one, drawn at random.
    """
    there = tf.reduce_any(present > 0)
    scheduled, new = progress.scheduled() & there, progress.first_seen(not_zero) & there
    due = scheduled | new
    seed = tf.cast(progress.batches.read_value(), tf.int32)

    def checked() -> tf.Tensor:
        if at_once is None:
            worst = coupled(observer, batch, present, seed, new)
        else:
            worst = _coupled_in_parts(observer, batch, present, seed, new, at_once)
        name = tf.gather(tf.constant(observer.names), tf.maximum(worst, 0))
        with tf.control_dependencies([require(worst < 0, PrivacyError, COUPLED, name)]):
            return tf.constant(True)

    required = [tf.cond(due, seldom(checked), lambda: tf.constant(False)).op]
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
        seed: int32 scalar: which examples stay; 0 is the first check, which tries both halves.
        whole: Whether to take all examples and to try values that the batch does not hold, as for
            seed 0, or to take a share of them as they are.
    """
    taken = tf.cond(
        tf.equal(seed, 0) | whole,
        lambda: tf.range(tf.size(present)),
        lambda: companies.order(present, seed)[: tf.maximum(tf.size(present) // _SHARE, _LEAST)],
    )
    of_own_size = functools.partial(_of_own_size, observer, batch, present, seed)
    batch, present = tf.nest.map_structure(lambda leaf: tf.gather(leaf, taken), (batch, present))
    trial = _trial(observer, observer.observe, batch, present, seed // 2, seed % 2 > 0)
    first = tf.equal(seed, 0)
    worst = _first_found(trial, companies.OF_THE_DATA, tf.where(first, 0, 1), first | whole)
    if trial.alters and observer.takes_nan:
        holed = functools.partial(_of_holes, observer, batch, present, trial.order)
        worst = _or_else(worst, first | whole, holed)
    if observer.observe_own_size is None:
        return worst
    return _or_else(worst, first | whole, of_own_size)


def _or_else(worst: tf.Tensor, due: tf.Tensor | bool, search: Callable[[], tf.Tensor]) -> tf.Tensor:
    """What was found, or what a further search finds if it is due."""
    return tf.cond((worst < 0) & due, search, functools.partial(tf.identity, worst))


def _coupled_in_parts(
    observer: Observer,
    batch: Any,
    present: tf.Tensor,
    seed: tf.Tensor,
    whole: tf.Tensor | bool,
    size: int,
) -> tf.Tensor:
    """As `coupled`, of one part of `size` examples after another until something is found."""
    count = tf.size(present)
    parts = -(-count // size)
    every = tf.equal(seed, 0) | whole
    drawn = tf.random.stateless_uniform([], tf.stack([seed, 3]), 0, parts, tf.int32)
    first = tf.where(every, 0, drawn)
    last = tf.where(every, parts, drawn + 1)

    def of_one(number: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        part = slice(number * size, tf.minimum((number + 1) * size, count))
        examples = tf.nest.map_structure(lambda leaf: leaf[part], batch)
        worst = tf.cond(
            tf.reduce_any(present[part] > 0),
            lambda: coupled(observer, examples, present[part], seed, whole),
            lambda: tf.constant(-1),
        )
        return number + 1, worst

    until = lambda number, worst: (number < last) & (worst < 0)  # noqa: E731
    return tf.while_loop(until, of_one, (first, tf.constant(-1)), parallel_iterations=1)[1]


def _of_own_size(observer: Observer, batch: Any, present: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """As `coupled`, but with companies of the size of the batch, known while it is traced.

    A model may compute something else where Python sees how many examples there are.
    """
    assert observer.observe_own_size is not None
    trial = _trial(observer, observer.observe_own_size, batch, present, seed, tf.constant(False))
    worst = _first_found(trial, companies.BOTH_HALVES, tf.constant(0), tf.equal(seed, 0))
    return tf.where(worst < 0, worst, worst + observer.names_of_any_size)


def _of_holes(observer: Observer, batch: Any, present: tf.Tensor, order: tf.Tensor) -> tf.Tensor:
    """As `coupled`, of few examples with NaN in some of their floats, and copies of a half."""
    few = order[: companies.FEW]
    batch, present = tf.nest.map_structure(lambda leaf: tf.gather(leaf, few), (batch, present))
    holed = companies.with_holes(batch, observer.alterable)
    zero, no = tf.constant(0), tf.constant(False)
    worst = _trial(observer, observer.observe, holed, present, zero, no).coupled_in(zero)
    return tf.where(worst < 0, worst, worst + companies.HOLES * observer.tensors)


def _first_found(
    trial: "_Trial", of_the_data: Sequence[int], begin: tf.Tensor, others: tf.Tensor
) -> tf.Tensor:
    """What `coupled` gives, of these companies in turn, and of those of other values if wanted.

    A loop, so that what compares them is traced once.

    Args:
        trial: What they are made from.
        of_the_data: Numbers of companies whose values are those of the batch.
        begin: Which of these is the first, int32 scalar.
        others: Whether to try companies with other values after these, bool scalar.
    """
    of_other_values = [companies.EXTREME, companies.OPPOSITE, companies.ZERO]
    if trial.takes_nan:
        of_other_values = [companies.NOT_A_NUMBER, *of_other_values, companies.INFINITE]
    numbers = tf.constant([*of_the_data, *of_other_values])
    altered = others if trial.alters else tf.constant(False)
    end = tf.where(altered, tf.size(numbers), len(of_the_data))

    def of_one(place: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        number = numbers[place]
        worst = trial.coupled_in(number)
        kind = tf.maximum(number + 1 - companies.NOT_A_NUMBER, 0)
        return place + 1, tf.where(worst < 0, worst, worst + kind * trial.tensors)

    until = lambda place, worst: (place < end) & (worst < 0)  # noqa: E731
    return tf.while_loop(until, of_one, (begin, tf.constant(-1)), parallel_iterations=1)[1]


@dataclasses.dataclass(frozen=True)
class _Trial:
    """What the companies of one batch are made from.

    Attributes:
        observe: What is recorded of a company.
        alterable: Of each leaf of the batch, whether its numbers may have any value.
        takes_nan: Whether floats among them may be NaN.
        tensors: How many tensors are compared, and the ids.
        batch: Nested tensors `[batch, ...]`.
        present: float32 `[batch]`, 0 for padding.
        order: The examples in the order in which companies take them, int32 `[batch]`.
        first_stays: Which half stays in company 1, bool scalar; in company 0 the other one.
        reference: What is recorded of the batch itself.
        looser: How much larger tolerances are where batches of another size round in another way,
            float32 scalar.
    """

    observe: Observe
    alterable: Any
    takes_nan: bool
    tensors: int
    batch: Any
    present: tf.Tensor
    order: tf.Tensor
    first_stays: tf.Tensor
    reference: Observation
    looser: tf.Tensor

    @property
    def alters(self) -> bool:
        """Whether some leaf may be altered."""
        return any(tf.nest.flatten(self.alterable))

    def coupled_in(self, number: tf.Tensor) -> tf.Tensor:
        """What `coupled` gives of the company of this number alone."""
        company = companies.company(
            number, self.order, self.present, self.first_stays, self.reference.random, self.looser
        )
        batch = companies.taken(self.batch, self.alterable, company)
        return companies.worst(self.reference, self.observe(batch), company)


def _trial(
    observer: Observer,
    observe: Observe,
    batch: Any,
    present: tf.Tensor,
    seed: tf.Tensor,
    first_stays: tf.Tensor,
) -> _Trial:
    looser = tf.constant(_HALF_PRECISION if observer.half_precision else 1.0, tf.float32)
    order = companies.order(present, seed)
    shared = observer.alterable, observer.takes_nan, observer.tensors
    return _Trial(observe, *shared, batch, present, order, first_stays, observe(batch), looser)

"""What a model's own loss is, and whether one example's outputs decide on the gradient of another.

Both are measured before the first step, inside a recorded pass, by the gradients of the model's
outputs. One example is taken alone, and twice, the second time with three times its weight. By a
sum, the gradient of the first stays; by a mean, it is halved; ÷ the sum of all weights, it is a
quarter. Then the outputs of some examples are replaced by NaN, large numbers and 0, which tame
batches do not reach: the gradients of the others must not change.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse import clipping
from dp_sparse.core import PrivacyError
from dp_sparse.sampling import Examples
from dp_sparse.step.own_loss import (
    EACH,
    MEAN,
    SUM,
    WEIGHTED,
    OwnLoss,
    has_own_loss,
    kind_of,
    set_kind,
)
from dp_sparse.step.traced_pass import same_seeds, uniforms_by

Gradients = Callable[[Examples, np.ndarray, float], np.ndarray]
_OCTAVES = {SUM: 0.0, MEAN: -1.0, WEIGHTED: -2.0}  # by which the gradient falls
_APART = 0.05  # octaves
_TRIED, _COMPARED = 256, 8  # examples
_CLOSE, _CLOSE_IN_HALF = 2.0**-10, 2.0**-5
_VALUES = (float("nan"), 1e4, -1e4, 0.0, float("inf"))

_NEITHER = (
    "Expected {name}.compute_loss to return the sum or the mean of its examples' losses, got a "
    "number whose gradient for an example is {ratio:.3g} of itself beside a copy of it.\n"
    "Reduce all parts alike (ops.mean(losses * weights)), or return one loss each, [batch]."
)
_NO_GRADIENT = (
    "Expected {name}.compute_loss to give one example alone a gradient, got none for {count} "
    "examples of the batch{beside}.\nIn-batch negatives, or any loss against other examples, "
    "cannot be private: use dp_sparse.losses.SampledSoftmax. Any other loss: return [batch]."
)
_MIXES = (
    "The gradient of one example depends on the outputs of another example, once these are "
    "{value:g}: {name}.compute_loss compares examples (in-batch negatives) or puts more than a sum "
    "or a mean around their losses (a cap, a root).\nReplace in-batch negatives by "
    "dp_sparse.losses.SampledSoftmax; apply the rest to each example's own loss first."
)


def measure(model: keras.Model, examples: Examples, batch_capacity: int) -> None:
    """Finds out what the model's own loss is, from a batch with an example; once until `compile`.

    Args:
        model: Built; without a loss of its own nothing is done.
        examples: The batch.
        batch_capacity: As in `clipping.record`.

    Raises:
        PrivacyError: It is neither a sum nor a mean, mixes outputs, or no example tells.
        ValueError: It is neither a number nor `[batch]`.
        UnsupportedLayerError: As `clipping.record`.
    """
    if not has_own_loss(model) or kind_of(model) is not None:
        return
    name = type(model).__name__
    examples = examples._replace(sample_weight=_positive(examples.sample_weight))
    traced = _Traced(model, examples, batch_capacity)
    there = np.flatnonzero(np.asarray(examples.present) > 0)[:_TRIED]
    norms = _norms(traced.gradients(_chosen(examples, there)))
    order = there[np.argsort(-np.nan_to_num(norms, nan=0.0), kind="stable")]
    _refuse_mixed_outputs(model, traced, _chosen(examples, order[:_COMPARED]), name)
    if traced.gives_each:
        set_kind(model, EACH)
        return
    for place in order[:_COMPARED]:
        alone = float(_norms(traced.gradients(_chosen(examples, [place])))[0])
        if not np.isfinite(alone) or alone <= 0:
            continue
        beside = float(_norms(traced.gradients(_twice(examples, place)))[0])
        ratio = beside / alone
        octaves = np.log2(ratio) if ratio > 0 else -np.inf
        for kind, by in _OCTAVES.items():
            if abs(octaves - by) <= _APART and _fits(kind, examples):
                set_kind(model, kind)
                return
        raise PrivacyError(_NEITHER.format(name=name, ratio=ratio))
    some = ", though they have some beside each other" if np.nanmax(norms, initial=0) > 0 else ""
    raise PrivacyError(_NO_GRADIENT.format(name=name, count=len(there), beside=some))


def _fits(kind: str, examples: Examples) -> bool:
    return kind != WEIGHTED or len(tf.nest.flatten(examples.sample_weight)) == 1


def _positive(weights: Any) -> Any:
    """Weights above 0: those of an example that does not count are 1 here."""
    return tf.nest.map_structure(lambda w: tf.where(w > 0, w, tf.ones_like(w)), weights)


def _chosen(examples: Examples, places: Any) -> Examples:
    return tf.nest.map_structure(lambda leaf: tf.gather(leaf, places), examples)


def _twice(examples: Examples, place: int) -> Examples:
    both = _chosen(examples, [place, place])
    heavier = tf.nest.map_structure(
        lambda w: tf.concat([w[:1], 3.0 * w[1:]], 0), both.sample_weight
    )
    return both._replace(sample_weight=heavier)


def _norms(gradients: np.ndarray) -> np.ndarray:
    return np.linalg.norm(gradients.astype(np.float64), axis=1)


def _refuse_mixed_outputs(
    model: keras.Model, traced: "_Traced", examples: Examples, name: str
) -> None:
    count = len(np.asarray(examples.present))
    kept = np.arange(count) < (count + 1) // 2
    if kept.all():
        return
    half = any(layer.compute_dtype != "float32" for layer in model._flatten_layers())
    close = _CLOSE_IN_HALF if half else _CLOSE
    own = traced.gradients(examples)[kept]
    sizes = np.linalg.norm(own, axis=1, keepdims=True)
    for value in _VALUES:
        if not np.isfinite(value) and clipping.lets_nan_through(model):
            continue
        try:
            found = traced.gradients(examples, kept, value)[kept]
        except tf.errors.InvalidArgumentError:
            continue  # the loss asserts something of outputs
        wrong = ~(np.abs(found - own) <= close * sizes) & np.isfinite(own)
        if np.any(wrong):
            raise PrivacyError(_MIXES.format(name=name, value=value))


class _Traced:
    """Gradients of the sum of a model's loss by its outputs, in one trace for batches of any size.

    Attributes:
        gives_each: Whether the loss is `[batch]`.
    """

    def __init__(self, model: keras.Model, examples: Examples, batch_capacity: int) -> None:
        self._model, self._capacity, self.gives_each = model, batch_capacity, False
        specs = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), examples
        )
        scalars = tf.TensorSpec([None], tf.bool), tf.TensorSpec([], tf.float32)
        function = tf.function(self._in_its_context, autograph=False)
        self._traced = function.get_concrete_function(specs, *scalars)

    def gradients(
        self, examples: Examples, kept: np.ndarray | None = None, value: float = 0.0
    ) -> np.ndarray:
        """Float32 `[examples, entries]`.

        Args:
            examples: The batch.
            kept: Which of them keep their own outputs; by default all.
            value: What the outputs of the others hold.
        """
        if kept is None:
            kept = np.ones(len(np.asarray(examples.present)), bool)
        found = self._traced(examples, tf.constant(kept), tf.constant(value, tf.float32))
        return np.asarray(found.numpy())

    def _in_its_context(self, *args: Any) -> tf.Tensor:
        strategy = self._model._distribute_strategy
        if strategy is None:
            return self._trace(*args)
        trace = tf.autograph.experimental.do_not_convert(self._trace)
        return strategy.experimental_local_results(strategy.run(trace, args=args))[0]

    def _trace(self, examples: Examples, kept: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        own, watched = OwnLoss(self._model, examples), list[tf.Tensor]()

        def of_some(outputs: Any) -> tf.Tensor:
            leaves = [tf.identity(leaf) for leaf in tf.nest.flatten(outputs)]
            watched.extend(leaf for leaf in leaves if leaf.dtype.is_floating)
            tape.watch(watched)
            altered = [_altered(leaf, kept, value) for leaf in leaves]
            return own(tf.nest.pack_sequence_as(outputs, altered))

        with tf.GradientTape(watch_accessed_variables=False) as tape:
            recording = clipping.record(
                self._model,
                examples.x,
                tape,
                self._capacity,
                same_seeds,
                own_loss=of_some,
                shared_uniforms=uniforms_by(same_seeds),
            )
            loss = tf.convert_to_tensor(recording.loss)
            self.gives_each = loss.shape.rank == 1
            total = tf.reduce_sum(loss)
        with clipping.guarded():
            found = tape.gradient(total, watched, unconnected_gradients="zero")
        size = tf.shape(examples.present)[0]
        flat = [tf.reshape(tf.cast(each, tf.float32), [size, -1]) for each in found]
        return tf.concat(flat, 1) if flat else tf.zeros([size, 0])


def _altered(leaf: tf.Tensor, kept: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    if not leaf.dtype.is_floating:
        return leaf
    whose = tf.reshape(kept, [-1] + [1] * (leaf.shape.rank - 1))
    return tf.where(whose, leaf, tf.cast(value, leaf.dtype))

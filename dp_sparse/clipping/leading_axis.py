"""Whether the leading axis of all that is recorded is the batch, so that it tells examples apart.

A layer that folds positions into the batch axis has records `[batch · positions, ...]`. With one
example its norms would broadcast against the losses, and each position would be clipped by itself.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from dp_sparse.clipping.uses import Use, fields_of
from dp_sparse.core import PrivacyError, require

_MEND = (
    "another axis was folded into that of the batch, or part of the batch left out. Keep the "
    "examples on the first axis: give layers [batch, positions, width], or use "
    "keras.layers.TimeDistributed"
)


def recorded_tensors(
    uses: Sequence[tuple[keras.Variable, Use]], losses: tf.Tensor
) -> list[tuple[str, tf.Tensor]]:
    """All that clipping reads, each under the name of its variable."""
    return [("the loss", losses), *((v.path, t) for v, use in uses for t in fields_of(use))]


def require_batch_leads(
    named: Sequence[tuple[str, tf.Tensor]], present: tf.Tensor
) -> list[tf.Operation]:
    """Fails unless all tensors, under their variables' names, lead with the axis of `present`.

    Shapes that are known when the step is traced cost nothing; all others together four operations.

    Raises:
        PrivacyError: Naming the variable; at once, or when the operations returned run.
    """
    known = {t.shape[0] for t in (present, *(t for _, t in named))} - {None}
    batch = present.shape[0] if present.shape[0] is not None else min(known, default=None)
    for name, tensor in named:
        if tensor.shape[0] not in (None, batch):
            raise PrivacyError(_message(name, tensor.shape[0], int(batch or 0)))
    unknown = [each for each in named if each[1].shape[0] is None or present.shape[0] is None]
    if not unknown:
        return []
    leads, expected = _leads([tensor for _, tensor in unknown]), tf.shape(present)[0]
    wrong = tf.argmax(tf.cast(tf.not_equal(leads, expected), tf.int32))
    name = tf.gather(tf.constant([name for name, _ in unknown]), wrong)
    found = tf.gather(leads, wrong)
    message = _message("{}", "{}", "{}")
    return [require(tf.equal(found, expected), PrivacyError, message, expected, name, found)]


def _message(name: str, lead: int | str, batch: int | str) -> str:
    return (
        f"Expected the batch of {batch} examples to be the first axis of what {name} records, got "
        f"{lead} there: {_MEND}."
    )


def _leads(tensors: list[tf.Tensor]) -> tf.Tensor:
    """The first dimension of each, int32 `[tensors]`."""
    by_dtype: dict[tf.DType, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    shapes: list[tf.Tensor] = [None] * len(tensors)
    for indices in by_dtype.values():
        found = tf.shape_n([tensors[index] for index in indices])
        for index, shape in zip(indices, found, strict=True):
            shapes[index] = shape
    starts = [0]
    for tensor in tensors[:-1]:
        starts.append(starts[-1] + tensor.shape.rank)
    return tf.gather(tf.concat(shapes, 0), tf.constant(starts))

"""The exceptions that `dp_sparse` raises, and how they leave a TensorFlow graph.

A check that needs a tensor's value runs inside the training graph, where TensorFlow turns any failure into an
`InvalidArgumentError` with a long trace. `require` writes a marked sentence into that failure and `translated` takes it
out again, so that the user reads the sentence alone.
"""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

_MARK = "dp_sparse refuses: "


class PrivacyError(RuntimeError):
    """The requested operation would void the privacy guarantee."""


class UnsupportedLayerError(ValueError):
    """A layer's per-example gradients cannot be had; the message lists each layer's path and the mend."""


class BadExampleError(ValueError):
    """A batch holds a value outside the range its layer or loss accepts."""


_KINDS = {kind.__name__: kind for kind in (PrivacyError, BadExampleError)}


def require(
    condition: tf.Tensor, kind: type[Exception], message: str, *values: tf.Tensor
) -> tf.Operation:
    """Returns an operation that fails with `message`, each `{}` in it replaced by one of `values`.

    Args:
        condition: Boolean scalar; the operation fails when it is false.
        kind: `PrivacyError` or `BadExampleError`.
        message: One sentence that names the argument, the value and the mend.
        *values: Scalars or small vectors to print.
    """
    text = tf.strings.format(f"{_MARK}{kind.__name__}|{message}|", values)
    return tf.debugging.Assert(condition, [text], summarize=8)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Re-raises a failed `require` as its own exception, without the TensorFlow trace."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = re.search(re.escape(_MARK) + r"(\w+)\|(.*?)\|", str(error), re.DOTALL)
        if found is None:
            raise
        raise _KINDS[found[1]](found[2]) from None

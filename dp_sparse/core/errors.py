"""The exceptions that `dp_sparse` raises, and how they leave a TensorFlow graph.

A check that needs a tensor's value runs inside the training graph, where TensorFlow turns any
failure into an `InvalidArgumentError` with a long trace. `require` writes a marked sentence into
that failure and `translated` takes it out again, so that the user reads the sentence alone.
"""

import base64
import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from dp_sparse.core import xla

_MARK = "dp_sparse refuses: "


class _OfTracing:
    """What autograph would wrap in an error of its own if it were not told to pass it through."""

    ag_pass_through = True


class PrivacyError(_OfTracing, RuntimeError):
    """The requested operation would void the privacy guarantee.

    Examples:
        Batches that the plan's sampler did not make are refused:

        >>> import dp_sparse, keras, numpy as np
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> model = keras.Sequential([keras.layers.Embedding(10, 2), keras.layers.Dense(1)])
        >>> model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
        >>> model.fit(np.arange(8), np.ones(8), verbose=0)  # not plan.sampling.batches((x, y))
        Traceback (most recent call last):
            ...
        dp_sparse.core.errors.PrivacyError: Expected a batch made by this plan's sampler, got ...
    """


class UnsupportedLayerError(_OfTracing, ValueError):
    """A layer's per-example gradients cannot be had.

    The message lists each layer's path and the mend.

    Examples:
        A layer that mixes the examples of a batch cannot be trained privately:

        >>> import dp_sparse, keras, numpy as np
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> model = keras.Sequential([keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        >>> model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
        >>> model.fit(plan.sampling.batches((np.ones((8, 3)), np.ones(8))), verbose=0)
        Traceback (most recent call last):
            ...
        dp_sparse.core.errors.UnsupportedLayerError: Cannot train privately:
        - ...BatchNormalization): mixes the examples of a batch. ...
    """


class BadExampleError(_OfTracing, ValueError):
    """A batch holds a value outside the range its layer or loss accepts.

    Examples:
        An id outside of its table is refused, here and in training:

        >>> import dp_sparse, numpy as np
        >>> examples = {"users": np.array([3, 12])}, np.ones(2)
        >>> dp_sparse.select_top_k(
        ...     examples, {"users": 10}, k=1, source=dp_sparse.PublicRows(), progress=False
        ... )
        Traceback (most recent call last):
            ...
        dp_sparse.core.errors.BadExampleError: Expected ids of table 'users' in [0, 10), got 12 ...
    """


_KINDS = {kind.__name__: kind for kind in (PrivacyError, BadExampleError, ValueError)}


def require(
    condition: tf.Tensor, kind: type[Exception], message: str, *values: tf.Tensor
) -> tf.Operation:
    """Returns an operation that fails with `message`, each `{}` in it replaced by one of `values`.

    In code that XLA compiles it fails after the kernel, before any result of it is used.

    Args:
        condition: Boolean scalar; the operation fails when it is false.
        kind: `PrivacyError`, `BadExampleError` or `ValueError`.
        message: One sentence that names the argument, the value and the mend.
        *values: Scalars or small vectors to print.
    """

    def asserted(condition: tf.Tensor, values: tuple[tf.Tensor, ...]) -> tf.Operation:
        text = tf.strings.format(message, values)
        code = tf.io.encode_base64(text, pad=True)
        marked = tf.strings.join([f"{_MARK}{kind.__name__}|", code, "|"])
        return tf.debugging.Assert(condition, [text, marked], summarize=8)

    if xla.inside():
        return xla.postpone(condition, values, asserted)
    return asserted(condition, values)


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Marks an exception raised by Python code in a `tf.data` pipeline; `translated` finds it."""
    try:
        yield
    except tuple(_KINDS.values()) as error:
        code = base64.urlsafe_b64encode(str(error).encode()).decode()
        kind = next(kind for kind in _KINDS.values() if isinstance(error, kind))
        raise kind(f"{error} {_MARK}{kind.__name__}|{code}|") from None


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Re-raises a failed `require`, or what `marked` marked, as its own exception.

    So is the use of a tensor of an earlier trace. The TensorFlow trace is left out.
    """
    try:
        yield
    except tf.errors.OpError as error:
        found = re.search(re.escape(_MARK) + r"(\w+)\|([\w=-]*)\|", str(error))
        if found is None:
            raise
        raise _KINDS[found[1]](base64.urlsafe_b64decode(found[2]).decode()) from None
    except (TypeError, ValueError) as error:
        if "cannot be accessed from" not in str(error):  # TensorFlow's words, of no public class
            raise
        raise PrivacyError(
            "A layer, a loss or a metric uses a tensor that it kept in Python from an earlier "
            "call. Keep none: compute it anew in each call, or pass it on as an output.\n"
            f"TensorFlow says: {error}"
        ) from None

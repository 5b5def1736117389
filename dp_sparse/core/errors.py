"""The exceptions that `dp_sparse` raises, and how they leave a TensorFlow graph.

A check that needs a tensor's value runs inside the training graph, where TensorFlow turns any
failure into an `InvalidArgumentError` with a long trace. `require` writes a marked sentence into
that failure, and `translated` takes it out again, so that the user reads the sentence alone. A
check that holds costs one operation: its sentence is a constant, and the values are filled in only
when a failure is read.

It also filters what the process writes to standard error, TensorFlow's own log included.
"""

import base64
import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator

import tensorflow as tf

from dp_sparse.core import xla

_MARK = "dp_sparse refuses: "
_END = "end of what dp_sparse says"
_SHOWN = 8  # entries of a vector


class _OfTracing:
    """A base of errors that autograph passes on as they are, and does not wrap in its own."""

    ag_pass_through = True


class PrivacyError(_OfTracing, RuntimeError):
    """The requested operation would void the privacy guarantee.

    Examples:
        Batches that the plan's sampler did not make are refused:

        >>> import dp_sparse, keras, numpy as np
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> ids, table = keras.Input((), dtype="int32"), keras.layers.Embedding(10, 2)
        >>> model = keras.Sequential([ids, table, keras.layers.Dense(1)])
        >>> model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
        >>> model.fit(np.arange(8), np.ones(8), verbose=0)  # not plan.sampling.batches((x, y))
        Traceback (most recent call last):
            ...
        dp_sparse.core.errors.PrivacyError: Expected a batch made by this plan's sampler, got ...
    """


class NoStepsLeftError(PrivacyError):
    """A batch came after the last step of its plan."""


class UnsupportedLayerError(_OfTracing, ValueError):
    """A layer's per-example gradients cannot be computed.

    The message lists the path of each such layer and what to do instead.

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


_KINDS = {
    kind.__name__: kind for kind in (NoStepsLeftError, PrivacyError, BadExampleError, ValueError)
}


def require(
    condition: tf.Tensor, kind: type[Exception], message: str, *values: tf.Tensor
) -> tf.Operation:
    """Returns an operation that fails with `message`, each `{}` in it replaced by one of `values`.

    In code that XLA compiles it fails after the kernel, before any result of it is used.

    Args:
        condition: Boolean scalar; the operation fails when it is false.
        kind: `PrivacyError`, `NoStepsLeftError`, `BadExampleError` or `ValueError`.
        message: One sentence that names the argument, the value and the fix.
        *values: Scalars or small vectors of numbers, or scalar strings, to print.
    """

    def asserted(condition: tf.Tensor, values: tuple[tf.Tensor, ...]) -> tf.Operation:
        code = base64.urlsafe_b64encode(message.encode()).decode()
        marked = f"{_MARK}{kind.__name__}|{code}|{''.join(map(_form, values))}|"
        data = [message, marked, *values, _END]
        return tf.raw_ops.Assert(condition=condition, data=data, summarize=_SHOWN)

    if xla.static_shapes():
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
        raise kind(f"{error} {_MARK}{kind.__name__}|{code}||") from None


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Re-raises a failed `require`, or what `marked` marked, as the exception that it stands for.

    The use of a tensor of an earlier trace becomes a `PrivacyError`. The TensorFlow trace is left
    out.
    """
    try:
        yield
    except tf.errors.OpError as error:
        found = re.search(re.escape(_MARK) + r"(\w+)\|([\w=-]*)\|([stv]*)\|", str(error))
        if found is None:
            raise
        message = base64.urlsafe_b64decode(found[2]).decode()
        values = _printed(str(error)[found.end() :], found[3])
        raise _KINDS[found[1]](_filled(message, values)) from None
    except (TypeError, ValueError) as error:
        if "cannot be accessed from" not in str(error):  # TensorFlow's words, of no public class
            raise
        raise PrivacyError(
            "A layer, a loss or a metric uses a tensor that it kept in Python from an earlier "
            "call. Compute it again in each call, or return it as an output.\n"
            f"TensorFlow says: {error}"
        ) from None


def _printed(text: str, kinds: str) -> list[str]:
    """The values that TensorFlow prints, each in brackets, after the mark of a failed check."""
    printed = text.partition(f" [{_END}]")[0].removeprefix("]")
    values = printed.removeprefix(" [").removesuffix("]").split("] [") if kinds else []
    return [_FORMS[kind](value) for value, kind in zip(values, kinds, strict=True)]


def _form(value: tf.Tensor) -> str:
    """How a value is read from what TensorFlow prints: a key of `_FORMS`."""
    if value.dtype == tf.string:
        return "t"
    return "v" if value.shape.rank else "s"


def _unescaped(printed: str) -> str:
    return printed.encode().decode("unicode_escape").encode("latin-1").decode()


_FORMS: dict[str, Callable[[str], str]] = {
    "s": str,
    "v": "[{}]".format,
    "t": _unescaped,
}


def _filled(message: str, values: list[str]) -> str:
    """The message with a value for each `{}`."""
    first, *rest = message.split("{}") if values else [message]
    return first + "".join(value + part for value, part in zip(values, rest, strict=True))


@contextlib.contextmanager
def stderr_without(*expected: str) -> Iterator[None]:
    """Holds back what is written to file descriptor 2, and writes all but expected lines after.

    TensorFlow logs a failed assertion in C++, also one that is meant to fail. Keep the body short:
    lines of other threads come late, too.

    Args:
        *expected: Parts of the lines to leave out.
    """
    try:
        console = os.dup(2)
    except OSError:  # closed, as in some services
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(console, 2)
            os.close(console)
            held.seek(0)
            for line in held:
                if not any(part.encode() in line for part in expected):
                    os.write(2, line)

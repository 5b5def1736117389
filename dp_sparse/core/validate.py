"""Central validators; every message reads like `Expected clip_norm > 0, got clip_norm=-1.0`.

It also asks for libraries that the package can do without.
"""

import math
from typing import Any

CLIP_NORMS = (1e-12, 1e12)


def positive(name: str, value: Any) -> float:
    """Returns `value` as a float; raises ValueError unless it is a finite number above zero."""
    if not _is_number(value) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"Expected {name} > 0 and finite, got {name}={value!r}.")
    return float(value)


def clip_norm(name: str, value: Any) -> float:
    """Returns `value` as a float; raises ValueError unless float32 can hold noise of its scale."""
    low, high = CLIP_NORMS
    if not low <= positive(name, value) <= high:
        raise ValueError(f"Expected {low:g} <= {name} <= {high:g}, got {name}={value!r}.")
    return float(value)


def finite(name: str, value: Any) -> float:
    """Returns `value` as a float; raises ValueError unless it is a finite number."""
    if not _is_number(value) or not math.isfinite(value):
        raise ValueError(f"Expected a finite {name}, got {name}={value!r}.")
    return float(value)


def positive_integer(name: str, value: Any) -> int:
    """Returns `value` as an int; raises ValueError unless it is a whole number above zero."""
    if not _is_number(value) or not math.isfinite(value) or value != int(value) or value <= 0:
        raise ValueError(f"Expected {name} to be a whole number > 0, got {name}={value!r}.")
    return int(value)


def probability(name: str, value: Any) -> float:
    """Returns `value` as a float; raises ValueError unless 0 < value < 1."""
    if not _is_number(value) or not 0 < value < 1:
        raise ValueError(f"Expected 0 < {name} < 1, got {name}={value!r}.")
    return float(value)


def of_keras_3(name: str, value: Any) -> None:
    """Raises ValueError for a model, an optimizer, a loss or a metric of tf_keras, Keras 2."""
    bases = [cls for cls in type(value).__mro__ if cls.__module__.partition(".")[0] == "tf_keras"]
    if bases:
        raise ValueError(
            f"Expected {name} of Keras 3, got {type(value).__name__} of tf_keras, which is Keras 2 "
            "(TensorFlow Recommenders uses it): dp_sparse trains models of Keras 3 alone. Build "
            "all of it with `import keras`."
        )


def _is_number(value: Any) -> bool:
    is_scalar = not isinstance(value, bool) and getattr(value, "ndim", 0) == 0
    return is_scalar and hasattr(value, "__float__") and not math.isnan(value)


def is_weight(value: Any) -> bool:
    """Whether `value` is a finite number >= 0."""
    return _is_number(value) and math.isfinite(value) and value >= 0


def require_matplotlib(what: str) -> None:
    """Raises ImportError, with what installs it, if there is no matplotlib to draw `what` with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{what} needs matplotlib: pip install matplotlib.") from error

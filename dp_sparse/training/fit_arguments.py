"""What a private model's `fit`, `evaluate` and `predict` take, made what Keras takes, or refused.

Before a step is paid: what Keras would ignore beside batches of a sampler, and held-out text, of
which Keras takes tensors alone.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from dp_sparse.core import PrivacyError
from dp_sparse.reports import PrivacyReport
from dp_sparse.sampling import is_sampled, text_tensors, trained_on

Method = Callable[..., Any]
_STOCK = {
    name: inspect.signature(functools.partial(getattr(keras.Model, name), None))
    for name in ("fit", "evaluate", "predict")
}


def checked_fit(fit: Method) -> Method:
    """Keras' `fit` of batches that a sampler made: they have their order, sizes and weights."""

    @functools.wraps(fit)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = _bound("fit", fit, args, kwargs)
        _refuse_class_weight(given.arguments.get("class_weight"))
        _refuse_other_data(given.arguments.get("x"))
        if is_sampled(given.arguments["x"].element_spec):
            _refuse_beside_batches(given.arguments)
            given.arguments["shuffle"] = False  # Keras warns that it cannot
            _refuse_training_rows(given.arguments)
        held_out = given.arguments.get("validation_data")
        given.arguments["validation_data"] = text_tensors(held_out, "validation_data")
        return fit(*given.args, **given.kwargs)

    return run


def taking_text(name: str, method: Method) -> Method:
    """Keras' `evaluate` or `predict`, with text in arrays of every dtype that NumPy has for it."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = _bound(name, method, args, kwargs)
        for part in {"x", "y"} & given.arguments.keys():
            given.arguments[part] = text_tensors(given.arguments[part], part)
        return method(*given.args, **given.kwargs)

    return run


def _bound(name: str, method: Method, args: Any, kwargs: Any) -> inspect.BoundArguments:
    """The arguments by name; those of Keras' method if a model's own hands on whatever it gets."""
    own = inspect.signature(method)
    signature = own if "x" in own.parameters else _STOCK[name]
    return signature.bind(*args, **kwargs)


def _refuse_other_data(x: Any) -> None:
    if not hasattr(x, "element_spec"):
        raise PrivacyError(
            f"Expected a batch made by this plan's sampler, got {type(x).__name__} without its "
            "marker: train with model.fit(plan.sampling.batches(dataset)). Batches made any other "
            "way void the plan's accounting."
        )


def _refuse_class_weight(given: Any) -> None:
    """Keras has no class weights for batches that have weights of their own."""
    if given is not None:
        raise ValueError(
            f"Expected no class_weight in fit, got class_weight={given}: give it to the "
            "sampler, plan.sampling.batches(dataset, class_weight=...) of Poisson sampling, or "
            "give each example its weight, (x, y, sample_weight)."
        )


def _refuse_training_rows(given: dict[str, Any]) -> None:
    """Callbacks take validation metrics for those of other examples, and write or steer by them."""
    callbacks, held_out = given.get("callbacks"), given.get("validation_data")
    each = callbacks if isinstance(callbacks, list | tuple) else [callbacks] if callbacks else []
    reports = [callback for callback in each if isinstance(callback, PrivacyReport)]
    accepted = any(report.diagnostics == "non_private" for report in reports)
    if each and not accepted and trained_on(given["x"], held_out):
        raise PrivacyError(
            "Expected validation_data that training does not use, got rows that batches(...) was "
            "given: no epsilon covers their metrics, which callbacks write or steer by.\n"
            "Hold rows out: batches((x[:n], y[:n])) and validation_data=(x[n:], y[n:]). Or accept "
            "the leak with PrivacyReport(diagnostics='non_private')."
        )


def _refuse_beside_batches(given: dict[str, Any]) -> None:
    if given.get("validation_split"):
        raise ValueError(
            f"Expected no validation_split beside batches, got "
            f"validation_split={given['validation_split']}: split the arrays before sampling, "
            "plan.sampling.batches((x[:n], y[:n])), and give the rest as "
            "validation_data=(x[n:], y[n:])."
        )
    if given.get("batch_size") is not None:
        raise ValueError(
            f"Expected no batch_size beside batches, got batch_size={given['batch_size']}: the "
            "plan's sampling sets it, PoissonSampling(..., expected_batch_size=...); "
            "for validation_data use validation_batch_size."
        )

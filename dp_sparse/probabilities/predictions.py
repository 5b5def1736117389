"""Reads what a model predicts of examples, as scores and labels that a histogram counts."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dp_sparse.core import BadExampleError, PrivacyError, validate
from dp_sparse.guards import refuse_mixed_predictions
from dp_sparse.probabilities.score_histogram import ScoreKind
from dp_sparse.sampling import check_source, checked_number, chunks_of, is_sampled

CLIP = 1e-7  # probabilities nearer to 0 or 1 than float32 tells apart
_AT_ONCE = 1024  # examples of a batch
_SAMPLED = (
    "Expected each example once, got batches of a sampler, which may hold an example several "
    "times.\nPass what sampling.batches(...) was given."
)


class Scored(NamedTuple):
    """Examples as a histogram counts them.

    Attributes:
        scores: float64 `[n]`.
        labels: In [0, 1], float64 `[n]`.
        weights: float64 `[n]`, or None for 1.
        kind: What the scores are.
    """

    scores: np.ndarray
    labels: np.ndarray
    weights: np.ndarray | None
    kind: ScoreKind


def scored(
    model: keras.Model,
    examples: Any,
    output: str | int | None,
    label_range: tuple[float, float] | None,
    num_examples: int | None,
    of_plan: int | None,
) -> Iterator[Scored]:
    """What the model says of each example, a chunk at a time; arguments as of calibration.

    `of_plan` is the number of examples of the plan that pays, if one does.

    Raises:
        ValueError: An argument out of its range, another number of examples, no labels, or
            predictions of another kind.
        BadExampleError: A label or a weight out of its range.
        PrivacyError: Batches of a sampler, or a prediction depends on other examples.
    """
    label_range = None if label_range is None else _checked_range(label_range)
    expected, seen, kind = _number_of(examples, num_examples, of_plan), 0, None
    predict, compared, shapes = _predicting(model, output), False, None
    for chunk in chunks_of(examples):
        x, y, weights = _parts(chunk)
        shapes = _same_shapes(shapes, x)
        found = predict(x)
        if kind is None:
            kind = _kind_of(model, found, output, label_range)
        if not compared:
            compared = refuse_mixed_predictions(model, predict, x)
        scores, labels = _read(kind, found, _chosen(y, output, required=True), seen)
        yield Scored(scores, labels, _checked_weights(weights, output, seen), kind)
        seen += len(labels)
        if seen > expected:
            break
    if seen != expected:
        raise ValueError(
            f"Expected num_examples={expected} examples, each once, got "
            f"{'more' if seen > expected else seen}: a histogram pays for one pass."
        )


def _number_of(examples: Any, num_examples: int | None, of_plan: int | None) -> int:
    """How many examples there must be: those of the plan that pays, or as many as are said.

    Raises:
        ValueError: It is not known, or not the plan's.
        PrivacyError: A dataset mixes examples.
    """
    if isinstance(examples, tf.data.Dataset):
        if is_sampled(examples.element_spec):
            raise PrivacyError(_SAMPLED)
        check_source(examples)
        for leaf in tf.nest.flatten(examples.element_spec):
            if leaf.shape.rank is None or None in leaf.shape[1:].as_list():
                raise ValueError(
                    f"Expected batches whose shape is known but for its first axis, got "
                    f"{leaf.shape}.\nGive padded_batch fixed padded_shapes: a batch as long as its "
                    "longest example shows that one to the others."
                )
    given = checked_number(examples, num_examples)
    if of_plan is not None and given not in (None, of_plan):
        raise ValueError(
            f"Expected the {of_plan} examples of the plan that pays, each once, got {given}.\n"
            "For other examples give budget=PrivacyBudget(epsilon, delta)."
        )
    if (expected := of_plan or given) is None:
        raise ValueError("Expected num_examples=, the number of examples, got None.")
    return expected


def _same_shapes(before: list[Any] | None, x: Any) -> list[Any]:
    """Shapes of single examples; raises ValueError if they are not those of the chunk before."""
    own = [np.shape(leaf)[1:] for leaf in tf.nest.flatten(x)]
    if before not in (None, own):
        raise ValueError(
            f"Expected examples of one shape, got {own} after {before}.\nPad all batches alike: a "
            "batch as long as its longest example shows that one to the others."
        )
    return own


def _checked_range(label_range: tuple[float, float]) -> tuple[float, float]:
    low, high = (validate.finite("label_range", value) for value in label_range)
    if not low < high:
        raise ValueError(f"Expected label_range=(least, largest), got {label_range}.")
    return low, high


def _kind_of(
    model: keras.Model,
    found: np.ndarray,
    output: str | int | None,
    label_range: tuple[float, float] | None,
) -> ScoreKind:
    """What an output is, by the shape of its predictions and by its loss."""
    if found.ndim > 2:
        raise ValueError(
            f"Expected one prediction for each example, [batch] or [batch, classes], got shape "
            f"{[None, *found.shape[1:]]} from {model.name}.\nName another output with output=."
        )
    if label_range is not None:
        return ScoreKind("regression", False, label_range, output)
    loss = _chosen(model.loss, output)
    from_logits = bool(getattr(loss, "from_logits", False))
    several = found.ndim == 2 and found.shape[1] > 1
    named = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    if several and "binary" in named.lower():
        raise ValueError(
            f"Expected one probability for each example, got {found.shape[1]} labels of their own "
            f"from {model.name}.\nGive each its own output, and calibrate one with output=."
        )
    return ScoreKind("multiclass" if several else "binary", from_logits, None, output)


def _chosen(nest: Any, output: str | int | None, required: bool = False) -> Any:
    """The part of a nest of outputs, losses or labels that belongs to one output."""
    if isinstance(nest, Mapping) and output in nest:
        return nest[output]
    if isinstance(nest, list | tuple) and type(output) is int and 0 <= output < len(nest):
        return nest[output]
    nested = isinstance(nest, Mapping | list | tuple)
    if nested and len(nest) == 1 and output is None:
        return next(iter(nest.values() if isinstance(nest, Mapping) else nest))
    if required and nested:
        names = [*nest] if isinstance(nest, Mapping) else [*range(len(nest))]
        raise ValueError(f"Expected output= to be one of {names}, got output={output!r}.")
    return None if nested else nest


def _predicting(model: keras.Model, output: str | int | None) -> Callable[[Any], np.ndarray]:
    def predict(x: Any) -> np.ndarray:
        count = len(tf.nest.flatten(x)[0])
        filled = -count % _AT_ONCE  # all batches of one size, whose kernels round alike
        places = np.concatenate([np.arange(count), np.zeros(filled, np.int64)])
        x = tf.nest.map_structure(lambda leaf: np.asarray(leaf)[places], x)
        found = model.predict(x, batch_size=_AT_ONCE, verbose=0)
        return np.asarray(_chosen(found, output, required=True), np.float64)[:count]

    return predict


def _parts(chunk: Any) -> tuple[Any, Any, Any]:
    """`(x, y, sample_weight)` of a chunk; refuses those without labels, and a sampler's."""
    if is_sampled(chunk):
        raise PrivacyError(_SAMPLED)
    if not isinstance(chunk, tuple | list) or len(chunk) not in (2, 3):
        raise ValueError(
            "Expected examples (x, y) or (x, y, sample_weight), with labels, got "
            f"{type(chunk).__name__}."
        )
    x, y, *rest = chunk
    return x, y, rest[0] if rest else None


def _read(kind: ScoreKind, found: np.ndarray, y: Any, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and labels of examples, of which the first has the number `first`."""
    labels = np.asarray(y, np.float64)
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    read = {"binary": _binary, "multiclass": _of_top_class, "regression": _regression}[kind.name]
    scores, labels = read(kind, found, labels)
    bad = np.flatnonzero(~((labels >= 0) & (labels <= 1)))
    if bad.size:
        raise BadExampleError(
            f"Expected labels in [0, 1], got {np.ravel(y)[bad[0]]} in example {first + bad[0]}.\n"
            "For a regression, give label_range=(least, largest)."
        )
    return scores, labels


def _checked_weights(weights: Any, output: str | int | None, first: int) -> np.ndarray | None:
    if weights is None:
        return None
    own = _chosen(weights, output)
    if own is None:
        raise ValueError(
            f"Expected sample weights of output={output!r}, got those of {[*weights]}."
        )
    own = np.asarray(own, np.float64).reshape(len(own))
    bad = np.flatnonzero(~(np.isfinite(own) & (own >= 0)))
    if bad.size:
        raise BadExampleError(
            f"Expected sample weights >= 0 and finite, got {own[bad[0]]} in example "
            f"{first + bad[0]}."
        )
    return own


def log_odds(probabilities: np.ndarray) -> np.ndarray:
    """The log odds of probabilities, which are kept 1e-7 away from 0 and 1."""
    p = np.clip(probabilities, CLIP, 1 - CLIP)
    return np.log(p) - np.log1p(-p)


def _binary(kind: ScoreKind, found: np.ndarray, labels: np.ndarray) -> tuple[Any, Any]:
    found = found.reshape(len(found), -1)
    _require_shape(found.shape[1] == 1 and labels.ndim == 1, found, labels)
    own = found[:, 0]
    if kind.from_logits:
        return own, labels
    _require_probabilities(own)
    return log_odds(own), labels


def _of_top_class(kind: ScoreKind, found: np.ndarray, labels: np.ndarray) -> tuple[Any, Any]:
    _require_shape(found.ndim == 2 and labels.ndim in (1, 2), found, labels)
    if kind.from_logits:
        found = np.exp(found - np.max(found, axis=1, keepdims=True))
        found = found / np.sum(found, axis=1, keepdims=True)
    _require_probabilities(found)
    top = np.argmax(found, axis=1)
    if labels.ndim == 2:
        _require_shape(labels.shape == found.shape, found, labels)
        labels = np.argmax(labels, axis=1)
    return log_odds(found[np.arange(len(top)), top]), (labels == top).astype(np.float64)


def _regression(kind: ScoreKind, found: np.ndarray, labels: np.ndarray) -> tuple[Any, Any]:
    found = found.reshape(len(found), -1)
    _require_shape(found.shape[1] == 1 and labels.ndim == 1, found, labels)
    assert kind.label_range is not None
    low, high = kind.label_range
    return (found[:, 0] - low) / (high - low), np.clip((labels - low) / (high - low), 0, 1)


def _require_shape(fits: bool, found: np.ndarray, labels: np.ndarray) -> None:
    if not fits or len(found) != len(labels):
        raise ValueError(
            f"Expected a label for each prediction, got predictions {list(found.shape)} and labels "
            f"{list(labels.shape)}.\nIf the model has several outputs, name one with output=."
        )


def _require_probabilities(found: np.ndarray) -> None:
    if np.any((found < -1e-6) | (found > 1 + 1e-6)):
        raise ValueError(
            "Expected predictions in [0, 1], got one outside of it.\nCompile the model with a loss "
            "of from_logits=True if it predicts logits; for a regression, give label_range."
        )

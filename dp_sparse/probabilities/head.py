"""A score map behind a model, of Keras' own layers: what is saved loads without `dp_sparse`."""

from typing import Any

import keras
import numpy as np
from keras import ops

from dp_sparse.optimizers import Calibrated, note_calibration
from dp_sparse.probabilities.predictions import CLIP
from dp_sparse.probabilities.score_histogram import ScoreHistogram, ScoreKind
from dp_sparse.probabilities.score_map import ScoreMap

_TINY = 1e-30  # a share of what float32 rounded to nothing
_BELOW = 0.999  # of the top class, which stays the top


def with_head(
    model: keras.Model, score_map: ScoreMap, histogram: ScoreHistogram, inputs: Any
) -> keras.Model:
    """The model with calibrated outputs; its own weights are shared, not copied.

    Args:
        model: The trained model.
        score_map: Of its scores.
        histogram: What it was made from; exports look at that.
        inputs: Symbolic inputs for a model that is not functional.
    """
    functional = getattr(model, "_functional", model)
    if getattr(functional, "_inputs_struct", None) is not None:
        inputs, outputs = functional._inputs_struct, functional._outputs_struct
    else:
        outputs = model(inputs, training=False)
    head = _Head(score_map, histogram)
    name = f"{model.name}_calibrated"
    return keras.Model(inputs, _replaced(outputs, histogram.kind, head), name=name)


def _replaced(outputs: Any, kind: ScoreKind, head: "_Head") -> Any:
    """The outputs with the one that is calibrated in place of its own."""
    calibrate = {"binary": _binary, "multiclass": _of_top_class, "regression": _regression}
    if kind.output is None and not isinstance(outputs, dict | list | tuple):
        return calibrate[kind.name](outputs, head, kind)
    pairs = list(outputs.items() if isinstance(outputs, dict) else enumerate(outputs))
    chosen = [name for name, _ in pairs if name == kind.output or len(pairs) == 1]
    if not chosen:
        raise ValueError(
            f"Expected a model with the output {kind.output!r} that was calibrated, got outputs "
            f"{[name for name, _ in pairs]}."
        )
    made = {
        name: calibrate[kind.name](own, head, kind) if name in chosen else own
        for name, own in pairs
    }
    return made if isinstance(outputs, dict) else type(outputs)(made.values())


def _binary(output: Any, head: "_Head", kind: ScoreKind) -> Any:
    scores = ops.cast(output, "float32")
    if kind.from_logits:
        return head(_as_column(scores), len(output.shape))
    return ops.sigmoid(head(_log_odds(_as_column(scores)), len(output.shape)))


def _of_top_class(output: Any, head: "_Head", kind: ScoreKind) -> Any:
    """The top class gets its calibrated probability, the others share the rest as before.

    The top class stays the top: its probability is at least that of one class in k, and where the
    others are too uneven to stay below it, they are mixed with even shares.
    """
    own, classes = ops.cast(output, "float32"), output.shape[-1]
    own = ops.softmax(own, axis=-1) if kind.from_logits else own
    top = ops.max(own, axis=-1, keepdims=True)
    # shares·(1 − c) stay below c if max(shares) < c / (1 − c), the odds. Mixed with even shares,
    # max is even + kept·excess.
    even = 1.0 / (classes - 1)
    calibrated = ops.maximum(ops.sigmoid(head(_log_odds(top), 2)), 1.0 / classes)
    is_top = ops.one_hot(ops.argmax(own, axis=-1), classes, dtype="float32")
    others = own * (1.0 - is_top) + _TINY * (1.0 - is_top)
    shares = others / ops.sum(others, axis=-1, keepdims=True)
    excess = ops.maximum(ops.max(shares, axis=-1, keepdims=True) - even, _TINY)
    odds = calibrated / ops.maximum(1.0 - calibrated, CLIP)
    kept = ops.minimum(1.0, _BELOW * (odds - even) / excess)
    shares = kept * shares + (1.0 - kept) * even * (1.0 - is_top)
    found = is_top * calibrated + shares * (1.0 - calibrated)
    return ops.log(ops.maximum(found, _TINY)) if kind.from_logits else found


def _regression(output: Any, head: "_Head", kind: ScoreKind) -> Any:
    assert kind.label_range is not None
    low, high = kind.label_range
    scores = (_as_column(ops.cast(output, "float32")) - low) / (high - low)
    return head(scores, len(output.shape)) * (high - low) + low


def _as_column(scores: Any) -> Any:
    return ops.reshape(scores, (-1, 1)) if len(scores.shape) == 1 else scores


def _log_odds(probabilities: Any) -> Any:
    p = ops.clip(probabilities, CLIP, 1.0 - CLIP)
    return ops.log(p) - ops.log(1.0 - p)


class _Head:
    """The map of scores by dense layers that do not train, of which exports know the release."""

    def __init__(self, score_map: ScoreMap, histogram: ScoreHistogram) -> None:
        self._map, self._of = score_map, histogram

    def __call__(self, scores: Any, rank: int) -> Any:
        """Calibrated scores of `[batch, 1]`, of the rank that the output has."""
        x, values = np.asarray(self._map.knots), self._map.values
        if len(x) == 1:
            constant = values[0] - self._map.slope * x[0]
            mapped = self._dense("calibration", [[self._map.slope]], [constant])(scores)
        else:
            slopes = np.diff(values) / np.diff(x)
            bends = np.diff(np.concatenate([[0.0], slopes, [0.0]]))
            inside = ops.clip(scores, x[0], x[-1])
            beyond = self._dense("knots", np.ones((1, len(x))), -x, "relu")(inside)
            mapped = self._dense("calibration", bends[:, None], [values[0]])(beyond)
        return ops.reshape(mapped, (-1,)) if rank == 1 else mapped

    def _dense(
        self, name: str, kernel: Any, bias: Any, activation: str | None = None
    ) -> keras.layers.Dense:
        kernel, bias = np.asarray(kernel, np.float32), np.asarray(bias, np.float32)
        layer = keras.layers.Dense(
            kernel.shape[1],
            activation,
            name=f"{name}_{self._of.histogram_id[:8]}",
            trainable=False,
            dtype="float32",
        )
        layer.build((None, kernel.shape[0]))
        layer.set_weights([kernel, bias])
        of = self._of
        note_calibration(layer.weights, Calibrated(of.histogram_id, of.paid_by, of.statement))
        return layer

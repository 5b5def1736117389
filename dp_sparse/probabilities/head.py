"""A score map behind a model, of Keras' own layers: what is saved loads without `dp_sparse`."""

from typing import Any

import keras
import numpy as np
from keras import ops

from dp_sparse.probabilities.predictions import CLIP
from dp_sparse.probabilities.score_histogram import ScoreKind
from dp_sparse.probabilities.score_map import ScoreMap


def with_head(model: keras.Model, score_map: ScoreMap, kind: ScoreKind, inputs: Any) -> keras.Model:
    """The model with calibrated outputs; its own weights are shared, not copied.

    Args:
        model: The trained model.
        score_map: Of its scores.
        kind: What they are.
        inputs: Symbolic inputs for a model that is not functional.
    """
    functional = getattr(model, "_functional", model)
    if getattr(functional, "_inputs_struct", None) is not None:
        inputs, outputs = functional._inputs_struct, functional._outputs_struct
    else:
        outputs = model(inputs, training=False)
    return keras.Model(inputs, _replaced(outputs, score_map, kind), name=f"{model.name}_calibrated")


def _replaced(outputs: Any, score_map: ScoreMap, kind: ScoreKind) -> Any:
    """The outputs with the one that is calibrated in place of its own."""
    calibrate = {"binary": _binary, "multiclass": _of_top_class, "regression": _regression}
    if kind.output is None and not isinstance(outputs, dict | list | tuple):
        return calibrate[kind.name](outputs, score_map, kind)
    pairs = outputs.items() if isinstance(outputs, dict) else enumerate(outputs)
    made = {
        name: calibrate[kind.name](own, score_map, kind)
        if name == kind.output or len(outputs) == 1
        else own
        for name, own in pairs
    }
    return made if isinstance(outputs, dict) else type(outputs)(made.values())


def _binary(output: Any, score_map: ScoreMap, kind: ScoreKind) -> Any:
    scores = ops.cast(output, "float32")
    if kind.from_logits:
        return _mapped(_as_column(scores), score_map, len(output.shape))
    scores = _log_odds(_as_column(scores))
    return ops.sigmoid(_mapped(scores, score_map, len(output.shape)))


def _of_top_class(output: Any, score_map: ScoreMap, kind: ScoreKind) -> Any:
    own = ops.cast(output, "float32")
    own = ops.softmax(own, axis=-1) if kind.from_logits else own
    top = ops.max(own, axis=-1, keepdims=True)
    calibrated = ops.sigmoid(_mapped(_log_odds(top), score_map, 2))
    is_top = ops.one_hot(ops.argmax(own, axis=-1), own.shape[-1], dtype="float32")
    others = own * (1.0 - is_top)
    rest = ops.sum(others, axis=-1, keepdims=True)
    found = is_top * calibrated + others * (1.0 - calibrated) / ops.maximum(rest, 1e-30)
    return ops.log(ops.maximum(found, CLIP)) if kind.from_logits else found


def _regression(output: Any, score_map: ScoreMap, kind: ScoreKind) -> Any:
    assert kind.label_range is not None
    low, high = kind.label_range
    scores = (_as_column(ops.cast(output, "float32")) - low) / (high - low)
    return _mapped(scores, score_map, len(output.shape)) * (high - low) + low


def _as_column(scores: Any) -> Any:
    return ops.reshape(scores, (-1, 1)) if len(scores.shape) == 1 else scores


def _log_odds(probabilities: Any) -> Any:
    p = ops.clip(probabilities, CLIP, 1.0 - CLIP)
    return ops.log(p) - ops.log(1.0 - p)


def _mapped(scores: Any, score_map: ScoreMap, rank: int) -> Any:
    """The map of `[batch, 1]` by dense layers that do not train."""
    x = np.asarray(score_map.knots)
    if len(x) == 1:
        constant = score_map.values[0] - score_map.slope * x[0]
        mapped = _dense("calibration", [[score_map.slope]], [constant])(scores)
    else:
        slopes = np.diff(score_map.values) / np.diff(x)
        bends = np.diff(np.concatenate([[0.0], slopes, [0.0]]))
        beyond = _dense("calibration_knots", np.ones((1, len(x))), -x, "relu")(scores)
        mapped = _dense("calibration", bends[:, None], [score_map.values[0]])(beyond)
    return ops.reshape(mapped, (-1,)) if rank == 1 else mapped


def _dense(name: str, kernel: Any, bias: Any, activation: str | None = None) -> keras.layers.Dense:
    kernel, bias = np.asarray(kernel, np.float32), np.asarray(bias, np.float32)
    layer = keras.layers.Dense(
        kernel.shape[1], activation, name=name, trainable=False, dtype="float32"
    )
    layer.build((None, kernel.shape[0]))
    layer.set_weights([kernel, bias])
    return layer

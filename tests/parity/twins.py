"""The same model in Keras 3 and in tf_keras, and the clipped sums tensorflow-privacy makes of it.

tensorflow-privacy 0.9 knows legacy Keras alone. A model is a function of the Keras module to build
it from, so that both are one text; the weights are copied.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from tensorflow_privacy.privacy.fast_gradient_clipping import clip_grads, layer_registry
from tensorflow_privacy.privacy.fast_gradient_clipping.registry_functions import (
    layer_normalization,
    multi_head_attention,
)
from tensorflow_privacy.privacy.keras_models import dp_keras_model

from tests.clipping.brute_force import square_loss

Build = Callable[[Any], tuple[Any, Any]]  # keras or tf_keras → (inputs, outputs)


class SquareLoss(tf_keras.losses.Loss):
    """The loss of `tests.clipping.brute_force`, summed over the examples."""

    def __init__(self, reduction: str = "sum", name: str = "square") -> None:
        super().__init__(reduction=reduction, name=name)

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return square_loss(tf.reshape(y_true, [-1]), y_pred)


@dataclasses.dataclass(frozen=True)
class Twins:
    """`ours` in Keras 3 and `theirs` in tf_keras, of equal weights."""

    ours: keras.Model
    theirs: tf_keras.Model


def twins(build: Build, **dp_model: Any) -> Twins:
    """Both models; `theirs` is a DPModel with fast clipping if it is given DPModel's arguments."""
    ours = keras.Model(*build(keras))
    arguments = dict(zip(("inputs", "outputs"), build(tf_keras), strict=True))
    if dp_model:
        theirs = dp_keras_model.DPModel(layer_registry=registry(), **dp_model, **arguments)
    else:
        theirs = tf_keras.Model(**arguments)
    theirs.set_weights(ours.get_weights())
    return Twins(ours, theirs)


def registry() -> layer_registry.LayerRegistry:
    """The default one (Dense, Embedding) and what else tensorflow-privacy has functions for."""
    layers = layer_registry.make_default_layer_registry()
    layers.insert(
        tf_keras.layers.LayerNormalization, layer_normalization.layer_normalization_computation
    )
    layers.insert(
        tf_keras.layers.MultiHeadAttention,
        multi_head_attention.multi_head_attention_layer_computation,
    )
    return layers


def their_norms(model: tf_keras.Model, x: Any, y: np.ndarray) -> np.ndarray:
    """Per-example gradient norms by tensorflow-privacy."""
    _compile(model)
    norms = clip_grads.compute_gradient_norms(model, registry(), x, tf.constant(y))
    return norms.numpy()


def their_clipped_sums(
    model: tf_keras.Model, x: Any, y: np.ndarray, clip_norm: float
) -> list[np.ndarray]:
    """Sums of clipped gradients by tensorflow-privacy, in the order of trainable variables."""
    _compile(model)
    sums, _, _ = clip_grads.compute_clipped_gradients_and_outputs(
        model, clip_norm, registry(), x, tf.constant(y), clipping_loss=model.loss
    )
    return [tf.convert_to_tensor(total).numpy() for total in sums]


def fit_one_step(model: tf_keras.Model, x: tf.Tensor, y: np.ndarray) -> None:
    """One step of a DPModel on the whole of `x`, plain SGD of learning rate 100."""
    model.compile(
        tf_keras.optimizers.SGD(100.0),
        tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(x, y, batch_size=len(y), verbose=0)


def _compile(model: tf_keras.Model) -> None:
    model.compile(optimizer="sgd", loss=SquareLoss())


def norm(sums: list[np.ndarray]) -> float:
    """L2 norm over all variables together."""
    return float(np.sqrt(sum(np.sum(np.square(part, dtype=np.float64)) for part in sums)))

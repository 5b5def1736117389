"""Layers that carry variances through a model: that of tokens, and that of any layer's outputs.

A model with Re-Attention has two tensors where others have one: what it computes, and its variance
given the noise in the weights. `error_propagation` has the rules.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse.accounting import Release
from dp_sparse.clipping import stop_gradient_read
from dp_sparse.core import validate
from dp_sparse.layers import error_propagation
from dp_sparse.layers.error_propagation import EffectiveErrors
from dp_sparse.layers.paid import PaidByPlan

_ACTIVATIONS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "linear": lambda mean, variance: variance,
    "relu": error_propagation.relu,
    "gelu": error_propagation.gelu,
}


@keras.saving.register_keras_serializable(package="dp_sparse")
class TokenVariance(PaidByPlan, keras.layers.Layer):
    """The variance of each token's row: integer `[batch, positions]` to `[batch, positions, 1]`.

    It is the same for all entries of a row.

    Args:
        num_tokens: Rows of the table.
        errors: `effective_errors(...)` of `num_tokens` tokens. Their variances are weights that do
            not train, so a model that is loaded has them again; None leaves them at 0.

    Raises:
        ValueError: `errors` has another number of tokens.
        PrivacyError: When training begins, or the model is exported, an optimizer whose plan does
            not pay for the errors.

    Examples:
        >>> import dp_sparse, numpy as np
        >>> errors = dp_sparse.layers.EffectiveErrors(0.0, np.array([0.0, 0.5, 2.0]))
        >>> layer = dp_sparse.layers.TokenVariance(3, errors)
        >>> layer(np.array([[2, 1]])).numpy()[..., 0]
        array([[2. , 0.5]], dtype=float32)

    ### Formal Guarantees
    The variances tell what their frequencies do. The plan that trains the model must have the
    release of noisy ones, also if the model was copied or saved before it trained. A model that was
    saved after such a plan took a step is not asked again: its variances were published with the
    weights, under the statement of that run.
    """

    def __init__(
        self, num_tokens: int, errors: EffectiveErrors | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs | {"dtype": "float32", "trainable": False})
        self.num_tokens = validate.positive_integer("num_tokens", num_tokens)
        given = np.zeros(num_tokens) if errors is None else errors.token_variances
        if given.shape != (num_tokens,):
            raise ValueError(f"Expected errors of {num_tokens} tokens, got {len(given)}.")
        self.release = None if errors is None else errors.release
        self.variances = self.add_weight(
            shape=(num_tokens,), initializer="zeros", trainable=False, name="variances"
        )
        self.variances.assign(given)
        self.built = True

    def call(self, tokens: tf.Tensor) -> tf.Tensor:
        """Looks the variances up."""
        return tf.gather(self.variances.value, tokens)[..., tf.newaxis]

    def compute_output_shape(self, tokens_shape: tuple[int | None, ...]) -> tuple[Any, ...]:
        """One more axis, of size 1."""
        return (*tokens_shape, 1)

    def get_config(self) -> dict[str, Any]:
        """The number of tokens, and what is to be paid; variances are weights."""
        owed = None if self.release is None or self.is_paid else self.release.get_config()
        return {**super().get_config(), "num_tokens": self.num_tokens, "release": owed}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TokenVariance":
        """A layer without its variances."""
        given = dict(config)
        owed = given.pop("release", None)  # files of earlier versions have none
        layer = cls(**given)
        layer.release = None if owed is None else Release.from_config(owed)
        return layer


@keras.saving.register_keras_serializable(package="dp_sparse")
class WithVariance(keras.layers.Wrapper):
    """Calls a layer, and propagates the variance of its inputs to its outputs.

    Called with `(mean, variance)`, returns the layer's outputs and their variance, float32.

    Args:
        layer: A Dense with the activation linear, ReLU or GELU, an Activation of these, a
            LayerNormalization of the last axis, or a Dropout, which keeps the variance.
        weight_variance: Variance of the noise in every entry of the layer's weights.

    Raises:
        ValueError: No rule for the layer, or `weight_variance` is negative.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> layer = dp_sparse.layers.WithVariance(keras.layers.Dense(2), weight_variance=0.01)
        >>> mean, variance = layer(np.ones((1, 3), np.float32), np.zeros((1, 3), np.float32))
        >>> variance.numpy()  # of three weights and a bias, at inputs of 1
        array([[0.04, 0.04]], dtype=float32)

    ### Formal Guarantees
    The layer's clipping rule is its own; no gradient flows through the variance, which reads
    released weights alone.
    """

    def __init__(
        self, layer: keras.layers.Layer, weight_variance: float = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(layer, autocast=False, **kwargs)
        if not validate.is_weight(weight_variance):
            raise ValueError(
                f"Expected a finite weight_variance >= 0, got weight_variance={weight_variance!r}."
            )
        self.weight_variance = float(weight_variance)
        self._rule = _rule_of(layer)

    def build(self, mean_shape: Any, variance_shape: Any) -> None:
        """Builds the layer."""
        del variance_shape
        super().build(mean_shape)

    def call(
        self, mean: tf.Tensor, variance: tf.Tensor, training: bool | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The layer's outputs, and their variance."""
        drops = isinstance(self.layer, keras.layers.Dropout)
        outputs = self.layer(mean, training=training) if drops else self.layer(mean)
        mean, variance = (tf.cast(tf.stop_gradient(v), tf.float32) for v in (mean, variance))
        return outputs, self._rule(self.layer, mean, variance, self.weight_variance)

    def compute_output_spec(self, mean: Any, variance: Any, training: Any = None) -> Any:
        """The layer's, twice."""
        del variance, training
        outputs = self.layer.compute_output_spec(mean)
        return outputs, keras.KerasTensor(outputs.shape, "float32")

    def get_config(self) -> dict[str, Any]:
        """The layer and the variance of its weights."""
        return super().get_config() | {"weight_variance": self.weight_variance}


Propagation = Callable[[Any, tf.Tensor, tf.Tensor, float], tf.Tensor]


def _rule_of(layer: keras.layers.Layer) -> Propagation:
    rules: dict[type, Propagation] = {
        keras.layers.Dense: _of_dense,
        keras.layers.Activation: _of_activation,
        keras.layers.LayerNormalization: _of_layer_normalization,
        keras.layers.Dropout: lambda layer, mean, variance, weight_variance: variance,
    }
    rule = rules.get(type(layer))
    activation = getattr(getattr(layer, "activation", None), "__name__", "linear")
    lora = getattr(layer, "lora_enabled", False)
    last = getattr(layer, "axis", -1) in (-1, [-1], (-1,))
    if rule is None or activation not in _ACTIVATIONS or lora or not last:
        raise ValueError(
            f"Expected a Dense or Activation (linear, relu, gelu), a LayerNormalization of the "
            f"last axis, or a Dropout, got {layer!r} with activation={activation!r}."
        )
    return rule


def _of_dense(
    layer: keras.layers.Dense, mean: tf.Tensor, variance: tf.Tensor, weight_variance: float
) -> tf.Tensor:
    kernel = stop_gradient_read(layer.kernel)
    found = error_propagation.linear(mean, variance, kernel, weight_variance, layer.use_bias)
    name = layer.activation.__name__
    if name == "linear":
        return found
    bias = stop_gradient_read(layer.bias) if layer.use_bias else 0.0
    return _ACTIVATIONS[name](tf.matmul(mean, kernel) + bias, found)


def _of_activation(
    layer: keras.layers.Activation, mean: tf.Tensor, variance: tf.Tensor, weight_variance: float
) -> tf.Tensor:
    del weight_variance
    return _ACTIVATIONS[layer.activation.__name__](mean, variance)


def _of_layer_normalization(
    layer: keras.layers.LayerNormalization,
    mean: tf.Tensor,
    variance: tf.Tensor,
    weight_variance: float,
) -> tf.Tensor:
    scale = stop_gradient_read(layer.gamma) if layer.scale else tf.ones(mean.shape[-1])
    return error_propagation.layer_norm(mean, variance, scale, weight_variance, layer.epsilon)

"""Re-Attention: self-attention that takes back the attention which noise in keys attracts.

If a key is normal with some variance, the expectation of exp⟨q, k⟩ is too large by exp(var/2): keys
that are mostly noise attract attention that they do not deserve. Source: "Delving into
Differentially Private Transformer" (Ding et al., ICML 2024), 4.3.3, with two changes. The variance
of a logit ⟨q, k⟩/√d is Σ_c q_c²·var(k_c)/d, which is the paper's ⟨q, q⟩·var(k) with the scale of
logits, each coordinate with its own variance. And half of it is subtracted from the logit before
the softmax, so that scores add up to 1; the paper's division after the softmax is an option.

Costs one more matrix product for the keys' variance and one for the logits', forward alone; both
are small if the inputs have one variance for all entries, as tokens do (`projected_variance`).
"""

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse.clipping import stop_gradient_read
from dp_sparse.core import validate
from dp_sparse.layers import error_propagation
from dp_sparse.layers.error_propagation import ProjectedVariance, projected_variance

CORRECTIONS = ("before_softmax", "after_softmax")


@dataclasses.dataclass
class _Errors:
    """Variances of one call; `attended` is the attention's own outcome and its variance."""

    key: ProjectedVariance
    value: ProjectedVariance | None = None  # None unless the output's variance is wanted
    attended: tuple[tf.Tensor, tf.Tensor] | None = None


@keras.saving.register_keras_serializable(package="dp_sparse")
class ReAttention(keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` for self-attention, with logits corrected for noisy keys.

    Call it as that layer, and with `variance`, the variance of its inputs by `TokenVariance` and
    `WithVariance`. Without noise, that is with `weight_variance=0` and no `variance`, it is Keras'
    layer. Its clipping is exact: the layers inside have rules, and no gradient flows through the
    correction.

    Args:
        num_heads: As Keras' layer.
        key_dim: As Keras' layer.
        weight_variance: Variance of the noise in every entry of this layer's weights,
            `effective_errors(...).weight_variance`.
        correction: "before_softmax" subtracts from the logits; "after_softmax" divides the scores,
            as the paper writes it, so that they no longer add up to 1.
        **kwargs: As Keras' layer; `use_gate` has no error propagation, and must be False.

    Call arguments:
        query, value, key, masks, return_attention_scores, training, use_causal_mask: As Keras'.
        variance: Of `value` (and `key`), float `[batch, positions, width]`, or `[batch, positions,
            1]` if it is the same for all entries; None for 0.
        return_variance: Whether to return the variance of the output, too, as the last of a tuple.

    Raises:
        ValueError: `weight_variance` is negative, `correction` unknown, `use_gate` set, or
            `variance` has another shape.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> layer = dp_sparse.layers.ReAttention(num_heads=1, key_dim=4, weight_variance=1e-6)
        >>> values = np.ones((2, 3, 4), np.float32)
        >>> noisy = np.array([0.0, 100.0, 0.0], np.float32)[:, np.newaxis] * values
        >>> _, scores = layer(values, values, variance=noisy, return_attention_scores=True)
        >>> bool((scores[..., 1] < scores[..., 0]).numpy().all())  # the noisy key attracts less
        True

    ### Formal Guarantees
    Of public numbers and released weights alone, the correction is the same function for every
    example; it reads no other example and has no gradient. A step has the sensitivity that it has
    with Keras' layer.
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        *,
        weight_variance: float = 0.0,
        correction: str = CORRECTIONS[0],
        **kwargs: Any,
    ) -> None:
        super().__init__(num_heads, key_dim, autocast=False, **kwargs)
        if not validate.is_weight(weight_variance):
            raise ValueError(
                f"Expected a finite weight_variance >= 0, got weight_variance={weight_variance!r}."
            )
        if correction not in CORRECTIONS:
            raise ValueError(
                f"Expected correction to be one of {CORRECTIONS}, got correction={correction!r}."
            )
        if kwargs.get("use_gate"):
            raise ValueError("Expected use_gate=False, got use_gate=True: gates are not covered.")
        self.weight_variance, self.correction = float(weight_variance), correction
        self._errors: _Errors | None = None

    def call(
        self,
        query: tf.Tensor,
        value: tf.Tensor,
        key: tf.Tensor | None = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
        variance: tf.Tensor | None = None,
        return_variance: bool = False,
    ) -> Any:
        """Keras' call, with the errors of its keys at hand."""
        key = value if key is None else key
        given = self._given(variance, value)
        errors = _Errors(self._projected_variance(self._key_dense, key, given))
        if return_variance:
            errors.value = self._projected_variance(self._value_dense, value, given)
        self._errors = errors
        try:
            outputs = super().call(
                query,
                value,
                key,
                query_mask=query_mask,
                value_mask=value_mask,
                key_mask=key_mask,
                attention_mask=attention_mask,
                return_attention_scores=return_attention_scores,
                training=training,
                use_causal_mask=use_causal_mask,
            )
        finally:
            self._errors = None
        return (*_as_tuple(outputs), self._output_variance(errors)) if return_variance else outputs

    def _given(self, variance: tf.Tensor | None, value: tf.Tensor) -> tf.Tensor:
        """The variance, whose shape fits that of the values; zeros if there is none."""
        if variance is None:
            return tf.zeros_like(value[..., :1])
        variance = tf.convert_to_tensor(variance)
        self._require_fit(variance.shape, value.shape)
        return variance

    def _require_fit(self, variance: Any, values: Any) -> None:
        """Refuses a variance whose shape does not fit that of the values."""
        *positions, width = values
        shape = tf.TensorShape(variance)
        fits = shape.rank is not None and shape[-1:] in ([1], [width])
        if not (fits and shape[:-1].is_compatible_with(positions)):
            raise ValueError(
                f"Expected variance of shape {(*positions, width)} or {(*positions, 1)} at layer "
                f"{self.path!r}, got {tuple(shape)}: pass that of its inputs, by TokenVariance or "
                "WithVariance."
            )

    def _compute_attention(
        self,
        query: tf.Tensor,
        key: tf.Tensor,
        value: tf.Tensor,
        attention_mask: tf.Tensor | None = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """What Keras' call asks for: from projected inputs to attended values and scores."""
        del return_attention_scores
        errors = self._errors
        assert errors is not None
        query *= tf.cast(self._inverse_sqrt_key_dim, query.dtype)
        logits = keras.ops.einsum(self._dot_product_equation, key, query)
        excess = self._excess(query, errors.key)
        if self.correction == CORRECTIONS[0]:
            scores = self._masked_softmax(logits - tf.cast(excess, logits.dtype), attention_mask)
        else:
            scores = self._masked_softmax(logits, attention_mask)
            scores *= tf.cast(tf.exp(-excess), scores.dtype)
        kept = self._dropout_layer(scores, training=training)
        attended = keras.ops.einsum(self._combine_equation, kept, value)
        if errors.value is not None:
            errors.attended = attended, self._attended_variance(scores, errors.value)
        return attended, scores

    def _excess(self, query: tf.Tensor, key_variance: ProjectedVariance) -> tf.Tensor:
        """log E[exp logit] − E[logit], half the variance of the logit; of the scaled query."""
        halves = 0.5 * tf.square(tf.cast(query, tf.float32))
        factors = key_variance.over_entries(halves)
        excess = keras.ops.einsum(self._dot_product_equation, key_variance.of_positions, factors)
        return tf.stop_gradient(excess)

    def _attended_variance(self, scores: tf.Tensor, value_variance: ProjectedVariance) -> tf.Tensor:
        """Σ s²·var(v): scores are taken for constants."""
        squares = tf.square(tf.cast(scores, tf.float32))
        sums = keras.ops.einsum(self._combine_equation, squares, value_variance.of_positions)
        return tf.stop_gradient(value_variance.of_sums(sums))

    def _projected_variance(
        self, layer: keras.layers.EinsumDense, mean: tf.Tensor, variance: tf.Tensor
    ) -> ProjectedVariance:
        """The variance of keys or of values."""
        mean, variance = _floats(mean, variance)
        kernel = stop_gradient_read(layer.kernel)
        return projected_variance(mean, variance, kernel, self.weight_variance, self.use_bias)

    def _output_variance(self, errors: _Errors) -> tf.Tensor:
        """After the projection of all heads together, `[batch, positions, out]`."""
        assert errors.attended is not None
        kernel = stop_gradient_read(self._output_dense.kernel)  # [heads, width, out]
        inputs = int(np.prod(kernel.shape[:2]))
        flat = [
            tf.reshape(values, tf.concat([tf.shape(values)[:-2], [inputs]], 0))
            for values in _floats(*errors.attended)
        ]
        weights = tf.reshape(kernel, [inputs, -1])
        found = error_propagation.linear(
            flat[0], flat[1], weights, self.weight_variance, self.use_bias
        )
        return tf.reshape(found, tf.concat([tf.shape(found)[:-1], kernel.shape[2:]], 0))

    def compute_output_spec(
        self,
        *args: Any,
        variance: Any = None,
        return_variance: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Keras', and one more of the output's shape for its variance."""
        if variance is not None:
            self._require_fit(variance.shape, (args[1] if len(args) > 1 else kwargs["value"]).shape)
        outputs = super().compute_output_spec(*args, **kwargs)
        if not return_variance:
            return outputs
        own = _as_tuple(outputs)
        return (*own, keras.KerasTensor(own[0].shape, "float32"))

    def get_config(self) -> dict[str, Any]:
        """Keras' configuration, and what is added here."""
        own = {"weight_variance": self.weight_variance, "correction": self.correction}
        return super().get_config() | own


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _floats(*values: tf.Tensor) -> list[tf.Tensor]:
    return [tf.cast(tf.stop_gradient(each), tf.float32) for each in values]

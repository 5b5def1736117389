"""Clipping styles: flat, per layer, automatic (normalised), or to a quantile that is tracked.

### Formal Guarantees
Every style gives factors with `Σ over variables of f²‖g‖² ≤ C²` for each example, so the clipped
sum has sensitivity C under add-or-remove and zero-out neighbours. An example's factors depend on
its own norms alone, and no gradient flows through them.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeAlias

import keras
import tensorflow as tf

from dp_sparse.core import validate

ClipNorm: TypeAlias = float | tf.Tensor

_TINY = 1e-30
_RAMP = 2.0**-3  # of C: the range of norms in which an example counts in part as unclipped
_BELOW = 1 - 2.0**-20  # of C: leaves room for the rounding of norms and factors in float32


@dataclasses.dataclass(frozen=True)
class ClippingStyle(abc.ABC):
    """Gives each variable's clip factors from the squared norms of an example's gradient."""

    @abc.abstractmethod
    def factors(
        self, variables: Sequence[keras.Variable], squared: Sequence[tf.Tensor], clip_norm: ClipNorm
    ) -> list[tf.Tensor]:
        """For each variable f `[batch]`, from ‖g_i‖² of each variable `[batch]` and C.

        C is a Python number or a scalar.
        """

    def statistic(
        self, squared_norms: tf.Tensor, clip_norm: ClipNorm, present: tf.Tensor
    ) -> tf.Tensor:
        """What else the style releases, before its noise; float64 scalar."""
        del squared_norms, clip_norm, present
        return tf.zeros([], tf.float64)

    def noise_multipliers(self, of_step: float) -> tuple[float, float]:
        """Those of the gradients and of what else the style releases, together `of_step`.

        That is 1/of_step² = Σ 1/σ². The second is infinite if nothing else is released.
        """
        return of_step, math.inf

    def check(self, variables: Sequence[keras.Variable]) -> None:  # noqa: B027  (most fit all)
        """Raises ValueError if the style does not fit a model of these trainable variables."""

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The style that `get_config` described."""
        return cls(**config)


@keras.saving.register_keras_serializable(package="dp_sparse")
@dataclasses.dataclass(frozen=True)
class FlatClipping(ClippingStyle):
    """f = min(1, C/‖g_i‖) for the whole gradient (Abadi et al., CCS 2016, Algorithm 1).

    Examples:
        The default. Of gradients of norm 2 and ½, the first is halved at C = 1:

        >>> import dp_sparse, tensorflow as tf
        >>> squared_norms = tf.constant([4.0, 0.25])
        >>> (factors,) = dp_sparse.FlatClipping().factors(["a variable"], [squared_norms], 1.0)
        >>> factors.numpy().round(2)
        array([0.5, 1. ], dtype=float32)
    """

    def factors(
        self, variables: Sequence[keras.Variable], squared: Sequence[tf.Tensor], clip_norm: ClipNorm
    ) -> list[tf.Tensor]:
        """One factor for all variables."""
        return [_bounded(total(squared), clip_norm)] * len(variables)


@keras.saving.register_keras_serializable(package="dp_sparse")
@dataclasses.dataclass(frozen=True)
class AutomaticClipping(ClippingStyle):
    """f = C/(‖g_i‖ + γ): every gradient is normalised, so C only scales the learning rate.

    Source: Bu et al., "Automatic Clipping", NeurIPS 2023, AUTO-S.

    Args:
        stability: γ > 0, which keeps small gradients from being blown up to C.

    Raises:
        ValueError: `stability <= 0`.

    Examples:
        Gradients of norm 2 and ½ both get a norm near C = 1:

        >>> import dp_sparse, tensorflow as tf
        >>> style = dp_sparse.AutomaticClipping()  # DPSGDOptimizer(..., clipping=style)
        >>> (factors,) = style.factors(["a variable"], [tf.constant([4.0, 0.25])], 1.0)
        >>> factors.numpy().round(2)
        array([0.5 , 1.96], dtype=float32)
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        validate.positive("stability", self.stability)

    def factors(
        self, variables: Sequence[keras.Variable], squared: Sequence[tf.Tensor], clip_norm: ClipNorm
    ) -> list[tf.Tensor]:
        """One factor for all variables."""
        norms = tf.sqrt(total(squared))
        return [tf.cast(_BELOW * clip_norm, tf.float32) / (norms + self.stability)] * len(variables)


@keras.saving.register_keras_serializable(package="dp_sparse")
@dataclasses.dataclass(frozen=True)
class PerLayerClipping(ClippingStyle):
    """f_k = min(1, C_k/‖g_i on layer k‖) with `Σ C_k² = C²` (McMahan et al., ICLR 2018).

    A layer is what owns the variables: the part of a variable's path before its name.

    Args:
        shares: Each layer's share of C², in any unit: a positive number by the layer's name, or by
            as much of the end of its path as is unique. By default all layers get equal shares.

    Raises:
        ValueError: The shares of C² are no mapping, or not positive; or, when training begins, they
            name other layers than the model has.

    Examples:
        >>> import dp_sparse
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> style = dp_sparse.PerLayerClipping({"users": 3, "score": 1})  # ¾ of C² and ¼
        >>> dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0, clipping=style).clipping
        PerLayerClipping(shares={'users': 3, 'score': 1})
    """

    shares: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.shares is not None and not isinstance(self.shares, Mapping):
            raise ValueError(
                f"Expected shares as a mapping from layers to numbers, got shares={self.shares!r}: "
                "use PerLayerClipping({'name of a layer': 1.0, ...})."
            )
        for name, share in (self.shares or {}).items():
            validate.positive(f"shares[{name!r}]", share)

    def factors(
        self, variables: Sequence[keras.Variable], squared: Sequence[tf.Tensor], clip_norm: ClipNorm
    ) -> list[tf.Tensor]:
        """One factor for all variables of a layer."""
        by_layer: dict[str, list[tf.Tensor]] = {}
        for variable, norms in zip(variables, squared, strict=True):
            by_layer.setdefault(_layer_of(variable), []).append(norms)
        shares = self._shares(list(by_layer))
        factors = {
            name: _bounded(total(norms), clip_norm * shares[name] ** 0.5)
            for name, norms in by_layer.items()
        }
        return [factors[_layer_of(variable)] for variable in variables]

    def check(self, variables: Sequence[keras.Variable]) -> None:
        """Refuses shares of C² that do not name exactly the model's trained layers."""
        layers = list(dict.fromkeys(map(_layer_of, variables)))
        named = {layer: self._names_of(layer) for layer in layers}
        once = {name for names in named.values() for name in names if len(names) == 1}
        if self.shares is not None and not len(once) == len(self.shares) == len(layers):
            raise ValueError(
                f"Expected shares for the layers {layers}, got {list(self.shares)}: name each "
                f"layer with trainable variables once."
            )

    def _shares(self, layers: list[str]) -> dict[str, float]:
        """The part of C² of each layer; it does not depend on which layers a batch uses."""
        if self.shares is None:
            return dict.fromkeys(layers, 1 / len(layers))
        total = sum(self.shares.values())
        return {layer: self.shares[self._names_of(layer)[0]] / total for layer in layers}

    def _names_of(self, layer: str) -> list[str]:
        """The keys of `shares` that mean a layer.

        Key or path may have more in front: a loaded model may not be in its layers' paths.
        """
        names, path = self.shares or {}, f"/{layer}"
        if layer in names:
            return [layer]
        return [name for name in names if path.endswith(f"/{name}") or f"/{name}".endswith(path)]


@keras.saving.register_keras_serializable(package="dp_sparse")
@dataclasses.dataclass(frozen=True)
class QuantileClipping(FlatClipping):
    """Flat clipping whose C follows a quantile of the gradients' norms.

    After each step C ← C·exp(−learning_rate·(b − target_quantile)), where b is the noisy fraction
    of the batch's examples with ‖g_i‖ <= C. C begins at the optimizer's `clip_norm`. Examples whose
    norm is within 6 % of C count in part. Otherwise the count would jump by many examples if their
    norms are equal and the last bits change with the size of the batch.

    Source: Andrew et al., "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021,
    section 2.

    Args:
        target_quantile: The fraction of examples that shall stay unclipped, in (0, 1).
        learning_rate: The learning rate of log C, > 0.
        noise_ratio: The noise multiplier of the count of unclipped examples over that of the whole
            step, > 1. The gradients get 1/√(1 − noise_ratio⁻²) times the noise that they would have
            alone: 0.5 % more at 10.

    Raises:
        ValueError: An argument out of its range.

    Examples:
        Counting unclipped examples raises the noise of the gradients a little:

        >>> import dp_sparse
        >>> style = dp_sparse.QuantileClipping()  # DPSGDOptimizer(..., clipping=style)
        >>> of_gradients, of_count = style.noise_multipliers(of_step=2.0)
        >>> print(f"{of_gradients:.3f}, {of_count:.1f}")
        2.010, 20.0

    ### Formal Guarantees
    With s = Σ clip(8·(1 − ‖g_i‖/C), −½, ½) over the batch's examples, adding, removing or zeroing
    out one example moves s by ½. The clipped sum and s are released from one batch, with noise
    multipliers whose inverse squares add up to the plan's: one Gaussian mechanism. Every C is
    computed from what was released. The last bits of a norm may depend on the batch, and move s by
    10⁻⁶ for each example.
    """

    target_quantile: float = 0.5
    learning_rate: float = 0.2
    noise_ratio: float = 10.0

    def __post_init__(self) -> None:
        validate.probability("target_quantile", self.target_quantile)
        validate.positive("learning_rate", self.learning_rate)
        if validate.positive("noise_ratio", self.noise_ratio) <= 1:
            raise ValueError(
                f"Expected noise_ratio > 1, got noise_ratio={self.noise_ratio!r}: the count's "
                "noise must leave some of the step's budget to the gradients."
            )

    def noise_multipliers(self, of_step: float) -> tuple[float, float]:
        """Those of the gradients and of the count of unclipped examples."""
        return of_step / math.sqrt(1 - self.noise_ratio**-2), of_step * self.noise_ratio

    def statistic(
        self, squared_norms: tf.Tensor, clip_norm: ClipNorm, present: tf.Tensor
    ) -> tf.Tensor:
        """s: the sum of about ½ for each example that is not clipped, and −½ for the others."""
        norms = tf.sqrt(tf.cast(squared_norms, tf.float64))
        below = 1 - norms / tf.convert_to_tensor(clip_norm, tf.float64)
        counts = tf.clip_by_value(below / _RAMP, -0.5, 0.5)
        counts = tf.where(tf.math.is_nan(counts), tf.constant(-0.5, tf.float64), counts)
        return tf.reduce_sum(tf.where(present > 0, counts, 0.0))

    def following(self, clip_norm: tf.Tensor, unclipped: tf.Tensor) -> tf.Tensor:
        """The next C, from this one and the noisy fraction of unclipped examples."""
        exponent = -self.learning_rate * (unclipped - self.target_quantile)
        return tf.clip_by_value(clip_norm * tf.exp(exponent), *validate.CLIP_NORMS)


STYLES = (FlatClipping, PerLayerClipping, AutomaticClipping, QuantileClipping)


def total(squared: Sequence[tf.Tensor]) -> tf.Tensor:
    """Σ of squared norms `[batch]`, float32, added in float64."""
    added = tf.reduce_sum(tf.cast(tf.stack(list(squared)), tf.float64), axis=0)
    return tf.cast(added, tf.float32)


def _layer_of(variable: keras.Variable) -> str:
    return variable.path.rpartition("/")[0]


def _bounded(squared: tf.Tensor, clip_norm: ClipNorm) -> tf.Tensor:
    below = tf.cast(_BELOW * clip_norm, tf.float32)
    return tf.minimum(1.0, below * tf.math.rsqrt(tf.maximum(squared, _TINY)))

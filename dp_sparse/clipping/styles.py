"""How an example's gradient is scaled down: flat, per layer, normalised, or to a moving quantile.

### Formal Guarantees
Every style gives factors with `Σ over variables of f²‖g‖² ≤ C²` for each example, so the clipped
sum has sensitivity C under add-or-remove and zero-out neighbours. Factors are constants of the
backward pass: an example's own norms decide them, and nothing else.
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
_RAMP = 2.0**-3  # of C: norms between which an example counts in part as unclipped
_BELOW = 1 - 2.0**-20  # of C: what float32 may add when norms and factors are rounded


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
        """What the style releases beside the gradients, before its noise; float64 scalar."""
        del squared_norms, clip_norm, present
        return tf.zeros([], tf.float64)

    def noise_multipliers(self, of_step: float) -> tuple[float, float]:
        """Those of the gradients and of what else the style releases, which add up to a step's.

        That is 1/of_step² = Σ 1/σ²; infinite where nothing else is released.
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
        shares: For each layer, by its name or as much of the end of its path as tells it from
            others, its share of C², any positive numbers; by default equal.

    Raises:
        ValueError: Shares that are no mapping, or not positive; when training begins, shares that
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
        """Shares must name the model's trained layers, all and no others."""
        layers = list(dict.fromkeys(map(_layer_of, variables)))
        named = {layer: self._names_of(layer) for layer in layers}
        once = {name for names in named.values() for name in names if len(names) == 1}
        if self.shares is not None and not len(once) == len(self.shares) == len(layers):
            raise ValueError(
                f"Expected shares for the layers {layers}, got {list(self.shares)}: name each "
                f"layer with trainable variables once."
            )

    def _shares(self, layers: list[str]) -> dict[str, float]:
        """Of all layers of the model, so that a batch that misses one does not change the rest."""
        if self.shares is None:
            return dict.fromkeys(layers, 1 / len(layers))
        total = sum(self.shares.values())
        return {layer: self.shares[self._names_of(layer)[0]] / total for layer in layers}

    def _names_of(self, layer: str) -> list[str]:
        """The keys of `shares` that mean a layer.

        Either may have more in front: a model loaded from a file may not be in its layers' paths.
        """
        names, path = self.shares or {}, f"/{layer}"
        if layer in names:
            return [layer]
        return [name for name in names if path.endswith(f"/{name}") or f"/{name}".endswith(path)]


@keras.saving.register_keras_serializable(package="dp_sparse")
@dataclasses.dataclass(frozen=True)
class QuantileClipping(FlatClipping):
    """Flat clipping whose C follows a quantile of the gradients' norms.

    After each step C ← C·exp(−learning_rate·(b − target_quantile)), b being the noisy fraction of
    the batch's examples with ‖g_i‖ <= C. The optimizer's `clip_norm` is where C begins. Examples
    within 6 % of C count in part: a sharp step would jump by many examples when the last bits of
    equal norms change with the size of the batch.

    Source: Andrew et al., "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021,
    section 2.

    Args:
        target_quantile: Which fraction of the examples shall stay unclipped, in (0, 1).
        learning_rate: Of log C, > 0.
        noise_ratio: The noise multiplier of the count over that of the whole step, > 1. The rest
            of the step gets 1/√(1 − noise_ratio⁻²) times the noise that it would have alone: 0.5 %
            more at 10.

    Raises:
        ValueError: An argument out of its range.

    Examples:
        The count of unclipped examples takes a little of the step's noise:

        >>> import dp_sparse
        >>> style = dp_sparse.QuantileClipping()  # DPSGDOptimizer(..., clipping=style)
        >>> of_gradients, of_count = style.noise_multipliers(of_step=2.0)
        >>> print(f"{of_gradients:.3f}, {of_count:.1f}")
        2.010, 20.0

    ### Formal Guarantees
    With s = Σ clip(8·(1 − ‖g_i‖/C), −½, ½) over the batch's examples, adding, removing or zeroing
    out one example moves s by ½. Sum and s are released from one batch, with noise multipliers
    whose inverse squares add up to the plan's: one Gaussian mechanism. Every C is computed from
    what was released. Last bits of a norm, which may depend on the batch, move s by 10⁻⁶ each.
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
        """s: near ½ for each present example that is not clipped, −½ for the others."""
        norms = tf.sqrt(tf.cast(squared_norms, tf.float64))
        below = 1 - norms / tf.convert_to_tensor(clip_norm, tf.float64)
        shares = tf.clip_by_value(below / _RAMP, -0.5, 0.5)
        shares = tf.where(tf.math.is_nan(shares), tf.constant(-0.5, tf.float64), shares)
        return tf.reduce_sum(tf.where(present > 0, shares, 0.0))

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

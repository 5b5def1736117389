"""How an example's gradient is scaled down: flat, per layer, or normalised.

### Formal Guarantees
Every style gives factors with `Σ over variables of f²‖g‖² ≤ C²` for each example, so the clipped
sum has sensitivity C under add-or-remove and zero-out neighbours. Factors are constants of the
backward pass: an example's own norms decide them, and nothing else.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import keras
import tensorflow as tf

from dp_sparse import validate

_TINY = 1e-30
_BELOW = 1 - 2.0**-20  # of C: what float32 may add when norms and factors are rounded


@dataclasses.dataclass(frozen=True)
class ClippingStyle(abc.ABC):
    """Gives each variable's clip factors from the squared norms of an example's gradient."""

    @abc.abstractmethod
    def factors(
        self, variables: Sequence[keras.Variable], squared: Sequence[tf.Tensor], clip_norm: float
    ) -> list[tf.Tensor]:
        """For each variable f `[batch]`, from ‖g_i‖² of each variable `[batch]` and C."""

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
    """f = min(1, C/‖g_i‖) for the whole gradient (Abadi et al., CCS 2016, Algorithm 1)."""

    def factors(
        self, variables: Sequence[keras.Variable], squared: Sequence[tf.Tensor], clip_norm: float
    ) -> list[tf.Tensor]:
        """One factor for all variables."""
        return [_bounded(tf.add_n(list(squared)), clip_norm)] * len(variables)


@keras.saving.register_keras_serializable(package="dp_sparse")
@dataclasses.dataclass(frozen=True)
class AutomaticClipping(ClippingStyle):
    """f = C/(‖g_i‖ + γ): every gradient is normalised, so C only scales the learning rate.

    Source: Bu et al., "Automatic Clipping", NeurIPS 2023, AUTO-S.

    Args:
        stability: γ > 0, which keeps small gradients from being blown up to C.

    Raises:
        ValueError: `stability <= 0`.
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        validate.positive("stability", self.stability)

    def factors(
        self, variables: Sequence[keras.Variable], squared: Sequence[tf.Tensor], clip_norm: float
    ) -> list[tf.Tensor]:
        """One factor for all variables."""
        norms = tf.sqrt(tf.add_n(list(squared)))
        return [_BELOW * clip_norm / (norms + self.stability)] * len(variables)


@keras.saving.register_keras_serializable(package="dp_sparse")
@dataclasses.dataclass(frozen=True)
class PerLayerClipping(ClippingStyle):
    """f_k = min(1, C_k/‖g_i on layer k‖) with `Σ C_k² = C²` (McMahan et al., ICLR 2018).

    A layer is what owns the variables: the part of a variable's path before its name.

    Args:
        shares: For each layer's path its share of C², any positive numbers; by default equal.

    Raises:
        ValueError: A share that is not positive; when training begins, shares that name other
            layers than the model has.
    """

    shares: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        for name, share in (self.shares or {}).items():
            validate.positive(f"shares[{name!r}]", share)

    def factors(
        self, variables: Sequence[keras.Variable], squared: Sequence[tf.Tensor], clip_norm: float
    ) -> list[tf.Tensor]:
        """One factor for all variables of a layer."""
        by_layer: dict[str, list[tf.Tensor]] = {}
        for variable, norms in zip(variables, squared, strict=True):
            by_layer.setdefault(_layer_of(variable), []).append(norms)
        shares = self._shares(list(by_layer))
        factors = {
            name: _bounded(tf.add_n(norms), clip_norm * shares[name] ** 0.5)
            for name, norms in by_layer.items()
        }
        return [factors[_layer_of(variable)] for variable in variables]

    def check(self, variables: Sequence[keras.Variable]) -> None:
        """Shares must name the model's trained layers, all and no others."""
        layers = list(dict.fromkeys(map(_layer_of, variables)))
        if self.shares is not None and set(self.shares) != set(layers):
            raise ValueError(
                f"Expected shares for the layers {layers}, got {list(self.shares)}: name each "
                f"layer with trainable variables once."
            )

    def _shares(self, layers: list[str]) -> dict[str, float]:
        """Of all layers of the model, so that a batch that misses one does not change the rest."""
        given = self.shares or dict.fromkeys(layers, 1.0)
        total = sum(given.values())
        return {name: given[name] / total for name in layers}


def _layer_of(variable: keras.Variable) -> str:
    return variable.path.rpartition("/")[0]


def _bounded(squared: tf.Tensor, clip_norm: float) -> tf.Tensor:
    return tf.minimum(1.0, _BELOW * clip_norm * tf.math.rsqrt(tf.maximum(squared, _TINY)))

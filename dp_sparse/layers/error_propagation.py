"""How far noise in weights moves what is computed from them: means and variances through layers.

Every weight is taken for normal, with its noisy value as the mean and the variance of its noise;
all of them, and all entries of an activation, for independent, which they are of the first layer
alone: weights that two positions share correlate them. Each function gives the variance
after one operation; the mean is what the network computes anyway. Source: "Delving into
Differentially Private Transformer" (Ding et al., ICML 2024), 4.3.2 and C.2, with these changes:
the rule of ReLU subtracts E[Z]² and not c² (Eq. 31 can go negative), GELU has a rule of its own
in place of that of ReLU, and layer normalisation has one.

Means and variances are float32 of one shape, unless a function says otherwise; the cost is in each
function.

### Formal Guarantees
No function reads a label or mixes examples. No gradient flows through a result, so the gradients
of a network that uses it are those of a network with these numbers as constants.

The variance of keys and values of several heads, kept as a sum of few products where it is one.

Inputs of one variance for all entries, as tokens have, leave a projection with a variance that is
`error_propagation.linear_factors`: numbers of positions times numbers of entries. Sums over
positions, and over entries, are then sums of two numbers in place of the width of a head.

Effective errors: how much of each weight is noise, from what a plan makes public (definition 4.1
and claim 4.2): a step adds noise of deviation σ·C/B to every entry of the mean gradient. A weight
of the network gets a gradient from every example; the row of token i from the fraction p_i of them
that contain it, so its noise weighs 1/p_i as much. O(tokens), once.
"""

import dataclasses
import math

import numpy as np
import tensorflow as tf

from dp_sparse.accounting import PrivacyPlan, Release
from dp_sparse.core import PrivacyError, validate
from dp_sparse.selection import RowFrequencies

# A dozen passes over an activation become one; on a CPU they would cost more than the products.
# Elementwise only: XLA gives sums over an axis to YNNPACK, and two threads that first run one such
# kernel at once write one list without a lock (`xla::cpu::EmitYnnSubgraph`), which ends in a crash.
_elementwise = tf.function(jit_compile=True, autograph=False)
NODES = 20  # of Gauss–Hermite; relative errors below 1e-3 for variances up to 4


def linear(
    mean: tf.Tensor,
    variance: tf.Tensor,
    kernel: tf.Tensor,
    weight_variance: float,
    bias: bool = True,
) -> tf.Tensor:
    """Var[x·W + b], `[..., out]`: Σ_in [var_x·(μ_W² + var_W) + μ_x²·var_W] + var_b.

    Eq. 30, summed over the inputs; one matrix product, as the layer itself.

    Args:
        mean: μ_x, `[..., in]`.
        variance: var_x, `[..., in]`, or `[..., 1]` if it is the same for all entries.
        kernel: μ_W, `[in, out]`.
        weight_variance: var_W of every entry, which is that of the bias, too.
        bias: Whether there is one.
    """
    if variance.shape[-1] == 1:
        return tf.matmul(*linear_factors(mean, variance, kernel, weight_variance, bias))
    mean, variance, kernel = map(tf.stop_gradient, (mean, variance, kernel))
    of_inputs = tf.matmul(variance, tf.square(kernel))
    return of_inputs + _of_noisy_weights(mean, variance, weight_variance, bias)


def linear_factors(
    mean: tf.Tensor,
    variance: tf.Tensor,
    kernel: tf.Tensor,
    weight_variance: float,
    bias: bool = True,
) -> tuple[tf.Tensor, tf.Tensor]:
    """`linear` of one variance for all inputs, as two factors: `[..., 2]` and `[2, out]`.

    The first is var_x and what noise in weights adds, the second Σ_in μ_W² and ones. One pass over
    the inputs, no product.

    Args:
        mean: As `linear`.
        variance: var_x, `[..., 1]`.
        kernel: As `linear`.
        weight_variance: As `linear`.
        bias: As `linear`.
    """
    mean, variance, kernel = map(tf.stop_gradient, (mean, variance, kernel))
    of_weights = _of_noisy_weights(mean, variance, weight_variance, bias)
    squares = tf.reduce_sum(tf.square(kernel), axis=0)
    of_positions = tf.concat([tf.broadcast_to(variance, tf.shape(of_weights)), of_weights], -1)
    return of_positions, tf.stack([squares, tf.ones_like(squares)])


def _of_noisy_weights(
    mean: tf.Tensor, variance: tf.Tensor, weight_variance: float, bias: bool
) -> tf.Tensor:
    masses = tf.reduce_sum(_second_moment(mean, variance), axis=-1, keepdims=True)
    return weight_variance * (masses + float(bias))


@_elementwise
def _second_moment(mean: tf.Tensor, variance: tf.Tensor) -> tf.Tensor:
    return variance + tf.square(mean)


@_elementwise
def relu(mean: tf.Tensor, variance: tf.Tensor) -> tf.Tensor:
    """Var[max(X, 0)] = E[Z²] − E[Z]² of X ~ N(mean, variance), in elementwise operations."""
    mean, variance = map(tf.stop_gradient, (mean, variance))
    deviation = tf.sqrt(tf.maximum(variance, tf.constant(1e-30)))
    ratio = mean / deviation
    above = 0.5 * tf.math.erfc(-ratio * math.sqrt(0.5))  # Φ
    density = deviation * tf.exp(-0.5 * tf.square(ratio)) / math.sqrt(2 * math.pi)
    first = mean * above + density
    # E[Z²] − E[Z]² as a sum: of large means both are nearly μ², and their difference is rounding.
    return tf.maximum(variance * above + (mean - first) * first, 0.0)


def gelu(mean: tf.Tensor, variance: tf.Tensor, nodes: int = NODES) -> tf.Tensor:
    """Var[X·Φ(X)] of X ~ N(mean, variance), by Gauss–Hermite: `nodes` elementwise evaluations."""
    mean, variance = map(tf.stop_gradient, (mean, variance))
    deviation = tf.sqrt(tf.maximum(variance, 0.0))
    at_mean = _gelu(mean)
    first, second = tf.zeros_like(mean), tf.zeros_like(mean)
    for point, weight in zip(*_hermite(nodes), strict=True):
        distance = _gelu(mean + point * deviation) - at_mean  # small: squares do not cancel
        first, second = first + weight * distance, second + weight * tf.square(distance)
    return tf.maximum(second - tf.square(first), 0.0)


def layer_norm(
    mean: tf.Tensor,
    variance: tf.Tensor,
    scale: tf.Tensor,
    weight_variance: float,
    epsilon: float,
) -> tf.Tensor:
    """Var[γ·(x − m)/s + β] to first order about the mean, over the last axis.

    With y = (μ − m)/s, the derivatives are ∂y_i/∂x_j = (δ_ij − 1/d − y_i·y_j/d)/s. s² is its
    expectation, Var(μ) + mean(variance), so that inputs with much noise do not come out with more
    variance than a normalised vector has. Elementwise operations, and five averages.

    Args:
        mean: μ, `[..., d]`.
        variance: `[..., d]`.
        scale: γ, `[d]`.
        weight_variance: That of every entry of γ and β.
        epsilon: The layer's, which is added to s².
    """
    mean, variance, scale = map(tf.stop_gradient, (mean, variance, scale))
    centre, noise = _average(mean), _average(variance)
    square = _average(_squared_distance(mean, centre)) + noise + epsilon
    once, twice = map(_average, _weighted(mean, variance, centre, square))
    return _normalised(mean, variance, scale, centre, square, (noise, once, twice), weight_variance)


@_elementwise
def _squared_distance(mean: tf.Tensor, centre: tf.Tensor) -> tf.Tensor:
    return tf.square(mean - centre)


@_elementwise
def _weighted(
    mean: tf.Tensor, variance: tf.Tensor, centre: tf.Tensor, square: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """The variance times y, and times y²."""
    y = (mean - centre) * tf.math.rsqrt(square)
    return variance * y, variance * tf.square(y)


@_elementwise
def _normalised(
    mean: tf.Tensor,
    variance: tf.Tensor,
    scale: tf.Tensor,
    centre: tf.Tensor,
    square: tf.Tensor,
    averages: tuple[tf.Tensor, tf.Tensor, tf.Tensor],
    weight_variance: float,
) -> tf.Tensor:
    """The result, from the averages of the variance, alone and times y and y²."""
    width = float(mean.shape[-1])
    y = (mean - centre) * tf.math.rsqrt(square)
    own = variance * (1 - 2 * (1 + tf.square(y)) / width)
    noise, once, twice = averages
    others = noise + y * (2 * once + y * twice)
    normalised = tf.maximum(own + others / width, 0.0) / square
    of_weights = weight_variance * (normalised + tf.square(y) + 1.0)
    return tf.square(scale) * normalised + of_weights


def residual(variance: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Var[x + y] of independent x and y."""
    return tf.stop_gradient(variance + other)


def _average(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(values, axis=-1, keepdims=True)


def _gelu(values: tf.Tensor) -> tf.Tensor:
    return 0.5 * values * tf.math.erfc(-values * math.sqrt(0.5))


def _hermite(nodes: int) -> tuple[list[float], list[float]]:
    """Points and weights that integrate against the standard normal density."""
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    return points.tolist(), (weights / math.sqrt(2 * math.pi)).tolist()


@dataclasses.dataclass
class ProjectedVariance:
    """Σ_r `of_positions[..., h, r]`·`of_entries[r, h, c]`, `[batch, positions, heads, width]`.

    Attributes:
        of_positions: `[batch, positions, heads, r]`.
        of_entries: `[r, heads, width]`; None for the unit matrix, with r = width.
    """

    of_positions: tf.Tensor
    of_entries: tf.Tensor | None

    def over_entries(self, factors: tf.Tensor) -> tf.Tensor:
        """Contracts `[..., heads, width]` to r: its ⟨·, of_positions⟩ is Σ_c factors·variance."""
        if self.of_entries is None:
            return factors
        return tf.einsum("...hc,rhc->...hr", factors, self.of_entries)

    def of_sums(self, sums: tf.Tensor) -> tf.Tensor:
        """Sums of variances, from the same sums of `of_positions`: `[..., heads, r]` to width."""
        if self.of_entries is None:
            return sums
        return tf.einsum("...hr,rhc->...hc", sums, self.of_entries)


def projected_variance(
    mean: tf.Tensor,
    variance: tf.Tensor,
    kernel: tf.Tensor,
    weight_variance: float,
    bias: bool,
) -> ProjectedVariance:
    """The variance after a projection, for the forward pass alone.

    Args:
        mean: Inputs, float32 `[batch, positions, in]`.
        variance: Of them, or `[batch, positions, 1]` if it is the same for all entries.
        kernel: `[in, heads, width]`.
        weight_variance: Of the noise in every entry of the kernel and the bias.
        bias: Whether the projection has one.
    """
    flat = tf.reshape(kernel, [kernel.shape[0], -1])
    if variance.shape[-1] == 1:
        of_positions, entries = linear_factors(mean, variance, flat, weight_variance, bias)
        per_head = tf.repeat(of_positions[..., tf.newaxis, :], kernel.shape[1], axis=-2)
        return ProjectedVariance(per_head, tf.reshape(entries, [2, *kernel.shape[1:]]))
    found = linear(mean, variance, flat, weight_variance, bias)
    shape = tf.concat([tf.shape(mean)[:-1], kernel.shape[1:]], 0)
    return ProjectedVariance(tf.reshape(found, shape), None)


@dataclasses.dataclass(frozen=True, eq=False)
class EffectiveErrors:
    """Variances of the noise in weights, in units of the mean gradient.

    Attributes:
        weight_variance: (σ·C/B)², of every entry of a layer that all examples use.
        token_variances: float32 `[tokens]`: (σ·C/(B·p_i))², of every entry of a token's row.
        release: What a plan must pay for them; None if they follow from public numbers.

    Examples:
        >>> import dp_sparse, numpy as np
        >>> errors = dp_sparse.layers.EffectiveErrors(1e-6, np.ones(10, np.float32))
        >>> errors.token_variances.shape
        (10,)
    """

    weight_variance: float
    token_variances: np.ndarray
    release: Release | None = None

    def __post_init__(self) -> None:
        variances = np.array(self.token_variances, np.float32)
        good = variances.ndim == 1 and np.isfinite(variances).all() and (variances >= 0).all()
        if not good:
            raise ValueError(
                f"Expected token_variances finite, >= 0, of shape [tokens], got {variances!r}."
            )
        if not validate.is_weight(self.weight_variance):
            raise ValueError(
                f"Expected a finite weight_variance >= 0, got weight_variance="
                f"{self.weight_variance!r}."
            )
        variances.setflags(write=False)
        object.__setattr__(self, "token_variances", variances)
        object.__setattr__(self, "weight_variance", float(self.weight_variance))


def effective_errors(
    plan: PrivacyPlan, clip_norm: float, frequencies: RowFrequencies
) -> EffectiveErrors:
    """The effective errors of a training run.

    Args:
        plan: A calibrated plan, with the release of `frequencies` if they came from private data.
        clip_norm: C of the optimizer.
        frequencies: The fraction of examples that contain each token.

    Raises:
        ValueError: The plan has no noise multiplier, or `clip_norm` is out of its range.
        PrivacyError: The plan does not pay for the frequencies.

    Examples:
        >>> import dp_sparse
        >>> sampling = dp_sparse.StreamSampling(num_examples=800, batch_size=400)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-3), sampling)
        >>> plan = plan.with_noise(4.0)
        >>> known = dp_sparse.RowFrequencies.public("tokens", [0.5, 0.05])
        >>> errors = dp_sparse.layers.effective_errors(plan, clip_norm=1.0, frequencies=known)
        >>> print(f"{errors.weight_variance:.1e}", errors.token_variances)
        1.0e-04 [0.0004 0.04 ]

    ### Formal Guarantees
    All arguments are public, or released at a cost that the plan pays. The errors keep that
    release, and a model that has them trains under no plan without it.
    """
    if plan.noise_multiplier is None:
        raise ValueError("Expected a calibrated plan, got noise_multiplier=None: use calibrate().")
    if frequencies.costs and frequencies.release not in plan.releases:
        raise PrivacyError(
            f"Expected a plan that pays for {frequencies.release.name!r}, got releases="
            f"{[release.name for release in plan.releases]}: use "
            "PrivacyPlan(..., releases=(frequencies.release,)) before calibrate()."
        )
    clip_norm = validate.clip_norm("clip_norm", clip_norm)
    deviation = plan.noise_multiplier * clip_norm / plan.sampling.expected_batch_size
    release = frequencies.release if frequencies.costs else None
    of_tokens = np.square(deviation / frequencies.values)
    return EffectiveErrors(deviation**2, of_tokens, release)

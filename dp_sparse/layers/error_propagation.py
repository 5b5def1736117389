"""How far noise in weights moves what is computed from them: means and variances through layers.

Every weight is taken for normal, with its noisy value as the mean and the variance of its noise;
all of them, and all entries of an activation, for independent, which they are of the first layer
alone: weights that two positions share correlate them. Each function gives the variance
after one operation; the mean is what the network computes anyway. Source: "Delving into
Differentially Private Transformer" (Ding et al., ICML 2024), 4.3.2 and C.2, with these changes:
the rule of ReLU subtracts E[Z]² and not c² (Eq. 31 can go negative), GELU has a rule of its own
in place of that of ReLU, and layer normalisation has one.

Means and variances are float32 of one shape; the cost is in each function.

### Formal Guarantees
No function reads a label or mixes examples. No gradient flows through a result, so the gradients
of a network that uses it are those of a network with these numbers as constants.
"""

import math

import numpy as np
import tensorflow as tf

# A dozen passes over an activation become one; on a CPU they would cost more than the products.
_fused = tf.function(jit_compile=True, autograph=False)
NODES = 20  # of Gauss–Hermite; relative errors below 1e-3 for variances up to 4


def linear(
    mean: tf.Tensor, variance: tf.Tensor, kernel: tf.Tensor, weight_variance: float
) -> tf.Tensor:
    """Var[x·W + b], `[..., out]`: Σ_in [var_x·(μ_W² + var_W) + μ_x²·var_W] + var_b.

    Eq. 30, summed over the inputs; one matrix product, as the layer itself.

    Args:
        mean: μ_x, `[..., in]`.
        variance: var_x, `[..., in]`, or `[..., 1]` if it is the same for all entries.
        kernel: μ_W, `[in, out]`.
        weight_variance: var_W of every entry, which is that of the bias, too.
    """
    mean, variance, kernel = map(tf.stop_gradient, (mean, variance, kernel))
    squares = tf.square(kernel)
    if variance.shape[-1] == 1:
        of_inputs = variance * tf.reduce_sum(squares, axis=0)
    else:
        of_inputs = tf.matmul(variance, squares)
    return _with_noisy_weights(of_inputs, mean, variance, weight_variance)


@_fused
def _with_noisy_weights(
    of_inputs: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor, weight_variance: float
) -> tf.Tensor:
    masses = tf.reduce_sum(variance + tf.square(mean), axis=-1, keepdims=True)
    return of_inputs + weight_variance * (masses + 1.0)


@_fused
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


@_fused
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
    variance than a normalised vector has. Elementwise operations, and four sums.

    Args:
        mean: μ, `[..., d]`.
        variance: `[..., d]`.
        scale: γ, `[d]`.
        weight_variance: That of every entry of γ and β.
        epsilon: The layer's, which is added to s².
    """
    mean, variance, scale = map(tf.stop_gradient, (mean, variance, scale))
    width = float(mean.shape[-1])
    centred = mean - _average(mean)
    square = _average(tf.square(centred)) + _average(variance) + epsilon
    y = centred * tf.math.rsqrt(square)
    own = variance * (1 - 2 * (1 + tf.square(y)) / width)
    weighted = variance * y
    others = _average(variance) + y * (2 * _average(weighted) + y * _average(weighted * y))
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

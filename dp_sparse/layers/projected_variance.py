"""The variance of keys and values of several heads, kept as a sum of few products where it is one.

Inputs of one variance for all entries, as tokens have, leave a projection with a variance that is
`error_propagation.linear_factors`: numbers of positions times numbers of entries. Sums over
positions, and over entries, are then sums of two numbers in place of the width of a head.
"""

import dataclasses

import tensorflow as tf

from dp_sparse.layers import error_propagation


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
    """Of what a projection gives, forward alone.

    Args:
        mean: Inputs, float32 `[batch, positions, in]`.
        variance: Of them, or `[batch, positions, 1]` if it is the same for all entries.
        kernel: `[in, heads, width]`.
        weight_variance: Of the noise in every entry of the kernel and the bias.
        bias: Whether the projection has one.
    """
    flat = tf.reshape(kernel, [kernel.shape[0], -1])
    if variance.shape[-1] == 1:
        of_positions, entries = error_propagation.linear_factors(
            mean, variance, flat, weight_variance, bias
        )
        per_head = tf.repeat(of_positions[..., tf.newaxis, :], kernel.shape[1], axis=-2)
        return ProjectedVariance(per_head, tf.reshape(entries, [2, *kernel.shape[1:]]))
    found = error_propagation.linear(mean, variance, flat, weight_variance, bias)
    shape = tf.concat([tf.shape(mean)[:-1], kernel.shape[1:]], 0)
    return ProjectedVariance(tf.reshape(found, shape), None)

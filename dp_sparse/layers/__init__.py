"""Keras layers for private training: Re-Attention, and the error propagation that it needs.

May use: `core`, `accounting`, `selection`, and of `clipping` how weights are read without gradient.
"""

from dp_sparse.layers.error_propagation import EffectiveErrors, effective_errors
from dp_sparse.layers.re_attention import ReAttention
from dp_sparse.layers.variance_layers import TokenVariance, WithVariance

__all__ = ["EffectiveErrors", "ReAttention", "TokenVariance", "WithVariance", "effective_errors"]

"""Keras layers for private training: Re-Attention, and the error propagation that it needs.

Losses over many candidates are layers, too: `losses`.

May use: `core`, `accounting`, `selection`, and of `clipping` how weights are read without gradient
and rows that a step draws.
"""

from dp_sparse.layers import losses
from dp_sparse.layers.error_propagation import EffectiveErrors, effective_errors
from dp_sparse.layers.re_attention import ReAttention
from dp_sparse.layers.variance_layers import TokenVariance, WithVariance

__all__ = [
    "EffectiveErrors",
    "ReAttention",
    "TokenVariance",
    "WithVariance",
    "effective_errors",
    "losses",
]

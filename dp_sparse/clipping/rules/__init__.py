"""One file per layer family; a rule covers exactly the layer class it names.

A subclass may differ, so it is never covered.

A rule runs the layer's own `call` and tells the tap which tensors' cotangents determine the
gradients of the layer's variables: `rule(layer, call, tap, *args, **kwargs) -> outputs`.
"""

from collections.abc import Callable
from typing import Any

import keras

from dp_sparse.clipping.rules import (
    convolution,
    dense,
    einsum,
    embedding,
    fallback,
    normalization,
    prelu,
    recurrent,
)
from dp_sparse.clipping.rules.embedding import tables_of

Rule = Callable[..., Any]

_RULES: dict[type[keras.layers.Layer], Rule] = {
    keras.layers.Dense: dense.call_dense,
    keras.layers.EinsumDense: einsum.call_einsum_dense,
    keras.layers.Embedding: embedding.call_embedding,
    keras.layers.ReversibleEmbedding: embedding.call_reversible_embedding,
    keras.layers.LayerNormalization: normalization.call_layer_normalization,
    keras.layers.RMSNormalization: normalization.call_rms_normalization,
    keras.layers.GroupNormalization: normalization.call_group_normalization,
    keras.layers.PReLU: prelu.call_prelu,
    **convolution.RULES,
    **recurrent.RULES,
}


def rule_for(layer: keras.layers.Layer) -> Rule | None:
    """The rule of this exact layer class, or None."""
    return _RULES.get(type(layer))


def fallback_for(layer: keras.layers.Layer) -> Rule:
    """The rule for any layer that works on each example alone."""
    return fallback.call_any_layer


def covers_inner_layers(rule: Rule) -> bool:
    """Whether a rule records the variables of layers inside its own, too.

    The others leave them to rules of their own, like that of a PReLU that is a Dense's activation.
    """
    return rule is fallback.call_any_layer or rule in recurrent.RULES.values()


__all__ = ["Rule", "covers_inner_layers", "fallback_for", "rule_for", "tables_of"]

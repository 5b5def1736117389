"""Clipping rules, one file for each kind of layer; a rule covers exactly the classes it is for.

A subclass may differ, so it is never covered. For a recurrent layer the class of its cell counts.

A rule runs the layer's own `call` and tells the tap which tensors' cotangents determine the
gradients of the layer's variables: `rule(layer, call, tap, *args, **kwargs) -> outputs`.
"""

import sys
from collections.abc import Callable
from typing import Any

import keras

from dp_sparse.clipping.rules import (
    convolution,
    dense,
    embedding,
    fallback,
    normalization,
    recurrent,
)

Rule = Callable[..., Any]

_RULES: dict[type[keras.layers.Layer], Rule] = {
    keras.layers.Dense: dense.call_dense,
    keras.layers.EinsumDense: dense.call_einsum_dense,
    keras.layers.Embedding: embedding.call_embedding,
    keras.layers.ReversibleEmbedding: embedding.call_reversible_embedding,
    keras.layers.LayerNormalization: normalization.call_layer_normalization,
    keras.layers.RMSNormalization: normalization.call_rms_normalization,
    keras.layers.GroupNormalization: normalization.call_group_normalization,
    keras.layers.PReLU: normalization.call_prelu,
    **convolution.RULES,
}


# Classes of optional packages by their public names. The package does not import them: a model has
# such a layer only if its user imported the package.
_RULES_BY_NAME: dict[str, Rule] = {
    "keras_hub.layers.PositionEmbedding": embedding.call_position_embedding,
    "keras_hub.layers.ReversibleEmbedding": embedding.call_reversible_embedding,
    "keras_rs.layers.EmbedReduce": embedding.call_embed_reduce,
}

_LOOKUPS = (
    embedding.call_embedding,
    embedding.call_reversible_embedding,
    embedding.call_embed_reduce,
)
__all__ = [
    "Rule",
    "covers_inner_layers",
    "fallback_for",
    "may_read_table_whole",
    "name_of_rule",
    "rule_for",
    "tables_of",
]


def rule_for(layer: keras.layers.Layer) -> Rule | None:
    """The rule of this exact layer class or, for a recurrent layer, of its cell's; or None."""
    kind = type(layer)
    by_name = (rule for name, rule in _RULES_BY_NAME.items() if _imported(name) is kind)
    return _RULES.get(kind) or recurrent.rule_for(layer) or next(by_name, None)


def tables_of(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The variables of a layer in which it looks rows up."""
    if rule_for(layer) not in _LOOKUPS:
        return []
    low_rank = [layer.lora_embeddings_a] if layer.lora_enabled else []
    return [layer._embeddings, *low_rank]


def may_read_table_whole(layer: keras.layers.Layer) -> bool:
    """Whether a layer multiplies with the table in which it looks rows up, when asked to."""
    return rule_for(layer) in _LOOKUPS and getattr(layer, "tie_weights", False)


def fallback_for(layer: keras.layers.Layer) -> Rule:
    """The rule for any layer that works on each example alone."""
    return fallback.call_any_layer


def name_of_rule(rule: Rule) -> str:
    """What users read of a rule, such as "dense"."""
    own = rule.__name__.removeprefix("call_").replace("_", " ")
    return "fallback" if rule is fallback.call_any_layer else own


def covers_inner_layers(rule: Rule) -> bool:
    """Whether a rule also records the variables of the layers inside its layer.

    Otherwise those have rules of their own, as a PReLU that is the activation of a Dense.
    """
    return rule is fallback.call_any_layer or rule in recurrent.RULES


def _imported(name: str) -> Any:
    """The class of this full name, or None if its module has not been imported."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)

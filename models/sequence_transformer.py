"""Next-item models: Transformers with Re-Attention or plain attention, GRU, LSTM; tied output.

Source: "Delving into Differentially Private Transformer" (Ding et al., ICML 2024), D.2: width 64,
one head, two blocks, learned positions, and the table of items as the output layer. Blocks are
those of Vaswani et al. (2017): what attention or the two fully connected layers give is added to
their inputs and then normalised.

Sequences are integer `[batch, length]`: items from 1 on, with 0 as padding in front. A position's
logits depend on the items up to it. Of the last positions, as many as wanted predict.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras

from dp_sparse import layers

_RECURRENT = {"gru": keras.layers.GRU, "lstm": keras.layers.LSTM}
_EPSILON = 1e-6  # of normalisation; embeddings have small variances at first


@dataclasses.dataclass(frozen=True)
class Encoder:
    """What a sequence model is made of.

    Attributes:
        num_items: Items, numbered from 1 to `num_items`.
        length: Positions of a sequence.
        kind: One of `KINDS`.
        width: Entries of an embedding.
        heads: Heads of attention; 1 where there is none.
        blocks: Blocks of a Transformer, or recurrent layers.
        dropout: Of embeddings, attention scores and what is added to a block's inputs.
        tied: Whether the output layer has the table of items for its weights.
        errors: The noise in weights, for Re-Attention; token 0 is padding.
        correction: As `dp_sparse.layers.ReAttention`.
    """

    num_items: int
    length: int
    kind: str = "re_attention"
    width: int = 64
    heads: int = 1
    blocks: int = 2
    dropout: float = 0.2
    tied: bool = True
    errors: layers.EffectiveErrors | None = None
    correction: str = "before_softmax"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Expected kind to be one of {KINDS}, got kind={self.kind!r}.")
        if self.blocks < 1 or self.heads < 1 or self.width < 1 or self.width % self.heads:
            raise ValueError(
                "Expected blocks >= 1 and width >= 1, of which heads are a divisor, got "
                f"blocks={self.blocks}, width={self.width} and heads={self.heads}."
            )
        if self.heads > 1 and self.kind in _RECURRENT:
            raise ValueError(
                f"Expected heads=1 for kind={self.kind!r}, which has no attention, got "
                f"heads={self.heads}."
            )
        if (self.errors is not None) != (self.kind == "re_attention"):
            raise ValueError(
                f"Expected errors for Re-Attention and for nothing else, got kind={self.kind!r} "
                f"with errors={self.errors!r}: use dp_sparse.layers.effective_errors."
            )


def sequence_model(encoder: Encoder, predicted: int) -> keras.Model:
    """From items `[batch, length]` to logits `[batch, predicted, num_items + 1]`, 0 for padding.

    Args:
        encoder: The sizes.
        predicted: How many of the last positions predict the item after them.

    Raises:
        ValueError: `predicted` is not between 1 and the length.
    """
    if not 1 <= predicted <= encoder.length:
        raise ValueError(f"Expected 1 <= predicted <= {encoder.length}, got predicted={predicted}.")
    items = keras.Input((encoder.length,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(
        encoder.num_items + 1, encoder.width, tie_weights=encoder.tied, name="items"
    )
    hidden = _HIDDEN[encoder.kind](encoder, items, table(items))
    hidden = keras.layers.Identity(name="hidden")(hidden)
    return keras.Model(items, table(hidden[:, -predicted:], reverse=True))


def last_position(model: keras.Model) -> keras.Model:
    """The same layers, from items to the logits of the last position, `[batch, num_items + 1]`."""
    hidden, table = model.get_layer("hidden").output, model.get_layer("items")
    return keras.Model(model.input, table(hidden[:, -1], reverse=True))


def attention_maps(model: keras.Model) -> keras.Model:
    """The same layers, from items to each block's scores `[batch, heads, length, length]`.

    Of a model with one block the scores are in no list, as Keras has it.
    """
    attentions = [
        each for each in model.layers if isinstance(each, keras.layers.MultiHeadAttention)
    ]
    return keras.Model(model.input, [each.output[1] for each in attentions])


def _recurrent(
    kind: type[keras.layers.Layer],
    encoder: Encoder,
    items: keras.KerasTensor,
    values: keras.KerasTensor,
) -> keras.KerasTensor:
    del items
    for _ in range(encoder.blocks):
        values = keras.layers.Dropout(encoder.dropout)(values)
        values = kind(encoder.width, return_sequences=True)(values)
    return values


def _transformer(
    encoder: Encoder, items: keras.KerasTensor, values: keras.KerasTensor
) -> keras.KerasTensor:
    places = keras.ops.zeros_like(items) + keras.ops.arange(encoder.length, dtype="int32")
    values += keras.layers.Embedding(encoder.length, encoder.width, name="positions")(places)
    variance = None
    if encoder.errors is not None:
        variance = layers.TokenVariance(encoder.num_items + 1, encoder.errors)(items)
        variance += encoder.errors.weight_variance  # of the position's row
    there = keras.ops.not_equal(items, 0)[:, None, :]  # what may be attended to
    values = keras.layers.Dropout(encoder.dropout)(values)
    for block in range(encoder.blocks):
        last = block == encoder.blocks - 1
        values, variance = _block(encoder, values, variance, there, last)
    return values


def _block(
    encoder: Encoder,
    values: keras.KerasTensor,
    variance: keras.KerasTensor | None,
    there: keras.KerasTensor,
    last: bool,
) -> tuple[keras.KerasTensor, keras.KerasTensor | None]:
    """Causal attention and two fully connected layers; no errors leave the last block."""
    tracked = variance if not last else None
    attended, error = _attended(encoder, values, variance, there, tracked is not None)
    apply = functools.partial(_apply, encoder)
    drop = keras.layers.Dropout(encoder.dropout)
    norm = keras.layers.LayerNormalization(epsilon=_EPSILON)
    values, tracked = apply(norm, values + drop(attended), _added(tracked, error))
    inner, error = apply(keras.layers.Dense(4 * encoder.width), values, tracked)
    inner, error = apply(keras.layers.Activation("relu"), inner, error)  # its error reads its input
    inner, error = apply(keras.layers.Dense(encoder.width), inner, error)
    drop = keras.layers.Dropout(encoder.dropout)
    norm = keras.layers.LayerNormalization(epsilon=_EPSILON)
    return apply(norm, values + drop(inner), _added(tracked, error))


def _attended(
    encoder: Encoder,
    values: keras.KerasTensor,
    variance: keras.KerasTensor | None,
    there: keras.KerasTensor,
    tracked: bool,
) -> tuple[keras.KerasTensor, keras.KerasTensor | None]:
    """What attention gives, and its variance if that is wanted."""
    sizes = {"num_heads": encoder.heads, "key_dim": encoder.width // encoder.heads}
    given: dict[str, Any] = {
        "attention_mask": there,
        "use_causal_mask": True,
        "return_attention_scores": True,
    }
    if encoder.errors is None:
        attention = keras.layers.MultiHeadAttention(dropout=encoder.dropout, **sizes)
        return attention(values, values, **given)[0], None
    noise = encoder.errors.weight_variance
    attention = layers.ReAttention(
        dropout=encoder.dropout, weight_variance=noise, correction=encoder.correction, **sizes
    )
    found = attention(values, values, variance=variance, return_variance=tracked, **given)
    return found[0], found[2] if tracked else None


def _apply(
    encoder: Encoder,
    layer: keras.layers.Layer,
    values: keras.KerasTensor,
    variance: keras.KerasTensor | None,
) -> tuple[keras.KerasTensor, keras.KerasTensor | None]:
    """Calls a layer, with error propagation if there is an error."""
    if variance is None or encoder.errors is None:
        return layer(values), None
    return layers.WithVariance(layer, encoder.errors.weight_variance)(values, variance)


def _added(
    variance: keras.KerasTensor | None, other: keras.KerasTensor | None
) -> keras.KerasTensor | None:
    return None if variance is None else variance + other


_HIDDEN: dict[str, Callable[..., keras.KerasTensor]] = {  # from an encoder, items and their rows
    "re_attention": _transformer,
    "vanilla": _transformer,
    **{kind: functools.partial(_recurrent, layer) for kind, layer in _RECURRENT.items()},
}
KINDS = tuple(_HIDDEN)

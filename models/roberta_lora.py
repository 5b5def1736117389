"""Text classifiers from BERT, RoBERTa or XLM-R: LoRA on query and value, a head, the word table.

Source: "Sparsity-Preserving Differentially Private Training of Large Embedding Models" (Ghazi et
al., NeurIPS 2023), 4.1, 4.4 and D.1.2. Trained are LoRA's matrices (`lora`), the head and the word
table; positions, segments, normalisations and all other weights are frozen. Instead of the table
LoRA on it may be trained (Table 1), or nothing of it (Table 6).

With L layers of width d, rank r, c classes and V words: 4·L·d·r in attention, d² + d + (d + 1)·c in
the head, and V·d in the table, or r'·(V + d) of LoRA of rank r' on it. RoBERTa base at r = 16 has
589,824 + 592,130 + 38,603,520 for two classes. With Keras' own LoRA, one A for each head, it would
be 3,563,520 in attention.

`<pad>` is never looked up: a padded position looks up its example's first token, which that example
has looked up anyway. Attention leaves such positions out, so outputs are those of the backbone, and
no example contributes a row for its padding.
"""

from typing import Any

import keras

from models import lora
from models.pretrained import Backbone

WORDS = ("trained", "frozen", "lora")
POOLING = ("first", "mean")


@keras.saving.register_keras_serializable(package="dp_sparse_models")
class TextClassifier(keras.Model):
    """From token ids to logits; `text_classifier` explains the arguments.

    Attributes:
        backbone: keras-hub's, with LoRA in its attention layers.
        word_lookup: The layer that looks words up: the backbone's, or `LowRankWords` around it.
        head: Layers from a pooled hidden state to the logits, in their order.
    """

    def __init__(
        self,
        backbone: Backbone,
        classes: int,
        rank: int = 16,
        words: str = "trained",
        word_rank: int | None = None,
        pooling: str = "first",
        dropout: float = 0.1,
        **kwargs: Any,
    ) -> None:
        require_choices(classes, rank, words, word_rank, pooling)
        _require_new(backbone)
        _freeze(backbone)
        for layer in backbone.transformer_layers:
            lora.add_to_attention(layer._self_attention_layer, rank, layer.name)
        lookup = table = backbone.token_embedding
        table.trainable = words == "trained"
        if words == "lora":
            lookup = lora.LowRankWords(table, word_rank, dtype=table.dtype_policy, name="words")
        inputs = _inputs(backbone)
        head = _head(backbone, classes, pooling, dropout)
        values = _pooled(_hidden(backbone, lookup, inputs), inputs["padding_mask"], pooling)
        for layer in head:
            values = layer(values)
        super().__init__(inputs=inputs, outputs=values, **kwargs)
        self.backbone, self.word_lookup, self.head = backbone, lookup, head
        self.classes, self.rank, self.dropout, self.pooling = classes, rank, dropout, pooling
        self.words_are, self.word_rank = words, word_rank

    def get_config(self) -> dict[str, Any]:
        """The arguments; the backbone's config is its own, without LoRA."""
        return {
            "name": self.name,
            "backbone": keras.saving.serialize_keras_object(self.backbone),
            "classes": self.classes,
            "rank": self.rank,
            "words": self.words_are,
            "word_rank": self.word_rank,
            "pooling": self.pooling,
            "dropout": self.dropout,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "TextClassifier":
        """As Keras calls it."""
        backbone = keras.saving.deserialize_keras_object(config["backbone"], custom_objects)
        return cls(**{**config, "backbone": backbone})


def text_classifier(
    backbone: Backbone,
    *,
    classes: int,
    rank: int = 16,
    words: str = "trained",
    word_rank: int | None = None,
    pooling: str = "first",
    dropout: float = 0.1,
) -> TextClassifier:
    """A classifier, ready to be compiled with a private optimizer or any other.

    Args:
        backbone: As `pretrained.load_backbone` gives it; LoRA is put into it, so it belongs to this
            classifier from then on.
        classes: How many.
        rank: Of LoRA on query and value.
        words: What is trained of the word table: all of it, nothing, or LoRA (one of `WORDS`).
        word_rank: Of LoRA on the word table; the paper has 4 to 128.
        pooling: What the head gets: the hidden state of the first token, as BERT and RoBERTa were
            made for, or the mean over all tokens, as sentence embeddings (MiniLM).
        dropout: Of the head; the backbone has its own.

    Returns:
        A model from what the backbone takes (int32 `[batch, length]` each: `token_ids`,
        `padding_mask`, 0 for padding, and for BERT `segment_ids`) to logits `[batch, classes]`.

    Raises:
        ValueError: An argument that is out of range, or a backbone of another classifier.
    """
    return TextClassifier(backbone, classes, rank, words, word_rank, pooling, dropout)


def word_table(model: TextClassifier) -> keras.layers.Embedding:
    """The layer with the table of words; with LoRA on it, the layer with A, which is trained."""
    lookup = model.word_lookup
    return lookup.down if isinstance(lookup, lora.LowRankWords) else lookup


def merged(model: TextClassifier) -> keras.Model:
    """A plain model of Keras and keras-hub with the same predictions: every LoRA is multiplied out.

    It has weights of its own, and nothing of this package in its configuration.
    """
    own = model.backbone
    backbone = type(own).from_config(own.get_config())
    values = {variable.path: variable for variable in own.weights}
    for variable in backbone.weights:
        variable.assign(values[variable.path])
    if isinstance(model.word_lookup, lora.LowRankWords):
        backbone.token_embedding.embeddings.assign(model.word_lookup.merged_table())
    for layer, adapted in zip(backbone.transformer_layers, own.transformer_layers, strict=True):
        attention, with_lora = layer._self_attention_layer, adapted._self_attention_layer
        attention.query_dense.kernel.assign(with_lora.query_dense.merged_kernel())
        attention.value_dense.kernel.assign(with_lora.value_dense.merged_kernel())
    hidden = backbone(backbone.input)
    hidden = hidden["sequence_output"] if isinstance(hidden, dict) else hidden
    logits = _pooled(hidden, backbone.input["padding_mask"], model.pooling)
    for layer in model.head:
        copy = type(layer).from_config(layer.get_config())
        logits = copy(logits)
        copy.set_weights(layer.get_weights())
    return keras.Model(backbone.input, logits, name=model.name)


def require_choices(
    classes: int, rank: int, words: str, word_rank: int | None, pooling: str
) -> None:
    """Checks the arguments of `text_classifier`, before there is a backbone.

    Raises:
        ValueError: One that is out of range.
    """
    for name, value, least in (("classes", classes, 2), ("rank", rank, 1)):
        if value < least:
            raise ValueError(f"Expected {name} >= {least}, got {name}={value}.")
    for name, choice, choices in (("words", words, WORDS), ("pooling", pooling, POOLING)):
        if choice not in choices:
            raise ValueError(f"Expected {name} to be one of {choices}, got {name}={choice!r}.")
    if (words == "lora") != (word_rank is not None) or (word_rank is not None and word_rank < 1):
        raise ValueError(
            f"Expected word_rank >= 1 with words='lora' and none otherwise, got words={words!r} "
            f"with word_rank={word_rank}."
        )


def _require_new(backbone: Backbone) -> None:
    for layer in backbone.transformer_layers:
        if isinstance(layer._self_attention_layer._query_dense, lora.LowRankProjection):
            raise ValueError(
                f"Expected a backbone without LoRA, got {backbone.name}, which belongs to another "
                "classifier: load it anew."
            )


def _freeze(backbone: Backbone) -> None:
    """Every layer that owns weights; not those around them, which would freeze LoRA, too."""
    for layer in backbone._flatten_layers(include_self=False):
        if not list(layer._flatten_layers(include_self=False)):
            layer.trainable = False


def _inputs(backbone: Backbone) -> dict[str, keras.KerasTensor]:
    return {name: keras.Input((None,), dtype="int32", name=name) for name in backbone.input}


def _hidden(
    backbone: Backbone, lookup: keras.layers.Layer, inputs: dict[str, keras.KerasTensor]
) -> keras.KerasTensor:
    """The backbone's layers, behind a lookup that leaves padding out; `[batch, length, width]`."""
    ids, mask = inputs["token_ids"], inputs["padding_mask"]
    tokens = lookup(keras.ops.where(keras.ops.cast(mask, "bool"), ids, ids[:, :1]))
    if "segment_ids" in inputs:
        segments = backbone.segment_embedding(inputs["segment_ids"])
        values = backbone.embeddings_add((tokens, backbone.position_embedding(tokens), segments))
    else:
        values = tokens + backbone.embeddings.position_embedding(tokens)
    values = backbone.embeddings_dropout(backbone.embeddings_layer_norm(values))
    for layer in backbone.transformer_layers:
        values = layer(values, padding_mask=mask)
    return values


def _pooled(hidden: keras.KerasTensor, mask: keras.KerasTensor, pooling: str) -> keras.KerasTensor:
    if pooling == "first":
        return hidden[:, 0, :]
    return keras.layers.GlobalAveragePooling1D(name="mean")(hidden, mask=mask)


def _head(
    backbone: Backbone, classes: int, pooling: str, dropout: float
) -> list[keras.layers.Layer]:
    """As RoBERTa's; BERT's first fully connected layer comes trained, for its first token."""
    dtype = backbone.dtype_policy
    dense = getattr(backbone, "pooled_dense", None)
    if dense is None or pooling != "first":
        dense = keras.layers.Dense(
            backbone.hidden_dim, activation="tanh", dtype=dtype, name="head_dense"
        )
    dense.trainable = True
    return [
        keras.layers.Dropout(dropout, dtype=dtype, name="head_dropout"),
        dense,
        keras.layers.Dropout(dropout, dtype=dtype, name="logits_dropout"),
        keras.layers.Dense(classes, dtype=dtype, name="logits"),
    ]

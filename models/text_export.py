"""A trained text classifier that predicts on strings: keras-hub's tokenizer in front, LoRA merged.

Before training, text becomes tokens by the `tokenizers` library, which is fast; a served model has
the same tokenizer inside its graph. Tokens are equal on text as people write it. They differ where
a text holds a special token by its name (`[MASK]`, `<mask>`), or, with WordPiece, a space that does
not break; and where both texts of a pair are `_READ` times as long as a sequence may be.
"""

import base64
import json
import os
from typing import Any

import keras
import keras_hub
import numpy as np
import tensorflow as tf
import tokenizers

import dp_sparse
from models.roberta_lora import TextClassifier, merged
from models.sentence_pieces import is_xlm_roberta, proto_of

Tokenizer = tokenizers.Tokenizer | keras_hub.tokenizers.Tokenizer
_PREPROCESSORS = {
    "BertBackbone": keras_hub.models.BertTextClassifierPreprocessor,
    "RobertaBackbone": keras_hub.models.RobertaTextClassifierPreprocessor,
    "XLMRobertaBackbone": keras_hub.models.XLMRobertaTextClassifierPreprocessor,
}
_PROBES = (  # where tokenizers differ: accents, case, apostrophes, digits, dashes, other scripts
    "A naïve film that doesn't quite work ( 1 hour 45 minutes ) — but it's 100% fun !",
    "rock 'n' roll, 中文 and e-mail: 3.14",
)
_READ = 8
_PROBED = 512  # tokens, more than a probe has


def export_text_classifier(
    model: TextClassifier,
    path: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    length: int,
    texts: int = 1,
    note: str = "",
) -> dp_sparse.Export:
    """Writes a trained classifier as plain Keras and TensorFlow read it, with its statement.

    Both of its forms, as `dp_sparse.export_model` has them, take strings `[batch]` (of pairs a list
    of two) and give logits `[batch, classes]`. Keras and keras-hub are needed to load the first,
    TensorFlow and tensorflow-text to load the second.

    Args:
        model: Compiled with a private optimizer.
        path: A folder that is not there yet.
        tokenizer: The one of training, or keras-hub's form of it.
        length: Tokens of a sequence, as in training.
        texts: 2 for pairs of sentences.
        note: As `dp_sparse.export_model`.

    Raises:
        FileExistsError: `path` is there.
        ValueError: Of `dp_sparse.export_model` and `on_strings`.
    """
    return dp_sparse.export_model(
        model,
        path,
        as_model=lambda trained: on_strings(trained, tokenizer, length, texts),
        note=note,
    )


def on_strings(
    model: TextClassifier, tokenizer: Tokenizer, length: int, texts: int = 1
) -> keras.Model:
    """A plain model from strings to logits, with LoRA merged.

    Args:
        model: The classifier.
        tokenizer: As `export_text_classifier`.
        length: Tokens of a sequence; longer ones are cut.
        texts: 2 for pairs of sentences.

    Raises:
        ValueError: The tokenizer does not belong to the model, or has no equal in keras-hub.
    """
    preprocessor = preprocessor_of(model.backbone, tokenizer, length * (1 if texts == 1 else _READ))
    names = ("text",) if texts == 1 else ("first", "second")
    inputs = [keras.Input((), dtype="string", name=name) for name in names]
    rows = [preprocessor(each) for each in inputs]
    if texts == 1:
        mask = keras.ops.cast(rows[0]["padding_mask"], "int32")
        tokens = {"token_ids": rows[0]["token_ids"], "padding_mask": mask}
        tokens["segment_ids"] = keras.ops.zeros_like(mask)
    else:
        tokens = joined(*rows, preprocessor.tokenizer, length)
    plain = merged(model)
    logits = plain({name: tokens[name] for name in plain.input})
    return keras.Model(inputs[0] if texts == 1 else inputs, logits, name=model.name)


def preprocessor_of(backbone: Any, tokenizer: Tokenizer, length: int) -> keras.layers.Layer:
    """keras-hub's layer from strings to what the backbone takes.

    Raises:
        ValueError: As `on_strings`.
    """
    kind = _PREPROCESSORS.get(type(backbone).__name__)
    if kind is None:
        raise ValueError(
            f"Expected a backbone of {' or '.join(_PREPROCESSORS)}, got {type(backbone).__name__}, "
            "whose tokenizer is not exported: let dp_sparse.export_model write it on tokens, "
            "with as_model=models.roberta_lora.merged."
        )
    inside = tokenizer
    if isinstance(tokenizer, tokenizers.Tokenizer):
        inside = in_graph(tokenizer)
    if not isinstance(inside, kind.tokenizer_cls):
        raise ValueError(
            f"Expected a tokenizer of {type(backbone).__name__}, a {kind.tokenizer_cls.__name__}, "
            f"got {type(inside).__name__}: give the one that the model was trained with."
        )
    if inside.vocabulary_size() > backbone.vocabulary_size:
        raise ValueError(
            f"Expected a tokenizer of at most {backbone.vocabulary_size} tokens, the rows of the "
            f"word table, got {inside.vocabulary_size()}: give the one that the model was trained "
            "with."
        )
    _keep_vocabulary(inside)
    if inside is not tokenizer:
        _require_equal_tokens(kind(inside, sequence_length=_PROBED), tokenizer)
    return kind(inside, sequence_length=length)


def joined(
    first: dict[str, Any], second: dict[str, Any], tokenizer: Any, length: int
) -> dict[str, Any]:
    """Two texts as one sequence, the longer one cut first, as the `tokenizers` library does.

    keras-hub's own layer takes a tuple, which Keras saves as a list; and of two texts that are too
    long it leaves the odd token to the other one.

    Args:
        first: What keras-hub makes of the first text alone, with a token in front and behind; with
            room for more tokens than the sequence has, to tell which text is longer.
        second: The same of the second text.
        tokenizer: keras-hub's.
        length: Tokens of the sequence.
    """
    ops, end = keras.ops, tokenizer.end_token_id
    between = 1 if isinstance(tokenizer, keras_hub.models.BertTokenizer) else 2
    room = length - 2 - between
    one, two = (
        ops.sum(ops.cast(each["padding_mask"], "int32"), axis=1, keepdims=True) - 2
        for each in (first, second)
    )
    shorter, longer = ops.minimum(one, two), ops.maximum(one, two)
    both = 2 * shorter > room  # are cut
    longer = ops.where(both, room - room // 2, ops.minimum(longer, room - shorter))
    shorter = ops.where(both, room // 2, shorter)
    swapped = one > two
    one, two = ops.where(swapped, longer, shorter), ops.where(swapped, shorter, longer)
    places = ops.cumsum(ops.ones_like(first["token_ids"][:, :length]), axis=1) - 1
    begins, ends = one + between, one + between + two  # of the second, less the token before it
    moved = ops.clip(places - begins, 0, length - 1)
    ids = ops.where(places <= ends, ops.take_along_axis(second["token_ids"], moved, axis=1), end)
    ids = ops.where(places <= begins, end, ids)
    ids = ops.where(places <= one, first["token_ids"][:, :length], ids)
    mask = places <= ends + 1
    return {
        "token_ids": ops.where(mask, ids, tokenizer.pad_token_id),
        "padding_mask": ops.cast(mask, "int32"),
        "segment_ids": ops.cast(ops.logical_and(places > begins, mask), "int32"),
    }


def in_graph(tokenizer: tokenizers.Tokenizer) -> keras_hub.tokenizers.Tokenizer:
    """The same tokenizer as a layer of keras-hub: that of BERT, RoBERTa or XLM-R.

    Raises:
        ValueError: It is none of them.
    """
    spec = json.loads(tokenizer.to_str())
    model, normalizer = spec["model"], spec["normalizer"] or {}
    if model["type"] == "WordPiece" and normalizer.get("type") == "BertNormalizer":
        lowercase, accents = normalizer["lowercase"], normalizer["strip_accents"]
        return keras_hub.models.BertTokenizer(
            vocabulary=sorted(model["vocab"], key=model["vocab"].get),
            lowercase=lowercase,
            strip_accents=lowercase if accents is None else accents,
        )
    before = spec["pre_tokenizer"] or {}
    if model["type"] == "BPE" and before.get("type") == "ByteLevel" and not normalizer:
        pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        return keras_hub.models.RobertaTokenizer(
            vocabulary=model["vocab"], merges=pairs, add_prefix_space=before["add_prefix_space"]
        )
    if is_xlm_roberta(spec):
        return keras_hub.models.XLMRobertaTokenizer(proto=proto_of(spec))
    raise ValueError(
        "Expected BERT's WordPiece, RoBERTa's byte-level BPE or XLM-R's pieces, which keras-hub "
        f"has in a graph, got a {model['type']} model: let dp_sparse.export_model write the model "
        "on tokens, with as_model=models.roberta_lora.merged."
    )


def _keep_vocabulary(tokenizer: Any) -> None:
    """Puts the vocabulary into the layer's config.

    keras-hub keeps it in a file beside the config, which Keras reads after it has called all layers
    of a model anew.
    """
    kept: dict[str, Any]
    if isinstance(tokenizer, keras_hub.tokenizers.SentencePieceTokenizer):
        kept = {"proto": base64.b64encode(tokenizer.proto).decode()}
    elif isinstance(tokenizer, keras_hub.tokenizers.BytePairTokenizer):
        kept = {"vocabulary": dict(tokenizer.vocabulary), "merges": list(tokenizer.merges)}
    else:
        kept = {"vocabulary": tokenizer.vocabulary}
    config = tokenizer.get_config()
    tokenizer.get_config = lambda: {**config, **kept}


def _require_equal_tokens(
    preprocessor: keras.layers.Layer, tokenizer: tokenizers.Tokenizer
) -> None:
    """Compares what both make of two sentences."""
    in_a_graph = tf.function(lambda text: preprocessor(text)["token_ids"], autograph=False)
    for text, found in zip(_PROBES, in_a_graph(tf.constant(_PROBES)).numpy(), strict=True):
        wanted = tokenizer.encode(text).ids
        if not np.array_equal(found[: len(wanted)], wanted):
            raise ValueError(
                f"Expected a tokenizer that keras-hub has in a graph, got one that makes {wanted} "
                f"of {text!r}, where keras-hub's makes {found.tolist()}: give a tokenizer of "
                "keras-hub."
            )

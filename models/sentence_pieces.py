"""XLM-R's tokenizer, from SentencePiece's form to that of the `tokenizers` library and back.

SentencePiece's form comes with its weights, and a TensorFlow graph can hold it.

Its vocabulary begins with `<s>`, `<pad>`, `</s>`, `<unk>` and ends with `<mask>`; keras-hub puts
these around the pieces of a SentencePiece model by itself. Of `sentencepiece_model.proto` only the
fields that are written are declared here: the module that comes with SentencePiece demands a newer
protobuf than TensorFlow allows.
"""

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tokenizers import models, normalizers, pre_tokenizers, processors

_FIRST, _LAST = ["<s>", "<pad>", "</s>", "<unk>"], "<mask>"
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3  # kinds of pieces
_UNIGRAM = 1
_FIELDS = {  # of each message: the number and the type of what is written
    "Piece": {"piece": (1, "STRING"), "score": (2, "FLOAT"), "type": (3, "INT32")},
    "TrainerSpec": {"model_type": (3, "INT32"), "vocab_size": (4, "INT32")},
    "NormalizerSpec": {"name": (1, "STRING"), "precompiled_charsmap": (2, "BYTES")},
    "ModelProto": {
        "pieces": (1, "Piece"),
        "trainer_spec": (2, "TrainerSpec"),
        "normalizer_spec": (3, "NormalizerSpec"),
    },
}


def is_xlm_roberta(spec: Mapping[str, Any]) -> bool:
    """Whether a tokenizer of the `tokenizers` library, as JSON has it, is one of XLM-R's."""
    if spec["model"]["type"] != "Unigram":
        return False
    names = [name for name, _ in spec["model"]["vocab"]]
    return names[:4] == _FIRST and names[-1] == _LAST


def proto_of(spec: Mapping[str, Any]) -> bytes:
    """The SentencePiece model of such a tokenizer, serialized."""
    model = model_proto()
    model.pieces.add(piece="<unk>", type=_UNKNOWN)
    for name in ("<s>", "</s>"):
        model.pieces.add(piece=name, type=_CONTROL)
    for name, score in spec["model"]["vocab"][4:-1]:
        model.pieces.add(piece=name, score=score, type=_NORMAL)
    model.trainer_spec.model_type = _UNIGRAM
    model.trainer_spec.vocab_size = len(model.pieces)
    model.normalizer_spec.name = "nmt_nfkc"
    for charsmap in _charsmaps(spec["normalizer"]):
        model.normalizer_spec.precompiled_charsmap = base64.b64decode(charsmap)
    return bytes(model.SerializeToString())


def tokenizer_of_proto(proto: bytes) -> tokenizers.Tokenizer:
    """The tokenizer of a SentencePiece model, as Transformers write XLM-R's `tokenizer.json`.

    Raises:
        google.protobuf.message.DecodeError: It is no such model.
    """
    model = model_proto().FromString(proto)
    pieces = [(each.piece, each.score) for each in model.pieces[3:]]
    names = [*((name, 0.0) for name in _FIRST), *pieces, (_LAST, 0.0)]
    made = tokenizers.Tokenizer(models.Unigram(names, unk_id=_FIRST.index("<unk>")))
    if charsmap := model.normalizer_spec.precompiled_charsmap:
        made.normalizer = normalizers.Precompiled(charsmap)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    begin, end = ((name, _FIRST.index(name)) for name in ("<s>", "</s>"))
    made.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> </s> $B </s>", [begin, end]
    )
    return made


def _charsmaps(normalizer: Mapping[str, Any] | None) -> Iterator[str]:
    """What the normalizer, or a part of it, maps characters by."""
    for part in (normalizer or {}).get("normalizers", [normalizer or {}]):
        if part.get("type") == "Precompiled":
            yield part["precompiled_charsmap"]


def model_proto() -> Any:
    """An empty SentencePiece model."""
    file = descriptor_pb2.FileDescriptorProto(name="pieces.proto", package="pieces")
    kinds = descriptor_pb2.FieldDescriptorProto
    for message, fields in _FIELDS.items():
        declared = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            field = declared.field.add(name=name, number=number)
            field.label = kinds.LABEL_REPEATED if name == "pieces" else kinds.LABEL_OPTIONAL
            if kind in _FIELDS:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".pieces.{kind}"
            else:
                field.type = getattr(kinds, f"TYPE_{kind}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pieces.ModelProto"))()

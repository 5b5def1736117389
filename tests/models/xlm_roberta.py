"""XLM-R's tokenizer, small: pieces that SentencePiece learns, and Transformers' file of them."""

import io

import sentencepiece
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from models.sentence_pieces import model_proto


def sentence_pieces(texts: list[str], size: int = 24) -> bytes:
    """`sentencepiece.bpe.model` of pieces of these texts."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=size,
        model_type="unigram",
        minloglevel=2,
    )
    return model.getvalue()


def of_model(model: bytes) -> tokenizers.Tokenizer:
    """`tokenizer.json`, as Transformers write XLM-R's."""
    proto = model_proto().FromString(model)
    pieces = [(piece.piece, piece.score) for piece in proto.pieces][3:]
    special = [(name, 0.0) for name in ("<s>", "<pad>", "</s>", "<unk>")]
    made = tokenizers.Tokenizer(
        models.Unigram([*special, *pieces, ("<mask>", 0.0)], unk_id=3, byte_fallback=False)
    )
    made.normalizer = normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    made.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> </s> $B </s>", [("<s>", 0), ("</s>", 2)]
    )
    return made

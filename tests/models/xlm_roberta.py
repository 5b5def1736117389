"""Pieces of XLM-R's kind, few of them, which SentencePiece learns."""

import io

import sentencepiece


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

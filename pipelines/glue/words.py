"""Rows of the word table that are selected before training, by how many sentences have a word.

Public counts cost nothing: RoBERTa's authors publish how often each token of its BPE occurs in
public text. For another tokenizer the text of each of these tokens is tokenized again, and its
count goes to what comes out.
"""

from pathlib import Path

import ml_collections
import numpy as np

import dp_sparse
from pipelines.glue.records import Tokens
from pipelines.glue.tasks import GlueDataError
from pipelines.glue.tokens import TextTokenizer, load_tokenizer, roberta_counts
from pipelines.methods import noise_source_of

PUBLIC = "public"


def selected_rows(
    config: ml_collections.ConfigDict,
    table: str,
    num_rows: int,
    training: Tokens,
    tokenizer: TextTokenizer,
    plan: dp_sparse.PrivacyPlan,
) -> dp_sparse.SelectedRows:
    """The `config.selection.rows` most frequent words.

    Padding counts as a word that nobody has: the public source does not select it, noise may.

    Args:
        config: Of the run; `selection.source` is `public`, or a noise source.
        table: The name of the layer that has the word table.
        num_rows: Its rows.
        training: The examples, which are counted unless the source is public.
        tokenizer: What made their tokens.
        plan: What they may spend, of which the counts take `selection.share`.

    Raises:
        ValueError: There is no such source, no public counts, or a number is out of its range.
    """
    settings = config.selection
    if not 0 < settings.rows < num_rows:
        raise ValueError(
            f"Expected 0 < selection.rows < {num_rows}, the rows of the word table, got "
            f"selection.rows={settings.rows}."
        )
    if settings.source == PUBLIC:
        counts = public_counts(settings.counts, tokenizer)
        counts[tokenizer.padding_id] = -1  # behind tokens that the public text lacks
        order = np.argsort(-counts, kind="stable")[: settings.rows]
        return dp_sparse.SelectedRows.public({table: order}, {table: num_rows})
    length = training.records["tokens"].shape[1]
    tables = {table: dp_sparse.TopKTable(num_rows, length, tokenizer.padding_id)}
    source = noise_source_of(config, (PUBLIC,))
    noise = dp_sparse.calibrate_top_k(plan, tables, settings.rows, source, share=settings.share)
    examples = ({table: np.asarray(training.records["tokens"])}, training.records["label"])
    return dp_sparse.select_top_k(examples, tables, settings.rows, noise.source, progress=False)


def public_counts(folder: str, tokenizer: TextTokenizer) -> np.ndarray:
    """How often each token occurs in the public text of RoBERTa's authors, int64 `[tokens]`.

    Tokens that stand in every example, such as `<s>`, have the largest count, and padding has none.

    Args:
        folder: With `encoder.json`, `vocab.bpe` and `dict.txt`.
        tokenizer: Whose tokens are counted.

    Raises:
        GlueDataError: There are no such files.
    """
    if not folder or not (Path(folder) / "dict.txt").is_file():
        raise GlueDataError(
            "Expected selection.counts, a folder with RoBERTa's encoder.json, vocab.bpe and "
            f"dict.txt, with selection.source='public', got {folder!r}."
        )
    theirs = load_tokenizer(folder)
    counted = roberta_counts(Path(folder) / "dict.txt")
    same = theirs.tokenizer.get_vocab() == tokenizer.tokenizer.get_vocab()
    counts = counted.copy() if same else _translated(counted, theirs, tokenizer)
    counts[tokenizer.tokenizer.encode("").ids] = counts.max() + 1
    counts[tokenizer.padding_id] = 0
    return counts


def _translated(counted: np.ndarray, theirs: TextTokenizer, tokenizer: TextTokenizer) -> np.ndarray:
    """The counts of one tokenizer's tokens, as counts of another's."""
    own = tokenizer.tokenizer
    counts = np.zeros(tokenizer.size, np.int64)
    ids = np.flatnonzero(counted)
    texts = [theirs.tokenizer.decode([number]) for number in ids]
    encodings = own.encode_batch_fast([text.strip() for text in texts], add_special_tokens=False)
    for number, text, encoding in zip(ids, texts, encodings, strict=True):
        inside = own.token_to_id(f"##{text}")  # WordPiece has other tokens inside of words
        found = encoding.ids if text.startswith(" ") or inside is None else [inside]
        for token in set(found):
            counts[token] += counted[number]
    return counts

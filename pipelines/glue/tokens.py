"""Tokenizers of the `tokenizers` library, from the files that come with a model's weights.

A folder has `tokenizer.json`; or `vocab.json` and `merges.txt` (RoBERTa); or `vocab.txt` (BERT's
WordPiece); or `sentencepiece.bpe.model` (XLM-R); or `encoder.json`, `vocab.bpe` and `dict.txt`,
RoBERTa's BPE as its authors publish it: the first two are GPT-2's, and `dict.txt` has a line for
each of its tokens, by how often it occurs in public text. RoBERTa's id of a token is that line,
counted from 0, plus 4.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors
from tokenizers.implementations import BertWordPieceTokenizer

from models.pretrained import OFFLINE, reason
from models.sentence_pieces import tokenizer_of_proto
from models.transformers_folder import is_table_of, words_of
from pipelines.glue.tasks import GlueDataError

GPT2_TOKENS = 50_257  # later lines of dict.txt fill its table up, and stand for no token
_FIRST, _LAST = ("<s>", "<pad>", "</s>", "<unk>"), "<mask>"
_FILLERS = 3
_PADS = ("<pad>", "[PAD]")


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer of sentences and pairs.

    Attributes:
        tokenizer: With the special tokens of its model; it neither pads nor cuts by itself.
        padding_id: The id of padding.
        source: Where it is from.
    """

    tokenizer: tokenizers.Tokenizer
    padding_id: int
    source: str

    @property
    def size(self) -> int:
        """Rows that a table needs: the largest id and one more."""
        return max(self.tokenizer.get_vocab().values()) + 1

    def digest(self) -> str:
        """A hash of all that it does."""
        return hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()

    def check_table(self, rows: int) -> None:
        """Refuses a word table that is not for these tokens.

        Raises:
            GlueDataError: The table has another number of rows.
        """
        if not is_table_of(rows, self.size):
            raise GlueDataError(
                f"Expected a word table of {self.size} rows for the tokenizer of {self.source}, "
                f"got one of {rows}: the tokenizer and the weights belong to different models."
            )


def tokenizer_of(source: str) -> TextTokenizer:
    """The tokenizer of a folder, or that of a preset of keras-hub.

    Raises:
        GlueDataError: There is none, or one that the `tokenizers` library cannot be given.
    """
    folder = Path(source).expanduser()
    if any(_is_there(folder, names) for names, _ in _LOADERS) and not _of_keras_hub(folder):
        return load_tokenizer(folder)
    import keras_hub

    try:
        found = keras_hub.tokenizers.Tokenizer.from_preset(
            str(folder) if folder.is_dir() else source
        )
    except Exception as error:  # of a network, of a folder, of a class that is not there
        raise GlueDataError(
            f"Expected a folder with a tokenizer ({_KNOWN}) or a preset of keras-hub that can be "
            f"fetched, got {source!r}: {reason(error)} {OFFLINE} Another tokenizer is given by "
            "--config.model.tokenizer=FOLDER."
        ) from error
    if isinstance(found, keras_hub.tokenizers.BytePairTokenizer):
        merges = [tuple(pair.split(" ")) for pair in found.merges]
        return checked(byte_level_bpe(dict(found.vocabulary), merges), source)
    if isinstance(found, keras_hub.tokenizers.WordPieceTokenizer):
        return checked(word_piece(list(found.vocabulary), found.lowercase), source)
    if isinstance(found, keras_hub.tokenizers.XLMRobertaTokenizer):
        return checked(tokenizer_of_proto(found.proto), source)
    raise GlueDataError(
        f"Expected a tokenizer of BERT, RoBERTa or XLM-R in {source!r}, got "
        f"{type(found).__name__}: give a folder with tokenizer.json by "
        "--config.model.tokenizer=FOLDER."
    )


def load_tokenizer(folder: str | Path) -> TextTokenizer:
    """The tokenizer of a folder.

    Raises:
        GlueDataError: There are no such files, or they cannot be read.
    """
    folder = Path(folder)
    for names, load in _LOADERS:
        if _is_there(folder, names):
            try:
                tokenizer = load(*(folder / name for name in names))
            except Exception as error:  # the library raises plain Exception
                raise GlueDataError(
                    f"Expected a tokenizer in {', '.join(names)} of {folder}, got {error}."
                ) from error
            return checked(tokenizer, str(folder))
    raise GlueDataError(
        f"Expected a folder with a tokenizer ({_KNOWN}), got {folder}: give it by "
        "--config.model.tokenizer=FOLDER."
    )


def checked(tokenizer: tokenizers.Tokenizer, source: str) -> TextTokenizer:
    """The tokenizer, without the padding and the length of its file.

    Raises:
        GlueDataError: It has no padding.
    """
    ids = [tokenizer.token_to_id(name) for name in _PADS]
    padding_id = next((number for number in ids if number is not None), None)
    if padding_id is None:
        raise GlueDataError(
            f"Expected a token {' or '.join(_PADS)} in {source}, got none: give the tokenizer of "
            "BERT, RoBERTa or XLM-R by --config.model.tokenizer=FOLDER."
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return TextTokenizer(tokenizer, padding_id, source)


def byte_level_bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """RoBERTa's tokenizer: `<s> a </s>`, and `<s> a </s></s> b </s>` for pairs."""
    for name in ("<s>", "</s>", "<pad>"):
        if name not in vocabulary:
            raise ValueError(f"no token {name} in the vocabulary")
    unknown = "<unk>" if "<unk>" in vocabulary else None
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end, begin = (("</s>", vocabulary["</s>"]), ("<s>", vocabulary["<s>"]))
    tokenizer.post_processor = processors.RobertaProcessing(end, begin, add_prefix_space=False)
    return tokenizer


def roberta_counts(path: Path) -> np.ndarray:
    """How often each of RoBERTa's tokens occurs in the public text of `dict.txt`.

    These are public: rows that are selected by them cost no privacy.

    Returns:
        int64 `[50,265]`, 0 for special tokens and for the lines that fill the table up.
    """
    names, counts = _dictionary(path)
    found = np.zeros(len(_FIRST) + len(names) + _FILLERS + 1, np.int64)
    found[len(_FIRST) : len(_FIRST) + len(names)] = counts
    return found


def _dictionary(path: Path) -> tuple[list[str], np.ndarray]:
    """GPT-2's ids as `dict.txt` names them, in RoBERTa's order, and their counts."""
    lines = path.read_text(encoding="utf-8").splitlines()[:GPT2_TOKENS]
    pairs = [line.rsplit(" ", 1) for line in lines]
    wrong = [n for n, p in enumerate(pairs, 1) if len(p) != 2 or not all(x.isdigit() for x in p)]
    if wrong:
        raise GlueDataError(
            f"Expected `id count` in line {wrong[0]} of {path}, got {lines[wrong[0] - 1]!r}."
        )
    return [name for name, _ in pairs], np.array([int(count) for _, count in pairs], np.int64)


def _of_authors(encoder: Path, bpe: Path, dictionary: Path) -> Any:
    token_of = {number: token for token, number in json.loads(encoder.read_text("utf-8")).items()}
    names, _ = _dictionary(dictionary)
    vocabulary = {token: number for number, token in enumerate(_FIRST)}
    vocabulary |= {token_of[int(name)]: n for n, name in enumerate(names, start=len(_FIRST))}
    fillers = range(len(vocabulary), len(vocabulary) + _FILLERS)
    vocabulary |= {f"madeupword{n:04}": number for n, number in enumerate(fillers)}
    vocabulary[_LAST] = len(vocabulary)
    return byte_level_bpe(vocabulary, _merges(bpe))


def _of_vocabulary(vocabulary: Path, merges: Path) -> Any:
    return byte_level_bpe(json.loads(vocabulary.read_text("utf-8")), _merges(merges))


def _merges(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text("utf-8").split("\n")
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    return [(first, second) for first, second in pairs]


def word_piece(names: list[str], lowercase: bool) -> Any:
    """BERT's tokenizer: `[CLS] a [SEP]`, and `[CLS] a [SEP] b [SEP]` for pairs."""
    vocabulary = {name: number for number, name in enumerate(names)}
    made = BertWordPieceTokenizer(vocabulary, lowercase=lowercase)
    return tokenizers.Tokenizer.from_str(made.to_str())


def _of_words(vocabulary: Path) -> Any:
    config = vocabulary.with_name("tokenizer_config.json")
    settings = json.loads(config.read_text("utf-8")) if config.is_file() else {}
    return word_piece(words_of(vocabulary), settings.get("do_lower_case", True))


def _of_keras_hub(folder: Path) -> bool:
    """Whether `save_to_preset` wrote it, whose tokenizer.json is another one."""
    path = folder / "tokenizer.json"
    return path.is_file() and '"registered_name"' in path.read_text("utf-8")


def _is_there(folder: Path, names: tuple[str, ...]) -> bool:
    return all((folder / name).is_file() for name in names)


_LOADERS = (
    (("tokenizer.json",), lambda path: tokenizers.Tokenizer.from_file(str(path))),
    (("vocab.json", "merges.txt"), _of_vocabulary),
    (("encoder.json", "vocab.bpe", "dict.txt"), _of_authors),
    (("vocab.txt",), _of_words),
    (("sentencepiece.bpe.model",), lambda path: tokenizer_of_proto(path.read_bytes())),
)
_KNOWN = "; ".join(" and ".join(names) for names, _ in _LOADERS)

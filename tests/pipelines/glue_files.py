"""Small folders of a tokenizer, as they come with RoBERTa's and BERT's weights, and text files."""

import json
from pathlib import Path

SPECIAL = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
WORDS = ("a", "film", "fine", "dull", "joy", "mess", "what", "no", "the", "is")


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def roberta_folder(folder: Path) -> Path:
    """A byte-level BPE of the printable letters, and a few merges."""
    letters = [chr(n) for n in range(33, 127)] + ["Ġ"]
    merges = ["Ġ a", "Ġ f", "i n"]
    names = [*SPECIAL, *letters, *(pair.replace(" ", "") for pair in merges), "<mask>"]
    vocabulary = {name: number for number, name in enumerate(names)}
    written(folder / "vocab.json", json.dumps(vocabulary))
    written(folder / "merges.txt", "#version: 0.2\n" + "\n".join(merges) + "\n")
    return folder


def bert_folder(folder: Path) -> Path:
    """A WordPiece of a few words."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    written(folder / "vocab.txt", "\n".join(names) + "\n")
    return folder


def sst2_folder(folder: Path, rows: int = 60) -> Path:
    """Sentences whose label one word decides, in training and dev files."""
    bad, good = ("dull", "mess"), ("fine", "joy")
    lines = [
        f"{WORDS[n % 3]} {(good if n % 2 else bad)[n // 2 % 2]} {WORDS[n % 7]} {n}\t{n % 2}"
        for n in range(rows)
    ]
    for name, own in (("train", lines), ("dev", lines[: rows // 3])):
        written(folder / f"{name}.tsv", "sentence\tlabel\n" + "\n".join(own) + "\n")
    return folder

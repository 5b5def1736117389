"""Small folders of a tokenizer, as they come with RoBERTa's and BERT's weights, and text files."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import ml_collections
from safetensors.numpy import save_file
from tokenizers.pre_tokenizers import ByteLevel

from configs import glue_sst2
from pipelines.glue.tokens import load_tokenizer
from tests.models import language
from tests.models.xlm_roberta import sentence_pieces

SPECIAL = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
WORDS = ("a", "film", "fine", "dull", "joy", "mess", "what", "no", "the", "is")


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def roberta_folder(folder: Path) -> Path:
    """A byte-level BPE of single bytes, and a few merges."""
    letters = sorted(ByteLevel.alphabet())
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


def xlm_roberta_folder(folder: Path) -> Path:
    """Pieces of a few words."""
    model = sentence_pieces([f"{a} {b} what is no" for a in WORDS for b in WORDS], 22)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sentencepiece.bpe.model").write_bytes(model)
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


_TOKENIZERS = {"bert": bert_folder, "roberta": roberta_folder, "xlm-roberta": xlm_roberta_folder}


def model_folder(folder: Path, kind: str, positions: int = 16) -> Path:
    """A tokenizer, and random weights of a small model for its words."""
    rows = load_tokenizer(_TOKENIZERS[kind](folder)).size
    with mock.patch.multiple(language, ROWS=rows, LENGTH=positions - 2):
        (folder / "config.json").write_text(json.dumps(language.config(kind, layers=1)))
        save_file(language.tensors(kind, layers=1), folder / "model.safetensors")
    return folder


def small(folder: Path, kind: str = "roberta", **changes: Any) -> ml_collections.ConfigDict:
    """A config that trains for some steps, on files of `folder`."""
    config = glue_sst2.get_config()
    config.model.source = str(model_folder(folder / kind, kind))
    config.model.rank = 2
    config.data.path = str(folder)
    config.data.length = 12
    config.training.update(
        {"batch_size": 16, "microbatch_size": 8, "epochs": 1.0, "evaluations": 2}
    )
    config.selection.update({"rows": 20, "share": 0.1})
    config.report.update({"directory": str(folder / "run"), "verbose": 0})
    config.update_from_flattened_dict(changes)
    return config

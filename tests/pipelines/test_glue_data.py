"""Text files and tokens: what is read, refused or counted, and what stays on disk."""

import gzip
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers

from pipelines.glue import data, reading, records, tokens
from pipelines.glue.tasks import TASKS, GlueDataError, task_of
from tests.pipelines.glue_files import bert_folder, roberta_folder, small, sst2_folder, written

SST2 = "sentence\tlabel\na fine film \t1\nno wit , only gags\t0\n"


def config(folder: Path | str = "", **changes: Any) -> Any:
    settings = {"path": str(folder), "tfds": False, "directory": "", "quarantine": False}
    return SimpleNamespace(**{**settings, **changes})


def read(folder: Path, task: str = "sst2", split: str = "train", **changes: Any) -> Any:
    return reading.source_of(config(folder, **changes), TASKS[task], split).read()


# Files


def test_sentences_and_classes_are_read(tmp_path: Path) -> None:
    written(tmp_path / "train.tsv", SST2)
    found = read(tmp_path)
    assert found.texts == (["a fine film", "no wit , only gags"],)
    assert found.labels.tolist() == [1, 0] and not found.left_out
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "train.tsv.gz").write_bytes(gzip.compress(SST2.encode()))
    assert read(packed).texts == found.texts


def test_pairs_stay_pairs_whatever_the_order_of_columns(tmp_path: Path) -> None:
    lines = "index\tquestion\tsentence\tlabel\n0\twho ?\the did\tentailment\n1\twhy ?\tred\t"
    written(tmp_path / "train.tsv", lines + "not_entailment\n")
    found = read(tmp_path, "qnli")
    assert found.texts == (["who ?", "why ?"], ["he did", "red"])
    assert found.labels.tolist() == [0, 1]
    header = "is_duplicate\tid\tqid1\tqid2\tquestion2\tquestion1\n"
    written(tmp_path / "dev.tsv", header + "1\t5\t6\t7\tsecond\tfirst\n")
    found = read(tmp_path, "qqp", "dev")
    assert found.texts == (["first"], ["second"]) and found.labels.tolist() == [1]


def test_xnli_has_other_columns_and_words_for_labels_in_each_file(tmp_path: Path) -> None:
    written(tmp_path / "multinli.train.en.tsv", "premise\thypo\tlabel\na\tb\tcontradictory\n")
    dev = "language\tgold_label\tsentence1\tsentence2\nde\tcontradiction\tc\td\nfr\tneutral\te\tf\n"
    written(tmp_path / "xnli.dev.tsv", dev)
    assert read(tmp_path, "xnli").labels.tolist() == [2]
    assert read(tmp_path, "xnli", "dev").labels.tolist() == [2, 1]
    assert TASKS["xnli"].classes == 3


@pytest.mark.parametrize(
    ("line", "reason", "expected"),
    [
        ("a film", reading.FIELDS, "as many fields as the header has"),
        ("a\tfilm\t1", reading.FIELDS, "as many fields as the header has"),
        (" \t1", reading.EMPTY, "a sentence"),
        ("a film\t2", reading.LABEL, "a label of the task"),
        ("a film\t", reading.LABEL, "a label of the task"),
    ],
)
def test_malformed_lines_are_named_or_counted(
    line: str, reason: str, expected: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "train.tsv", SST2 + line + "\n")
    with pytest.raises(GlueDataError, match=f"Expected {expected} in line 4 of {path}.*quarantine"):
        read(tmp_path)
    found = read(tmp_path, quarantine=True)
    assert len(found) == 2 and found.left_out == {reason: 1}


def test_bytes_that_are_no_text_are_named_or_counted(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_bytes(SST2.encode() + b"\xff\xfe\t1\n")
    with pytest.raises(GlueDataError, match="Expected UTF-8 in line 4"):
        read(tmp_path)
    assert read(tmp_path, quarantine=True).left_out == {reading.BYTES: 1}


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        GlueDataError, match="Expected train.tsv or train.tsv.gz in data.path=.*, got neither"
    ):
        read(tmp_path)
    written(tmp_path / "train.tsv", "text\tlabel\nfine\t1\n")
    with pytest.raises(GlueDataError, match="Expected the columns .* without 'sentence'"):
        read(tmp_path)
    written(tmp_path / "train.tsv", "sentence\tlabel\n")
    with pytest.raises(GlueDataError, match="Expected examples in .*, got none"):
        read(tmp_path)
    written(tmp_path / "train.tsv", "")
    with pytest.raises(GlueDataError, match="Expected the columns"):
        read(tmp_path)
    (tmp_path / "train.tsv").unlink()
    (tmp_path / "train.tsv.gz").write_bytes(b"not gzip")
    with pytest.raises(GlueDataError, match="Expected a TSV file"):
        read(tmp_path)


def test_one_of_path_and_tfds_and_a_known_task_are_needed(tmp_path: Path) -> None:
    for wrong in (config(), config(tmp_path, tfds=True)):
        with pytest.raises(GlueDataError, match="Expected either data.path"):
            reading.source_of(wrong, TASKS["sst2"], "train")
    with pytest.raises(GlueDataError, match="Expected task to be one of"):
        task_of(SimpleNamespace(task="cola"))  # type: ignore[arg-type]


# tensorflow-datasets


class Builder:
    """As much of a builder as the pipeline uses."""

    data_dir = "/nowhere"

    def __init__(
        self, prepared: bool = True, labels: tuple[int, ...] = (0, 1), last: bytes = "né".encode()
    ) -> None:
        self.is_prepared = lambda: prepared
        self._labels, self._last = labels, last

    def as_dataset(self, split: str, batch_size: int) -> dict[str, np.ndarray]:
        assert (split, batch_size) == ("validation", -1)
        texts = {"question": [b"who ?", b"why ?"], "sentence": [b"he did ", self._last]}
        return {**{k: np.array(v) for k, v in texts.items()}, "label": np.array(self._labels)}


@pytest.fixture
def tfds(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(as_numpy=lambda found: found, builder=lambda *_, **__: Builder())
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    return module


def test_a_split_of_tensorflow_datasets_is_read(tfds: SimpleNamespace) -> None:
    source = reading.source_of(config(tfds=True), TASKS["qnli"], "dev")
    found = source.read()
    assert found.texts == (["who ?", "why ?"], ["he did", "né"])
    assert found.labels.tolist() == [0, 1] and len(source.digest()) == 64


def test_a_split_that_is_not_prepared_or_unlabelled_is_refused(tfds: SimpleNamespace) -> None:
    source = reading.source_of(config(tfds=True), TASKS["qnli"], "dev")
    tfds.builder = lambda *_, **__: Builder(labels=(-1, 1))
    with pytest.raises(GlueDataError, match="by reasons: {'label': 1}. Leave it out with --config"):
        source.read()
    counted = reading.source_of(config(tfds=True, quarantine=True), TASKS["qnli"], "dev").read()
    assert len(counted) == 1 and counted.left_out == {reading.LABEL: 1}
    for last, reason in ((b" ", reading.EMPTY), (b"\xff", reading.BYTES)):
        tfds.builder = lambda *_, last=last, **__: Builder(last=last)
        with pytest.raises(GlueDataError, match=f"by reasons: {{'{reason}': 1}}"):
            source.read()
    tfds.builder = lambda *_, **__: Builder(prepared=False)
    with pytest.raises(GlueDataError, match="tfds build glue/qnli.*or give data.path"):
        source.read()
    with pytest.raises(GlueDataError, match="Expected data.path for task='xnli'"):
        reading.source_of(config(tfds=True), TASKS["xnli"], "train").read()


def test_tokens_are_of_the_prepared_files(tfds: SimpleNamespace, tmp_path: Path) -> None:
    """A dataset that is prepared anew, of rows that were taken out, has the same name."""
    tfds.builder = lambda *_, **__: SimpleNamespace(data_dir=tmp_path, is_prepared=lambda: True)
    source, digests = reading.source_of(config(tfds=True), TASKS["qnli"], "dev"), set()
    for content in (b"two rows", b"one row", b"one now"):
        (tmp_path / "qnli-validation.tfrecord").write_bytes(content)
        digests.add(source.digest())
        assert source.digest() in digests
    assert len(digests) == 3


@pytest.mark.parametrize("text", ["\u200b", "\x01", "\xa0\u2003"])
def test_a_sentence_of_no_character_is_empty(text: str, tmp_path: Path) -> None:
    """Tokenizers leave these out: an example would be its special tokens alone."""
    lines = f"sentence\tlabel\n{text}\t1\na film\t1\n"
    written(tmp_path / "train.tsv", lines)
    source = reading.source_of(config(tmp_path), TASKS["sst2"], "train")
    with pytest.raises(GlueDataError, match="Expected a sentence in line 2"):
        source.read()
    counted = reading.source_of(config(tmp_path, quarantine=True), TASKS["sst2"], "train").read()
    assert counted.texts == (["a film"],) and counted.left_out == {reading.EMPTY: 1}


# Tokens


def test_roberta_marks_sentences_and_pairs(tmp_path: Path) -> None:
    loaded = tokens.load_tokenizer(roberta_folder(tmp_path))
    vocabulary = loaded.tokenizer.get_vocab()
    ids = {name: vocabulary[name] for name in ("<s>", "</s>", "a", "b")}
    assert loaded.tokenizer.encode("a").ids == [ids["<s>"], ids["a"], ids["</s>"]]
    pair = [ids[name] for name in ("<s>", "a", "</s>", "</s>", "b", "</s>")]
    assert loaded.tokenizer.encode("a", "b").ids == pair
    assert loaded.padding_id == vocabulary["<pad>"] == 1


def test_bert_marks_segments(tmp_path: Path) -> None:
    loaded = tokens.load_tokenizer(bert_folder(tmp_path))
    found, counts = encoded(loaded, 8, ["A film"], ["film"])
    names = loaded.tokenizer.decode(found[0]["tokens"], skip_special_tokens=False)
    assert names == "[CLS] a film [SEP] film [SEP] [PAD] [PAD]"
    x, _ = records.Tokens(found, counts, segments=True).all()
    assert x["segment_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0]]
    assert x["padding_mask"].tolist() == [[1, 1, 1, 1, 1, 1, 0, 0]]


def encoded(loaded: tokens.TextTokenizer, length: int, *texts: list[str]) -> Any:
    labels = np.arange(len(texts[0]), dtype=np.int8) % 2
    return records.encoded(reading.Sentences(texts, labels, {}), loaded, length, "", False)


def test_long_examples_are_cut_and_counted_and_keep_their_end(tmp_path: Path) -> None:
    loaded = tokens.load_tokenizer(roberta_folder(tmp_path))
    found, counts = encoded(loaded, 6, ["a a a a a a a", "a a", ""])
    assert counts["cut to length"] == 1
    assert found["length"].tolist() == [6, 4, 2]
    assert found[0]["tokens"][-1] == 2 and found[1]["tokens"][-1] == loaded.padding_id
    assert found["label"].tolist() == [0, 1, 0]
    with pytest.raises(GlueDataError, match=r"Expected data.length > 2, with room for 2"):
        encoded(loaded, 2, ["a"])
    with pytest.raises(GlueDataError, match=r"Expected data.length > 5, with room for 4"):
        encoded(loaded, 5, ["a"], ["b"])


@pytest.mark.parametrize("make", [roberta_folder, bert_folder])
def test_tables_of_another_model_are_refused(make: Any, tmp_path: Path) -> None:
    loaded = tokens.load_tokenizer(make(tmp_path))
    loaded.check_table(loaded.size)
    rounded = -(-loaded.size // 64) * 64
    loaded.check_table(rounded)
    for rows in (loaded.size - 1, loaded.size + 1, rounded + 128):
        with pytest.raises(GlueDataError, match=f"got one of {rows}: the tokenizer and the"):
            loaded.check_table(rows)


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GlueDataError, match="Expected a folder with a tokenizer .tokenizer.json;"):
        tokens.load_tokenizer(tmp_path)
    written(tmp_path / "tokenizer.json", "{}")
    with pytest.raises(GlueDataError, match="Expected a tokenizer in tokenizer.json of"):
        tokens.load_tokenizer(tmp_path)
    with pytest.raises(GlueDataError, match="Expected a token <pad> or"):
        tokens.checked(tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])), "here")
    written(tmp_path / "tokenizer.json", "")
    (tmp_path / "tokenizer.json").unlink()
    written(tmp_path / "vocab.json", json.dumps({"a": 0}))
    written(tmp_path / "merges.txt", "#version: 0.2\n")
    with pytest.raises(GlueDataError, match="no token <s>"):
        tokens.load_tokenizer(tmp_path)


def authors_folder(folder: Path) -> Path:
    """RoBERTa's files in small: GPT-2's ids 0, 1, 2, of which 2 is the most frequent."""
    folder.mkdir()
    written(folder / "encoder.json", json.dumps({"a": 0, "b": 1, "ab": 2}))
    written(folder / "vocab.bpe", "#version: 0.2\na b\n")
    written(folder / "dict.txt", "2 90\n0 50\n1 3\n")
    return folder


def test_ids_of_the_authors_files_are_places_in_dict_txt(tmp_path: Path) -> None:
    folder = authors_folder(tmp_path / "authors")
    loaded = tokens.load_tokenizer(folder)
    assert loaded.tokenizer.encode("aba").ids == [0, 4, 5, 2]
    assert loaded.size == 4 + 3 + 3 + 1 and loaded.tokenizer.token_to_id("<mask>") == 10
    counts = tokens.roberta_counts(folder / "dict.txt")
    assert counts.tolist() == [0, 0, 0, 0, 90, 50, 3, 0, 0, 0, 0]
    written(folder / "dict.txt", "2 90\n0\n")
    with pytest.raises(GlueDataError, match="Expected `id count` in line 2"):
        tokens.roberta_counts(folder / "dict.txt")


def test_the_published_bpe_gives_robertas_ids() -> None:
    folder = Path(os.environ.get("DP_SPARSE_DATA", "")) / "roberta_bpe"
    if not (folder / "dict.txt").is_file():
        pytest.skip("DP_SPARSE_DATA has no roberta_bpe")
    loaded = tokens.load_tokenizer(folder)
    assert loaded.size == 50_265 and loaded.padding_id == 1
    assert loaded.tokenizer.encode("Hello world").ids == [0, 31414, 232, 2]
    counts = tokens.roberta_counts(folder / "dict.txt")
    assert counts.shape == (50_265,) and counts[4] == 850_314_647
    assert np.all(np.diff(counts[4:50_261]) <= 0)  # from frequent to rare
    assert not counts[:4].any() and not counts[50_261:].any()


# Files of tokens


def test_tokens_are_made_once_and_again_when_what_they_are_of_changes(tmp_path: Path) -> None:
    folder, cache = roberta_folder(tmp_path / "model"), tmp_path / "cache"
    written(tmp_path / "train.tsv", SST2)

    def made(length: int = 8) -> records.Tokens:
        loaded = tokens.load_tokenizer(folder)
        source = reading.source_of(config(tmp_path), TASKS["sst2"], "train")
        return records.tokens_of(source, "train", loaded, length, cache, progress=False)

    first = made()
    (path,) = cache.glob("*.records")
    stamp = path.stat().st_mtime_ns
    again = made()
    np.testing.assert_array_equal(first.records, again.records)
    assert path.stat().st_mtime_ns == stamp and first.counts == again.counts
    made(length=9)
    written(tmp_path / "train.tsv", SST2 + "more\t1\n")
    assert len(made()) == 3 and len(list(cache.glob("*.records"))) == 3
    assert not [each for each in cache.iterdir() if each.name.endswith(".tmp")]
    assert first.at(np.array([1])).gather(np.array([0]))[1].tolist() == [0]


def test_a_file_of_tokens_that_was_cut_is_refused(tmp_path: Path) -> None:
    folder = roberta_folder(tmp_path / "model")
    written(tmp_path / "train.tsv", SST2)
    source = reading.source_of(config(tmp_path), TASKS["sst2"], "train")
    loaded = tokens.load_tokenizer(folder)
    made = records.tokens_of(source, "train", loaded, 8, tmp_path, progress=False)
    del made
    (path,) = tmp_path.glob("*.records")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(GlueDataError, match="Expected 88 bytes in .*, got 87: remove it"):
        records.tokens_of(source, "train", loaded, 8, tmp_path, progress=False)


# A run's examples


def test_rows_are_held_out_to_validate_alone_and_tokens_need_a_place(tmp_path: Path) -> None:
    sst2_folder(tmp_path)
    task, tokenizer = TASKS["sst2"], tokens.load_tokenizer(roberta_folder(tmp_path / "roberta"))
    settings = small(tmp_path, **{"data.validation": 5, "data.judge": "validation"})
    found = data.load(settings, task, tokenizer, segments=False)
    assert len(found.judging["validation"]) == 5 and len(found.training) <= 55
    assert "Which rows train" in data.protected(settings)
    settings.data.validation = 0
    assert "Which rows train" not in data.protected(settings)
    settings.report.directory, settings.data.judge = "", "dev"
    with pytest.raises(GlueDataError, match="Expected data.prepared, a folder for tokens"):
        data.load(settings, task, tokenizer, segments=False)

"""Rows held out by sentence: no row of a side contains one of another."""

import collections
import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.glue import held_out
from pipelines.glue.tasks import GlueDataError
from tests.reference import containment as reference

WORDS = st.sampled_from("abcA")
ROWS = st.lists(st.lists(WORDS, min_size=1, max_size=7).map(" ".join), min_size=1, max_size=25)
TREE = [
    "the film is a joy from beginning to end",
    "a joy from beginning to end",
    "a joy",
    "joy",
    "a dull and lifeless joy",
    "dull and lifeless",
    "what a mess",
    "mess",
    "What A Mess",
]


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_the_maximal_texts_around_each_row_are_those_of_all_pairs(rows: list[str]) -> None:
    found = held_out.containment(rows)
    texts = {
        number: " ".join(row.lower().split())
        for row, number in zip(rows, found.of_row, strict=True)
    }
    own = [{texts[m] for m in found.around[number]} for number in found.of_row]
    assert own == reference.maximal_around(rows)
    assert {texts[m] for m in found.maximal} == set().union(*own)
    assert [len(texts[n].split()) for n in range(len(texts))] == found.words.tolist()


def sides_of(rows: list[str], found: held_out.Split) -> dict[str, list[str]]:
    names = ("training", "validation", "held_out", "dropped")
    return {name: [rows[i] for i in getattr(found, name)] for name in names}


def crossings(sides: dict[str, list[str]]) -> list[tuple[str, str]]:
    """Rows that contain a row of another side."""
    kept = [(name, row) for name, rows in sides.items() if name != "dropped" for row in rows]
    return [
        (outer, inner)
        for side, outer in kept
        for other, inner in kept
        if side != other and reference.contains(outer, inner)
    ]


@settings(max_examples=200, deadline=None)
@given(
    ROWS, st.integers(1, 4), st.integers(0, 3), st.integers(0, 5), st.sampled_from([1, 2, 3, 99])
)
def test_no_row_contains_a_row_of_another_side(
    rows: list[str], judging: int, choosing: int, seed: int, linking: int
) -> None:
    try:
        found = held_out.split(rows, judging, choosing, seed, linking)
    except GlueDataError:
        return
    assert (len(found.held_out), len(found.validation)) == (judging, choosing)
    assert len(found.training)
    every = np.concatenate([found.training, found.validation, found.held_out, found.dropped])
    assert sorted(every.tolist()) == list(range(len(rows)))
    assert not crossings(sides_of(rows, found))


def test_a_split_of_single_rows_has_crossings() -> None:
    """What the check above must find: rows divided without a look at each other."""
    sides = {"training": TREE[::2], "held_out": TREE[1::2], "validation": []}
    assert ("a joy", "joy") in crossings(sides)


def test_groups_are_linked_by_long_rows_alone() -> None:
    found = held_out.containment(TREE)
    group = held_out.groups(found, linking_words=1)
    assert len(np.unique(group[group >= 0])) == 2  # `joy` is in two sentences
    group = held_out.groups(found, linking_words=2)
    assert len(np.unique(group[group >= 0])) == 3


def test_a_row_in_sentences_of_two_sides_is_dropped() -> None:
    dropped, kept = set(), collections.Counter[str]()
    for seed in range(20):
        sides = sides_of(TREE, held_out.split(TREE, 1, 0, seed))
        kept.update({side: len(rows) for side, rows in sides.items()})
        dropped.update(sides["dropped"])
        held = sides["held_out"][0]
        if held.lower() == "what a mess":  # its twin in other letters is on no other side
            assert not {"mess", "what a mess", "What A Mess"} & set(sides["training"])
    assert "joy" in dropped and kept["training"] > kept["held_out"] == 20


def test_too_few_groups_are_refused() -> None:
    with pytest.raises(GlueDataError, match="got 9 rows in 3 groups: lower data.held_out"):
        held_out.split(TREE, 9, 0, seed=0)
    with pytest.raises(GlueDataError, match="rows to train on and 1 and 9 others"):
        held_out.split(TREE, 1, 9, seed=0)


def sst2_rows() -> list[str]:
    data = os.environ.get("DP_SPARSE_DATA")
    path = Path(data or "") / "sst2" / "train.tsv.gz"
    if not data or not path.is_file():
        pytest.skip("DP_SPARSE_DATA has no sst2/train.tsv.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line.split("\t")[0] for line in file][1:]


def test_sst2_is_divided_with_few_rows_dropped() -> None:
    rows = sst2_rows()
    found = held_out.split(rows, 7_000, 3_000, seed=0)
    assert (len(found.held_out), len(found.validation)) == (7_000, 3_000)
    assert len(found.dropped) < 0.04 * len(rows)
    words = {
        side: np.mean([len(rows[i].split()) for i in getattr(found, side)])
        for side in ("training", "validation", "held_out")
    }
    assert max(words.values()) - min(words.values()) < 1.0  # the sides are alike in length


def test_single_words_link_almost_all_of_sst2() -> None:
    """Why groups are linked by long rows alone."""
    by_words = {line["linking_words"]: line for line in held_out.measure(sst2_rows(), 10_000)}
    assert by_words[1]["largest"] > 65_000
    assert by_words[held_out.LINKING_WORDS]["largest"] < 300


def test_the_command_prints_groups_and_dropped_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "sentence\tlabel\n" + "".join(f"{row}\t1\n" for row in TREE)
    (tmp_path / "train.tsv").write_text(text)
    assert held_out.main([f"--data={tmp_path}", "--rows=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| 1 | 2 | 6 | 0 |") and lines[3].startswith("| 2 | 3 | ")
    assert held_out.main([f"--data={tmp_path / 'nowhere'}"]) == 1
    assert f"error: Expected train.tsv or train.tsv.gz in data.path='{tmp_path / 'nowhere'}'" in (
        capsys.readouterr().err
    )

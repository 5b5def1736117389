"""Vocabularies of periods: old ids stay, each draw has a plan of its own; files and JSON."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dp_sparse
from dp_sparse.core import PrivacyError
from dp_sparse.selection.vocabulary.threshold import VocabularyNoise
from dp_sparse.selection.vocabulary.vocabulary import VocabularyDraw
from tests.selection.vocabulary.cases import drawn


def made(
    values: dict[str, Any], payer: str = "a run", draw: str | None = None, first: int = 90
) -> dp_sparse.PrivateVocabulary:
    """A vocabulary whose counts fall from `first` on."""
    counts = {name: first - np.arange(len(each)) for name, each in values.items()}
    draws = (VocabularyDraw(VocabularyNoise(2.0, 1e-3), 2, payer, draw or f"draw of {payer}"),)
    return dp_sparse.PrivateVocabulary(values, counts, draws)


def test_new_values_stand_behind_the_old_ones() -> None:
    monday = made({"city": ("b", "a"), "item": (7, 3)}, "Monday", first=90)
    tuesday = made({"item": (3, 9, 1), "city": ("c", "b", "d")}, "Tuesday", first=50)
    both = monday.extended(tuesday)
    assert both["city"] == ["b", "a", "c", "d"] and both["item"] == [7, 3, 9, 1]
    assert both.noisy_counts["city"].tolist() == [90, 89, 50, 48]
    assert both.draws == (*monday.draws, *tuesday.draws)
    assert both.release == tuesday.release
    wednesday = made({"city": ("a", "e"), "item": ()}, "Wednesday")
    assert both.extended(wednesday)["city"] == ["b", "a", "c", "d", "e"]


def test_each_draw_has_a_plan_of_its_own() -> None:
    monday = made({"city": ("a",)}, "Monday")
    both = monday.extended(made({"city": ("b",)}, "Tuesday"))
    for earlier in (monday, both):
        with pytest.raises(ValueError, match="a vocabulary of other examples, got newer= with a"):
            earlier.extended(monday)
        with pytest.raises(PrivacyError, match="two draws under one plan, which pays for one"):
            earlier.extended(made({"city": ("c",)}, "Monday", draw="of another process"))


def test_other_columns_and_kinds() -> None:
    monday = made({"city": ("a",)}, "Monday")
    with pytest.raises(ValueError, match=r"columns \['city'\], got \['town'\]"):
        monday.extended(made({"town": ("a",)}, "Tuesday"))
    with pytest.raises(ValueError, match="Expected text in both vocabularies of column 'city'"):
        monday.extended(made({"city": (1,)}, "Tuesday"))
    with pytest.raises(ValueError, match="Expected newer to be a PrivateVocabulary, got newer="):
        monday.extended(["b"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Expected a column among \['city'\], got 'town'"):
        monday["town"]


@pytest.mark.parametrize(
    "values", [("a", 1), ("a", "a"), (1.0, 2.0), (True, False)], ids=["mixed", "twice", "f", "b"]
)
def test_values_that_no_draw_gives(values: Any) -> None:
    with pytest.raises(ValueError, match="distinct texts, or distinct integers, of column 'c'"):
        made({"c": values})


def test_counts_that_do_not_fit() -> None:
    whole = made({"c": ("a", "b")})
    for counts in ({"c": np.ones(3)}, {"d": np.ones(2)}):
        with pytest.raises(ValueError, match="Expected (a count for each|counts of the columns)"):
            dp_sparse.PrivateVocabulary(whole.values, counts, whole.draws)
    with pytest.raises(ValueError, match="and a draw, got counts of .* and 0 draws"):
        dp_sparse.PrivateVocabulary(whole.values, whole.noisy_counts, ())


def same(one: dp_sparse.PrivateVocabulary, other: dp_sparse.PrivateVocabulary) -> bool:
    return one.get_config() == other.get_config() and one.draws == other.draws


def test_a_config_is_json() -> None:
    both = made({"city": ("ü", "a"), "item": (7,)}, "Monday").extended(
        made({"city": ("c",), "item": (-8,)}, "Tuesday")
    )
    config = json.loads(json.dumps(both.get_config()))
    assert same(dp_sparse.PrivateVocabulary.from_config(config), both)


def test_a_file(tmp_path: Path) -> None:
    path, found = tmp_path / "words.npz", drawn({"c": np.repeat(["x", "y"], 300)})
    found.save(path)
    assert same(dp_sparse.PrivateVocabulary.load(path), found)
    with pytest.raises(ValueError, match="read-only"):
        found.noisy_counts["c"][0] = 1
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="another or a damaged file"):
        dp_sparse.PrivateVocabulary.load(path)
    with pytest.raises(FileNotFoundError):
        dp_sparse.PrivateVocabulary.load(tmp_path / "none.npz")

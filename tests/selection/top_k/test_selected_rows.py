"""A set of rows as a file: what it says again, and which files and rows are refused."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest

from dp_sparse.accounting.mechanisms import Release
from dp_sparse.selection.top_k.counting import TopKTable
from dp_sparse.selection.top_k.noise_sources import (
    GaussianTopK,
    GumbelTopK,
    LaplaceTopK,
    NoiseSource,
    PublicRows,
)
from dp_sparse.selection.top_k.selected_rows import SelectedRows

TABLES = {"user": 10, "tokens/lookup": 10**10, "empty": 3}
ROWS = {"tokens/lookup": [0, 2**33, 2**33 + 5], "user": [1, 9], "empty": []}
SOURCES = [PublicRows(), GaussianTopK(3.7), GumbelTopK(98.2), LaplaceTopK(95.5)]


def rows_of(source: NoiseSource) -> SelectedRows:
    return SelectedRows({n: np.array(r, np.int64) for n, r in ROWS.items()}, TABLES, source, 9)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: type(source).__name__)
@pytest.mark.parametrize("way", ["file", "config"])
def test_round_trip(source: NoiseSource, way: str, tmp_path: Path) -> None:
    rows, path = rows_of(source), tmp_path / "rows of a model"
    rows.save(path)
    config = json.loads(json.dumps(rows.get_config()))
    found = SelectedRows.load(path) if way == "file" else SelectedRows.from_config(config)
    assert list(found.row_ids) == list(TABLES) and found.num_rows == TABLES
    for name, expected in ROWS.items():
        assert found.row_ids[name].dtype == np.int64
        np.testing.assert_array_equal(found.row_ids[name], expected)
    assert found.source == source and found.event == rows.event and found.release == rows.release
    assert (found.lookups, found.selected) == (9, 5)
    assert found.costs == (not isinstance(source, PublicRows))


def test_release_names_the_price() -> None:
    rows = rows_of(GaussianTopK(3.0))
    assert rows.release == Release(
        "top 5 rows of 3 tables (Gaussian noise of standard deviation 9 on each count; selection "
        f"{rows.fingerprint})",
        dp_accounting.GaussianDpEvent(3.0),
    )
    assert "public, at no cost" in rows_of(PublicRows()).release.name


def test_fingerprints_tell_choices_apart() -> None:
    rows = rows_of(GaussianTopK(3.0))
    assert rows.fingerprint == rows_of(GaussianTopK(3.0)).fingerprint
    row_ids = {name: np.array(ids) for name, ids in rows.row_ids.items()}
    table = next(name for name, ids in row_ids.items() if 0 < len(ids) < TABLES[name])
    others = np.setdiff1d(np.arange(TABLES[table]), row_ids[table])
    row_ids[table] = np.sort(np.append(row_ids[table][1:], others[0]))
    other = SelectedRows(row_ids, TABLES, GaussianTopK(3.0), rows.lookups)
    assert other.event == rows.event and other.release != rows.release


def test_public_rows_from_a_list() -> None:
    tables = {"user": TopKTable(10), "tokens": 50}
    rows = SelectedRows.public({"tokens": [3, 1, 3], "user": np.array([], int)}, tables)
    assert rows.row_ids["tokens"].tolist() == [1, 3] and rows.row_ids["user"].size == 0
    assert not rows.costs and rows.event == dp_accounting.NoOpDpEvent()


def test_tables_are_read_only() -> None:
    """What a plan has paid for stays as it is; copies are equal."""
    rows = SelectedRows.public({"users": [1, 4]}, {"users": 9})
    with pytest.raises(TypeError, match="item assignment"):
        rows.row_ids["users"] = np.arange(9)  # type: ignore[index]
    with pytest.raises(TypeError, match="item assignment"):
        rows.num_rows["users"] = 2  # type: ignore[index]
    for made in (copy.deepcopy(rows), pickle.loads(pickle.dumps(rows))):
        assert made.fingerprint == rows.fingerprint and made.get_config() == rows.get_config()


def test_rows_are_read_only() -> None:
    given = np.array([1, 2])
    rows = SelectedRows({"t": given}, {"t": 5}, PublicRows())
    given[0] = 4
    assert rows.row_ids["t"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        rows.row_ids["t"][0] = 4


def test_saving_replaces_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows"
    rows_of(PublicRows()).save(path)
    before = path.read_bytes()

    def fails(file: Any, **arrays: Any) -> None:
        file.write(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fails)
    with pytest.raises(OSError, match="disk full"):
        rows_of(GaussianTopK(1.0)).save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_files_are_small_and_hold_no_counts(tmp_path: Path) -> None:
    rows = np.arange(0, 300_000, 3)
    SelectedRows({"t": rows}, {"t": 10**6}, GaussianTopK(1.0), 1).save(tmp_path / "rows")
    assert (tmp_path / "rows").stat().st_size < 300_000
    with np.load(tmp_path / "rows") as file:
        assert set(file) == {"header", "rows_0"}
        header = json.loads(str(file["header"]))
    assert header == {
        "format": "dp-sparse-rows-1",
        "num_rows": {"t": 10**6},
        "source": {"class": "GaussianTopK", "noise_multiplier": 1.0},
        "lookups": 1,
        "event": {"event": "GaussianDpEvent", "fields": {"noise_multiplier": 1.0}},
    }


# --------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({**TABLES, "user": 11}, "for a table 'user' of 11 rows, got one of 10 rows: .* another"),
        ({"user": 10}, r"for the tables \['user'\], got \['empty', 'tokens/lookup', 'user'\]"),
        ({**TABLES, "item": 4}, r"for the tables \['empty', 'item', .*, got \['empty', 'tokens"),
    ],
)
def test_rows_of_another_model(tables: dict[str, int], message: str, tmp_path: Path) -> None:
    rows_of(GaussianTopK(1.0)).save(tmp_path / "rows")
    with pytest.raises(ValueError, match=message):
        SelectedRows.load(tmp_path / "rows", tables)
    with_caps = {name: TopKTable(rows, max_lookups=7) for name, rows in TABLES.items()}
    assert SelectedRows.load(tmp_path / "rows", with_caps).num_rows == TABLES


@pytest.mark.parametrize("damage", ["text", "cut", "flipped", "empty", "other npz", "newer"])
def test_damaged_files(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    rows_of(GaussianTopK(1.0)).save(path)
    whole = path.read_bytes()
    if damage == "other npz":
        with path.open("wb") as file:
            np.savez(file, weights=np.zeros(3))
    elif damage == "newer":
        with path.open("wb") as file:
            np.savez(file, header=np.array(json.dumps({"format": "dp-sparse-rows-2"})))
    else:
        middle = whole.index(b"rows_1.npy") + 70
        path.write_bytes(
            {
                "text": b"not rows",
                "cut": whole[: len(whole) // 2],
                "flipped": whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :],
                "empty": b"",
            }[damage]
        )
    with pytest.raises(ValueError, match="to be rows that SelectedRows.save wrote, in format"):
        SelectedRows.load(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SelectedRows.load(tmp_path / "rows")


def test_a_price_that_is_not_its_source_s() -> None:
    config = rows_of(GaussianTopK(1.0)).get_config()
    config["event"]["fields"]["noise_multiplier"] = 50.0
    with pytest.raises(ValueError, match="Expected the cost of GaussianTopK"):
        SelectedRows.from_config(config)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([1, 5], r"rows of table 't' in \[0, 5\), got 5"),
        ([-1, 2], r"rows of table 't' in \[0, 5\), got -1"),
        ([2, 1], "sorted, distinct rows of table 't': use np.unique"),
        ([2, 2], "sorted, distinct rows"),
        ([1.0, 2.0], "Expected integer rows"),
        ([[1, 2]], "Expected integer rows"),
    ],
)
def test_bad_rows(rows: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelectedRows({"t": np.array(rows)}, {"t": 5}, PublicRows())


def test_a_private_choice_has_a_price() -> None:
    with pytest.raises(
        ValueError, match="Expected lookups to be a whole number > 0, got lookups=0"
    ):
        SelectedRows({"t": np.array([1])}, {"t": 5}, GaussianTopK(1.0))
    whole = SelectedRows(
        {"t": np.arange(5), "u": np.arange(0)}, {"t": 5, "u": 9}, GaussianTopK(1.0)
    )
    assert whole.selected == 0 and not whole.costs  # nothing was chosen


def test_rows_without_their_table() -> None:
    with pytest.raises(ValueError, match=r"Expected rows for the tables \['t'\], got \['u'\]"):
        SelectedRows({"u": np.array([1])}, {"t": 5}, PublicRows())

"""Counts against sets, from every kind of input; caps, padding, bad ids, examples read twice."""

import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse.core.errors import BadExampleError, PrivacyError
from dp_sparse.sampling.data_source import RecordFile
from dp_sparse.sampling.poisson import PoissonSampling
from dp_sparse.selection.top_k.counting import RowCounts, TopKTable, count_rows
from tests.reference import top_k

ONE = TopKTable(7)
TOKENS = TopKTable(12, max_lookups=6, padding_id=0)
BOTH = {"one": ONE, "tokens": TOKENS}
N = 50


def dense(counts: RowCounts) -> list[int]:
    assert counts.row_ids.dtype == counts.counts.dtype == np.int64
    assert np.all(np.diff(counts.row_ids) > 0) and np.all(counts.counts > 0)
    found = np.zeros(counts.num_rows, np.int64)
    found[counts.row_ids] = counts.counts
    return found.tolist()


def counted(examples: Any, tables: dict[str, TopKTable] = BOTH, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = count_rows(examples, tables, progress=False, **options)
    return {name: dense(counts) for name, counts in found.items()}


def arrays(count: int = N) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    x = {
        "one": rng.integers(0, 7, count).astype(np.int32),
        "tokens": rng.integers(0, 12, (count, 6)),
        "other": rng.normal(size=(count, 2)),
    }
    return x, rng.integers(0, 2, count)


def expected(x: dict[str, np.ndarray], tables: dict[str, TopKTable] = BOTH) -> Any:
    return {
        name: top_k.count_rows(
            x[name].reshape(len(x[name]), -1).tolist(), t.num_rows, t.max_lookups, t.padding_id
        )
        for name, t in tables.items()
    }


RECORD = np.dtype([("one", "<i4"), ("tokens", "<i8", (6,)), ("label", "u1")])


def record_file(folder: Path) -> RecordFile:
    x, y = arrays()
    records = np.zeros(N, RECORD)
    records["one"], records["tokens"], records["label"] = x["one"], x["tokens"], y
    records.tofile(folder / "records")
    return RecordFile(
        folder / "records", RECORD, lambda r: ({"one": r["one"], "tokens": r["tokens"]}, r["label"])
    )


def batches(size: int = 8) -> Iterator[Any]:
    x, _ = arrays()
    for start in range(0, N, size):
        yield {name: values[start : start + size] for name, values in x.items()}


@pytest.mark.parametrize("kind", ["file", "arrays", "files", "dataset", "x alone", "tensors"])
def test_every_kind_of_input(kind: str, tmp_path: Path) -> None:
    x, y = arrays()
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    examples: Any = {
        "file": lambda: record_file(tmp_path),
        "arrays": lambda: (x, y),
        "files": lambda: [record_file(tmp_path), record_file(tmp_path)],
        "dataset": lambda: dataset.batch(8),
        "x alone": batches,
        "tensors": lambda: list(dataset.batch(8)),
    }[kind]()
    wanted = expected(x)
    if kind == "files":
        wanted = {name: [2 * count for count in counts] for name, counts in wanted.items()}
    assert counted(examples) == wanted


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.data())
@settings(deadline=None)
def test_caps_and_duplicates(rows: int, lookups: int, cap: int, data: st.DataObject) -> None:
    ids = st.lists(st.integers(-1, rows - 1), min_size=lookups, max_size=lookups)
    examples = data.draw(st.lists(ids, min_size=1, max_size=8))
    table = TopKTable(rows, cap, padding_id=data.draw(st.sampled_from([-1, -1, 0])))
    if table.padding_id == 0:
        examples = [[max(row, 0) for row in example] for example in examples]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = count_rows([{"t": np.array(examples)}], {"t": table}, progress=False)
    wanted = top_k.count_rows(examples, rows, cap, table.padding_id)
    assert dense(found["t"]) == wanted
    uncapped = top_k.count_rows(examples, rows, lookups, table.padding_id)
    assert bool(told) == (wanted != uncapped)


def test_one_example_changes_each_count_by_one_at_most() -> None:
    x, y = arrays()
    x["tokens"][7] = 3
    less = ({n: np.delete(v, 7, 0) for n, v in x.items()}, np.delete(y, 7))
    change = {n: np.subtract(counted((x, y))[n], counted(less)[n]) for n in BOTH}
    assert sorted(change["one"]) == [0] * 6 + [1]
    assert change["tokens"].tolist() == [0, 0, 0, 1] + [0] * 8


def test_truncation_is_told() -> None:
    table = TopKTable(9, max_lookups=2)
    ids = np.array([[5, 5, 3, 8], [1, 1, 1, 2], [8, 0, 1, 2]])
    with pytest.warns(
        UserWarning, match="2 examples had more than max_lookups distinct rows of table 't'"
    ):
        found = count_rows([{"t": ids}, {"t": ids[:0]}], {"t": table}, progress=False)
    assert dense(found["t"]) == [1, 1, 1, 1, 0, 1, 0, 0, 1]


def test_examples_of_weight_zero_count_nothing() -> None:
    """Under zero-out a neighbour has such an example in the place of another."""
    x, y = arrays()
    weights = np.ones(N)
    weights[[3, 4]] = 0
    x["tokens"][3] = 99  # nobody looks at its ids
    kept = {name: np.delete(values, [3, 4], axis=0) for name, values in x.items()}
    assert counted((x, y, weights)) == expected(kept)
    several = {"a": weights, "b": np.stack([weights, 0 * weights], axis=1)}
    assert counted([(x, y, several)]) == expected(kept)


def test_counts_merge_over_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dp_sparse.selection.top_k.counting._PENDING", 40)
    monkeypatch.setattr("dp_sparse.sampling.data_source._CHUNK", 7)
    table = TopKTable(10**9)
    ids = np.random.default_rng(1).integers(0, 300, 5_000) * 3_000_000
    found = count_rows(({"t": ids}, ids), {"t": table}, progress=False)["t"]
    rows, counts = np.unique(ids, return_counts=True)
    np.testing.assert_array_equal(found.row_ids, rows)
    np.testing.assert_array_equal(found.counts, counts)


def test_memory_is_flat_in_examples_and_rows() -> None:
    def peak(num_rows: int, seen: int, times: int) -> int:
        ids = np.random.default_rng(2).integers(0, seen, (times, 4096)) * (num_rows // seen)
        tracemalloc.start()
        count_rows(({"t": chunk} for chunk in ids), {"t": TopKTable(num_rows)}, progress=False)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    few = peak(10**6, 1000, 400)
    assert few < 25e6
    assert peak(10**9, 1000, 400) < 1.1 * few and peak(10**9, 1000, 1600) < 1.1 * few
    assert peak(10**9, 500_000, 400) < few + 70 * 500_000


# --------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("bad", [-1, 12, 2**40])
def test_ids_outside_the_table(bad: int) -> None:
    x, y = arrays()
    x["tokens"][21, 2] = bad
    with pytest.raises(
        BadExampleError,
        match=rf"ids of table 'tokens' in \[0, 12\), got {bad} in example 21\. Fix the data, set "
        "padding_id, or leave such ids out with quarantine=True",
    ):
        counted((x, y))
    with pytest.warns(UserWarning, match="1 ids outside table 'tokens' were left out"):
        found = count_rows((x, y), BOTH, quarantine=True, progress=False)
    x["tokens"][21, 2] = 0  # padding
    assert {name: dense(counts) for name, counts in found.items()} == expected(x)


def test_nan_and_other_kinds_of_ids() -> None:
    x, y = arrays()
    floats = x["one"].astype(np.float32)
    floats[4] = np.nan
    with pytest.raises(
        BadExampleError, match=r"integer ids of table 'one' in \[0, 7\), got float32 with nan"
    ):
        counted(({**x, "one": floats}, y))
    for wrong in (floats[:4], np.array(["a"]), np.array([True]), np.array([[1], [1, 2]], object)):
        with pytest.raises(BadExampleError, match="Expected integer ids of table 'one'"):
            counted([{**x, "one": wrong}])


def test_a_dataset_that_is_not_batched() -> None:
    dataset = tf.data.Dataset.from_tensor_slices(arrays())
    for tables in (BOTH, {"one": ONE}, {"tokens": TOKENS}):
        with pytest.raises(ValueError, match="batch the dataset"):
            counted(dataset, tables)
    one_hot = {"tokens": TopKTable(12)}  # a row of ids looks like a batch; the label tells
    with pytest.raises(ValueError, match=r"one leading dimension, got shapes .* batch the dataset"):
        counted(dataset, one_hot)
    with pytest.raises(ValueError, match="Expected num_examples=50 examples, each once, got more"):
        counted(dataset.map(lambda x, _: x), one_hot, num_examples=N)


def test_examples_read_more_than_once() -> None:
    dataset = tf.data.Dataset.from_tensor_slices(arrays()).batch(8)
    with pytest.raises(ValueError, match="Expected a finite dataset"):
        counted(dataset.repeat())
    with pytest.raises(ValueError, match="Expected num_examples=50 examples, each once, got more"):
        counted(dataset.repeat(2), num_examples=N)
    with pytest.raises(ValueError, match="Expected num_examples=50 examples, each once, got 48"):
        counted(dataset.take(6), num_examples=N)
    with pytest.raises(ValueError, match="Expected num_examples=50, the length of examples, got"):
        counted(arrays(), num_examples=49)
    with pytest.raises(PrivacyError, match="got batches of a sampler"):
        counted(PoissonSampling(N, 10, 3).batches(arrays()))


@pytest.mark.parametrize("wrong", [{"one": np.zeros(3, int)}, "file", 3, None])
def test_what_holds_no_batches(wrong: Any) -> None:
    with pytest.raises(ValueError, match="Expected a dp_sparse.RecordFile or a list of them"):
        counted(wrong)


def test_other_batches() -> None:
    x, y = arrays()
    with pytest.raises(ValueError, match=r"x with ids of tables \['users'\], got x with \['one'"):
        counted((x, y), {"users": ONE})
    for batch in (x["one"], (x["one"], y), (x, y, None, None)):
        with pytest.raises(ValueError, match="whose x maps names to arrays"):
            counted([batch])
    with pytest.raises(ValueError, match="one leading dimension"):
        counted([{**x, "one": x["one"][:3]}])
    with pytest.raises(
        ValueError, match=r"max_lookups=6, as \[batch, lookups\], got shape \(50,\)"
    ):
        counted([{**x, "tokens": x["one"]}])


def test_bad_tables() -> None:
    with pytest.raises(ValueError, match="Expected num_rows to be a whole number > 0"):
        TopKTable(0)
    with pytest.raises(ValueError, match="Expected max_lookups to be a whole number > 0"):
        TopKTable(3, max_lookups=0)


def test_no_examples() -> None:
    empty = ({"one": np.zeros(0, np.int32), "tokens": np.zeros((0, 6), np.int64)}, np.zeros(0))
    with pytest.warns(UserWarning, match="there was no example"):
        found = count_rows(empty, BOTH, progress=False)
    assert [dense(counts) for counts in found.values()] == [[0] * 7, [0] * 12]


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    count_rows(arrays(), BOTH)
    assert "counting: 100%" in capsys.readouterr().err
    count_rows(arrays(), BOTH, progress=False)
    assert capsys.readouterr().err == ""

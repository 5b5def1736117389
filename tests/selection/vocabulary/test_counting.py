"""Votes against lists, from every kind of input; caps, missing values, bad values."""

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse.core import BadExampleError, PrivacyError
from dp_sparse.sampling import PoissonSampling, RecordFile
from dp_sparse.selection.vocabulary.counting import ValueCounts, count_values
from tests.reference import vocabulary as reference

N = 50
LETTERS = ["a", "b", "c", "ü", "longer text"]


def votes(
    examples: Any,
    columns: list[str],
    max_values: int | None = None,
    num_examples: int = N,
    padding_value: int | None = None,
) -> dict[tuple[str, Any], int]:
    found = count_values(
        examples,
        columns,
        max_values,
        num_examples=num_examples,
        padding_value=padding_value,
        progress=False,
    )
    return {
        (column, value.decode() if isinstance(value, bytes) else value): int(count)
        for column, counted in found.items()
        for value, count in _pairs(counted)
    }


def _pairs(counted: ValueCounts) -> list[tuple[Any, int]]:
    assert counted.counts.dtype == np.int64
    return list(zip(counted.values, counted.counts, strict=True))


def arrays() -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    x = {
        "city": np.array(LETTERS)[rng.integers(0, 5, N)],
        "words": np.array([*LETTERS, ""])[rng.integers(0, 6, (N, 4))],
        "item": rng.integers(-3, 4, N),
        "price": rng.normal(size=N),
    }
    return x, rng.integers(0, 2, N)


COLUMNS = ["city", "words", "item"]


def plain(x: dict[str, np.ndarray], columns: list[str] = COLUMNS) -> list[reference.Example]:
    rows = len(x[columns[0]])
    return [{c: np.ravel(x[c][i]).tolist() for c in columns} for i in range(rows)]


RECORD = np.dtype([("city", "S12"), ("words", "S12", (4,)), ("item", "<i4"), ("label", "u1")])


def record_file(folder: Path) -> RecordFile:
    x, y = arrays()
    records = np.zeros(N, RECORD)
    records["city"], records["words"] = np.char.encode(x["city"]), np.char.encode(x["words"])
    records["item"], records["label"] = x["item"], y
    records.tofile(folder / "records")
    return RecordFile(
        folder / "records", RECORD, lambda r: ({c: r[c] for c in COLUMNS}, r["label"])
    )


def batches(size: int = 8) -> Iterator[Any]:
    x, _ = arrays()
    for start in range(0, N, size):
        yield {name: values[start : start + size] for name, values in x.items()}


@pytest.mark.parametrize("kind", ["file", "arrays", "x alone", "files", "dataset", "batches"])
def test_every_kind_of_input(kind: str, tmp_path: Path) -> None:
    x, y = arrays()
    examples: Any = {
        "file": lambda: record_file(tmp_path),
        "arrays": lambda: (x, y),
        "x alone": lambda: x,
        "files": lambda: [record_file(tmp_path), record_file(tmp_path)],
        "dataset": lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(8),
        "batches": batches,
    }[kind]()
    several = 2 if kind == "files" else 1
    wanted = reference.counts(several * plain(x), 4)
    assert votes(examples, COLUMNS, 4, several * N) == wanted


VALUES = st.sampled_from([*LETTERS, "", None])
EXAMPLES = st.lists(
    st.fixed_dictionaries(
        {"one": VALUES.map(lambda v: [v]), "many": st.lists(VALUES, min_size=3, max_size=3)}
    ),
    min_size=1,
    max_size=12,
)


def columns_of(examples: list[Any]) -> dict[str, np.ndarray]:
    one = np.array([e["one"][0] for e in examples] + [None], object)[:-1]
    return {"one": one, "many": np.array([e["many"] for e in examples], object)}


@settings(max_examples=80, deadline=None)
@given(EXAMPLES, st.integers(2, 5))
def test_votes_are_those_of_the_reference(examples: list[Any], cap: int) -> None:
    found = votes(columns_of(examples), ["one", "many"], cap, len(examples))
    assert found == reference.counts(examples, cap)


@settings(max_examples=80, deadline=None)
@given(EXAMPLES, EXAMPLES.map(lambda examples: examples[0]), st.integers(2, 5), st.data())
def test_one_example_changes_at_most_m_counts_by_one_each(
    others: list[Any], one: Any, cap: int, data: st.DataObject
) -> None:
    """Wherever it stands."""
    place = data.draw(st.integers(0, len(others)))
    both = [*others[:place], one, *others[place:]]
    more = votes(columns_of(both), ["one", "many"], cap, len(both))
    less = votes(columns_of(others), ["one", "many"], cap, len(others))
    change = {key: more.get(key, 0) - less.get(key, 0) for key in {*more, *less}}
    assert set(change.values()) <= {0, 1} and sum(change.values()) <= cap


TEXTS: dict[str, Callable[[list[str]], Any]] = {
    "U": np.array,
    "S": lambda texts: np.char.encode(np.array(texts)),
    "str": lambda texts: np.array(texts, object),
    "bytes": lambda texts: np.array([text.encode() for text in texts], object),
    "both": lambda texts: np.array([t.encode() if i % 2 else t for i, t in enumerate(texts)], "O"),
    "of numpy": lambda texts: np.array([np.str_(texts[0]), *map(str, texts[1:])], object),
    "string type": lambda texts: np.array(texts, np.dtypes.StringDType()),
    "pandas": lambda texts: pandas.Series(texts),
    "categories": lambda texts: pandas.Series(texts, dtype="category"),
    "tensor": lambda texts: tf.constant(texts),
    "list": list,
}


@settings(max_examples=80, deadline=None)
@given(EXAMPLES, st.integers(2, 5), st.data())
def test_where_padding_stands_changes_no_vote(
    examples: list[Any], cap: int, data: st.DataObject
) -> None:
    """The longest example decides how much padding the others have, and where."""
    x = columns_of(examples)
    wider = {name: _spread(column, data) for name, column in x.items()}
    columns, count = list(x), len(examples)
    assert votes(wider, columns, cap, count, 0) == votes(x, columns, cap, count, 0)


def _spread(column: np.ndarray, data: st.DataObject) -> np.ndarray:
    """The same values in their order, with padding before, between and behind them."""
    column = column.reshape(len(column), -1)
    made = np.full((len(column), column.shape[1] + 3), "", column.dtype)
    for row, values in enumerate(column):
        places = data.draw(st.permutations(range(made.shape[1])))[: len(values)]
        made[row, sorted(places)] = values
    return made


@pytest.mark.parametrize("kind", TEXTS)
def test_text_of_every_kind_is_the_same_value(kind: str) -> None:
    texts = ["ü", "a", "ü", "", "a", "ü"]
    found = votes([{"c": np.asarray(TEXTS[kind](texts))}, {"c": np.array(["ü"])}], ["c"], None, 7)
    assert found == {("c", "ü"): 4, ("c", "a"): 2}
    assert votes({"c": TEXTS[kind](texts)}, ["c"], None, 6) == {("c", "ü"): 3, ("c", "a"): 2}


def test_one_text_as_str_and_as_bytes_has_one_vote() -> None:
    row = np.array([["a", b"a", np.str_("a"), "b"]], object)
    assert votes({"c": row}, ["c"], 2, 1) == {("c", "a"): 1, ("c", "b"): 1}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64", "object", "Int64"])
def test_integers_of_every_kind(dtype: str) -> None:
    values = pandas.Series([3, 0, 3, 7]).astype(dtype)
    assert votes({"c": values}, ["c"], None, 4) == {("c", 3): 2, ("c", 0): 1, ("c", 7): 1}
    assert votes({"c": values}, ["c"], None, 4, padding_value=0) == {("c", 3): 2, ("c", 7): 1}


def test_what_is_missing_has_no_vote() -> None:
    nothing = [None, float("nan"), np.float32("nan"), pandas.NA, ""]
    assert votes({"c": np.array([*nothing, "a"], object)}, ["c"], None, 6) == {("c", "a"): 1}
    assert votes({"c": np.array([*nothing, b"a"], object)}, ["c"], None, 6) == {("c", "a"): 1}
    ints = np.array([None, 5, 0, np.int64(5)], object)
    assert votes({"c": ints}, ["c"], None, 4) == {("c", 5): 2, ("c", 0): 1}
    assert votes({"c": ints}, ["c"], None, 4, padding_value=0) == {("c", 5): 2}
    for empty in (np.full(3, None), np.full(3, np.nan), np.full(3, ""), np.zeros(0)):
        assert votes([{"c": empty}, {"c": np.array(["a"])}], ["c"], None, len(empty) + 1) == {
            ("c", "a"): 1
        }


def test_a_long_example_votes_for_its_first_values() -> None:
    """The first of each column, then the second of each: no column is left out."""
    x = {"a": np.array([["p", "p", "q", "r"]]), "b": np.array([["s", "t", "", "u"]])}
    order = [("a", "p"), ("b", "s"), ("b", "t"), ("a", "q"), ("b", "u"), ("a", "r")]
    for cap in range(2, 7):
        assert votes(x, ["a", "b"], cap, 1) == dict.fromkeys(order[:cap], 1)


def test_examples_of_weight_zero_have_no_vote() -> None:
    x, y = arrays()
    weights = np.ones(N)
    weights[[3, 4]] = 0
    kept = {name: np.delete(values, [3, 4], axis=0) for name, values in x.items()}
    assert votes((x, y, weights), COLUMNS, 4) == reference.counts(plain(kept), 4)
    assert votes((x, None, {"head": weights}), ["city"]) == reference.counts(
        plain(kept, ["city"]), 1
    )


def test_counts_merge_over_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dp_sparse.selection.vocabulary.counting._PENDING", 40)
    monkeypatch.setattr("dp_sparse.sampling.data_source._CHUNK", 7)
    ids = np.random.default_rng(1).integers(0, 300, 5000) * 3_000_000
    rows, counts = np.unique(ids, return_counts=True)
    wanted = {("c", row): count for row, count in zip(rows.tolist(), counts.tolist(), strict=True)}
    assert votes({"c": ids}, ["c"], None, 5000) == wanted


def test_memory_is_flat_in_examples() -> None:
    def peak(seen: int, times: int) -> int:
        ids = np.random.default_rng(2).integers(0, seen, (times, 4096))
        tracemalloc.start()
        votes(({"c": chunk} for chunk in ids), ["c"], None, 4096 * times)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    few = peak(1000, 80)
    assert few < 15e6 and peak(1000, 240) < 1.1 * few


# --------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("values", "got"),
    [
        (["a", 3], "both"),
        ([3.0, float("nan")], r"3.0 \(float\)"),
        ([True, False], r"True \(bool\)"),
        (["a", ["b", "c"]], r"\['b', 'c'\] \(list\)"),
        ([b"\xff", b"a"], "bytes that are not UTF-8"),
        (["\ud800", "a"], "text that is not Unicode"),
        ([2**63, 1], "an integer beyond 64 bits"),
        ([-(2**63) - 1, 1], "an integer beyond 64 bits"),
        (np.array(["2024-01-01", "2024-01-02"], "datetime64[ns]"), r"datetime64\[ns\]"),
    ],
)
def test_values_that_are_neither_text_nor_integers(values: Any, got: str) -> None:
    column = values if isinstance(values, np.ndarray) else np.array([*values, None], object)[:-1]
    with pytest.raises(BadExampleError, match=f"text or integers in column 'c'.*got {got}"):
        votes({"c": column}, ["c"], None, 2)


def test_one_value_of_a_list_does_not_change_the_others() -> None:
    """NumPy would make the text "nan" of NaN beside texts, and of None something else."""
    for last in ("a", None, float("nan"), b"a"):
        x = {"c": ["a", "b\0", float("nan"), last]}
        found = votes(x, ["c"], None, 4)
        found[("c", "a")] -= last in ("a", b"a")
        assert found == {("c", "a"): 1, ("c", "b\0"): 1}


def test_several_integers_of_an_example_need_what_stands_for_none() -> None:
    """Whether an example has padding would depend on the longest one."""
    x = {"c": np.array([[5, 0], [7, 8]])}
    with pytest.raises(
        ValueError, match="padding_value= with column 'c', of which an example has 2 integers"
    ):
        votes(x, ["c"], 4, 2)
    assert votes(x, ["c"], 4, 2, 0) == {("c", 5): 1, ("c", 7): 1, ("c", 8): 1}
    assert votes(x, ["c"], 4, 2, -1)[("c", 0)] == 1


def test_integers_that_pandas_made_floats_of() -> None:
    with pytest.raises(BadExampleError, match="Fill what is missing by '' or padding_value, cast"):
        votes({"c": pandas.Series([None, 5], dtype="Int64")}, ["c"], None, 2)


def test_a_column_keeps_its_kind() -> None:
    with pytest.raises(BadExampleError, match="column 'c', one of the two, got both"):
        votes([{"c": np.array(["a"])}, {"c": np.array([1])}], ["c"], None, 2)


def test_other_numbers_of_examples() -> None:
    x, y = arrays()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    told = r"Expected the 50 examples of the plan that pays, each once, got "
    for examples, got in [
        ([(x, y), (x, y)], "more"),
        (dataset.repeat(2), "more"),
        (dataset.take(6), "48"),
        ({c: v[:49] for c, v in x.items()}, "49"),
        ({c: v[:0] for c, v in x.items()}, "0"),
        ([], "0"),
    ]:
        with pytest.raises(ValueError, match=told + got):
            votes(examples, ["city"])
    with pytest.raises(ValueError, match="Expected a finite dataset"):
        votes(dataset.repeat(), ["city"])


def test_batches_of_a_sampler() -> None:
    x, y = arrays()
    with pytest.raises(PrivacyError, match="got batches of a sampler"):
        votes(PoissonSampling(N, 10, 3).batches((x, y)), ["city"])


def test_a_dataset_that_mixes_examples() -> None:
    x, y = arrays()
    dataset = tf.data.Dataset.from_tensor_slices(({"item": x["item"]}, y)).batch(25)
    mixed = dataset.map(lambda x, y: ({"item": x["item"] - tf.reduce_sum(x["item"])}, y))
    with pytest.raises(PrivacyError):
        votes(mixed, ["item"])


def test_columns_and_shapes() -> None:
    x, y = arrays()
    with pytest.raises(ValueError, match=r"Expected columns among \['city', .*\], got .*'town'"):
        votes((x, y), ["city", "town"])
    with pytest.raises(ValueError, match=r"Expected columns among \['city', .*\], got .*'town'"):
        votes(batches(), ["town"])
    with pytest.raises(ValueError, match="Expected max_values= with column 'words'.* up to 4"):
        votes((x, y), ["words"])
    with pytest.raises(ValueError, match=r"'words' as \[batch\] or \[batch, values\], got shape"):
        votes({"words": x["words"][:, None]}, ["words"], 3)
    for wrong in ((x, y[:3]), {"city": x["city"], "item": y[:3]}, {"city": "a", "item": 3}):
        with pytest.raises(ValueError, match="arrays of one common length"):
            votes(wrong, ["city", "item"])
    with pytest.raises(ValueError, match="one leading dimension"):
        votes([{"city": x["city"], "item": x["item"][:3]}], ["city", "item"])
    with pytest.raises(ValueError, match="batch the dataset"):
        votes(tf.data.Dataset.from_tensor_slices((x, y)), ["city"])
    with pytest.raises(ValueError, match=r"arrays by their names, got x of type DataFrame"):
        votes((pandas.DataFrame({"city": x["city"]}), y), ["city"])
    with pytest.raises(ValueError, match="Expected a dp_sparse.RecordFile or a list of them"):
        votes("file", ["city"])

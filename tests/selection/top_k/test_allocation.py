"""How k rows are divided: exact sums, proportions, small tables, weights; what is counted."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_sparse.selection.top_k.counting import TopKTable, as_tables
from dp_sparse.selection.top_k.select import allocate_rows

TABLES = st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0, 0.5, 1, 3])), max_size=7)


def rows_of(k: int, rows: list[int], weights: list[float] | None = None) -> list[int]:
    tables = as_tables({str(index): size for index, size in enumerate(rows)})
    named = None if weights is None else dict(zip(tables, weights, strict=True))
    return list(allocate_rows(k, tables, named).rows.values())


@pytest.mark.parametrize(
    ("k", "rows", "weights", "expected"),
    [
        (6, [10, 10, 10], None, [2, 2, 2]),
        (8, [10, 10, 10], None, [3, 3, 2]),  # the first tables get what is left
        (9, [10, 2, 10], None, [4, 2, 3]),  # a table of 2 rows leaves 1 of its 3
        (12, [10, 2, 3], None, [7, 2, 3]),
        (20, [10, 2, 3], None, [10, 2, 3]),  # more than there are
        (0, [10, 2, 3], None, [0, 0, 0]),
        (8, [10, 10, 10], [1, 1, 2], [2, 2, 4]),
        (7, [10, 10], [0, 1], [0, 7]),
        (20, [10, 10], [0, 1], [0, 10]),
        (10, [100] * 3, [0.1, 0.2, 0.7], [1, 2, 7]),
        (0, [], None, []),
    ],
)
def test_cases(k: int, rows: list[int], weights: list[float] | None, expected: list[int]) -> None:
    assert rows_of(k, rows, weights) == expected


@given(TABLES, st.integers(0, 200))
def test_rows_add_up_and_follow_the_weights(tables: list[tuple[int, float]], k: int) -> None:
    rows, weights = [size for size, _ in tables], [weight for _, weight in tables]
    if tables and not any(weights):
        weights = [1.0] * len(weights)
    found = rows_of(k, rows, weights if tables else None)
    open_rows = sum(size for size, weight in zip(rows, weights, strict=True) if weight)
    assert sum(found) == min(k, open_rows)
    assert all(0 <= got <= size for got, size in zip(found, rows, strict=True))
    partial = [
        Fraction(got) / Fraction(weight)
        for got, size, weight in zip(found, rows, weights, strict=True)
        if weight and got < size
    ]
    for got, size, weight in zip(found, rows, weights, strict=True):
        if weight:  # nobody is more than one row ahead of a table that could take more
            assert all((got - 1) / Fraction(weight) <= other + 2 for other in partial)
        if got == size and weight:  # a table is kept whole when it would get that much
            assert all(size / Fraction(weight) <= other + 2 / Fraction(0.5) for other in partial)


def test_what_is_counted() -> None:
    tables = {"one": TopKTable(10), "tokens": TopKTable(50, max_lookups=8), "tiny": TopKTable(2)}
    wanted = allocate_rows(12, tables)
    assert wanted.rows == {"one": 5, "tokens": 5, "tiny": 2}
    assert list(wanted.counted) == ["one", "tokens"]  # tiny is kept whole: nothing is released
    assert (wanted.lookups, wanted.selected) == (9, 10)
    assert wanted.num_rows == {"one": 10, "tokens": 50, "tiny": 2}


@pytest.mark.parametrize("k", [-1, 1.5, float("nan"), None, "3"])
def test_bad_k(k: object) -> None:
    with pytest.raises(ValueError, match="Expected k to be a whole number >= 0, got k="):
        allocate_rows(k, as_tables({"t": 3}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1.0}, r"Expected weights for the tables \['a', 'b'\], got weights for \['a'\]"),
        ({"a": 1.0, "b": -1.0}, r"Expected finite weights >= 0, not all 0, got weights=.'b': -1.0"),
        ({"a": 1.0, "b": float("nan")}, "Expected finite weights >= 0"),
        ({"a": 0.0, "b": 0.0}, "not all 0, got weights=.'a': 0.0, 'b': 0.0"),
    ],
)
def test_bad_weights(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allocate_rows(3, as_tables({"a": 5, "b": 5}), weights)

"""The selected rows: jointly as noise on every row would choose them, and the awkward inputs."""

import itertools
import warnings
from typing import Any

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from scipy import integrate, stats

from dp_sparse.core.errors import BadExampleError
from dp_sparse.selection.top_k.counting import RowCounts, TopKTable
from dp_sparse.selection.top_k.noise_sources import (
    GaussianTopK,
    GumbelTopK,
    LaplaceTopK,
    NoiseSource,
    PublicRows,
    secret_generator,
)
from dp_sparse.selection.top_k.select import noisy_top_k, select_top_k
from dp_sparse.selection.top_k.selected_rows import SelectedRows
from tests.reference import top_k as reference
from tests.reference.distributions import SIGNIFICANCE, binomial, chi_square

SOURCES = {"gaussian": GaussianTopK(1.0), "gumbel": GumbelTopK(1.0), "laplace": LaplaceTopK(1.0)}
DISTRIBUTIONS = {"gaussian": stats.norm, "gumbel": stats.gumbel_r, "laplace": stats.laplace}
COUNTS, K, SCALE, RUNS = [0, 3, 0, 0, 1, 0, 2], 3, 1.5, 12_000
SUBSETS = {rows: i for i, rows in enumerate(itertools.combinations(range(len(COUNTS)), K))}


def row_counts(counts: dict[int, int], num_rows: int) -> RowCounts:
    rows = np.array(sorted(counts), np.int64)
    return RowCounts(num_rows, rows, np.array([counts[row] for row in rows], np.int64))


def selections(
    source: NoiseSource, counts: RowCounts, k: int, scale: float, runs: int
) -> np.ndarray:
    """The selected rows of independent runs, int64 `[runs, k]`."""
    rng = secret_generator()
    return np.array([noisy_top_k(counts, k, source, scale, rng) for _ in range(runs)])


def same_subsets(found: np.ndarray, wanted: np.ndarray) -> float:
    """p-value of two samples of sets, `[runs, k]` sorted, being of one distribution."""
    tables = [
        np.bincount([SUBSETS[tuple(rows)] for rows in sample.tolist()], minlength=len(SUBSETS))
        for sample in (found, wanted)
    ]
    return float(stats.chi2_contingency(np.array(tables)).pvalue)


def brute_force(name: str, scale: float) -> np.ndarray:
    noise = reference.STANDARD_NOISE[name]
    chosen = reference.noisy_top_k(COUNTS, K, noise, scale, 200_000, seed=3)
    return np.nonzero(chosen)[1].reshape(-1, K)


# ------------------------------------------------------------------------------------ distribution


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", SOURCES)
def test_jointly_as_noise_on_every_row(name: str) -> None:
    """The frequency of every set of rows; 2/3 and 3/2 of the noise are rejected."""
    seen = row_counts({row: count for row, count in enumerate(COUNTS) if count}, len(COUNTS))
    found = selections(SOURCES[name], seen, K, SCALE, RUNS)
    assert same_subsets(found, brute_force(name, SCALE)) > SIGNIFICANCE
    for wrong in (2 / 3, 3 / 2):
        assert same_subsets(found, brute_force(name, wrong * SCALE)) < SIGNIFICANCE
    other = next(other for other in SOURCES if other != name)
    assert same_subsets(found, brute_force(other, SCALE)) < SIGNIFICANCE


def test_gumbel_is_k_exponential_mechanisms() -> None:
    seen = row_counts({row: count for row, count in enumerate(COUNTS) if count}, len(COUNTS))
    found = selections(SOURCES["gumbel"], seen, K, SCALE, RUNS)
    chances = [reference.gumbel_subset_probability(COUNTS, rows, SCALE) for rows in SUBSETS]
    assert sum(chances) == pytest.approx(1)
    exact = stats.rv_discrete(values=(range(len(SUBSETS)), chances))
    assert chi_square([SUBSETS[tuple(rows)] for rows in found.tolist()], exact) > SIGNIFICANCE


@pytest.mark.cases(5)
@pytest.mark.parametrize("zero_rows", [10, 10**6, 10**12])
@pytest.mark.parametrize("name", SOURCES)
def test_one_row_against_many_zero_rows(name: str, zero_rows: int) -> None:
    """P[count + noise beats the largest of n noises], also of n that nobody could draw."""
    noise, runs = DISTRIBUTIONS[name], 4_000

    def wins(rows: float, count: float) -> float:
        def integrand(x: float) -> float:
            return noise.pdf(x) * np.exp(rows * noise.logcdf(x + count))

        low, high = noise.ppf(1e-12), noise.isf(1e-12)
        return integrate.quad(integrand, low, high, limit=500, points=[0.0])[0]

    count = int(np.ceil(noise.isf(1 / zero_rows)))  # in units of the scale
    seen = row_counts({5: 10 * count}, zero_rows + 1)
    found = selections(SOURCES[name], seen, 1, 10.0, runs)
    hits = int(np.count_nonzero(found == 5))
    assert binomial(hits, runs, wins(zero_rows, count)) > SIGNIFICANCE
    assert binomial(hits, runs, wins(10 * zero_rows, count)) < SIGNIFICANCE
    assert binomial(hits, runs, wins(zero_rows, 1.5 * count)) < SIGNIFICANCE


def test_zero_rows_are_equally_likely() -> None:
    seen = row_counts({0: 5, 3: 10_000, 9: 5}, 12)
    found = selections(GaussianTopK(1.0), seen, 3, 100.0, 10_000)
    zeros = found[~np.isin(found, [0, 3, 9])]
    free = np.setdiff1d(np.arange(12), [0, 3, 9])
    assert chi_square(np.searchsorted(free, zeros), stats.randint(0, len(free))) > SIGNIFICANCE
    assert np.all(np.isin(3, found))


def test_blocks_of_counts_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dp_sparse.selection.top_k.select._BLOCK", 2)
    counts = [2, 1, 4, 1, 3, 2, 2]
    seen = row_counts(dict(enumerate(counts)), len(counts))
    found = selections(SOURCES["laplace"], seen, K, SCALE, RUNS)
    noise = reference.STANDARD_NOISE["laplace"]
    for scale, accepted in ((SCALE, True), (1.5 * SCALE, False)):
        chosen = reference.noisy_top_k(counts, K, noise, scale, 200_000, seed=4)
        wanted = np.nonzero(chosen)[1].reshape(-1, K)
        assert (same_subsets(found, wanted) > SIGNIFICANCE) == accepted


@pytest.mark.cases(1)
@pytest.mark.parametrize("source", [GumbelTopK(2.0), LaplaceTopK(2.0), GaussianTopK(2.0)])
def test_the_noise_fits_the_lookups(source: NoiseSource) -> None:
    """Two tables, one of up to 8 lookups: p = 9, on which the Gaussian's deviation depends."""
    examples = ({"a": np.repeat([0, 1], [6, 2]), "b": np.full((8, 8), 3)}, np.zeros(8))
    tables = {"a": TopKTable(2), "b": TopKTable(4, max_lookups=8)}
    runs = 4_000
    chosen = [
        select_top_k(examples, tables, 2, source, progress=False).row_ids["a"] for _ in range(runs)
    ]
    hits = int(np.count_nonzero(np.concatenate(chosen) == 0))
    differences = {
        "GaussianTopK": lambda scale: stats.norm.cdf(4 / (scale * 2**0.5)),
        "GumbelTopK": lambda scale: stats.logistic.cdf(4 / scale),
        "LaplaceTopK": lambda scale: 1 - np.exp(-4 / scale) * (2 + 4 / scale) / 4,
    }
    chance = differences[type(source).__name__]
    right = 2.0 * 3 if isinstance(source, GaussianTopK) else 2.0
    assert binomial(hits, runs, chance(right)) > SIGNIFICANCE
    for wrong in (right / 1.5, right * 1.5, 2.0 * 9):
        assert binomial(hits, runs, chance(wrong)) < SIGNIFICANCE


# ------------------------------------------------------------------------------------------ public


def test_public_rows_are_the_most_frequent() -> None:
    x = {"t": np.array([4, 4, 4, 1, 1, 6, 6, 3, 7])}
    found = select_top_k((x, x["t"]), {"t": 9}, 4, PublicRows(), progress=False)
    assert found.row_ids["t"].tolist() == [1, 3, 4, 6]  # of 3 and 7, with one each, the lower
    assert not found.costs and found.event == dp_accounting.NoOpDpEvent()
    more = select_top_k((x, x["t"]), {"t": 9}, 7, PublicRows(), progress=False)
    assert more.row_ids["t"].tolist() == [0, 1, 2, 3, 4, 6, 7]  # then the lowest of those not seen


def test_public_streams_need_no_number() -> None:
    batches = [{"t": np.array([2, 2, 1])}, {"t": np.array([2])}]
    found = select_top_k(batches, {"t": 5}, 1, PublicRows(), progress=False)
    assert found.row_ids["t"].tolist() == [2]


def test_public_counts_of_nothing() -> None:
    with (
        pytest.warns(UserWarning, match="there was no example"),
        pytest.raises(ValueError, match=r"look up every table, got none for \['t'\].*weight of 0"),
    ):
        select_top_k([], {"t": 5}, 1, PublicRows(), progress=False)


# ----------------------------------------------------------------------------- what it gives, edges


def private(examples: Any, tables: Any, k: int, **options: Any) -> SelectedRows:
    """Gaussian noise too small to matter, unless counts are equal."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return select_top_k(examples, tables, k, GaussianTopK(1e-3), progress=False, **options)


def test_all_tables_at_once() -> None:
    rng = np.random.default_rng(5)
    x = {
        "user": np.minimum(rng.geometric(0.1, 5000) - 1, 99),
        "tokens": np.minimum(rng.geometric(0.05, (5000, 10)), 499),
        "tiny": rng.integers(0, 3, 5000),
    }
    tables = {"user": 100, "tokens": TopKTable(500, 10, padding_id=1), "tiny": 3}
    found = private((x, x["user"]), tables, 33)
    assert {name: len(rows) for name, rows in found.row_ids.items()} == {
        "user": 15,
        "tokens": 15,
        "tiny": 3,
    }
    assert found.row_ids["user"].tolist() == list(range(15))
    assert found.row_ids["tokens"].tolist() == [*range(2, 17)]
    assert (found.lookups, found.selected) == (11, 30)  # the tiny table is kept whole: no cost
    assert found.event == dp_accounting.GaussianDpEvent(1e-3)
    dataset = tf.data.Dataset.from_tensor_slices((x, x["user"])).batch(512)
    again = private(dataset, tables, 33, num_examples=5000)
    for name in tables:
        np.testing.assert_array_equal(again.row_ids[name], found.row_ids[name])


def test_weights_share_out_the_rows() -> None:
    x = {"a": np.array([1, 1, 2]), "b": np.array([3, 0, 0])}
    found = private((x, x["a"]), {"a": 5, "b": 5}, 3, weights={"a": 0, "b": 1})
    assert found.row_ids["a"].size == 0 and found.row_ids["b"].size == 3
    assert found.lookups == 1  # no row of a is selected, so it was not counted


@pytest.mark.parametrize("k", [0, 8, 100])
def test_nothing_to_choose_costs_nothing(k: int) -> None:
    """Without rows to select, or with every table kept whole, the examples are not even read."""
    found = private(None, {"a": 5, "b": 3}, k)
    assert [len(rows) for rows in found.row_ids.values()] == ([0, 0] if k == 0 else [5, 3])
    assert not found.costs and found.event == dp_accounting.NoOpDpEvent()


def test_a_table_with_fewer_rows_than_its_share() -> None:
    x = {"a": np.array([0, 0, 4]), "b": np.array([1, 1, 0])}
    found = private((x, x["a"]), {"a": 50, "b": 2}, 6)
    assert len(found.row_ids["a"]) == 4 and found.row_ids["b"].tolist() == [0, 1]


def test_equal_counts_are_chosen_at_random() -> None:
    seen = row_counts(dict.fromkeys(range(4), 7), 4)
    found = selections(GumbelTopK(1.0), seen, 2, 1.0, 3_000)
    pairs = {rows: i for i, rows in enumerate(itertools.combinations(range(4), 2))}
    chosen = [pairs[tuple(rows)] for rows in found.tolist()]
    assert chi_square(chosen, stats.randint(0, len(pairs))) > SIGNIFICANCE


@pytest.mark.parametrize("source", SOURCES.values())
def test_no_examples(source: NoiseSource) -> None:
    """A private source must not tell no example from one: it chooses at random, with a warning."""
    empty = ({"t": np.zeros(0, np.int64)}, np.zeros(0))
    with pytest.warns(UserWarning, match="there was no example"):
        found = select_top_k(empty, {"t": 10**9}, 5, source, progress=False)
    assert len(found.row_ids["t"]) == 5 and found.costs


def test_a_huge_table() -> None:
    """10⁹ rows, of which 1000 are seen; nothing of the table's size could be allocated in time."""
    rng = np.random.default_rng(6)
    rows = rng.integers(0, 10**9, 1000)
    x = {"t": np.repeat(rows, 500)}
    found = select_top_k((x, x["t"]), {"t": 10**9}, 3000, GaussianTopK(20.0), progress=False)
    assert len(np.intersect1d(found.row_ids["t"], rows)) == len(np.unique(rows))
    assert len(found.row_ids["t"]) == 3000


def test_bad_ids() -> None:
    x = {"t": np.array([0, 9, 3])}
    with pytest.raises(BadExampleError, match=r"table 't' in \[0, 5\), got 9 in example 1"):
        private((x, x["t"]), {"t": 5}, 2)
    source = GaussianTopK(1e-3)
    with pytest.warns(UserWarning, match="1 ids outside table 't'"):
        found = select_top_k((x, x["t"]), {"t": 5}, 2, source, quarantine=True, progress=False)
    assert found.row_ids["t"].tolist() == [0, 3]


def test_streams_need_a_number_of_examples() -> None:
    batches = [{"t": np.array([2, 2, 1])}, {"t": np.array([2])}]
    with pytest.raises(ValueError, match="Expected num_examples with examples that have no length"):
        private(batches, {"t": 5}, 2)
    assert private(batches, {"t": 5}, 2, num_examples=4).row_ids["t"].tolist() == [1, 2]


def test_a_source_is_an_object() -> None:
    def unread() -> Any:
        raise AssertionError("the examples were read")
        yield

    for wrong in (GaussianTopK, "gumbel", 3.0):
        with pytest.raises(ValueError, match=r"Expected source to be GaussianTopK\(...\)"):
            select_top_k(unread(), {"a": 10}, 3, wrong, num_examples=5)  # type: ignore[arg-type]


def test_bad_arguments() -> None:
    x = ({"t": np.array([1])}, np.zeros(1))
    with pytest.raises(ValueError, match="Expected k to be a whole number >= 0, got k=-1"):
        private(x, {"t": 5}, -1)
    with pytest.raises(ValueError, match="Expected num_rows to be a whole number > 0"):
        private(x, {"t": 0}, 1)
    with pytest.raises(ValueError, match="Expected weights for the tables"):
        private(x, {"t": 5}, 1, weights={"u": 1.0})

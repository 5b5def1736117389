"""Noisy histograms: what they add up, what is selected from them, what they cost."""

from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

import dp_sparse
from dp_sparse.selection.top_k.histograms import HistogramRows
from dp_sparse.selection.top_k.noise_sources import NoiseSource

QUIET = 0.01  # of noise that rounds to 0


def quiet(counts: dict[str, list[int]], data: str = "a day") -> dp_sparse.NoisyHistogram:
    arrays = {name: np.array(values) for name, values in counts.items()}
    sizes = {name: len(values) for name, values in counts.items()}
    return dp_sparse.histogram_of_counts(arrays, sizes, QUIET, data=data)


def noise_of(rows: int, noise_multiplier: float, lookups: int) -> np.ndarray:
    table = dp_sparse.TopKTable(rows, max_lookups=lookups)
    counts = np.arange(rows)
    found = dp_sparse.histogram_of_counts(
        {"t": counts}, {"t": table}, noise_multiplier, data="a day"
    )
    return found.counts["t"] - counts


def test_examples_are_counted_once_for_each_of_their_rows() -> None:
    x = {"one": np.array([2, 2, 0]), "many": np.array([[1, 1, 3], [3, 1, 1], [0, 0, 0]])}
    tables = {"one": 3, "many": dp_sparse.TopKTable(5, max_lookups=2, padding_id=0)}
    found = dp_sparse.noisy_histogram((x, np.ones(3)), tables, QUIET, data="a day", progress=False)
    assert found.counts["one"].tolist() == [1, 0, 2]
    assert found.counts["many"].tolist() == [0, 2, 0, 2, 0]
    assert found.lookups == 3


class TestNoise:
    ROWS, LOOKUPS, SIGMA = 40_000, 9, 4.0

    def p_value(self, noise: np.ndarray, sigma: float) -> float:
        """Of its variance: that of the Gaussian, and 1/12 of rounding."""
        expected = sigma**2 * self.LOOKUPS + 1 / 12
        statistic = np.sum(noise.astype(float) ** 2) / expected
        return float(
            2
            * min(
                scipy.stats.chi2(len(noise)).cdf(statistic),
                scipy.stats.chi2(len(noise)).sf(statistic),
            )
        )

    def test_it_is_whole_and_has_the_deviation(self) -> None:
        noise = noise_of(self.ROWS, self.SIGMA, self.LOOKUPS)
        assert noise.dtype == np.int64
        assert self.p_value(noise, self.SIGMA) > 1e-6
        deviation = self.SIGMA * np.sqrt(self.LOOKUPS)
        assert (
            scipy.stats.kstest(
                (noise + np.random.default_rng(0).uniform(-0.5, 0.5, len(noise))) / deviation,
                "norm",
            ).pvalue
            > 1e-6
        )

    @pytest.mark.parametrize("factor", [2 / 3, 3 / 2, 1.05])
    def test_another_deviation_is_seen(self, factor: float) -> None:
        noise = noise_of(self.ROWS, factor * self.SIGMA, self.LOOKUPS)
        assert self.p_value(noise, self.SIGMA) < 1e-6

    def test_tables_and_draws_have_noise_of_their_own(self) -> None:
        zeros = {"a": np.zeros(self.ROWS, int), "b": np.zeros(self.ROWS, int)}
        tables = {"a": self.ROWS, "b": self.ROWS}
        drawn = [dp_sparse.histogram_of_counts(zeros, tables, 9.0, data="d") for _ in range(2)]
        noise = [h.counts[name] for h in drawn for name in ("a", "b")]
        correlations = np.corrcoef(noise)[np.triu_indices(4, 1)]
        assert np.all(np.abs(correlations) < 6 / np.sqrt(self.ROWS))
        assert drawn[0].histogram_id != drawn[1].histogram_id


@given(
    counts=st.lists(st.lists(st.integers(0, 9), min_size=6, max_size=6), min_size=1, max_size=4),
    k=st.integers(0, 8),
)
def test_the_rows_are_those_of_the_largest_sums(counts: list[list[int]], k: int) -> None:
    histograms = [quiet({"t": values}) for values in counts]
    rows = dp_sparse.select_from_histograms(histograms, k, own=None).row_ids["t"]
    total = np.sum(counts, axis=0)
    expected = sorted(sorted(range(6), key=lambda row: (-total[row], row))[:k])
    assert rows.tolist() == expected


class TestCost:
    def test_training_on_counted_examples_pays_for_their_histogram_alone(self) -> None:
        days = [quiet({"t": [1, 2, 3]}, day) for day in ("Monday", "Tuesday")]
        rows = dp_sparse.select_from_histograms(days, 1, own=days[1])
        assert rows.event == dp_accounting.GaussianDpEvent(QUIET) == days[1].release.event
        assert "sum of 2 noisy histograms" in rows.release.name

    def test_training_on_others_pays_nothing(self) -> None:
        rows = dp_sparse.select_from_histograms([quiet({"t": [1, 2, 3]})], 1, own=None)
        assert not rows.costs
        assert "whose plans pay for them" in rows.release.name

    def test_an_optimizer_wants_the_own_histogram_paid(self) -> None:
        histogram = quiet({"t": [1, 2, 3]})
        plan = dp_sparse.PrivacyPlan(
            dp_sparse.PrivacyBudget(1.0, 1e-3), dp_sparse.StreamSampling(8, 4)
        ).calibrate()
        for own in (None, histogram):
            rows = dp_sparse.select_from_histograms([histogram], 1, own=own)
            if own is None:
                dp_sparse.DPFESTOptimizer("sgd", plan, 1.0, rows)
            else:
                with pytest.raises(dp_sparse.PrivacyError, match="does not pay for rows"):
                    dp_sparse.DPFESTOptimizer("sgd", plan, 1.0, rows)

    def test_the_cost_survives_saving(self, tmp_path: Path) -> None:
        histogram = quiet({"t": [1, 2, 3], "u": [3, 0, 0]})
        rows = dp_sparse.select_from_histograms([histogram], 2, own=histogram)
        rows.save(tmp_path / "rows.npz")
        assert dp_sparse.SelectedRows.load(tmp_path / "rows.npz").release == rows.release
        source = NoiseSource.from_config(rows.source.get_config())
        assert source == HistogramRows(QUIET, (histogram.histogram_id,))
        with pytest.raises(dp_sparse.PrivacyError, match="draws no noise"):
            dp_sparse.select_top_k(
                ({"t": np.zeros(1, int)}, np.zeros(1)), {"t": 3}, 1, source, progress=False
            )


class TestBadInput:
    def test_a_histogram_is_saved_whole(self, tmp_path: Path) -> None:
        histogram, path = quiet({"t": [1, 2, 3]}), tmp_path / "h.npz"
        histogram.save(path)
        loaded = dp_sparse.NoisyHistogram.load(path)
        assert loaded.release == histogram.release
        assert loaded.counts["t"].tolist() == [1, 2, 3]
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(ValueError, match="another or a damaged file"):
            dp_sparse.NoisyHistogram.load(path)

    def test_own_is_one_of_them(self) -> None:
        with pytest.raises(ValueError, match="own to be one of the 1 histograms"):
            dp_sparse.select_from_histograms(
                [quiet({"t": [1, 2]})], 1, own=quiet({"t": [1, 2]}, "Friday")
            )

    def test_each_once(self) -> None:
        histogram = quiet({"t": [1, 2]}, "Friday")
        with pytest.raises(ValueError, match="each histogram once, got that of Friday twice"):
            dp_sparse.select_from_histograms([histogram, histogram], 1, own=None)

    def test_none(self) -> None:
        with pytest.raises(ValueError, match="at least one histogram"):
            dp_sparse.select_from_histograms([], 1, own=None)

    def test_other_tables(self) -> None:
        with pytest.raises(ValueError, match="histograms of the same tables"):
            dp_sparse.select_from_histograms(
                [quiet({"t": [1, 2]}), quiet({"t": [1, 2, 3]})], 1, own=None
            )

    def test_counts_of_another_size(self) -> None:
        with pytest.raises(ValueError, match=r"Expected counts \[rows\] of the tables"):
            dp_sparse.histogram_of_counts({"t": np.zeros(3)}, {"t": 4}, 1.0, data="a day")

    def test_no_noise(self) -> None:
        with pytest.raises(ValueError, match="noise_multiplier"):
            dp_sparse.histogram_of_counts({"t": np.zeros(4)}, {"t": 4}, 0.0, data="a day")

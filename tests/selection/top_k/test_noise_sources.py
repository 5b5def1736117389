"""Noise quantiles against SciPy, down to the tails; what each noise source costs; round trips."""

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from dp_sparse.accounting.events import GumbelTopKDpEvent
from dp_sparse.selection.top_k.noise_sources import (
    GaussianTopK,
    GumbelTopK,
    LaplaceTopK,
    NoiseSource,
    PublicRows,
    Quantile,
    random_quantiles,
)
from tests.reference.distributions import SIGNIFICANCE

PRIVATE = [
    (GaussianTopK(2.0), stats.norm),
    (GumbelTopK(3.0), stats.gumbel_r),
    (LaplaceTopK(4.0), stats.laplace),
]
RNG = np.random.Generator(np.random.Philox(key=2))


@pytest.mark.parametrize(("source", "distribution"), PRIVATE)
def test_quantiles(source: NoiseSource, distribution: stats.rv_continuous) -> None:
    tail = np.array([0.5, 0.4, 1e-3, 1e-16, 1e-30])
    upper = source.quantiles(Quantile(tail, np.ones(5, bool)))
    lower = source.quantiles(Quantile(tail, np.zeros(5, bool)))
    np.testing.assert_allclose(distribution.sf(upper), tail, rtol=1e-9)
    np.testing.assert_allclose(distribution.cdf(lower), tail, rtol=1e-9)


@pytest.mark.parametrize(("source", "distribution"), PRIVATE)
def test_noise_has_the_right_distribution(
    source: NoiseSource, distribution: stats.rv_continuous
) -> None:
    noise = source.quantiles(random_quantiles(100_000, RNG))
    assert stats.kstest(noise, distribution.cdf).pvalue > SIGNIFICANCE
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(wrong * noise, distribution.cdf).pvalue < SIGNIFICANCE


def test_scales() -> None:
    assert GaussianTopK(2.0).scale_of(26) == 2 * 26**0.5
    assert GumbelTopK(3.0).scale_of(26) == 3
    assert LaplaceTopK(4.0).scale_of(26) == 4


def test_events() -> None:
    laplace = dp_accounting.SelfComposedDpEvent(dp_accounting.LaplaceDpEvent(4.0), 26)
    assert PublicRows().event(26, 100) == dp_accounting.NoOpDpEvent()
    assert GaussianTopK(2.0).event(26, 100) == dp_accounting.GaussianDpEvent(2.0)
    assert GumbelTopK(3.0).event(26, 100) == GumbelTopKDpEvent(3.0, 26, 100)
    assert LaplaceTopK(4.0).event(26, 100) == laplace


@pytest.mark.parametrize("source", [PublicRows(), *(source for source, _ in PRIVATE)])
def test_round_trip(source: NoiseSource) -> None:
    assert NoiseSource.from_config(source.get_config()) == source


def test_another_name_is_refused() -> None:
    with pytest.raises(
        ValueError, match="Expected a NoiseSource among .*GaussianTopK.*got 'Exact'"
    ):
        NoiseSource.from_config({"class": "Exact"})


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), None])
def test_bad_noise(value: float) -> None:
    with pytest.raises(ValueError, match="Expected noise_multiplier > 0"):
        GaussianTopK(value)
    for source in (GumbelTopK, LaplaceTopK):
        with pytest.raises(ValueError, match="Expected scale > 0"):
            source(value)


def test_noise_that_hides_nothing() -> None:
    with pytest.raises(ValueError, match=r"Expected scale >= 0.01, in counts, got scale=0.001"):
        GumbelTopK(0.001)

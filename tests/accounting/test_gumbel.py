"""The cost of the one-shot Gumbel top-k: against quadrature, exact selections and simulation."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from dp_sparse.accounting.accountant import Accountant, epsilon_of
from dp_sparse.accounting.privacy_loss import (
    GumbelTopKDpEvent,
    gumbel_loss,
    histogram_delta,
    peeling_delta,
)
from tests.reference import top_k as reference

MANY = 10**9  # so many rows that peeling is of no help

CASES = [(1, 0.01), (1, 1.0), (26, 1 / 2600), (26, 0.3), (26, 2.0), (512, 0.01)]


@pytest.mark.parametrize(("lookups", "e0"), CASES)
def test_histogram_delta_is_the_reference(lookups: int, e0: float) -> None:
    epsilons = np.array([0.0, 0.3, 1.0, 2.5]) * e0 * math.sqrt(lookups)
    removed, added = histogram_delta(epsilons, 1 / e0, lookups)
    wanted = [reference.gumbel_deltas(epsilon, e0, lookups) for epsilon in epsilons]
    np.testing.assert_allclose(np.stack([removed, added], 1), wanted, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("e0", [0.3, 1.5])
def test_histogram_delta_is_what_noisy_counts_tell(e0: float) -> None:
    """The hockey-stick divergence of one Gumbel density and its shift by one, by quadrature."""
    x = np.linspace(-12 / e0, 60 / e0, 2_000_001)
    density, shifted = stats.gumbel_r.pdf(e0 * x) * e0, stats.gumbel_r.pdf(e0 * (x - 1)) * e0
    for epsilon in (0.0, 0.5 * e0, 2 * e0):
        removed, added = histogram_delta(np.array([epsilon]), 1 / e0, 1)
        for found, upper, lower in ((removed, shifted, density), (added, density, shifted)):
            exact = np.trapezoid(np.maximum(upper - math.exp(epsilon) * lower, 0), x)
            assert found[0] == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("rho", [1e-7, 1e-4, 0.02, 3.0])
def test_peeling_delta_is_the_best_order(rho: float) -> None:
    """ρ = k·ε0²/8, here with k = 50; never below the best order's δ."""
    epsilons = np.array([0.0, 0.5, 2.0, 6.0]) * math.sqrt(rho) + rho
    found = peeling_delta(epsilons, math.sqrt(50 / (8 * rho)), 50)
    best = [reference.zcdp_delta(epsilon, rho) for epsilon in epsilons]
    np.testing.assert_allclose(found, best, rtol=1e-4)
    assert np.all(found >= np.array(best) * (1 - 1e-9))


@pytest.mark.parametrize("scale", [0.7, 2.0, 10.0])
@pytest.mark.parametrize("counts", [[0, 0, 0, 0, 0], [9, 1, 0, 0, 4], [3, 3, 3, 0, 0]])
def test_exact_selections_cost_no_more(counts: list[float], scale: float) -> None:
    """Every set of 2 of 5 rows, for an example that looks up 1 to 4 of them."""
    for lookups in range(1, 5):
        changed = [count + (row < lookups) for row, count in enumerate(counts)]
        sets = list(itertools.combinations(range(5), 2))
        without, with_it = (
            np.array([reference.gumbel_subset_probability(c, rows, scale) for rows in sets])
            for c in (counts, changed)
        )
        epsilons = np.array([0.0, 0.1, 0.5, 1.0]) / scale
        loss = gumbel_loss(GumbelTopKDpEvent(scale, lookups, 2), 1e-3 / scale)
        bound = np.asarray(loss.get_delta_for_epsilon(epsilons))
        for upper, lower in ((without, with_it), (with_it, without)):
            gains = np.maximum(upper - np.exp(epsilons)[:, None] * lower, 0)
            assert np.all(gains.sum(axis=1) <= bound + 1e-12)


@pytest.mark.parametrize(
    ("lookups", "selected"), [(1, 1), (1, 1000), (26, 4), (26, 60), (26, MANY)]
)
@pytest.mark.parametrize("scale", [2.0, 98.2, 2600.0])
def test_privacy_loss_dominates_by_little(scale: float, lookups: int, selected: int) -> None:
    """On the grid δ is at most the smaller bound, and off the hull's chords equal to it."""
    interval = min(1e-3, 1e-2 / scale)
    loss = gumbel_loss(GumbelTopKDpEvent(scale, lookups, selected), interval)
    epsilons = interval * np.arange(0, 400, 7)
    found = np.asarray(loss.get_delta_for_epsilon(epsilons))
    histogram = np.maximum(*histogram_delta(epsilons, scale, lookups))
    peeled = peeling_delta(epsilons, scale, selected)
    assert np.all(found <= np.minimum(histogram, peeled) * (1 + 1e-7) + 1e-10)
    if selected == MANY:
        np.testing.assert_allclose(found, histogram, rtol=1e-6, atol=1e-10)
    slopes = np.diff(found) / np.diff(np.exp(epsilons))
    assert np.all(np.diff(slopes) >= -1e-6 * np.abs(slopes[:-1]) - 1e-10 / interval)


def test_peeling_helps_when_few_rows_are_chosen() -> None:
    few = epsilon_of(GumbelTopKDpEvent(100.0, 26, 10), 1e-8, 1e-4)
    assert few < 0.7 * epsilon_of(GumbelTopKDpEvent(100.0, 26, MANY), 1e-8, 1e-4)
    rho = 10 / (8 * 100.0**2)
    assert reference.zcdp_delta(few, rho) == pytest.approx(1e-8, rel=0.05)


def test_directions_compose_with_their_own() -> None:
    """Removing an example: the heavy tail of a sampled Gaussian, the light one of Gumbel noise.

    δ of the pair by sampling losses under true densities; composing across is told apart.
    """
    q, sigma, scale, lookups, epsilon = 0.3, 0.7, 0.9, 1, 2.0
    rng = np.random.default_rng(7)
    draws = 2_000_000

    def gaussian_loss(with_example: bool) -> np.ndarray:
        hit = (rng.random(draws) < q) & with_example
        x = hit + sigma * rng.normal(size=draws)
        ratio = np.log1p(q * np.expm1((2 * x - 1) / (2 * sigma**2)))
        return ratio if with_example else -ratio

    def gumbel_loss(with_example: bool) -> np.ndarray:
        x = with_example + scale * rng.gumbel(size=draws)
        noise = stats.gumbel_r(scale=scale)
        ratio = noise.logpdf(x - 1) - noise.logpdf(x)
        return ratio if with_example else -ratio

    def delta(loss: np.ndarray) -> float:
        return float(np.mean(np.maximum(-np.expm1(epsilon - loss), 0)))

    accountant = Accountant(value_discretization_interval=1e-3)
    sampled = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
    accountant.compose(sampled).compose(GumbelTopKDpEvent(scale, lookups, MANY))
    found = accountant.get_delta(epsilon)
    aligned = max(delta(gaussian_loss(side) + gumbel_loss(side)) for side in (True, False))
    crossed = max(delta(gaussian_loss(side) + gumbel_loss(not side)) for side in (True, False))
    error = 2.5 / math.sqrt(draws)  # six deviations
    assert abs(found - aligned) < error
    assert abs(found - crossed) > 4 * error


def test_accountant_knows_other_events_and_nests() -> None:
    gumbel = GumbelTopKDpEvent(50.0, 3, MANY)
    twice = epsilon_of(dp_accounting.SelfComposedDpEvent(gumbel, 2), 1e-6, 1e-4)
    assert twice == pytest.approx(
        epsilon_of(dp_accounting.ComposedDpEvent((gumbel, gumbel)), 1e-6, 1e-4), abs=1e-4
    )
    # Two histograms of 3 counts are one of 6.
    assert twice == pytest.approx(
        epsilon_of(GumbelTopKDpEvent(50.0, 6, MANY), 1e-6, 1e-4), abs=2e-3
    )
    plain = dp_accounting.pld.PLDAccountant().compose(dp_accounting.GaussianDpEvent(2.0))
    ours = epsilon_of(dp_accounting.GaussianDpEvent(2.0), 1e-5, 1e-4)
    assert 0 <= ours - plain.get_epsilon(1e-5) < 1e-7  # rounded up
    assert not Accountant().supports(dp_accounting.UnsupportedDpEvent())
    assert Accountant().supports(gumbel)


@pytest.mark.parametrize("scale", [0.05, 0.2, 1.0, 5.0, 1e6])
@pytest.mark.parametrize("lookups", [1, 26, 512])
def test_every_noise_has_a_price(scale: float, lookups: int) -> None:
    found = epsilon_of(GumbelTopKDpEvent(scale, lookups, 10_000), 1e-6, interval=1e-2)
    assert found > 3 if scale <= 1 else 0 <= found < 40


def test_noise_too_small_to_hide_anything() -> None:
    assert epsilon_of(GumbelTopKDpEvent(0.01, 1, 5), 1e-6, interval=1e-2) == math.inf


# ------------------------------------------------- against numbers derived and simulated elsewhere

DELTA = 1 / 4.5e7

# ε0, δ at ε = ε0 of one shifted count, ε at δ = 1/4.5e7
ONE_COUNT = [
    (0.01, 0.0013601195401011235, 0.12077284473588475),
    (0.1, 0.014209637463104635, 1.5059604014014674),
    (1.0, 0.19737919372656032, 28.491726558398668),
]


@pytest.mark.parametrize(("e0", "delta", "epsilon"), ONE_COUNT)
def test_one_count(e0: float, delta: float, epsilon: float) -> None:
    found = np.maximum(*histogram_delta(np.array([e0]), 1 / e0, 1))[0]
    assert found == pytest.approx(delta, rel=1e-9)
    event = GumbelTopKDpEvent(1 / e0, 1, MANY)
    assert epsilon_of(event, DELTA, interval=1e-3 * e0) == pytest.approx(epsilon, rel=1e-4)


def test_the_paper_s_setting() -> None:
    """26 features at ε = 0.01 in all, which the paper gives each as 0.01/26."""
    claimed = np.maximum(*histogram_delta(np.array([0.01]), 2600.0, 26))[0]
    assert claimed == pytest.approx(1.7588440956141848e-08, rel=1e-9)
    split = epsilon_of(GumbelTopKDpEvent(2600.0, 26, MANY), DELTA, interval=1e-6)
    assert split == pytest.approx(0.009835671263675396, rel=1e-4)
    whole = epsilon_of(GumbelTopKDpEvent(100.0, 26, MANY), DELTA, interval=1e-5)
    assert whole == pytest.approx(0.31576016008828256, rel=1e-4)


def test_simulated_delta() -> None:
    """From 4 million draws, 0.3548."""
    found = np.maximum(*histogram_delta(np.array([1.0]), 1 / 0.3, 26))[0]
    assert found == pytest.approx(0.35491437357757394, rel=1e-12)


@pytest.mark.parametrize(("e0", "gap", "log_ratio"), [(0.1, 300, 0.2999999999999), (1.0, 60, 3.0)])
def test_pure_price_is_that_of_k_rows(e0: float, gap: float, log_ratio: float) -> None:
    """k = 3 of 6 rows become more frequent by 1 and are chosen: e^(k·ε0) times as likely."""
    before, after = (
        reference.gumbel_subset_probability([low] * 3 + [gap] * 3, range(3), 1 / e0)
        for low in (0.0, 1.0)
    )
    assert math.log(after / before) == pytest.approx(log_ratio, rel=1e-9)

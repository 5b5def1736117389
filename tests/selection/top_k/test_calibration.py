"""The cost of a selection with training: closed forms, numbers derived elsewhere, a plan's ε."""

import dataclasses
import math
import warnings

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import pld_pmf, privacy_loss_distribution

from dp_sparse.accounting.accountant import Accountant
from dp_sparse.accounting.plan import PrivacyBudget, PrivacyPlan, Release
from dp_sparse.accounting.release_noise import smallest_joint_noise, smallest_noise
from dp_sparse.sampling.poisson import PoissonSampling
from dp_sparse.sampling.stream import StreamSampling
from dp_sparse.selection.top_k.calibration import calibrate_top_k
from dp_sparse.selection.top_k.counting import TopKTable
from dp_sparse.selection.top_k.noise_sources import (
    GaussianTopK,
    GumbelTopK,
    LaplaceTopK,
    NoiseSource,
    PublicRows,
)
from tests.reference import top_k as reference

# DP-SGD on Criteo: five epochs whose ε is 0.989995 at δ = 1/4.5e7, so that 0.01 of ε = 1 is left.
DELTA = 1 / 4.5e7
TRAINING = dp_accounting.SelfComposedDpEvent(
    dp_accounting.PoissonSampledDpEvent(
        4.4676536530911005e-05, dp_accounting.GaussianDpEvent(0.6010345458984375)
    ),
    111_916,
)
MANY = 100_000
# Every loss is rounded up by at most 512·2⁻⁵³ / 1e-4 of it, so δ after 111,916 steps by 6.4e-5 of
# itself, and composition adds less. d log δ / dε is 5 there, so ε is up to 1.3e-5 above.
LEAST, MOST = 1 - 1e-7, 1 + 2e-5

# Source, lookups of an example, and the noise on a count for ε = 1 together with that training:
# dp-accounting's losses at interval 1e-4, composed in extended precision (tests/reference), where
# ε moves by less than 1e-7 from one processor to another. (float64 gave 95.77 or 95.62, not 96.06.)
JOINT = [
    (GaussianTopK, 26, 96.06296064358551),
    (GaussianTopK, 1, 18.839496570924886),
    (GaussianTopK, 512, 426.28914494132295),
    (LaplaceTopK, 26, 95.84929304760288),
    (LaplaceTopK, 1, 18.436001382560978),
    (LaplaceTopK, 128, 212.95817631788563),
]
# The same for Gumbel noise, from composing the heavier direction with both of training's.
JOINT_GUMBEL = [(26, 98.50175992455736), (1, 21.770573230585384), (128, 215.55035962352292)]

# Source, lookups, rows selected, and the noise for ε = 0.01 on its own.
APART = [
    (GaussianTopK, 26, MANY, 2016.2772163810141, 1e-4),
    (GaussianTopK, 1, MANY, 395.4244950438205, 1e-4),
    (LaplaceTopK, 26, MANY, 1928.691939310188, 2e-4),
    (LaplaceTopK, 1, MANY, 100.0, 2e-4),
    (GumbelTopK, 26, MANY, 2560.1875985998327, 2e-4),
    (GumbelTopK, 26, 100, 2132.4899264896285, 2e-4),
    (GumbelTopK, 1, MANY, 974.5408513348177, 2e-4),
    (GumbelTopK, 512, MANY, 9474.635256553755, 2e-4),
]


@pytest.fixture(scope="module")
def training() -> privacy_loss_distribution.PrivacyLossDistribution:
    return Accountant().compose(TRAINING).distribution


def noise_of(source: type[NoiseSource], noise: float, lookups: int) -> float:
    """The number that makes a source of this noise on each count."""
    return noise / math.sqrt(lookups) if source is GaussianTopK else noise


def joint_epsilon(
    training: privacy_loss_distribution.PrivacyLossDistribution, event: dp_accounting.DpEvent
) -> float:
    return Accountant().compose(event).add(training).get_epsilon(DELTA)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("source", "lookups", "noise"), JOINT)
def test_joint_price(
    training: privacy_loss_distribution.PrivacyLossDistribution,
    source: type[NoiseSource],
    lookups: int,
    noise: float,
) -> None:
    """ε = 1 at the noise derived elsewhere, and never below; with half a percent less, above."""
    value = noise_of(source, noise, lookups)
    assert LEAST <= joint_epsilon(training, source(value).event(lookups, MANY)) <= MOST
    assert joint_epsilon(training, source(0.995 * value).event(lookups, MANY)) > 1 + 5e-5


@pytest.mark.slow
@pytest.mark.parametrize(("lookups", "noise"), JOINT_GUMBEL)
def test_joint_price_of_gumbel_noise(
    training: privacy_loss_distribution.PrivacyLossDistribution, lookups: int, noise: float
) -> None:
    """Direction by direction it is a little less than with the heavier one on both sides."""
    interval = 1e-4
    epsilons = interval * np.arange(-20_000, 20_001)
    heavier = []
    for epsilon in epsilons:
        less, more = reference.gumbel_deltas(abs(epsilon), 1 / noise, lookups)
        mirrored = 1 - math.exp(epsilon) + math.exp(epsilon) * less
        heavier.append(more if epsilon >= 0 else mirrored)
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots(
        interval, np.arange(-20_000, 20_001), np.clip(heavier, 0, 1)
    )
    loss = privacy_loss_distribution.PrivacyLossDistribution(pmf)
    both = Accountant().add(training).add(loss).get_epsilon(DELTA)
    assert LEAST <= both <= MOST
    ours = joint_epsilon(training, GumbelTopK(noise).event(lookups, MANY))
    assert 0.995 < ours < MOST
    assert joint_epsilon(training, GumbelTopK(0.75 * noise).event(lookups, MANY)) > 1


@pytest.mark.slow
def test_joint_price_of_peeling(
    training: privacy_loss_distribution.PrivacyLossDistribution,
) -> None:
    """zCDP as one (ε, δ) gives a scale of 548 for 100 rows; its whole curve gives far less."""
    rho = 4.158114885432627e-05
    assert rho == pytest.approx(100 / (8 * 548.2855046282941**2))
    guarantee = dp_accounting.pld.common.DifferentialPrivacyParameters(
        0.05, reference.zcdp_delta(0.05, rho)
    )
    point = training.compose(privacy_loss_distribution.from_privacy_parameters(guarantee))
    assert point.get_epsilon_for_delta(DELTA) == pytest.approx(1, abs=2e-4)
    assert joint_epsilon(training, GumbelTopK(548.0).event(10**6, 100)) < 0.992
    assert joint_epsilon(training, GumbelTopK(125.0).event(10**6, 100)) < 1


@pytest.mark.parametrize(("source", "lookups", "selected", "noise", "tolerance"), APART)
def test_price_apart(
    source: type[NoiseSource], lookups: int, selected: int, noise: float, tolerance: float
) -> None:
    found = smallest_noise(
        lambda value: source(value).event(lookups, selected), epsilon=0.01, delta=DELTA
    )
    assert found == pytest.approx(noise_of(source, noise, lookups), rel=tolerance)


@pytest.mark.slow
def test_smallest_joint_noise() -> None:
    """21 times less than if 0.01 is spent apart, as in the paper.

    What is left for it, 0.01, shrinks by up to `MOST` − 1; it goes with 1 / noise².
    """
    found = smallest_joint_noise(
        TRAINING, lambda value: GaussianTopK(value).event(26, MANY), epsilon=1.0, delta=DELTA
    )
    larger = found * 26**0.5 / 96.06296064358551 - 1
    assert -1e-7 <= larger <= (MOST - 1) / 0.01 / 2 + 1e-4
    assert 2016.2772163810141 / (found * 26**0.5) == pytest.approx(21, abs=0.1)


@pytest.mark.slow
def test_no_noise_is_enough() -> None:
    with pytest.raises(ValueError, match=r"No noise up to 1e\+09 meets the budget: raise share"):
        smallest_joint_noise(
            dp_accounting.GaussianDpEvent(1.0),
            lambda value: GaussianTopK(value).event(1, 1),
            epsilon=0.1,
            delta=1e-5,
        )


def test_any_noise_is_enough() -> None:
    found = smallest_noise(
        lambda value: GaussianTopK(value).event(1, 1), epsilon=6000.0, delta=1e-5
    )
    assert 0.1 <= found < 0.2


# ------------------------------------------------------------------------------------------- plans

STREAM = PrivacyPlan(PrivacyBudget(1.0, 1e-5), StreamSampling(10_000, 100, passes=2))
TABLES = {"user": 100, "tokens": TopKTable(500, max_lookups=8), "tiny": 2}


def test_calibration_of_a_stream() -> None:
    """Gaussian noise on Gaussian training: 1/σ² adds up, which has a closed form."""
    calibrated = calibrate_top_k(STREAM, TABLES, 52, share=0.05)
    assert calibrated.lookups == 9 and isinstance(calibrated.source, GaussianTopK)
    together = STREAM.calibrate().noise_multiplier
    smaller = dataclasses.replace(STREAM, budget=PrivacyBudget(0.95, 1e-5))
    training = smaller.calibrate().noise_multiplier
    assert together is not None and training is not None
    exact = (2 / together**2 - 2 / training**2) ** -0.5
    assert calibrated.source.noise_multiplier == pytest.approx(exact, rel=1e-2)
    assert isinstance(calibrated.apart, GaussianTopK)
    assert calibrated.apart.noise_multiplier > 4 * exact
    assert "apart from it, " in str(calibrated) and "composed with training" in str(calibrated)


@pytest.mark.slow
def test_price_in_a_plan() -> None:
    """The plan with the release meets the budget, and the price is what the release adds."""
    source = calibrate_top_k(STREAM, TABLES, 52, LaplaceTopK, share=0.05).source
    release = Release("rows", source.event(9, 50))
    other = Release("something else", dp_accounting.GaussianDpEvent(40.0))
    plan = dataclasses.replace(STREAM, releases=(release,)).calibrate()
    assert plan.spent(200).epsilon == pytest.approx(1, abs=1e-3)
    price = plan.price(release)
    assert price.joint == pytest.approx(0.05, rel=0.05)
    assert price.alone > 3 * price.joint
    assert str(price).startswith("rows: epsilon 0.0") and "on its own" in str(price)
    both = dataclasses.replace(STREAM, releases=(other, release)).calibrate()
    assert both.price(release).alone == price.alone


@pytest.mark.slow
def test_other_releases_of_the_plan_count_first() -> None:
    other = Release("histogram", dp_accounting.GaussianDpEvent(10.0))
    alone = calibrate_top_k(STREAM, TABLES, 52, share=0.05).source
    beside = calibrate_top_k(
        dataclasses.replace(STREAM, releases=(other,)), TABLES, 52, share=0.05
    ).source
    assert isinstance(alone, GaussianTopK) and isinstance(beside, GaussianTopK)
    # Both leave ε = 0.95 to the rest, so the selection costs what it did.
    assert beside.noise_multiplier == pytest.approx(alone.noise_multiplier, rel=2e-2)


def test_bad_arguments() -> None:
    for k in (0, 10_000):
        with pytest.raises(ValueError, match="every table is kept whole or left out"):
            calibrate_top_k(STREAM, TABLES, k)
    for wrong in (GaussianTopK(3.0), PublicRows, "gumbel"):
        with pytest.raises(ValueError, match="Expected source_class among .*GumbelTopK"):
            calibrate_top_k(STREAM, TABLES, 52, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected 0 < share < 1, got share=1"):
        calibrate_top_k(STREAM, TABLES, 52, share=1)
    release = Release("rows", dp_accounting.GaussianDpEvent(3.0))
    with pytest.raises(ValueError, match=r"Expected a release of the plan, \[\], got 'rows'"):
        STREAM.calibrate().price(release)
    with pytest.raises(ValueError, match="Expected a calibrated plan"):
        dataclasses.replace(STREAM, releases=(release,)).price(release)


@pytest.mark.slow
def test_calibration_on_criteo() -> None:
    """One epoch at ε = 1: training gets 0.99, the selection 0.01, together they meet the budget."""
    plan = PrivacyPlan(PrivacyBudget(1.0, DELTA), PoissonSampling(45_840_617, 2048, steps=22_384))
    tables = {f"category {index}": 10_000 for index in range(26)}
    calibrated = calibrate_top_k(plan, tables, 1000)
    joint, apart = calibrated.source.scale_of(26), calibrated.apart.scale_of(26)
    assert apart == pytest.approx(2016.2772163810141, rel=2e-4)
    assert 15 < apart / joint < 30
    release = Release("rows", calibrated.source.event(26, 1000))
    final = dataclasses.replace(plan, releases=(release,)).calibrate()
    price = final.price(release)
    assert price.joint == pytest.approx(0.01, abs=2e-3)  # σ is found to 1e-4
    assert price.alone > 0.2


def test_the_warning_of_a_hopeless_budget_is_left_to_the_plan() -> None:
    """It came twice: for the plan that trains, and for training at a part of its epsilon."""
    sampling = StreamSampling(num_examples=10, batch_size=5)
    plan = PrivacyPlan(PrivacyBudget(0.01, 1e-3), sampling)
    with pytest.warns(UserWarning, match="No training can learn"):
        plan.calibrate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate_top_k(plan, {"users": 10}, k=4, share=0.1)


def test_batches_beyond_the_capacity_are_named_where_they_take_all_of_delta() -> None:
    """At a large ε and few examples; a search for noise would find none, and say something else."""
    sampling = PoissonSampling(40, expected_batch_size=20, steps=4, capacity=34)
    plan = PrivacyPlan(PrivacyBudget(20.0, 1 / 40), sampling)
    message = "Batches beyond capacity=34 alone exceed delta=0.025 at epsilon=20, .* Raise samp"
    with pytest.raises(ValueError, match=message):
        calibrate_top_k(plan, {"items": TopKTable(13, 4)}, k=1, share=0.5)

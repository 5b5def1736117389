"""Maps and measures that follow from a histogram of scores."""

import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse.probabilities import measures
from dp_sparse.probabilities.score_histogram import BINS, UNITS, ScoreHistogram, ScoreKind
from dp_sparse.probabilities.score_map import IDENTITY, ScoreMap, fitted, usable
from tests.reference import score_histogram as reference

BINARY = ScoreKind("binary")
SLOPE, CONSTANT = 0.4, -0.7


def histogram(cells: np.ndarray, noise: float = 1e-6, kind: ScoreKind = BINARY) -> ScoreHistogram:
    counts = np.rint(np.asarray(cells) * UNITS).astype(np.int64)
    return ScoreHistogram(counts, noise, kind, 1.0, "id", 0, None)


def as_a_map_says(
    slope: float = SLOPE, constant: float = CONSTANT, count: float = 1e4
) -> np.ndarray:
    """Counts whose rates an affine map of the log odds gives exactly."""
    rates = scipy.special.expit(slope * BINARY.middles + constant)
    return count * np.stack([1 - rates, rates], axis=1)


def test_platt_scaling_finds_the_map_that_made_the_labels() -> None:
    found = fitted(histogram(as_a_map_says()), "platt")
    assert found.slope == pytest.approx(SLOPE, abs=1e-3)
    assert found(np.zeros(1))[0] == pytest.approx(CONSTANT, abs=1e-3)


def test_isotonic_scaling_finds_the_rates() -> None:
    cells = as_a_map_says()
    found = fitted(histogram(cells), "isotonic")
    rates = scipy.special.expit(found(BINARY.middles))
    np.testing.assert_allclose(rates, cells[:, 1] / cells.sum(1), atol=1e-3)


@pytest.mark.parametrize("method", ["platt", "isotonic"])
def test_a_regression_is_fitted_by_the_mean_labels(method: str) -> None:
    kind = ScoreKind("regression", label_range=(1.0, 5.0))
    labels = np.clip(0.5 * kind.middles + 0.2, 0, 1)
    cells = 1e4 * np.stack([1 - labels, labels], axis=1)
    found = fitted(histogram(cells, kind=kind), method)
    np.testing.assert_allclose(found(kind.middles), labels, atol=1e-3)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(["platt", "isotonic"]), st.floats(0.0, 300.0))
def test_a_map_never_decreases(seed: int, method: str, noise: float) -> None:
    rng = np.random.default_rng(seed)
    cells = rng.integers(0, 2000, (BINS, 2)) + rng.normal(0, noise, (BINS, 2))
    found = fitted(histogram(cells, max(noise, 1e-6)), method)
    assert np.all(np.diff(found(np.linspace(-20, 20, 400))) >= -1e-9)


def test_what_noise_alone_makes_counts_as_empty() -> None:
    cells = np.zeros((BINS, 2))
    cells[5], cells[9], cells[20] = (100.0, -3.0), (4.0, 4.0), (30.0, 70.0)
    found = usable(histogram(cells, noise=3.0))
    assert np.flatnonzero(found.sum(1)).tolist() == [5, 20] and found[5, 1] == 0


def test_noise_hardly_moves_the_map() -> None:
    """At 40 on each count of 120,000 examples, as on Criteo's sample."""
    rng, cells = np.random.default_rng(3), as_a_map_says(count=120_000 / BINS)
    found = fitted(histogram(cells + rng.normal(0, 40, cells.shape), 40.0), "platt")
    assert found.slope == pytest.approx(SLOPE, abs=0.02)
    assert found(np.zeros(1))[0] == pytest.approx(CONSTANT, abs=0.05)


@pytest.mark.parametrize("method", ["platt", "isotonic"])
@pytest.mark.parametrize("cells", [np.zeros((BINS, 2)), np.eye(BINS)[:, :2] * 9])
def test_too_few_examples_leave_scores_as_they_are(method: str, cells: np.ndarray) -> None:
    with pytest.warns(UserWarning, match="predictions stay as they are"):
        assert fitted(histogram(cells, noise=40.0), method) is IDENTITY


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31))
def test_measures_are_those_of_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cells = rng.integers(1, 500, (BINS, 2)).astype(float)
    score_map = ScoreMap((0.0,), (CONSTANT,), SLOPE)
    found = measures.measured(histogram(cells), score_map)
    before, after = BINARY.middles, SLOPE * BINARY.middles + CONSTANT
    assert found["auc"].value == pytest.approx(reference.auc(cells))
    for prefix, scores in (("", before), ("calibrated_", after)):
        predicted = scipy.special.expit(scores)
        loss = found[f"{prefix}log_loss"].value
        assert loss == pytest.approx(reference.log_loss(cells, scores))
        error = found[f"{prefix}calibration_error"].value
        assert error == pytest.approx(reference.calibration_error(cells, predicted))
    assert found["rate"].value == pytest.approx(cells[:, 1].sum() / cells.sum())


@pytest.mark.parametrize(("reach", "count"), [(40.0, 4000), (3.0, 800)])
def test_standard_errors_are_those_of_the_noise(reach: float, count: int) -> None:
    """Over many draws of the noise, measures deviate as one draw says they do.

    Also where most bins are empty, among them those of scores that cost most.
    """
    rng, noise = np.random.default_rng(1), 30.0
    cells = as_a_map_says(count=count)
    cells[np.abs(BINARY.middles) > reach] = 0
    drawn = [
        measures.measured(histogram(cells + rng.normal(0, noise, cells.shape), noise), IDENTITY)
        for _ in range(40)
    ]
    for name in ("auc", "log_loss", "rate", "calibration_error"):
        seen = np.std([each[name].value for each in drawn])
        said = np.median([each[name].standard_error for each in drawn])
        assert 0.6 * seen < said < 1.6 * seen


@pytest.mark.parametrize(("spread", "apart"), [(1.0, 0.25), (8.0, 0.25), (20.0, 0.7)])
def test_scores_of_any_spread_are_calibrated(spread: float, apart: float) -> None:
    """A clipped model may give log odds of 20 where 1 is right."""
    rng = np.random.default_rng(0)
    right = rng.normal(-1, 1, 50_000)
    labels = rng.random(50_000) < scipy.special.expit(right)
    scores = spread * right
    bins = np.searchsorted(BINARY.edges, scores, side="right")
    cells = np.stack([np.bincount(bins[labels == k], minlength=BINS) for k in (0, 1)], axis=1)
    found = fitted(histogram(cells.astype(float), 20.0), "platt")
    np.testing.assert_allclose(found(scores), right, atol=apart)

"""The reference itself, against numbers that were derived by hand and by simulation."""

import numpy as np
import pytest

from tests.reference import adafest


@pytest.mark.parametrize(
    ("sigma", "clip_norm", "threshold", "value", "right", "printed"), adafest.SURVIVAL
)
def test_survival_probability(
    sigma: float, clip_norm: float, threshold: float, value: float, right: float, printed: float
) -> None:
    arguments = (value, threshold, sigma, clip_norm)
    assert adafest.survival_probability(*arguments) == pytest.approx(right, rel=1e-9)
    assert adafest.printed_survival_probability(*arguments) == pytest.approx(printed, rel=1e-9)


@pytest.mark.parametrize(
    ("first", "second", "combined"),
    [(1, 1, 0.7071067811865476), (5, 1, 0.9805806756909201), (3.0, 0.6, 0.588348405414552)],
)
def test_combined_noise_multiplier(first: float, second: float, combined: float) -> None:
    assert adafest.combined_noise_multiplier(first, second) == pytest.approx(combined, rel=1e-12)


@pytest.mark.parametrize(
    ("sigma", "ratio", "first", "second"),
    [
        (0.5768, 0.1, 0.5796768258262529, 5.796768258262529),
        (0.5768, 5, 2.9411144554403186, 0.5882228910880637),
        (1.0, 1, 1.4142135623730951, 1.4142135623730951),
        (2.0, 20, 40.049968789001575, 2.0024984394500787),
    ],
)
def test_split_noise_multiplier(sigma: float, ratio: float, first: float, second: float) -> None:
    split = adafest.split_noise_multiplier(sigma, ratio)
    assert split == pytest.approx((first, second), rel=1e-12)
    assert adafest.combined_noise_multiplier(*split) == pytest.approx(sigma, rel=1e-12)


def test_contribution_of_one_hot_features() -> None:
    """26 features, one row each: every row gains C1/√26 = 0.196 at C1 = 1, and 1 at C1 = √26."""
    example = [[0]] * 26
    assert adafest.contribution_map([example], [1] * 26, 1.0) == pytest.approx(0.19611613513818404)
    assert adafest.contribution_map([example], [1] * 26, np.sqrt(26)) == pytest.approx(1.0)


def test_step_restricts_before_it_clips() -> None:
    """A gradient that loses its large row is not clipped; the other order would shrink the rest."""
    rows = np.array([[[3.0], [0.5]]])  # [batch, rows, width]
    dense = np.array([[0.5]])
    survived = np.array([False, True])
    [table], total = adafest.step(
        [[[0, 1]]], [rows], dense, survived=survived, clip_norm=1.0, expected_batch_size=2.0
    )
    np.testing.assert_allclose(table, [[0.0], [0.25]])
    np.testing.assert_allclose(total, [0.25])

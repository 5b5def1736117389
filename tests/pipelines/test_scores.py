"""Log loss and mean prediction, and when a report says that predictions are no probabilities."""

import numpy as np
import pytest

from pipelines import scores


def test_scores_of_logits() -> None:
    labels, logits = np.array([1.0, 0.0, 0.0]), np.log([3.0, 1.0, 1 / 3])
    assert scores.mean_prediction(logits) == pytest.approx(0.5)
    assert scores.log_loss(labels, logits) == pytest.approx(-np.log([0.75, 0.5, 0.75]).mean())
    assert np.isfinite(scores.log_loss(labels, np.array([-1e4, 1e4, 0.0])))
    assert scores.constant_log_loss(0.25) == pytest.approx(
        scores.log_loss(np.array([1.0, 0.0, 0.0, 0.0]), np.full(4, -np.log(3.0)))
    )


@pytest.mark.parametrize(
    ("loss", "mean", "said"),
    [
        (0.50, 0.25, ""),
        (0.50, 0.20, ""),
        (0.60, 0.25, "log loss 0.600, a constant has 0.562"),
        (0.50, 0.10, "mean prediction 0.100, the true rate is 0.250"),
        (0.50, 0.32, "mean prediction 0.320"),
        (float("nan"), float("nan"), "log loss nan"),
    ],
)
def test_probabilities_that_cannot_be_used_are_told(loss: float, mean: float, said: str) -> None:
    """At a rate of a quarter, of which a constant has a log loss of 0.562."""
    lines = scores.of_probabilities("dp_sgd", loss, mean, 0.25)
    assert len(lines) == bool(said) and all(said in line for line in lines)

"""What predicted click probabilities are worth beside their order: log loss and mean prediction."""

import math
from collections.abc import Sequence

import numpy as np
import scipy.special
import scipy.stats

_FIX = {
    False: "Calibrate them (dp_sparse.calibrate_probabilities) before anybody bids with them.",
    True: "Calibration did not repair them: raise its share of epsilon, or train on more rows.",
}
_APART = 0.25  # of the true rate: a mean prediction farther from it is told


def exact_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """The area under the ROC curve, ties counted half: the Mann-Whitney statistic over ranks.

    Raises:
        ValueError: When all labels are the same.
    """
    positive = int(labels.sum())
    negative = len(labels) - positive
    if not positive or not negative:
        raise ValueError(
            f"Expected clicks and non-clicks among the rows, got {positive} and {negative}."
        )
    ranks = scipy.stats.rankdata(scores)
    return float((ranks[labels > 0].sum() - positive * (positive + 1) / 2) / (positive * negative))


def weighted_auc(labels: np.ndarray, ranks: np.ndarray, times: np.ndarray) -> float:
    """As `exact_auc`, of rows that occur `times` times each.

    Args:
        labels: 0 or 1, `[rows]`.
        ranks: The place of each row's score among the different scores, from 0, int `[rows]`.
        times: Int `[rows]`.
    """
    positive = np.bincount(ranks, weights=times * (labels > 0))
    negative = np.bincount(ranks, weights=times * (labels <= 0))
    below = np.cumsum(negative) - negative / 2
    return float(positive @ below / (positive.sum() * negative.sum()))


def log_loss(labels: np.ndarray, logits: np.ndarray) -> float:
    """The mean log loss of logits `[examples]`, given labels of 0 and 1."""
    values = np.asarray(logits, np.float64)
    return float(np.mean(np.logaddexp(0.0, values) - labels * values))


def mean_prediction(logits: np.ndarray) -> float:
    """The mean probability that logits `[examples]` say."""
    return float(np.mean(scipy.special.expit(np.asarray(logits, np.float64))))


def constant_log_loss(rate: float) -> float:
    """The log loss of the best prediction that does not see the inputs: the rate of label 1."""
    return float(scipy.special.entr([rate, 1 - rate]).sum())


def of_probabilities(
    name: str, loss: float, mean: float, rate: float, calibrated: bool = False
) -> list[str]:
    """Whether predictions can be used as probabilities; a sentence if not.

    Args:
        name: What predicted.
        loss: Its log loss on held-out examples.
        mean: Its mean prediction on them.
        rate: The part of them that is labelled 1.
        calibrated: Whether the predictions were calibrated.
    """
    constant = constant_log_loss(rate)
    wrong: Sequence[str] = [
        *([f"log loss {loss:.3f}, a constant has {constant:.3f}"] if not loss < constant else []),
        *(
            [f"mean prediction {mean:.3f}, the true rate is {rate:.3f}"]
            if math.isnan(mean) or abs(mean - rate) > _APART * rate
            else []
        ),
    ]
    if not wrong:
        return []
    return [
        f"{name}: do not use its predictions as probabilities ({'; '.join(wrong)}). They order the "
        f"examples. {_FIX[calibrated]}"
    ]

"""Windows of selection, attacked end to end; each planted break must be caught."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from dp_sparse import PoissonSampling, PrivacyBudget, PrivacyPlan, StreamSampling
from dp_sparse.optimizers import window
from tests.attacks.windows import gaussian_distance, log_likelihood_ratios, observe
from tests.reference import windowed_selection as reference

WORLDS, RATIO = 12_000, 0.3
DISTANCE = 2.0  # of the Gaussian mechanism that the plan accounts for


def poisson(steps: int) -> tuple[PrivacyPlan, np.ndarray]:
    """Every example is in every batch."""
    examples = WORLDS // 2
    sampling = PoissonSampling(examples, examples, steps=steps)
    plan = PrivacyPlan(PrivacyBudget(1.0, 1e-3), sampling).with_noise(np.sqrt(steps) / DISTANCE)
    return plan, np.ones([steps, examples], bool)


def stream(steps_per_pass: int, passes: int) -> tuple[PrivacyPlan, np.ndarray]:
    """Every example is in one batch of a pass."""
    examples = WORLDS // 2
    sampling = StreamSampling(examples, examples // steps_per_pass, passes)
    plan = PrivacyPlan(PrivacyBudget(1.0, 1e-3), sampling).with_noise(np.sqrt(passes) / DISTANCE)
    batch = np.arange(examples) // sampling.batch_size
    return plan, np.arange(sampling.steps)[:, np.newaxis] % steps_per_pass == batch


def distance_of(
    plan: PrivacyPlan,
    joined: np.ndarray,
    longest: int,
    scales: Callable[[int, int], float],
    threshold: float = 2.0,
    **told: float,
) -> float:
    """The least distance that the attacker's samples prove."""
    settings = {"window": longest, "threshold": threshold, "noise_ratio": RATIO}
    seen = observe(plan, WORLDS, joined, **settings)
    lengths = list(itertools.islice(reference.lengths(longest), len(joined)))
    begins = np.cumsum([0, *lengths[:-1]])
    of_windows = [scales(int(begin), length) for begin, length in zip(begins, lengths, strict=True)]
    return gaussian_distance(log_likelihood_ratios(seen, lengths, of_windows, **told))


def of_poisson(begin: int, length: int) -> float:
    del begin
    return float(np.sqrt(length))


def of_one_map(begin: int, length: int) -> float:
    del begin, length
    return 1.0


@pytest.mark.parametrize("longest", [2, 4, 16])
def test_a_run_shows_no_more_than_its_plan_accounts_for(longest: int) -> None:
    plan, joined = poisson(2 * longest)
    found = distance_of(plan, joined, longest, of_poisson)
    assert 0.3 * DISTANCE < found < DISTANCE


def test_a_stream_shows_no_more() -> None:
    """A window lies within a pass, or touches several."""
    for steps_per_pass, passes, longest in ((6, 2, 4), (2, 9, 8)):
        plan, joined = stream(steps_per_pass, passes)

        def scales(begin: int, length: int, steps_per_pass: int = steps_per_pass) -> float:
            return float(np.sqrt(reference.rounds(begin, length, steps_per_pass)))

        found = distance_of(plan, joined, longest, scales, threshold=0.5)
        assert 0.3 * DISTANCE < found < DISTANCE


def test_noise_of_one_map_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window.tf, "sqrt", tf.ones_like)
    plan, joined = poisson(17)
    assert distance_of(plan, joined, 16, of_one_map) > DISTANCE
    plan, joined = stream(steps_per_pass=2, passes=17)
    assert distance_of(plan, joined, 16, of_one_map) > DISTANCE


def test_a_sum_that_is_kept_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    own = window.SelectionWindow._end

    def end(self, draw, by):
        progress = self._progress.read_value()
        row_ids, units = self._sum_so_far(progress[window._MERGED], progress[window._FILLED])
        own(self, draw, by)
        self._sum_ids.assign(row_ids)
        self._sum_units.assign(units)
        self._progress.assign([0, 0, 0, tf.size(row_ids, tf.int64), 0])
        return tf.constant(1, tf.int64)

    monkeypatch.setattr(window.SelectionWindow, "_end", end)
    plan, joined = poisson(33)
    assert distance_of(plan, joined, 16, of_poisson, kept=1.0) > DISTANCE

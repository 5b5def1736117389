"""Plans that pay for a vocabulary without a search for noise, and noise that is known."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import dp_sparse
from dp_sparse.selection.top_k.noise_sources import GaussianTopK, Quantile
from dp_sparse.selection.vocabulary.threshold import VocabularyNoise
from tests.training_cases import plan_for

NOISE = VocabularyNoise(noise_multiplier=2.0, delta=1e-3)


def paying_plan(num_examples: int, noise: VocabularyNoise = NOISE) -> dp_sparse.PrivacyPlan:
    """A plan with noise that has the release."""
    plan = plan_for(num_examples, noise_multiplier=2.0)
    return dataclasses.replace(plan, releases=(noise.release,))


def drawn(
    x: dict[str, Any], noise: VocabularyNoise = NOISE, **options: Any
) -> dp_sparse.PrivateVocabulary:
    """The vocabulary of all columns of x, under a plan of its own."""
    plan = paying_plan(len(next(iter(x.values()))), noise)
    return dp_sparse.private_vocabulary(x, list(x), plan, progress=False, **options)


def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every noise value is 0."""
    monkeypatch.setattr(GaussianTopK, "quantiles", lambda self, levels: np.zeros(levels.tail.shape))


def recorded_noise(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list to which every standard noise value is added as it is drawn."""
    found: list[float] = []
    quantiles = GaussianTopK.quantiles

    def recorded(self: GaussianTopK, levels: Quantile) -> np.ndarray:
        values = quantiles(self, levels)
        found.extend(values.tolist())
        return values

    monkeypatch.setattr(GaussianTopK, "quantiles", recorded)
    return found

"""All ways to permute do the same, and the keys are there."""

from collections.abc import Callable

import keras
import numpy as np
import pytest

from benchmarks import shuffling


def pair() -> keras.Model:
    """Two dense layers."""
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(2)]
    )


def test_the_ways_to_permute_agree() -> None:
    first, *others = (way().numpy() for way in shuffling.ways_to_permute(30).values())
    assert np.unique(first).size == 900
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_the_quick_run_has_every_metric(
    monkeypatch: pytest.MonkeyPatch, quick_run: Callable[..., tuple[list[str], dict[str, float]]]
) -> None:
    monkeypatch.setattr(shuffling, "QUICK_ROUNDS", 1)
    monkeypatch.setattr(shuffling, "SIZE", 100)
    monkeypatch.setattr(shuffling, "MODELS", {"bert": pair, "vit": pair})
    lines, metrics = quick_run(shuffling)
    assert metrics.keys() == {"bert_overhead", "vit_overhead", "matmul_over_index"}
    assert len(lines) == 8 and "shuffled" in lines[2]


@pytest.mark.parametrize("name", shuffling.MODELS)
def test_all_hidden_units_and_heads_of_the_models_are_permuted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("keras_hub")
    monkeypatch.setattr(shuffling, "WORDS", 100)
    groups = shuffling.shuffling.permutation_groups(shuffling.MODELS[name]())
    assert sorted(group.heads or 1 for group in groups) == [1, 1, 2, 2]

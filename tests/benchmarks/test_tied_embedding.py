"""The compared steps do the same thing, and the keys are there."""

from collections.abc import Callable

import keras
import numpy as np
import pytest

from benchmarks import clipping, clipping_ways, harness, tied_embedding
from benchmarks.tied_embedding import Setting


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LENGTH", 5), ("WIDTH", 4), ("BLOCKS", 1)):
        monkeypatch.setattr(tied_embedding, name, value)
    monkeypatch.setattr(tied_embedding, "BATCHES", {"last": 6, "all": 6})
    monkeypatch.setattr(clipping, "added_memory", lambda step: 1)


@pytest.mark.slow
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("positions", ["last", "all"])
def test_private_ways_take_the_same_step(positions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping_ways, "SIGMA", 0.0)
    monkeypatch.setattr(clipping_ways, "CLIP_NORM", 0.2)
    monkeypatch.setattr(keras.optimizers, "Adam", keras.optimizers.SGD)
    original, made = Setting.model, []

    def model(setting: Setting) -> keras.Model:
        keras.utils.set_random_seed(0)
        made.append(original(setting))
        return made[-1]

    monkeypatch.setattr(Setting, "model", model)
    for make in tied_embedding.WAYS.values():
        harness.finish(make(Setting(7, positions, 6), 1)())
    stock, *private = (each.get_weights() for each in made)
    for weights in private:
        for ours, others in zip(weights, private[0], strict=True):
            np.testing.assert_allclose(ours, others, rtol=0, atol=1e-6)
    moved = [
        np.abs(ours - unclipped).max() for ours, unclipped in zip(private[0], stock, strict=True)
    ]
    assert max(moved) > 1e-5


def test_examples_are_items_and_those_that_follow() -> None:
    x, y = Setting(3_416, "all", 100).examples()
    assert x.shape == y.shape == (100, tied_embedding.LENGTH) and x.dtype == y.dtype == np.int32
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    assert x.min() >= 0 and x.max() < 3_416 and np.median(x) < 100
    np.testing.assert_array_equal(Setting(3_416, "last", 100).examples()[1], y[:, -1])


@pytest.mark.slow
def test_the_quick_run_has_every_metric_of_the_larger_vocabulary(
    monkeypatch: pytest.MonkeyPatch, quick_run: Callable[..., tuple[list[str], dict[str, float]]]
) -> None:
    monkeypatch.setattr(tied_embedding, "VOCABULARIES", (5, 7))
    _, metrics = quick_run(tied_embedding)
    assert metrics.keys() == {
        "step_over_nonprivate_7",
        "memory_over_nonprivate_7",
        "last_step_over_nonprivate_7",
        "last_memory_over_nonprivate_7",
    }


@pytest.mark.slow
def test_a_way_that_needs_too_much_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tied_embedding, "MEMORY_LIMIT", 1)
    found = tied_embedding.measured(Setting(7, "last", 6), tuple(tied_embedding.WAYS), 1)
    assert found.keys() == {"stock", "ours"}

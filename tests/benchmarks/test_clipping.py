"""The compared steps do the same thing, memory is what a step adds, and the keys are there."""

import functools
from collections.abc import Callable

import keras
import numpy as np
import pytest

from benchmarks import clipping, clipping_ways, harness
from models import classifiers
from tests.subprocesses import run_python

TINY = functools.partial(classifiers.mlp, (4, 4), hidden=(8,))


def weights_after_a_step(way: str) -> list[np.ndarray]:
    """Of a model that starts from the same weights whatever the way."""
    made = []

    def build() -> keras.Model:
        keras.utils.set_random_seed(0)
        made.append(TINY())
        return made[-1]

    harness.finish(clipping_ways.WAYS[way](build, 8, 1)())
    return made[-1].get_weights()


@pytest.mark.slow
@pytest.mark.usefixtures("no_noise")
def test_private_ways_take_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping_ways, "SIGMA", 0.0)
    monkeypatch.setattr(clipping_ways, "CLIP_NORM", 0.5)
    monkeypatch.setattr(keras.optimizers, "Adam", keras.optimizers.SGD)
    stock, *private = (weights_after_a_step(way) for way in ("stock", "nxBP", "multiLoss", "ours"))
    for weights in private:
        for ours, others, unclipped in zip(weights, private[0], stock, strict=True):
            np.testing.assert_allclose(ours, others, rtol=0, atol=1e-6)
            assert np.abs(ours - unclipped).max() > 1e-5


@pytest.mark.parametrize("name", list(clipping.MODELS))
def test_examples_fit_each_model(name: str) -> None:
    model = clipping.MODELS[name]()
    x, y = clipping_ways.examples(model, 4)
    assert x.shape == (4, *model.input_shape[1:]) and y.max() < model.output_shape[-1]
    if name == "transformer":
        assert x.dtype == np.int32 and 0 <= x.min() <= x.max() < 5_000


def test_the_quick_run_has_every_metric(
    monkeypatch: pytest.MonkeyPatch, quick_run: Callable[..., tuple[list[str], dict[str, float]]]
) -> None:
    monkeypatch.setattr(clipping, "added_memory", lambda step: 1)
    monkeypatch.setattr(clipping, "MODELS", {"mlp": TINY, "rnn": TINY})
    monkeypatch.setattr(clipping, "QUICK_ROUNDS", 1)
    _, metrics = quick_run(clipping)
    assert metrics.keys() == {
        "mlp_over_nonprivate_128",
        "mlp_naive_over_ours_128",
        "rnn_over_nonprivate_128",
        "memory_over_nonprivate_max",
    }


def test_a_way_that_cannot_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping, "added_memory", lambda step: 1)
    monkeypatch.setattr(clipping_ways, "JACOBIAN_LIMIT", 1)
    seconds, _ = clipping.measured(TINY, 8, 1, ("stock", "multiLoss"))
    assert seconds.keys() == {"stock"}


@pytest.mark.slow
def test_memory_is_what_a_step_adds_at_its_peak() -> None:
    code = """
        import os
        os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
        import tensorflow as tf
        from benchmarks import clipping

        kept = tf.ones([2**22])
        step = tf.function(lambda: tf.reduce_sum(tf.sort(kept) * kept))
        step()
        print(clipping.added_memory(step))
    """
    assert 2**24 <= int(run_python(code)) <= 5 * 2**24  # a few tensors of 2**24 bytes

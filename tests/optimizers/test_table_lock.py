"""Noise that is delayed, when other threads flush or read a model while it trains."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse.optimizers.lazy_noise import DelayedNoise
from tests.subprocesses import HANG
from tests.training_cases import marked, plan_for

ROWS, WIDTH, EXAMPLES = 600, 8, 8
DEVIATION = 1 / EXAMPLES  # η·σ·C/B of a step
PAUSE = 0.3  # seconds in which a step would be over if nothing held it


class Training(NamedTuple):
    """A model; `step` takes one by which rows from `EXAMPLES` on lack noise."""

    model: keras.Model
    step: Callable[[], None]

    def rows(self) -> np.ndarray:
        return self.model.optimizer.tables[0].numpy()

    def steps_since(self, before: np.ndarray) -> float:
        """How many steps' noise the rows got that nobody looked up."""
        self.model.optimizer.flush()
        return float(np.var((self.rows() - before)[EXAMPLES:]) / DEVIATION**2)


@pytest.fixture(scope="module")
def traced() -> Training:
    plan = plan_for(EXAMPLES, noise_multiplier=1.0)
    layers = keras.layers.Embedding(ROWS, WIDTH, embeddings_initializer="zeros")
    model = keras.Sequential([keras.Input((1,), dtype="int32"), layers, keras.layers.Flatten()])
    model.add(keras.layers.Dense(1))
    optimizer = dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(1.0), plan, clip_norm=1.0)
    model.compile(optimizer, loss="mse")
    model.make_train_function()

    def step() -> None:
        model.train_function(iter([marked(plan, *examples())]))

    return Training(model, step)


@pytest.fixture
def training(traced: Training) -> Training:
    """After a step, and with all noise."""
    traced.step()
    traced.model.optimizer.flush()
    return traced


def examples() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(EXAMPLES, dtype=np.int32)[:, None], np.ones((EXAMPLES, 1), np.float32)


def test_a_flush_forgets_no_noise_of_a_step_of_another_thread(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step begins when all rows have their noise, before what they lack starts again at 0."""
    before, start_again = training.rows(), DelayedNoise._start_again
    other = threading.Thread(target=training.step, daemon=True)
    training.step()

    def interrupted(self: DelayedNoise) -> None:
        other.start()
        other.join(PAUSE)
        start_again(self)

    with monkeypatch.context() as patched:
        patched.setattr(DelayedNoise, "_start_again", interrupted)
        training.model.optimizer.flush()
    other.join(HANG)
    assert not other.is_alive()
    assert training.steps_since(before) == pytest.approx(2, rel=0.2)


@pytest.mark.parametrize("read", ["predict", "evaluate"])
def test_a_step_of_another_thread_waits_until_a_reader_is_done(
    read: str, training: Training
) -> None:
    """Otherwise the reader would see rows without the noise of this step."""
    other, found = threading.Thread(target=training.step, daemon=True), []

    class Reading(keras.callbacks.Callback):
        def begun(self, logs: Any = None) -> None:
            other.start()
            other.join(PAUSE)
            found.extend([other.is_alive(), np.any(training.rows() != before)])

        on_predict_begin = on_test_begin = begun

    before = training.rows()
    getattr(training.model, read)(examples()[0], callbacks=[Reading()], verbose=0, **LABELS[read])
    other.join(HANG)
    assert not other.is_alive()
    assert found == [True, False]
    assert np.any(training.rows() != before)


LABELS: dict[str, dict[str, Any]] = {"predict": {}, "evaluate": {"y": examples()[1]}}


def test_a_data_source_may_ask_the_model_while_it_trains(training: Training) -> None:
    """As for hard examples: the step waits for its data, and the source for no step."""
    model, before = training.model, training.rows()

    class Source:
        def __len__(self) -> int:
            return EXAMPLES

        def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            model.predict_on_batch(examples()[0])
            return tuple(values[indices] for values in examples())

    model.fit(model.optimizer.plan.sampling.batches(Source()), steps_per_epoch=5, verbose=0)
    assert training.steps_since(before) == pytest.approx(5, rel=0.2)


def test_readers_do_not_wait_for_each_other(training: Training) -> None:
    """A pipeline asks the model while the model evaluates what the pipeline makes."""
    training.step()

    def scored() -> Iterator[Any]:
        training.model.predict_on_batch(examples()[0])
        yield examples()

    kinds = tuple(tf.TensorSpec(part.shape, part.dtype) for part in examples())
    batches = tf.data.Dataset.from_generator(scored, output_signature=kinds).repeat(2)
    training.model.evaluate(batches, steps=2, verbose=0)

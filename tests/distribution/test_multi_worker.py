"""Two processes under MultiWorkerMirroredStrategy: the numbers of one device, one key."""

import dataclasses
import json
import socket
import subprocess
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import distribution
from dp_sparse.core.errors import PrivacyError
from dp_sparse.sampling.base import BatchPart
from tests.subprocesses import HANG, start_python
from tests.training_cases import assert_deviation, click_model, clicks, plan_for

VOCABULARIES = (40, 25)
SIZE, STEPS, LOUD = 13, 4, 100.0

WORKER = """
    import json, os, sys

    index, first, second = int(sys.argv[1]), *sys.argv[2:4]
    os.environ["TF_CONFIG"] = json.dumps({
        "cluster": {"worker": [f"localhost:{first}", f"localhost:{second}"]},
        "task": {"type": "worker", "index": index},
    })
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything runs
    import keras, numpy as np
    import dp_sparse
    from dp_sparse import distribution
    from tests.distribution.test_multi_worker import (
        SIZE, STEPS, VOCABULARIES, change_by_noise, compiled, report
    )
    from tests.training_cases import clicks, plan_for

    data = clicks(SIZE, VOCABULARIES)
    found = {}

    def train(name, sampling=None, source=data, epochs=1, **plan):
        model = compiled(strategy, sampling=sampling, **plan)
        history = distribution.train(model, source, epochs=epochs, class_weight=None)
        found[name] = report(model, history)

    train("quiet", epochs=2, noise_multiplier=1e-6)
    train("noisy", noise_multiplier=1.0)
    train("poisson", expected_batch_size=5, noise_multiplier=1.0)
    stream = dp_sparse.StreamSampling(num_examples=SIZE, batch_size=4, passes=1)
    train("stream", sampling=stream, noise_multiplier=1e-6)

    found["change by noise"] = change_by_noise(strategy).tolist()
    model = compiled(strategy)
    batches = model.optimizer.plan.sampling.batches(data)
    try:
        model.fit(batches, verbose=0)
    except dp_sparse.PrivacyError as error:
        found["fit"] = str(error)
    print(json.dumps(found))
"""

BY_HAND = """
    import dataclasses, json, os, sys

    index, first, second = int(sys.argv[1]), *sys.argv[2:4]
    os.environ["TF_CONFIG"] = json.dumps({
        "cluster": {"worker": [f"localhost:{first}", f"localhost:{second}"]},
        "task": {"type": "worker", "index": index},
    })
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    import dp_sparse
    from dp_sparse.core.errors import translated
    from dp_sparse.sampling import BatchPart, batch_of
    from dp_sparse.step import build_for
    from tests.distribution.test_multi_worker import SIZE, VOCABULARIES, compiled
    from tests.training_cases import clicks

    other = sys.argv[4] if index else ""  # what the second worker does otherwise
    model = compiled(
        strategy,
        noise_multiplier=0.5 if other == "plan" else 1.0,
        threshold=1.3 if other == "settings" else 1.2,
    )
    if other == "steps":
        model.optimizer.steps_spent.assign(1)
    if sys.argv[4] != "key":
        model.optimizer.use_noise_key(tf.constant([1, 2], tf.int64))
    part = BatchPart(index * 7, min(SIZE, index * 7 + 7), 5, 2**62)
    batches = model.optimizer.plan.sampling.batches_of(
        clicks(SIZE, VOCABULARIES), part, first_step=0
    )
    build_for(model, model.optimizer, batch_of(batches.element_spec).examples)
    batch = next(iter(strategy.distribute_datasets_from_function(lambda _: batches)))
    dp_sparse.preflight(model, batch)
    step = tf.function(lambda b: strategy.run(model.train_step, args=(b,)), autograph=False)
    try:
        with translated():
            step(batch)
    except dp_sparse.PrivacyError as error:
        print(error)
        sys.stdout.flush()
        os._exit(0)  # threads of a step that failed in its midst may wait for each other for ever
"""


def compiled(
    strategy: Any, sampling: Any = None, threshold: float = 1.2, **plan: Any
) -> keras.Model:
    """A click model, always the same one."""
    made = plan_for(SIZE, steps=STEPS, capacity=SIZE, **plan)
    if sampling is not None:
        made = dataclasses.replace(made, sampling=sampling)
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = click_model(VOCABULARIES)
        optimizer = dp_sparse.DPAdaFESTOptimizer(
            keras.optimizers.Adagrad(0.1), made, 0.5, threshold=threshold
        )
        model.compile(optimizer, loss="binary_crossentropy", metrics=["accuracy", "auc"])
    return model


def change_by_noise(strategy: Any) -> np.ndarray:
    """Of 4,000 weights in one step of DP-SGD under noise that drowns the gradients."""
    plan = plan_for(SIZE, steps=1, capacity=SIZE, noise_multiplier=LOUD)
    with strategy.scope():
        inputs = keras.Input((1,))
        model = keras.Model(inputs, keras.layers.Dense(2000, "tanh")(inputs))
        optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1.0), plan, clip_norm=0.5)
        model.compile(optimizer, "mse")
    before = np.concatenate([weight.ravel() for weight in model.get_weights()])
    rng = np.random.default_rng(0)
    data = tuple(rng.normal(size=(SIZE, n)).astype("float32") for n in (1, 2000))
    distribution.train(model, data)
    return np.concatenate([weight.ravel() for weight in model.get_weights()]) - before


def report(model: keras.Model, history: keras.callbacks.History) -> dict[str, Any]:
    totals = model.optimizer.diagnostics
    return {
        "weights": [weight.tolist() for weight in model.get_weights()],
        "history": history.history,
        "examples": int(totals.examples.numpy()),
        "rows": totals.rows.numpy().tolist(),
        "steps": int(model.optimizer.steps_spent.numpy()),
    }


def free_ports(count: int) -> list[str]:
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("localhost", 0))
    ports = [str(each.getsockname()[1]) for each in held]
    for each in held:
        each.close()
    return ports


def of_two_workers(code: str, *arguments: str) -> list[str]:
    """What each of two processes printed."""
    ports = free_ports(2)
    workers = [start_python(code, str(index), *ports, *arguments) for index in range(2)]
    try:
        return [worker.communicate(timeout=HANG)[0] for worker in workers]
    except subprocess.TimeoutExpired:
        for worker in workers:
            worker.kill()
        raise


@pytest.fixture(scope="module")
def workers() -> list[dict[str, Any]]:
    return [json.loads(printed) for printed in of_two_workers(WORKER)]


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for left, right in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
    for name, values in expected["history"].items():
        np.testing.assert_allclose(found["history"][name], values, rtol=1e-4)
    assert {k: found[k] for k in ("examples", "rows", "steps")} == {
        k: expected[k] for k in ("examples", "rows", "steps")
    }


@pytest.mark.slow
def test_as_on_one_device(workers: list[dict[str, Any]]) -> None:
    model = compiled(tf.distribute.get_strategy(), noise_multiplier=1e-6)
    history = distribution.train(model, clicks(SIZE, VOCABULARIES), epochs=2)
    for worker in workers:
        assert_close(worker["quiet"], report(model, history))


@pytest.mark.slow
def test_a_stream_as_on_one_device(workers: list[dict[str, Any]]) -> None:
    stream = dp_sparse.StreamSampling(num_examples=SIZE, batch_size=4, passes=1)
    model = compiled(tf.distribute.get_strategy(), sampling=stream, noise_multiplier=1e-6)
    rows = tf.data.Dataset.from_tensor_slices(clicks(SIZE, VOCABULARIES))
    history = distribution.train(model, rows)
    for worker in workers:
        assert_close(worker["stream"], report(model, history))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quiet", "noisy", "poisson", "stream"])
def test_workers_agree_to_the_last_bit(workers: list[dict[str, Any]], name: str) -> None:
    one, other = (worker[name] for worker in workers)
    assert one == other


@pytest.mark.slow
def test_noise_is_drawn_once(workers: list[dict[str, Any]]) -> None:
    """Drawn by each worker, it would have 0.7 of its deviation as a mean, 1.4 of it as a sum."""
    changes = [np.array(worker["change by noise"]) for worker in workers]
    np.testing.assert_array_equal(*changes)
    assert_deviation(changes[0], 0.5 * LOUD / SIZE)


def test_parts_with_one_key_are_one_sample() -> None:
    """What all workers see together is what one draw of the sampler gives, each example once."""
    sampling = dp_sparse.PoissonSampling(60, 15, 5)
    cut, capacity, data = 7, sampling.batch_capacity, (np.arange(60), np.zeros(60))
    workers = [BatchPart(*ends, 99, 1) for ends in ((0, capacity), (0, cut), (cut, capacity))]
    whole, left, right = (list(sampling.batches_of(data, part, first_step=0)) for part in workers)
    assert len(whole) == 5 and len({batch[0].numpy().tobytes() for batch in whole}) == 5
    for together, *parts in zip(whole, left, right, strict=True):
        joined = tf.nest.map_structure(lambda *leaves: tf.concat(leaves, 0), *parts)
        for one, other in zip(*map(tf.nest.flatten, (joined, together)), strict=True):
            np.testing.assert_array_equal(one, other)


def test_every_example_is_drawn_once_for_all_workers(workers: list[dict[str, Any]]) -> None:
    """Were each worker to sample on its own, or both the same rows, there would be others."""
    assert workers[0]["noisy"]["examples"] == SIZE * STEPS
    assert workers[0]["stream"]["examples"] == SIZE
    assert 0 < workers[0]["poisson"]["examples"] < SIZE * STEPS


def test_fit_is_refused_and_says_what_to_call(workers: list[dict[str, Any]]) -> None:
    assert "call dp_sparse.distribution.train" in workers[0]["fit"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("key", "Expected all workers with one noise key"),
        ("plan", "Expected all workers with one plan"),
        ("steps", "Expected all workers with one number of steps spent"),
        ("settings", "Expected all workers with one set of optimizer settings"),
    ],
)
def test_workers_that_differ_are_refused(other: str, message: str) -> None:
    """Their gradients would be averaged: less noise than one of them has, or another clip norm."""
    for printed in of_two_workers(BY_HAND, other):
        assert message in printed


def test_a_crashed_run_goes_on_where_it_was(tmp_path: Any) -> None:
    """By BackupAndRestore, with the same arguments: epochs are counted on, and steps."""
    seen: list[int] = []

    def begin(epoch: int, logs: Any) -> None:
        seen.append(epoch)
        if seen == [0, 1]:
            raise KeyboardInterrupt

    def run() -> int:
        model = compiled(tf.distribute.get_strategy())
        callbacks = [
            keras.callbacks.BackupAndRestore(tmp_path / "backup"),
            keras.callbacks.LambdaCallback(on_epoch_begin=begin),
        ]
        data = clicks(SIZE, VOCABULARIES)
        distribution.train(model, data, epochs=2, steps_per_epoch=2, callbacks=callbacks)
        return int(model.optimizer.steps_spent)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert run() == STEPS
    assert seen == [0, 1, 1]


@pytest.mark.slow
def test_a_run_of_which_nothing_is_left_trains_nothing() -> None:
    """As after a crash behind the last epoch; and a later run begins at epoch 0 again."""
    model, data, seen = compiled(tf.distribute.get_strategy()), clicks(SIZE, VOCABULARIES), []

    class Restored(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.model._initial_epoch = 2

    distribution.train(model, data, epochs=2, callbacks=[Restored()])
    assert int(model.optimizer.steps_spent) == 0
    noted = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(epoch))
    distribution.train(model, data, epochs=2, callbacks=[noted])
    assert seen == [0, 1] and int(model.optimizer.steps_spent) == STEPS


@pytest.mark.slow
def test_train_refuses() -> None:
    one_device = tf.distribute.get_strategy()
    model = compiled(one_device)
    with pytest.raises(ValueError, match="Expected at most 4 steps"):
        distribution.train(model, clicks(SIZE, VOCABULARIES), steps_per_epoch=5)
    with pytest.raises(ValueError, match="Expected epochs"):
        distribution.train(model, clicks(SIZE, VOCABULARIES), epochs=0)
    with pytest.raises(ValueError, match="got 5 steps in 5 epochs"):
        distribution.train(model, clicks(SIZE, VOCABULARIES), epochs=5)
    distribution.train(model, clicks(SIZE, VOCABULARIES), steps_per_epoch=3)
    distribution.train(model, clicks(SIZE, VOCABULARIES))
    assert int(model.optimizer.steps_spent.numpy()) == STEPS
    model.compile("sgd", "binary_crossentropy")
    with pytest.raises(ValueError, match="Expected a model compiled with a private optimizer"):
        distribution.train(model, clicks(SIZE, VOCABULARIES))
    stream = dp_sparse.StreamSampling(num_examples=SIZE, batch_size=4, passes=1)
    model = compiled(one_device, sampling=stream)
    rows = tf.data.Dataset.from_tensor_slices(clicks(SIZE, VOCABULARIES))
    with pytest.raises(ValueError, match="Expected no class_weight with a stream"):
        distribution.train(model, rows, class_weight={0: 1.0, 1: 2.0})
    lazy = dp_sparse.LazyDPSGDOptimizer("sgd", plan_for(SIZE), 1.0)
    model.compile(lazy, "binary_crossentropy")
    with pytest.raises(PrivacyError, match="noises at once, got LazyDPSGD.*train with fit"):
        distribution.train(model, clicks(SIZE, VOCABULARIES))

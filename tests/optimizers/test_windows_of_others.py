"""Windows of selection beside other threads, workers, processes and models."""

import copy
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import special

import dp_sparse
from dp_sparse import noise
from dp_sparse.accounting import longest_window
from dp_sparse.accounting.mechanisms import beyond_reach, windows_beyond_reach
from dp_sparse.noise import REACH
from dp_sparse.optimizers import SelectionWindow, replica_checks
from dp_sparse.optimizers import window as windows
from dp_sparse.sampling import Sampling
from tests.optimizers.test_window import LONGEST_AT_ONCE, Driven
from tests.optimizers.test_windowed_adafest import IDS, THRESHOLD, batches, compiled, trained
from tests.training_cases import VOCABULARIES, click_model, plan_for


def test_maps_of_two_threads_are_added_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though a thread waits between what it reads and what it writes."""
    own = SelectionWindow._own_progress

    def slowly(window: SelectionWindow, draw: noise.Draw) -> tf.Tensor:
        def wait(progress: np.ndarray) -> np.ndarray:
            time.sleep(0.003)
            return progress

        return tf.ensure_shape(tf.numpy_function(wait, [own(window, draw)], tf.int64), [5])

    monkeypatch.setattr(SelectionWindow, "_own_progress", slowly)
    driven, each = Driven(10**6, 50, 1.0, 1.0, ended=LONGEST_AT_ONCE), 20

    def work(rows: range) -> None:
        for _ in range(each):
            driven.take(dict.fromkeys(rows, 1))

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (range(30), range(20, 50))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driven.sum == {row: each * (1 + (20 <= row < 30)) for row in range(50)}
    assert driven.window._progress.numpy()[windows._STEPS] == 2 * each


def test_a_step_counts_under_its_own_number() -> None:
    """Even if another thread has advanced the count since it began."""
    model, plan = compiled(window=64)
    optimizer = model.optimizer
    remember = optimizer.remember

    def overtaken(of_step: tuple[tf.Tensor, ...], draw: object, step: tf.Tensor) -> None:
        optimizer.steps_spent.assign(40)
        remember(of_step, draw, step)
        optimizer.steps_spent.assign(step + 1)

    optimizer.remember = overtaken
    trained(model, batches(plan), steps=9)
    progress = optimizer._window._progress.numpy()
    assert progress[[windows._STEPS, windows._ROUNDS]].tolist() == [2, 2]  # after 1, 2 and 4
    assert progress[windows._LAST_ROUND] == 9


def words(window: SelectionWindow) -> tf.Tensor:
    one = tf.constant(1, tf.int64)
    return replica_checks.what_decides(
        tf.ones([1, 3], tf.int64), one, tf.ones([3], tf.int64), one, one, window.fingerprint()
    )


def begun(rows: list[int], ended: int) -> SelectionWindow:
    window = SelectionWindow(8)
    window.start([np.array(rows, np.int64)], np.array([0, 100]), ended)
    return window


@pytest.mark.parametrize("other", [([3, 8], 4), ([3, 7], 5), ([3], 4), ([], 4), ([3, 7, 9], 4)])
def test_workers_with_other_windows_are_refused(other: tuple[list[int], int]) -> None:
    own = words(begun([3, 7], 4))
    replica_checks.checks(tf.concat([own, words(begun([3, 7], 4))], 0))
    with pytest.raises(tf.errors.InvalidArgumentError):
        replica_checks.checks(tf.concat([own, words(begun(*other))], 0))


def test_the_state_of_a_choice_is_that_of_its_window() -> None:
    model, plan = compiled(window=4)
    trained(model, batches(plan), steps=2)
    first = int(model.optimizer.state_of_choice())
    assert first == int(model.optimizer._window.fingerprint()) != 0
    trained(model, batches(plan, IDS[2:]), steps=1)
    assert int(model.optimizer.state_of_choice()) != first
    single, _ = compiled()
    assert int(single.optimizer.state_of_choice()) == 0


def test_a_checkpoint_is_written_before_rows_are_shown() -> None:
    """Else a killed process could go on from an earlier one, and choose other rows."""
    model, plan = compiled(window=4)
    trained(model, batches(plan), steps=3)
    written: list[str] = []
    model.optimizer.before_publishing = lambda: written.append("survivors")
    assert model.optimizer.survivors and written == ["survivors"]
    model.optimizer.before_publishing = lambda: written.append("windows")
    assert len(model.optimizer.windows) == 2 and written[1:] == ["windows"]


def paid_rows() -> tuple[keras.Model, dp_sparse.SelectedRows, list[str]]:
    model = click_model()
    names = [each.name for each in model.layers if isinstance(each, keras.layers.Embedding)]
    sizes = dict(zip(names, VOCABULARIES, strict=True))
    return model, dp_sparse.SelectedRows.public({names[0]: [2, 5], names[1]: [3]}, sizes), names


@pytest.mark.parametrize("way", ["take_slots", "load_weights"])
def test_first_rows_of_another_plan_are_not_taken_over(way: str, tmp_path: Path) -> None:
    """Before a step nothing has survived; this plan may not pay for them."""
    model, first, _ = paid_rows()

    def compile_new(**settings: Any) -> dp_sparse.DPAdaFESTOptimizer:
        made = dp_sparse.DPAdaFESTOptimizer("sgd", plan_for(8), 1.0, window=4, **settings)
        model.compile(made, "binary_crossentropy")
        made.build(model.trainable_variables)
        return made

    previous = compile_new(first_rows=first)
    assert [own.tolist() for own in previous.survivors] == [[2, 5], [3]]
    model.save_weights(tmp_path / "run.weights.h5")
    optimizer = compile_new()
    if way == "take_slots":
        optimizer.take_slots(previous)
    else:
        model.load_weights(tmp_path / "run.weights.h5")
    assert [own.tolist() for own in optimizer.survivors] == [[], []]
    again = compile_new(first_rows=first)
    model.load_weights(tmp_path / "run.weights.h5")
    assert [own.tolist() for own in again.survivors] == [[2, 5], [3]]


def test_a_checkpoint_is_written_before_survivors_are_taken_over() -> None:
    model, plan = compiled(window=4)
    trained(model, batches(plan), steps=3)
    previous, written = model.optimizer, []
    previous.before_publishing = lambda: written.append(True)
    optimizer = dp_sparse.DPAdaFESTOptimizer(keras.optimizers.SGD(1.0), plan_for(8), 1.0, window=4)
    model.compile(optimizer, "binary_crossentropy")
    optimizer.take_slots(previous)
    assert written == [True] and len(optimizer.survivors) == 2


def two_tables(first_trains: bool) -> keras.Model:
    model = click_model()
    first = next(each for each in model.layers if isinstance(each, keras.layers.Embedding))
    first.trainable = first_trains
    return model


@pytest.mark.parametrize("way", ["take_slots", "load_weights"])
def test_survivors_of_other_tables_are_left_out(way: str, tmp_path: Path) -> None:
    """The first table is frozen from one period to the next."""
    model = two_tables(True)

    def compile_new() -> dp_sparse.DPAdaFESTOptimizer:
        made = dp_sparse.DPAdaFESTOptimizer(
            keras.optimizers.SGD(1.0), plan_for(8), 1.0, threshold=THRESHOLD, window=4
        )
        model.compile(made, "binary_crossentropy")
        return made

    previous = compile_new()
    trained(model, batches(previous.plan), steps=5)
    _, second = previous.survivors
    assert len(second)
    model.save_weights(tmp_path / "run.weights.h5")
    next(
        each for each in model.layers if isinstance(each, keras.layers.Embedding)
    ).trainable = False
    optimizer = compile_new()
    optimizer.build(model.trainable_variables)
    if way == "take_slots":
        optimizer.take_slots(previous)
    else:  # a file does not say whose rows are whose
        model.load_weights(tmp_path / "run.weights.h5")
    (found,) = optimizer.survivors
    np.testing.assert_array_equal(found, second if way == "take_slots" else [])
    trained(model, batches(optimizer.plan, IDS[5:]), steps=2)


def test_a_model_that_is_compiled_again_for_xla_goes_on() -> None:
    model, plan = compiled(window=4)
    rows = trained(model, batches(plan), steps=5)
    model.compile(model.optimizer, "binary_crossentropy", jit_compile=True)
    again = trained(model, batches(plan, IDS[5:]), steps=2)
    other, plan = compiled(window=4)
    assert [*rows, *again] == trained(other, batches(plan), steps=7)


def test_a_copy_of_a_window_is_empty() -> None:
    driven = Driven(8, 20, 1.0, 1.0, ended=LONGEST_AT_ONCE)
    driven.take({3: 2, 5: 1})
    for made in (copy.deepcopy(driven.window), pickle.loads(pickle.dumps(driven.window))):
        assert made.longest == 8 and made._progress.numpy().tolist() == [0] * 5
        assert not any(len(each.numpy()) for each in made.non_private_variables()[1:])
    driven.window.start([np.zeros(0, np.int64)], driven.offsets)
    assert not any(len(each.numpy()) for each in driven.window.non_private_variables()[1:])


def full_batches(steps: int) -> dp_sparse.PoissonSampling:
    return dp_sparse.PoissonSampling(100, 100, steps=steps)


def test_what_lies_beyond_the_noise_of_a_window() -> None:
    """In full batches an example is in all 16 of a window's steps."""
    sigma, ratio = 0.9, 0.5
    of_map = sigma * np.sqrt(1 + ratio**2)
    windows_of_16 = 4 + 4  # 64 / 16, and those that grow
    wanted = windows_of_16 * special.ndtr(4 / of_map - REACH)
    slack = 64 * (beyond_reach(sigma) - beyond_reach(sigma * np.sqrt(1 + ratio**-2)))
    found = windows_beyond_reach(full_batches(64), 16, sigma, ratio)
    assert found == pytest.approx(wanted - slack, rel=1e-6)
    stream = dp_sparse.StreamSampling(num_examples=640, batch_size=10, passes=3)
    assert windows_beyond_reach(stream, 16, sigma, ratio) < 1e-3 * found


@pytest.mark.parametrize(
    ("sampling", "sigma", "ratio", "longest"),
    [
        (full_batches(256), 4.0, 0.1, 8),
        (full_batches(256), 5.0, 1.0, 32),
        (full_batches(256), 16.0, 2.0, 256),
        (dp_sparse.PoissonSampling(55_000, 1024, steps=270), 0.7, 1.0, 256),
        (dp_sparse.PoissonSampling(1_600_000, 4096, steps=391), 0.8, 2.0, 256),
        (dp_sparse.StreamSampling(1_000_000, 4096, passes=1), 0.6, 2.0, 245),
    ],
)
def test_windows_are_as_long_as_their_noise_reaches(
    sampling: Sampling, sigma: float, ratio: float, longest: int
) -> None:
    window = min(256, sampling.steps)
    assert longest_window(sampling, window, sigma, ratio, delta=1e-6) == longest


def test_a_window_beyond_the_reach_of_its_noise_is_named() -> None:
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(20.0, 1e-12), full_batches(256))
    message = r"Expected window <= \d+, got window=256: one example .* noise_ratio=0.1"
    with pytest.raises(ValueError, match=message):
        dp_sparse.DPAdaFESTOptimizer("sgd", plan.calibrate(), 1.0, noise_ratio=0.1, window=256)

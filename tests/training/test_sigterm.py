"""SIGTERM in and around fits with a `PrivateCheckpoint`: none is lost, and no handler is."""

import gc
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest

import dp_sparse
from dp_sparse import PrivacyMonitor, PrivateCheckpoint
from dp_sparse.distribution import epochs
from dp_sparse.training.plan_steps import Sigterm, around_fit
from tests.subprocesses import HANG
from tests.training_cases import click_model, clicks, plan_for


@pytest.fixture(autouse=True)
def signals() -> Iterator[list[int]]:
    """What comes to the handler of SIGTERM that a user has, which is there again afterwards."""
    came: list[int] = []

    def user(number: int, frame: Any) -> None:
        came.append(number)

    before = signal.signal(signal.SIGTERM, user)
    yield came
    assert signal.getsignal(signal.SIGTERM) is user
    signal.signal(signal.SIGTERM, before)


class Calls(keras.callbacks.Callback):
    """Calls functions at places of a fit."""

    def __init__(self, **functions: Callable[[], object]) -> None:
        super().__init__()
        for place, function in functions.items():
            setattr(self, place, lambda *given, function=function, **named: function())


def ask() -> None:
    signal.raise_signal(signal.SIGTERM)


def interrupt() -> None:
    raise KeyboardInterrupt


class Run:
    """A model with its checkpoint and batches, of four steps."""

    def __init__(self, folder: pathlib.Path) -> None:
        plan = plan_for(8, steps=4, noise_multiplier=0.5)
        self.model = click_model()
        optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0)
        self.model.compile(optimizer=optimizer, loss="binary_crossentropy")
        self.checkpoint = PrivateCheckpoint(str(folder))
        self.spent = self.checkpoint.restore(self.model)
        self.batches = plan.sampling.batches(clicks(8))

    def fit(self, *callbacks: Any, **options: Any) -> None:
        callbacks = (*callbacks, self.checkpoint)
        self.model.fit(self.batches, callbacks=list(callbacks), verbose=0, **options)

    def is_ended_by(self, *callbacks: Any, **options: Any) -> None:
        with pytest.raises(SystemExit, match="143"):
            self.fit(*callbacks, **options)


def test_a_signal_is_answered_after_the_step(tmp_path: pathlib.Path, signals: list[int]) -> None:
    run = Run(tmp_path)
    run.is_ended_by(Calls(on_train_batch_begin=ask))
    assert run.checkpoint.steps == [1] and not signals
    ask()
    assert signals == [signal.SIGTERM]


@pytest.mark.parametrize("place", ["on_epoch_end", "on_test_batch_begin"])
def test_a_signal_in_the_last_epochs_end_is_answered(tmp_path: pathlib.Path, place: str) -> None:
    """Also behind the last place at which the checkpoint looks, as when a callback scores."""
    run = Run(tmp_path)
    run.is_ended_by(Calls(**{place: ask}), validation_data=clicks(8))
    assert run.checkpoint.steps == [4]


def test_a_signal_behind_the_end_goes_to_the_handler_before(
    tmp_path: pathlib.Path, signals: list[int]
) -> None:
    Run(tmp_path).fit(Calls(on_train_end=ask))
    assert signals == [signal.SIGTERM]


def test_the_second_signal_ends_the_process_at_once(
    tmp_path: pathlib.Path, signals: list[int]
) -> None:
    run = Run(tmp_path)
    run.is_ended_by(Calls(on_train_begin=ask, on_train_batch_begin=ask))
    assert run.checkpoint.steps == [] and not signals


def test_between_two_looks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends the process saves first."""
    run = Run(tmp_path)
    end = run.checkpoint._end_if_terminated
    monkeypatch.setattr(run.checkpoint, "_end_if_terminated", lambda: (ask(), end()))
    run.is_ended_by()
    assert run.checkpoint.steps == [1]


@pytest.mark.parametrize("place", ["on_epoch_end", "on_train_end", "on_train_begin"])
def test_an_interrupted_fit_gives_the_handler_back(
    tmp_path: pathlib.Path, signals: list[int], place: str
) -> None:
    run = Run(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.fit(Calls(**{place: interrupt}), steps_per_epoch=2)
    ask()
    assert signals == [signal.SIGTERM]
    run.is_ended_by(Calls(on_train_batch_begin=ask))  # the next fit waits anew


def test_a_noted_signal_of_an_interrupted_fit_is_passed_on(
    tmp_path: pathlib.Path, signals: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        ask()
        raise OSError("No space left")

    with pytest.raises(OSError, match="No space"):
        Run(tmp_path).fit(Calls(on_train_batch_begin=fail))
    assert signals == [signal.SIGTERM]
    assert "OSError: No space left" in capsys.readouterr().err  # the handler may end the process


def test_a_signal_that_was_passed_on_ends_nothing_later(
    tmp_path: pathlib.Path, signals: list[int]
) -> None:
    run = Run(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.fit(Calls(on_train_batch_begin=lambda: (ask(), interrupt())))
    assert signals == [signal.SIGTERM]
    run.model.evaluate(*clicks(8), callbacks=[run.checkpoint], verbose=0)


def test_an_interrupted_fit_keeps_no_folder_when_its_model_is_gone(tmp_path: pathlib.Path) -> None:
    """As in a notebook, where the cell runs anew with a new model."""
    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path).fit(Calls(on_epoch_end=interrupt), steps_per_epoch=2)
    gc.collect()
    assert Run(tmp_path).spent == 2


def test_a_fit_within_a_fit(tmp_path: pathlib.Path) -> None:
    outer, inner = Run(tmp_path / "outer"), Run(tmp_path / "inner")
    outer.is_ended_by(Calls(on_train_batch_begin=lambda: (inner.fit(), ask())))
    assert inner.checkpoint.steps == [4] and outer.checkpoint.steps == [1]


def test_several_processes_epochs_give_the_handler_back(
    tmp_path: pathlib.Path, signals: list[int]
) -> None:
    run = Run(tmp_path)
    callbacks = [run.checkpoint, Calls(on_train_begin=interrupt)]
    with pytest.raises(KeyboardInterrupt):
        epochs.run(run.model, None, lambda first: pytest.fail("It began."), 1, None, callbacks, 0)
    ask()
    assert signals == [signal.SIGTERM]


def test_a_fit_in_a_thread_changes_no_handler(tmp_path: pathlib.Path, signals: list[int]) -> None:
    failed: list[BaseException] = []

    def in_thread() -> None:
        try:
            run.fit(Calls(on_train_begin=during.set))
        except BaseException as error:  # which ends the thread alone
            failed.append(error)

    run, during = Run(tmp_path), threading.Event()
    thread = threading.Thread(target=in_thread)
    thread.start()
    assert during.wait(HANG)
    ask()
    thread.join()
    assert signals == [signal.SIGTERM] and not failed


def test_a_monitor_of_an_earlier_fit_is_not_asked_to_write(tmp_path: pathlib.Path) -> None:
    run = Run(tmp_path / "run")
    refused = PrivacyMonitor(str(tmp_path / "refused"))
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused" / "log.jsonl").write_text("no log\n")
    with pytest.raises(ValueError, match="Expected lines of JSON"):
        run.fit(refused)
    monitor = PrivacyMonitor(str(tmp_path / "log"), every_steps=1)
    run.fit(monitor, steps_per_epoch=1)
    run.is_ended_by(Calls(on_train_batch_begin=ask))
    assert run.checkpoint.steps == [1, 2]


def test_a_fork_of_a_fit_gets_its_own_signals() -> None:
    """As `multiprocessing` begins processes, and ends them."""
    kept, sigterm = signal.signal(signal.SIGTERM, signal.SIG_DFL), Sigterm()
    sigterm.wait()
    child = os.fork()
    if child == 0:
        ask()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    sigterm.end()
    assert not sigterm.came
    signal.signal(signal.SIGTERM, kept)


def test_who_sets_it_again_later_gets_nothing_noted(signals: list[int]) -> None:
    """As a callback that restores the handler it found when training began."""
    user, sigterm = signal.getsignal(signal.SIGTERM), Sigterm()
    sigterm.wait()
    ours = signal.signal(signal.SIGTERM, user)
    sigterm.end()
    signal.signal(signal.SIGTERM, ours)
    ask()
    assert signals == [signal.SIGTERM] and not sigterm.came
    signal.signal(signal.SIGTERM, user)


def test_a_handler_that_python_cannot_set_again_stays(
    monkeypatch: pytest.MonkeyPatch, signals: list[int]
) -> None:
    sigterm = Sigterm()
    with monkeypatch.context() as patch, around_fit():
        patch.setattr(signal, "getsignal", lambda number: None)
        sigterm.wait()
    ask()
    assert signals == [signal.SIGTERM]
    sigterm.end()

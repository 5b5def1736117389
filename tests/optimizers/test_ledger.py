"""The counter behind the budget: one for each plan and process, never set back, each batch once."""

import contextlib
import os
import threading

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from dp_sparse import PrivacyError, StreamSampling
from dp_sparse.errors import translated
from dp_sparse.optimizers.ledger import StepLedger
from dp_sparse.sampling.marker import SEEDED, Marker, new_nonce
from tests.training_cases import plan_for


def saved_count() -> keras.Variable:
    return keras.Variable(0, dtype="int64", trainable=False)


def spend(
    ledger: StepLedger, plan: object, nonce: int, index: int, saved: keras.Variable | None = None
) -> int:
    saved = saved_count() if saved is None else saved
    mark = Marker(plan.sampling.fingerprint, nonce, index)  # type: ignore[attr-defined]
    with translated():
        ledger.spend(tf.constant(mark.rows(plan.sampling.batch_capacity)), saved)  # type: ignore[attr-defined]
    return int(saved)


def test_every_batch_is_one_step() -> None:
    plan = plan_for(8, steps=3)
    ledger, nonce = StepLedger(plan), new_nonce(None)
    assert [spend(ledger, plan, nonce, i) for i in range(3)] == [1, 2, 3]
    with pytest.raises(PrivacyError, match="no steps left: 3 of 3 are spent"):
        spend(ledger, plan, nonce, 3)


def test_two_ledgers_of_a_plan_share_its_steps() -> None:
    plan = plan_for(8, steps=3)
    one, two = StepLedger(plan), StepLedger(plan)
    nonces = [new_nonce(None) for _ in range(4)]
    spent = [spend(ledger, plan, n, 0) for ledger, n in zip((one, two, one), nonces, strict=False)]
    assert spent == [1, 2, 3]
    with pytest.raises(PrivacyError, match="no steps left"):
        spend(two, plan, nonces[3], 0)


def test_another_plan_has_its_own_steps() -> None:
    one, two = plan_for(8, steps=1), plan_for(8, steps=1)
    for plan in (one, two):
        assert spend(StepLedger(plan), plan, new_nonce(None), 0) == 1


def test_the_larger_of_the_saved_and_the_counted_steps_holds() -> None:
    plan = plan_for(8, steps=10)
    ledger, saved = StepLedger(plan), saved_count()
    saved.assign(7)
    assert spend(ledger, plan, new_nonce(None), 0, saved) == 8
    saved.assign(0)
    assert spend(ledger, plan, new_nonce(None), 0, saved) == 9


@pytest.mark.parametrize(
    ("batches", "refused"),
    [
        ([(0, 0), (0, 0)], True),
        ([(0, 0), (0, 1), (0, 0)], True),
        ([(0, 0), (0, 2)], True),  # one was filtered out, perhaps by what it held
        ([(0, 3), (0, 4)], False),
        ([(0, 0), (1, 0)], False),
        ([(0, 0), (1, 0), (0, 0)], True),
        ([(0, 0), (1, 0), (0, 1)], True),
    ],
)
def test_each_batch_once_and_in_order(batches: list[tuple[int, int]], refused: bool) -> None:
    plan = plan_for(8)
    ledger = StepLedger(plan)
    nonces = [new_nonce(None), new_nonce(None)]
    for which, index in batches[:-1]:
        spend(ledger, plan, nonces[which], index)
    which, index = batches[-1]
    if not refused:
        spend(ledger, plan, nonces[which], index)
        return
    with pytest.raises(PrivacyError, match=f"got batch {index} again"):
        spend(ledger, plan, nonces[which], index)


def test_a_refused_batch_costs_no_step() -> None:
    plan = plan_for(8)
    ledger, saved, nonce = StepLedger(plan), saved_count(), new_nonce(None)
    spend(ledger, plan, nonce, 0, saved)
    with pytest.raises(PrivacyError):
        spend(ledger, plan, nonce, 0, saved)
    assert int(saved) == 1
    assert spend(ledger, plan, nonce, 1, saved) == 2


def test_seeded_and_foreign_batches() -> None:
    plan, other = plan_for(8), plan_for(9)
    ledger = StepLedger(plan)
    with pytest.raises(PrivacyError, match="use batches\\(\\) without seed"):
        spend(ledger, plan, SEEDED, 0)
    with pytest.raises(PrivacyError, match="got one of another sampler"):
        spend(ledger, other, new_nonce(None), 0)


def spoiled(rows: np.ndarray, how: str) -> np.ndarray:
    """A marker after something was done to its batch."""
    other = rows + np.array([0, 0, 1, 0])
    return {
        "halved": rows[:4],
        "doubled": np.concatenate([rows, rows]),
        "shuffled": rows[::-1],
        "mixed": np.concatenate([rows[:4], other[4:]]),
        "repeated": rows[[0, 0, 2, 3, 4, 5, 6, 7]],
        "empty": rows[:0],
    }[how]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("halved", "got 4 rows"),
        ("doubled", "got 16 rows"),
        ("shuffled", "got 8 rows, or some of several batches"),
        ("mixed", "got 8 rows, or some of several batches"),
        ("repeated", "got 8 rows, or some of several batches"),
        ("empty", "slice index 0 .* out of bounds"),
    ],
)
def test_a_batch_that_is_not_whole(how: str, message: str) -> None:
    plan = plan_for(8)
    ledger, saved = StepLedger(plan), saved_count()
    rows = spoiled(Marker(plan.sampling.fingerprint, new_nonce(None), 0).rows(8), how)
    refused = tf.errors.InvalidArgumentError if how == "empty" else PrivacyError
    with pytest.raises(refused, match=message), translated():
        ledger.spend(tf.constant(rows), saved)
    assert int(saved) == 0


def test_a_stream_goes_on_where_it_stopped() -> None:
    plan = dataclasses.replace(plan_for(8), sampling=StreamSampling(num_examples=8, batch_size=2))
    ledger, saved, nonce = StepLedger(plan), saved_count(), new_nonce(None)
    spend(ledger, plan, nonce, 0, saved)
    with pytest.raises(
        PrivacyError, match=r"Expected batch 1 of the stream, got batch 2.*first_step=1"
    ):
        spend(ledger, plan, nonce, 2, saved)
    saved.assign(3)
    assert spend(ledger, plan, new_nonce(None), 3, saved) == 4


def test_in_a_graph_the_update_waits_for_the_checks() -> None:
    plan = plan_for(8, steps=1)
    ledger, saved = StepLedger(plan), saved_count()
    weight = tf.Variable(0.0)

    @tf.function(autograph=False)
    def step(mark: tf.Tensor) -> None:
        with tf.control_dependencies([ledger.spend(mark, saved)]):
            weight.assign_add(1.0)

    mark = Marker(plan.sampling.fingerprint, new_nonce(None), 0)
    step(tf.constant(mark.rows(8)))
    with pytest.raises(PrivacyError), translated():
        step(tf.constant(mark._replace(position=1).rows(8)))
    assert float(weight) == 1.0
    assert int(saved) == 1


def test_threads_share_one_budget() -> None:
    """Two optimizers of one plan in two threads spend no more than the plan's steps together."""
    plan, spent = plan_for(8, steps=60), []

    def train(ledger: StepLedger) -> None:
        saved = saved_count()
        with contextlib.suppress(PrivacyError):
            for _ in range(60):
                spend(ledger, plan, new_nonce(None), 0, saved)
                spent.append(1)

    threads = [threading.Thread(target=train, args=(StepLedger(plan),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(spent) <= 60

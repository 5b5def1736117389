"""The counter behind the budget: one for each plan and process, never set back, each batch once."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dp_sparse import OfflinePoissonSampling, PrivacyError, PrivacyPlan, StreamSampling
from dp_sparse.core import replicas
from dp_sparse.core.errors import translated
from dp_sparse.optimizers.ledger import PassOwners, SavedCount, StepLedger
from dp_sparse.sampling.batch import OWN_ORDER, SEEDED, Marker, new_nonce
from tests.training_cases import plan_for


def saved_count(plan: PrivacyPlan, steps: int = 0, own_order: int = 0) -> SavedCount:
    variables = (keras.Variable(0, dtype="int64", trainable=False) for _ in range(3))
    saved = SavedCount(*variables)
    saved.write(plan, steps, own_order)
    return saved


def spend(
    ledger: StepLedger, plan: PrivacyPlan, nonce: int, index: int, saved: SavedCount | None = None
) -> int:
    saved = saved_count(plan) if saved is None else saved
    mark = Marker(plan.sampling.fingerprint, nonce, index)
    with translated():
        ledger.spend(tf.constant(mark.of_examples(plan.sampling.batch_capacity)), saved)
    return int(saved.steps)


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
    ledger, saved = StepLedger(plan), saved_count(plan, 7)
    assert spend(ledger, plan, new_nonce(None), 0, saved) == 8
    saved.write(plan, 0, 0)
    assert spend(ledger, plan, new_nonce(None), 0, saved) == 9


@pytest.mark.parametrize(
    ("batches", "refused"),
    [
        ([(0, 0), (0, 0)], True),
        ([(0, 0), (0, 1), (0, 0)], True),
        ([(0, 0), (0, 2)], True),  # one was filtered out, perhaps by what it held
        ([(0, 0), (0, 1)], False),
        ([(0, 3)], True),  # those before it were left out, perhaps for what they held
        ([(0, 0), (1, 1)], True),
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
    ledger, saved, nonce = StepLedger(plan), saved_count(plan), new_nonce(None)
    spend(ledger, plan, nonce, 0, saved)
    with pytest.raises(PrivacyError):
        spend(ledger, plan, nonce, 0, saved)
    assert int(saved.steps) == 1
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
        ("halved", "got 4,"),
        ("doubled", "got 16,"),
        ("shuffled", "got 8, or some of several batches"),
        ("mixed", "got 8, or some of several batches"),
        ("repeated", "got 8, or some of several batches"),
        ("empty", "slice index 0 .* out of bounds"),
    ],
)
def test_a_batch_that_is_not_whole(how: str, message: str) -> None:
    plan = plan_for(8)
    ledger, saved = StepLedger(plan), saved_count(plan)
    rows = spoiled(Marker(plan.sampling.fingerprint, new_nonce(None), 0).of_examples(8), how)
    refused = tf.errors.InvalidArgumentError if how == "empty" else PrivacyError
    with pytest.raises(refused, match=message), translated():
        ledger.spend(tf.constant(rows), saved)
    assert int(saved.steps) == 0


def stream_plan(passes: int = 3) -> PrivacyPlan:
    """Passes of four steps."""
    sampling = StreamSampling(num_examples=8, batch_size=2, passes=passes)
    return dataclasses.replace(plan_for(8), sampling=sampling)


def test_a_stream_goes_on_where_it_stopped() -> None:
    plan = stream_plan()
    ledger, saved, nonce = StepLedger(plan), saved_count(plan), new_nonce(None)
    spend(ledger, plan, nonce, 0, saved)
    with pytest.raises(
        PrivacyError, match=r"Expected batch 1 of the stream, got batch 2.*first_step=1"
    ):
        spend(ledger, plan, nonce, 2, saved)
    assert spend(ledger, plan, nonce, 1, saved) == 2


A, B, OWN = 0, 1, 2  # two iterators of a dataset; arrays


@pytest.mark.parametrize(
    ("before", "batch", "spent"),
    [
        ([(A, 0), (A, 1)], (A, 2), 3),
        ([(A, 0), (A, 1)], (B, 2), None),
        ([(A, 0), (A, 1)], (OWN, 2), None),
        ([(A, 0), (A, 1)], (B, 0), None),
        ([(A, 0), (A, 1)], (B, 4), 5),
        ([(A, 0), (A, 1)], (OWN, 4), 5),
        ([(A, 0), (A, 1)], (A, 4), None),  # the same iterator, as after a filter
        ([(A, 0), (A, 1)], (B, 3), None),
        ([(A, 0), (A, 1)], (B, 8), None),  # a whole pass left out
        ([(A, 0), (A, 1), (B, 4)], (A, 5), None),
        ([(A, 0), (A, 1), (B, 4)], (A, 2), None),
        ([(A, 0), (A, 1), (B, 4)], (B, 5), 6),
        ([(A, 0), (A, 1), (A, 2), (A, 3)], (A, 4), 5),
        ([(A, 0), (A, 1), (A, 2), (A, 3)], (B, 4), 5),
        ([(A, 0), (A, 1), (A, 2), (A, 3)], (OWN, 4), 5),
        ([(OWN, 0), (OWN, 1)], (OWN, 2), 3),
        ([(OWN, 0), (OWN, 1)], (OWN, 1), None),
        ([(OWN, 0), (OWN, 1)], (OWN, 4), None),
        ([(OWN, 0), (OWN, 1)], (A, 2), None),
        ([(OWN, 0), (OWN, 1)], (A, 4), 5),
        ([], (A, 2), None),
    ],
)
def test_whose_turn_it_is(
    before: list[tuple[int, int]], batch: tuple[int, int], spent: int | None
) -> None:
    plan = stream_plan()
    ledger, saved = StepLedger(plan), saved_count(plan)
    nonces = [new_nonce(None), new_nonce(None), OWN_ORDER]
    for which, index in before:
        spend(ledger, plan, nonces[which], index, saved)
    (which, index), spent_before = batch, int(saved.steps)
    if spent is not None:
        assert spend(ledger, plan, nonces[which], index, saved) == spent
        return
    with pytest.raises(PrivacyError, match=r"Expected batch \d (of|from)"):
        spend(ledger, plan, nonces[which], index, saved)
    assert int(saved.steps) == spent_before


@pytest.mark.parametrize(("nonce", "own_order"), [(OWN_ORDER, 1), (None, 0)])
def test_in_which_order_the_last_batch_came_is_saved(nonce: int | None, own_order: int) -> None:
    """A process that goes on from it must not read a dataset again within a pass."""
    plan = stream_plan()
    saved = saved_count(plan, 0, 1 - own_order)
    spend(StepLedger(plan), plan, new_nonce(None) if nonce is None else nonce, 0, saved)
    assert saved.values() == (1, own_order)


@pytest.mark.parametrize("own_order", [0, 1])
def test_a_count_that_another_process_saved(own_order: int) -> None:
    """Arrays go on within a pass if it was theirs; whoever saved it, a dataset does not."""
    for nonce, allowed in [(OWN_ORDER, own_order), (new_nonce(None), 0)]:
        plan = stream_plan()
        ledger, saved = StepLedger(plan), saved_count(plan, 2, own_order)
        if allowed:
            assert spend(ledger, plan, nonce, 2, saved) == 3
        else:
            with pytest.raises(PrivacyError, match=r"from a new one.*first_step=4\)"):
                spend(ledger, plan, nonce, 2, saved)


def test_an_older_count_does_not_say_in_which_order_a_pass_is() -> None:
    """A second optimizer, or an old checkpoint: what this process did holds."""
    for nonce, allowed in [(OWN_ORDER, True), (new_nonce(None), False)]:
        plan = stream_plan()
        ledger = StepLedger(plan)
        for index in range(2):
            spend(ledger, plan, nonce, index)
        if allowed:
            assert spend(ledger, plan, OWN_ORDER, 2, saved_count(plan, 1, 0)) == 3
        else:
            with pytest.raises(PrivacyError, match="from a new one"):
                spend(ledger, plan, OWN_ORDER, 2, saved_count(plan, 1, 1))


def test_the_last_pass_cannot_be_begun_anew() -> None:
    plan = stream_plan(1)
    ledger, saved = StepLedger(plan), saved_count(plan)
    spend(ledger, plan, new_nonce(None), 0, saved)
    with pytest.raises(PrivacyError, match="After 1 of 4 steps no pass is left"):
        spend(ledger, plan, new_nonce(None), 1, saved)


def test_in_a_graph_the_update_waits_for_the_checks() -> None:
    plan = plan_for(8, steps=1)
    ledger, saved = StepLedger(plan), saved_count(plan)
    weight = tf.Variable(0.0)

    @tf.function(autograph=False)
    def step(mark: tf.Tensor) -> None:
        with tf.control_dependencies([ledger.spend(mark, saved)]):
            weight.assign_add(1.0)

    mark = Marker(plan.sampling.fingerprint, new_nonce(None), 0)
    step(tf.constant(mark.of_examples(8)))
    with pytest.raises(PrivacyError), translated():
        step(tf.constant(mark._replace(position=1).of_examples(8)))
    assert float(weight) == 1.0
    assert int(saved.steps) == 1


def test_threads_share_one_budget() -> None:
    """Two optimizers of one plan in two threads spend no more than the plan's steps together."""
    plan, spent = plan_for(8, steps=60), []

    def train(ledger: StepLedger) -> None:
        saved = saved_count(plan)
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


def test_threads_that_make_ledgers_at_once_share_one_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, plan, ledgers = replicas.undistributed, plan_for(8, steps=3), []

    def slow(make: Callable[[], Any]) -> Any:
        time.sleep(0.2)
        return made(make)

    monkeypatch.setattr(replicas, "undistributed", slow)
    threads = [threading.Thread(target=lambda: ledgers.append(StepLedger(plan))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [spend(ledger, plan, new_nonce(None), 0) for ledger in ledgers[:3]] == [1, 2, 3]
    with pytest.raises(PrivacyError, match="no steps left"):
        spend(ledgers[3], plan, new_nonce(None), 0)


def test_two_plans_that_ask_for_one_pass_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One gets it; the other one reads nothing between the check and what the first one writes."""
    check, nonce, refused = PassOwners.check, new_nonce(None), []

    def slow(self: PassOwners, marker: Marker) -> list[tf.Operation]:
        found = check(self, marker)
        time.sleep(0.5)
        return found

    def train(plan: PrivacyPlan) -> None:
        try:
            spend(StepLedger(plan), plan, nonce, 0)
        except PrivacyError as error:
            refused.append(str(error))

    monkeypatch.setattr(PassOwners, "check", slow)
    threads = [threading.Thread(target=train, args=(plan_for(8, steps=1),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (message,) = refused
    assert "batches that this plan alone trains on" in message


def drawn_plan(**fields: Any) -> PrivacyPlan:
    """Four steps on one prepared draw, each time another plan of the same numbers."""
    sampling = OfflinePoissonSampling(8, 2, 4, capacity=8, draw_id=64 * "7", **fields)
    return dataclasses.replace(plan_for(8), sampling=sampling)


class TestAPreparedDraw:
    def test_serves_one_plan(self) -> None:
        first, second = drawn_plan(), drawn_plan()
        assert first.fingerprint == second.fingerprint
        spend(StepLedger(first), first, OWN_ORDER, 0, saved_count(first))
        with pytest.raises(PrivacyError, match="on which another plan has trained"):
            spend(StepLedger(second), second, OWN_ORDER, 1, saved_count(second, 1, 1))
        assert spend(StepLedger(first), first, OWN_ORDER, 1, saved_count(first, 1, 1)) == 2

    def test_that_is_shared_serves_several(self) -> None:
        for _ in range(2):
            plan = drawn_plan(shared=True)
            assert spend(StepLedger(plan), plan, OWN_ORDER, 0, saved_count(plan)) == 1


def test_a_changed_copy_of_a_plan_is_another_plan() -> None:
    """`dataclasses.replace` keeps the name of a calibration, but the steps are of other noise."""
    plan = plan_for(8, steps=3)
    ledger = StepLedger(plan)
    spend(ledger, plan, new_nonce(None), 0)
    changed = dataclasses.replace(plan, noise_multiplier=plan.noise_multiplier + 1)
    assert StepLedger(changed).steps_left(saved_count(changed)) == 3
    assert ledger.steps_left(saved_count(plan)) == 2

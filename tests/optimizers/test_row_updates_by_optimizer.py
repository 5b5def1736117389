"""The row-wise twin equals the Keras optimizer on a gradient's rows; what has none is refused."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dp_sparse.optimizers.row_updates import RowWise


def built(
    optimizer: keras.optimizers.Optimizer, table: keras.Variable
) -> tuple[RowWise, list[Any]]:
    slots: list[Any] = []

    def add_slot(reference: keras.Variable, name: str, value: float) -> keras.Variable:
        slots.append(keras.Variable(np.full(reference.shape, value, np.float32), name=name))
        return slots[-1]

    twin = RowWise(optimizer)
    twin.build([table], add_slot)
    return twin, slots


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.3),
        lambda: keras.optimizers.Adagrad(0.3, initial_accumulator_value=0.2, epsilon=1e-3),
        lambda: keras.optimizers.Adam(0.3, beta_1=0.8, beta_2=0.9, epsilon=1e-3),
        lambda: keras.optimizers.Ftrl(
            0.3,
            learning_rate_power=-0.6,
            l1_regularization_strength=0.2,
            l2_regularization_strength=0.1,
            l2_shrinkage_regularization_strength=0.05,
            beta=0.3,
        ),
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.3, 1, 0.5)),
    ],
    ids=["sgd", "adagrad", "adam", "ftrl", "schedule"],
)
def test_on_all_rows_it_is_keras(make: Any) -> None:
    start = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    table, reference = keras.Variable(start), keras.Variable(start)
    ours, theirs = make(), make()
    twin, _ = built(ours, table)
    theirs.build([reference])
    for step in range(1, 4):
        values = np.random.default_rng(step).normal(size=(4, 3)).astype(np.float32)
        twin.apply(table, tf.IndexedSlices(values, tf.range(4, dtype=tf.int64)), tf.constant(step))
        ours.iterations.assign_add(1)
        theirs.apply([tf.constant(values)], [reference])
        np.testing.assert_allclose(table.numpy(), reference.numpy(), atol=1e-6)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam", "Ftrl"])
def test_other_rows_and_their_slots_stay_bit_for_bit(name: str) -> None:
    start = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    table = keras.Variable(start)
    twin, slots = built(getattr(keras.optimizers, name)(0.3), table)
    before = [slot.numpy() for slot in slots]
    twin.apply(
        table, tf.IndexedSlices(tf.ones([2, 3]), tf.constant([1, 4], tf.int64)), tf.constant(1)
    )
    changed = np.any(table.numpy() != start, axis=1)
    assert changed.tolist() == [False, True, False, False, True, False]
    for slot, old in zip(slots, before, strict=True):
        assert np.any(slot.numpy() != old, axis=1).tolist() == changed.tolist()


def test_no_row_at_all() -> None:
    table = keras.Variable(np.ones((4, 3), np.float32))
    twin, _ = built(keras.optimizers.Adam(0.3), table)
    twin.apply(table, tf.IndexedSlices(tf.zeros([0, 3]), tf.zeros([0], tf.int64)), tf.constant(1))
    np.testing.assert_array_equal(table.numpy(), 1)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (keras.optimizers.AdamW(0.1), "got AdamW"),
        (keras.optimizers.RMSprop(0.1), "got RMSprop"),
        (keras.optimizers.Adamax(0.1), "got Adamax"),
        (keras.optimizers.SGD(0.1, momentum=0.9), "no momentum"),
        (keras.optimizers.Adam(0.1, amsgrad=True), "no amsgrad"),
        (keras.optimizers.SGD(0.1, weight_decay=0.1), "weight_decay=0.1"),
        (keras.optimizers.Adam(0.1, clipnorm=1.0), "clipnorm=1.0"),
        (keras.optimizers.Adam(0.1, global_clipnorm=1.0), "global_clipnorm=1.0"),
        (keras.optimizers.Adagrad(0.1, clipvalue=1.0), "clipvalue=1.0"),
        (keras.optimizers.SGD(0.1, use_ema=True), "use_ema=True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_touch_every_row_is_refused_with_the_mend(optimizer: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        RowWise(optimizer)
    assert "table_optimizer=keras.optimizers.Adagrad(...)" in str(caught.value)


def test_a_subclass_has_no_twin() -> None:
    class Mine(keras.optimizers.SGD):
        pass

    with pytest.raises(ValueError, match="got Mine"):
        RowWise(Mine(0.1))

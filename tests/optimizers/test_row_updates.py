"""Row-wise updates: the Keras optimizers' on the gradient's rows, nothing at all on the others."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from dp_sparse.optimizers import row_updates as row_wise
from tests.reference import rows as reference

ROWS, WIDTH, STEPS = 12, 3, 5
RATE, EPSILON, BETA_1, BETA_2 = 0.3, 0.05, 0.9, 0.99  # ε large enough to show where it stands
FTRL = row_wise.FtrlSettings(power=-0.5, l1=0.3, l2=0.2, shrinkage=0.0, beta=0.1)
Gradient = tuple[np.ndarray, np.ndarray]  # row ids, values


def initial_table() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)


def gradients(seed: int = 1) -> list[Gradient]:
    """One for each step: other rows each time, row 0 once and row 11 never; sorted and unique."""
    rng = np.random.default_rng(seed)
    found = []
    for step in range(STEPS):
        ids = np.sort(rng.choice(np.arange(1, ROWS - 1), rng.integers(1, 6), replace=False))
        ids = np.concatenate([[0], ids]) if step == 0 else ids
        found.append((ids, rng.normal(size=(len(ids), WIDTH)).astype(np.float32)))
    return found


def slices(gradient: Gradient) -> tf.IndexedSlices:
    ids, values = gradient
    return tf.IndexedSlices(tf.constant(values), tf.constant(ids, tf.int64))


def as_dense(gradient: Gradient) -> tf.Tensor:
    ids, values = gradient
    table = np.zeros((ROWS, WIDTH), np.float32)
    table[ids] = values
    return tf.constant(table)


def zeros() -> tf.Variable:
    return tf.Variable(tf.zeros([ROWS, WIDTH]))


def step_of(name: str, table: tf.Variable, slots: list[tf.Variable]) -> Callable[..., None]:
    """One update of an optimizer by name: `(gradient, step number)`."""

    def update(gradient: tf.IndexedSlices, step: tf.Tensor) -> None:
        rate = tf.constant(RATE)
        if name == "sgd":
            row_wise.sgd_rows(table, gradient, rate)
        elif name == "adagrad":
            row_wise.adagrad_rows(table, slots[0], gradient, rate, EPSILON)
        elif name == "ftrl":
            row_wise.ftrl_rows(table, *slots, gradient, rate, FTRL)
        else:
            row_wise.adam_rows(table, *slots, gradient, rate, step, BETA_1, BETA_2, EPSILON)

    return update


def new_slots(name: str) -> list[tf.Variable]:
    if name == "adagrad":
        return [tf.Variable(tf.fill([ROWS, WIDTH], 0.1))]
    if name == "ftrl":
        return [tf.Variable(tf.fill([ROWS, WIDTH], 0.1)), zeros()]
    return {"sgd": [], "adam": [zeros(), zeros()]}[name]


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("sgd", keras.optimizers.SGD(RATE)),
        ("adagrad", keras.optimizers.Adagrad(RATE, 0.1, EPSILON)),
    ],
)
def test_equals_keras(name: str, optimizer: keras.optimizers.Optimizer) -> None:
    """A zero gradient changes nothing under SGD and Adagrad, so the whole table must agree."""
    table, twin = tf.Variable(initial_table()), keras.Variable(initial_table())
    update = step_of(name, table, new_slots(name))
    for number, gradient in enumerate(gradients(), start=1):
        update(slices(gradient), tf.constant(number))
        optimizer.apply([as_dense(gradient)], [twin])
        np.testing.assert_allclose(table.numpy(), twin.numpy(), rtol=1e-6, atol=1e-6)


def test_adam_on_all_rows_equals_keras() -> None:
    table, twin = tf.Variable(initial_table()), keras.Variable(initial_table())
    optimizer = keras.optimizers.Adam(RATE, BETA_1, BETA_2, EPSILON)
    update = step_of("adam", table, new_slots("adam"))
    values = np.random.default_rng(3).normal(size=(STEPS, ROWS, WIDTH)).astype(np.float32)
    for number, gradient in enumerate(values, start=1):
        update(slices((np.arange(ROWS), gradient)), tf.constant(number))
        optimizer.apply([tf.constant(gradient)], [twin])
        np.testing.assert_allclose(table.numpy(), twin.numpy(), rtol=1e-5, atol=1e-6)


def test_adam_is_lazy() -> None:
    """Rows that were away keep their moments, and the bias correction counts the steps between."""
    table, slots = tf.Variable(initial_table()), new_slots("adam")
    expected = [
        initial_table().astype(np.float64),
        np.zeros((ROWS, WIDTH)),
        np.zeros((ROWS, WIDTH)),
    ]
    for number, gradient in enumerate(gradients(), start=1):
        step_of("adam", table, slots)(slices(gradient), tf.constant(number, tf.int64))
        reference.lazy_adam(
            *expected,
            *gradient,
            learning_rate=RATE,
            step=number,
            beta_1=BETA_1,
            beta_2=BETA_2,
            epsilon=EPSILON,
        )
        for found, wanted in zip([table, *slots], expected, strict=True):
            np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "ftrl"])
def test_equals_the_reference(name: str) -> None:
    table, slots = tf.Variable(initial_table()), new_slots(name)
    expected = [initial_table().astype(np.float64), *[slot.numpy().astype(float) for slot in slots]]
    for number, gradient in enumerate(gradients(), start=1):
        step_of(name, table, slots)(slices(gradient), tf.constant(number))
        if name == "sgd":
            reference.sgd(*expected, *gradient, RATE)
        elif name == "ftrl":
            reference.ftrl(*expected, *gradient, RATE, FTRL.l1, FTRL.l2, FTRL.beta)
            assert np.any(expected[0] == 0)  # L1 holds some weights at 0
        else:
            reference.adagrad(*expected, *gradient, RATE, EPSILON)
        for found, wanted in zip([table, *slots], expected, strict=True):
            np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_other_rows_stay_bit_for_bit(name: str) -> None:
    table, slots = tf.Variable(initial_table()), new_slots(name)
    warm_up, *rest = gradients(seed=4)
    step_of(name, table, slots)(slices(warm_up), tf.constant(1))
    for number, gradient in enumerate(rest, start=2):
        before = [variable.numpy() for variable in (table, *slots)]
        step_of(name, table, slots)(slices(gradient), tf.constant(number))
        others = np.setdiff1d(np.arange(ROWS), gradient[0])
        for variable, old in zip((table, *slots), before, strict=True):
            assert variable.numpy()[others].tobytes() == old[others].tobytes()
            assert np.all(variable.numpy()[gradient[0]] != old[gradient[0]])


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "ftrl"])
def test_no_rows_change_nothing(name: str) -> None:
    table, slots = tf.Variable(initial_table()), new_slots(name)
    nothing = (np.zeros(0, np.int64), np.zeros((0, WIDTH), np.float32))
    step_of(name, table, slots)(slices(nothing), tf.constant(1))
    np.testing.assert_array_equal(table.numpy(), initial_table())


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "ftrl"])
def test_no_operation_makes_a_tensor_of_the_tables_shape(name: str) -> None:
    table, slots = tf.Variable(initial_table()), new_slots(name)
    update = step_of(name, table, slots)

    @tf.function
    def traced(ids: tf.Tensor, values: tf.Tensor, step: tf.Tensor) -> None:
        update(tf.IndexedSlices(values, ids), step)

    concrete = traced.get_concrete_function(
        tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, WIDTH]), tf.TensorSpec([], tf.int64)
    )
    operations = concrete.graph.get_operations()
    assert any("Scatter" in operation.type for operation in operations)
    assert not [
        operation.name
        for operation in operations
        if operation.type == "ReadVariableOp"
        or any(output.shape == [ROWS, WIDTH] for output in operation.outputs)
    ]

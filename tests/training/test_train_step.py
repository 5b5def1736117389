"""The private step as a whole: Algorithm 1, noise of the right size, and Keras around it."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from tests.reference import clipping as brute
from tests.reference import step as numpy_step
from tests.training_cases import (
    assert_deviation,
    click_model,
    clicks,
    marked,
    marked_dataset,
    plan_for,
    weights_of,
)

CLIP = 0.05  # below most gradient norms of these models, so that clipping matters
OPTIMIZERS = {
    "sgd": (lambda: keras.optimizers.SGD(0.5), lambda: numpy_step.SGD(0.5)),
    "adagrad": (lambda: keras.optimizers.Adagrad(0.5), lambda: numpy_step.Adagrad(0.5)),
}
BINARY = keras.losses.BinaryCrossentropy()


def fitted(
    model: keras.Model, dataset: tf.data.Dataset, **arguments: Any
) -> keras.callbacks.History:
    return model.fit(dataset, verbose=0, **arguments)


def close(actual: list[np.ndarray], expected: list[np.ndarray], tolerance: float = 1e-5) -> None:
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance)


# ---- The noise-free step.


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.usefixtures("no_noise")
def test_noise_free_adafest_is_algorithm_1(kind: str, eager: bool) -> None:
    """Three steps with padding, weights and a weight of 0; τ keeps some rows and drops others."""
    make, make_reference = OPTIMIZERS[kind]
    x, y = clicks(12)
    weights = np.linspace(0.0, 2.0, 12).astype(np.float32)
    model, plan = click_model(), plan_for(12, capacity=15)
    optimizer = dp_sparse.DPAdaFESTOptimizer(make(), plan, CLIP, 1.2, threshold=1.5)
    model.compile(optimizer=optimizer, loss=BINARY, run_eagerly=eager)
    expected, reference = weights_of(model), make_reference()
    settings = numpy_step.AdaFEST(CLIP, 1.2, 1.5, plan.sampling.expected_batch_size)
    survived = []
    for step in range(3):
        gradients = brute.example_gradients(model, brute.keras_loss(BINARY), x, y[:, None], weights)
        lookups = [[[a], [b]] for a, b in x]
        mean, survivors = numpy_step.adafest_mean_gradient(
            settings, gradients, lookups, table_of=[0, 1], present=weights
        )
        assert np.max(brute.norms(gradients)) > CLIP
        reference.apply(expected, mean)
        fitted(model, plan.sampling.batches((x, y, weights)), steps_per_epoch=1)
        close(weights_of(model), expected)
        survived.append(np.concatenate(survivors))
        assert int(optimizer.steps_spent) == step + 1
    assert 0 < np.sum(survived[0]) < survived[0].size


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.usefixtures("no_noise")
def test_noise_free_dpsgd_is_clip_sum_divide(kind: str) -> None:
    """At a clip norm that binds for half of the examples: a factor of all losses would be seen."""
    make, make_reference = OPTIMIZERS[kind]
    x, y = clicks(10)
    model, plan = click_model(), plan_for(10, capacity=13)
    first = brute.example_gradients(model, brute.keras_loss(BINARY), x, y[:, None])
    clip = float(np.median(brute.norms(first)))
    model.compile(optimizer=dp_sparse.DPSGDOptimizer(make(), plan, clip), loss=BINARY)
    expected, reference = weights_of(model), make_reference()
    for _ in range(3):
        gradients = brute.example_gradients(model, brute.keras_loss(BINARY), x, y[:, None])
        reference.apply(expected, numpy_step.dpsgd_mean_gradient(gradients, clip, 10, np.ones(10)))
        fitted(model, plan.sampling.batches((x, y)), steps_per_epoch=1)
        close(weights_of(model), expected)


@pytest.mark.usefixtures("no_noise")
def test_division_is_by_the_expected_batch_size() -> None:
    """Three real examples of an expected 20 move the weights by Σ/20."""
    x, y = clicks(3)
    model, plan = click_model(), plan_for(40, expected_batch_size=20, capacity=5)
    optimizer = dp_sparse.DPAdaFESTOptimizer(keras.optimizers.SGD(1.0), plan, CLIP, threshold=0.3)
    model.compile(optimizer=optimizer, loss=BINARY)
    expected = weights_of(model)
    gradients = brute.example_gradients(model, brute.keras_loss(BINARY), x, y[:, None])
    numpy_step.SGD(1.0).apply(
        expected, [part / 20 for part in brute.clipped_sum(gradients, CLIP, np.ones(3))]
    )
    padded_x = np.concatenate([x, np.zeros((2, 2), np.int32)])
    padded_y = np.concatenate([y, np.zeros(2, np.float32)])
    fitted(model, marked_dataset(plan, padded_x, padded_y, present=[1, 1, 1, 0, 0]))
    close(weights_of(model), expected, 1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("no_noise")
def test_several_steps_in_one_execution() -> None:
    x, y = clicks(8)
    results = []
    for steps_per_execution in (1, 3):
        keras.utils.set_random_seed(1)
        model, plan = click_model(), plan_for(8)
        optimizer = dp_sparse.DPAdaFESTOptimizer(
            keras.optimizers.Adagrad(0.5), plan, CLIP, threshold=0.5
        )
        model.compile(optimizer=optimizer, loss=BINARY, steps_per_execution=steps_per_execution)
        fitted(model, plan.sampling.batches((x, y)), steps_per_epoch=6)
        assert int(optimizer.steps_spent) == int(optimizer.iterations) == 6
        results.append(weights_of(model))
    close(results[0], results[1], 1e-6)


def two_headed() -> keras.Model:
    ids = keras.Input((2,), dtype="int32", name="ids")
    numbers = keras.Input((3,), name="numbers")
    rows = keras.layers.Flatten()(keras.layers.Embedding(9, 3)(ids))
    hidden = keras.layers.Dense(5, activation="relu")(keras.layers.Concatenate()([rows, numbers]))
    click = keras.layers.Dense(1, activation="sigmoid", name="click")(hidden)
    kind = keras.layers.Dense(4, activation="softmax", name="kind")(hidden)
    return keras.Model([ids, numbers], [click, kind])


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("named", [False, True])
def test_several_outputs_losses_and_weights(named: bool) -> None:
    """Every output trains, each with its loss weight and its own sample weights."""
    rng = np.random.default_rng(3)
    x = (rng.integers(0, 9, (6, 2)).astype(np.int32), rng.normal(size=(6, 3)).astype(np.float32))
    y = (rng.integers(0, 2, 6).astype(np.float32), rng.integers(0, 4, 6).astype(np.float32))
    weights = tuple(rng.uniform(0.5, 2, 6).astype(np.float32) for _ in y)
    kind_loss = keras.losses.SparseCategoricalCrossentropy()
    losses: Any = [BINARY, kind_loss]
    loss_weights: Any = [1.0, 0.5]
    if named:
        losses, loss_weights = ({"click": a, "kind": b} for a, b in (losses, loss_weights))
    model, plan = two_headed(), plan_for(6, capacity=8)
    optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(0.5), plan, 0.5)
    model.compile(optimizer=optimizer, loss=losses, loss_weights=loss_weights)

    def loss_of(labels: Any, predictions: Any, weight: Any) -> tf.Tensor:
        click = BINARY(labels[0][:, None], predictions[0], weight[0])
        return click + 0.5 * kind_loss(labels[1][:, None], predictions[1], weight[1])

    gradients = brute.example_gradients(model, loss_of, x, y, weights)
    expected = weights_of(model)
    mean = numpy_step.dpsgd_mean_gradient(gradients, 0.5, 6, np.ones(6))
    numpy_step.SGD(0.5).apply(expected, mean)
    history = fitted(model, plan.sampling.batches((x, y, weights)), steps_per_epoch=1)
    close(weights_of(model), expected)
    assert {"loss", "click_loss", "kind_loss"} <= set(history.history)


@pytest.mark.usefixtures("no_noise")
def test_class_weights_scale_the_loss_before_clipping() -> None:
    x, y = clicks(8)
    model, plan = click_model(), plan_for(8)
    model.compile(
        optimizer=dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(0.5), plan, 0.2), loss=BINARY
    )
    weights = np.where(y > 0, 3.0, 0.25).astype(np.float32)
    gradients = brute.example_gradients(model, brute.keras_loss(BINARY), x, y[:, None], weights)
    expected = weights_of(model)
    numpy_step.SGD(0.5).apply(
        expected, numpy_step.dpsgd_mean_gradient(gradients, 0.2, 8, np.ones(8))
    )
    batches = plan.sampling.batches((x, y), class_weight={0: 0.25, 1: 3.0})
    fitted(model, batches, steps_per_epoch=1)
    close(weights_of(model), expected)


@pytest.mark.usefixtures("no_noise")
def test_a_loss_per_position_trains() -> None:
    """Outputs `[batch, positions, classes]`; an example's loss is the mean over its positions."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 9, (6, 4)).astype(np.int32)
    y = rng.integers(0, 3, (6, 4)).astype(np.int32)
    model = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(9, 3)])
    model.add(keras.layers.Dense(3, activation="softmax"))
    loss = keras.losses.SparseCategoricalCrossentropy()
    plan = plan_for(6, capacity=8)
    optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(0.5), plan, 0.1)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    gradients = brute.example_gradients(model, brute.keras_loss(loss), x, y)
    expected = weights_of(model)
    mean = numpy_step.dpsgd_mean_gradient(gradients, 0.1, 6, np.ones(6))
    numpy_step.SGD(0.5).apply(expected, mean)
    untrained = model.evaluate(x, y, verbose=0)
    history = fitted(model, plan.sampling.batches((x, y)), steps_per_epoch=1).history
    close(weights_of(model), expected)
    assert [history["loss"][0], history["accuracy"][0]] == pytest.approx(untrained, abs=1e-5)


@pytest.mark.usefixtures("no_noise")
def test_no_real_example_moves_nothing_without_noise() -> None:
    x, y = clicks(4)
    model, plan = click_model(), plan_for(4)
    optimizer = dp_sparse.DPAdaFESTOptimizer(keras.optimizers.SGD(0.5), plan, 1.0, threshold=0.5)
    model.compile(optimizer=optimizer, loss=BINARY, metrics=["accuracy"])
    before = weights_of(model)
    history = fitted(model, marked_dataset(plan, x, y, steps=2, present=[0, 0, 0, 0]))
    for old, new in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(old, new)
    assert np.isfinite(history.history["loss"][0])
    assert int(optimizer.steps_spent) == 2


@pytest.mark.usefixtures("no_noise")
def test_dense_regulariser_gradient_is_added_after_the_noise() -> None:
    """Its gradient is neither clipped nor divided by the batch size."""
    inputs = keras.Input((3,))
    layer = keras.layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.1))
    model = keras.Model(inputs, layer(inputs))
    plan = plan_for(4)
    model.compile(
        optimizer=dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1.0), plan, 1e-3), loss=no_gradient
    )
    kernel, bias = weights_of(model)
    fitted(model, marked_dataset(plan, np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)))
    close(weights_of(model), [kernel - 0.2 * kernel, bias], 1e-6)


# ---- Noise.


def flat_model(rows: int = 400, width: int = 8) -> keras.Model:
    ids = keras.Input((), dtype="int32")
    hidden = keras.layers.Embedding(rows, width)(ids)
    return keras.Model(ids, keras.layers.Dense(512)(hidden))


def no_gradient(y: Any, prediction: Any) -> tf.Tensor:
    return 0.0 * tf.reduce_sum(prediction, axis=-1)


def changes(model: keras.Model, plan: Any, *, present: int = 4) -> list[np.ndarray]:
    before = weights_of(model)
    x, y = np.arange(4, dtype=np.int32), np.zeros(4, np.float32)
    fitted(model, marked_dataset(plan, x, y, present=[1] * present + [0] * (4 - present)))
    return [new - old for new, old in zip(weights_of(model), before, strict=True)]


@pytest.mark.cases(1)
@pytest.mark.parametrize("present", [4, 0])
def test_dpsgd_noise_on_every_parameter(present: int) -> None:
    model, plan = (
        flat_model(),
        plan_for(100, expected_batch_size=10, capacity=4, noise_multiplier=1.5),
    )
    optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1.0), plan, clip_norm=0.7)
    model.compile(optimizer=optimizer, loss=no_gradient)
    table, kernel, bias = changes(model, plan, present=present)
    for part in (table, kernel):
        assert_deviation(part, 0.7 * 1.5 / 10)
    assert np.count_nonzero(bias == 0) <= 3  # on the grid of noise 0 has a chance of 8e-4
    assert abs(np.corrcoef(table.ravel(), kernel.ravel()[: table.size])[0, 1]) < 0.1


@pytest.mark.cases(1)
@pytest.mark.parametrize("present", [4, 0])
def test_adafest_noise_on_dense_parameters_and_on_every_survivor(present: int) -> None:
    """τ far below zero: all rows survive, so every row of the table is noised."""
    model, plan = (
        flat_model(),
        plan_for(100, expected_batch_size=10, capacity=4, noise_multiplier=1.5),
    )
    optimizer = dp_sparse.DPAdaFESTOptimizer(
        keras.optimizers.SGD(1.0), plan, clip_norm=0.7, noise_ratio=2.0, threshold=-1e6
    )
    model.compile(optimizer=optimizer, loss=no_gradient)
    table, kernel, bias = changes(model, plan, present=present)
    deviation = 0.7 * 1.5 * np.sqrt(1 + 1 / 2.0**2) / 10
    for part in (table, kernel):
        assert_deviation(part, deviation)
    assert np.count_nonzero(bias == 0) <= 3  # on the grid of noise 0 has a chance of 8e-4


def test_rows_that_did_not_survive_are_untouched_bit_for_bit() -> None:
    model, plan = (
        flat_model(),
        plan_for(100, expected_batch_size=10, capacity=4, noise_multiplier=1.5),
    )
    optimizer = dp_sparse.DPAdaFESTOptimizer(
        keras.optimizers.Adam(0.1), plan, clip_norm=0.7, expected_false_rows=20
    )
    model.compile(optimizer=optimizer, loss=no_gradient)
    optimizer.build(model.trainable_variables)
    slots = [v for v in optimizer.variables if tuple(v.shape) == (400, 8)]
    assert len(slots) == 2
    before = [np.array(slot) for slot in slots]
    table, kernel, _ = changes(model, plan, present=0)
    touched = np.any(table != 0, axis=1)
    assert 1 <= touched.sum() <= 60
    assert touched.sum() == int(optimizer.diagnostics.rows[0])
    assert np.mean(table[touched] != 0) > 0.97
    for slot, old in zip(slots, before, strict=True):
        np.testing.assert_array_equal(np.any(np.array(slot) != old, axis=1), touched)
    assert np.mean(kernel != 0) > 0.99  # on the grid of noise 0 has a chance of 8e-4


def test_two_steps_and_two_runs_draw_different_noise() -> None:
    drawn = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        model, plan = (
            flat_model(),
            plan_for(100, expected_batch_size=10, capacity=4, noise_multiplier=1.0),
        )
        optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1.0), plan, 1.0)
        model.compile(optimizer=optimizer, loss=no_gradient)
        drawn += [changes(model, plan)[1].ravel() for _ in range(2)]
    for i, first in enumerate(drawn):
        for second in drawn[i + 1 :]:
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.1


# ---- Keras around the step.


def compiled_click(
    x: np.ndarray, make: Callable[..., Any] = dp_sparse.DPAdaFESTOptimizer, **arguments: Any
) -> tuple[keras.Model, Any]:
    model, plan = click_model(), plan_for(len(x), noise_multiplier=0.5)
    model.compile(
        optimizer=make(keras.optimizers.SGD(0.1), plan, clip_norm=1.0), loss=BINARY, **arguments
    )
    return model, plan


@pytest.mark.slow
def test_validation_evaluate_and_predict_are_stock() -> None:
    x, y = clicks(16)
    model, plan = compiled_click(x, metrics=[keras.metrics.AUC(name="auc")])
    history = fitted(
        model, plan.sampling.batches((x, y)), epochs=2, steps_per_epoch=3, validation_data=(x, y)
    )
    assert {"loss", "auc", "val_loss", "val_auc"} <= set(history.history)
    stock = click_model()
    stock.set_weights(model.get_weights())
    stock.compile(loss=BINARY, metrics=[keras.metrics.AUC(name="auc")])
    assert model.evaluate(x, y, verbose=0) == pytest.approx(
        stock.evaluate(x, y, verbose=0), abs=1e-6
    )
    np.testing.assert_allclose(model.predict(x, verbose=0), stock.predict(x, verbose=0), atol=1e-6)
    assert history.history["val_loss"][-1] == pytest.approx(
        stock.evaluate(x, y, verbose=0)[0], abs=1e-6
    )


@pytest.mark.slow
def test_epochs_continue_one_iterator() -> None:
    x, y = clicks(8)
    model, plan = compiled_click(x)
    fitted(model, plan.sampling.batches((x, y)), epochs=5, steps_per_epoch=20)
    assert int(model.optimizer.steps_spent) == 100


def test_training_metrics_leave_padding_out(no_noise: None) -> None:
    x, y = clicks(6)
    model, plan = click_model(), plan_for(6, capacity=10)
    model.compile(
        optimizer=dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(0.0), plan, 1.0),
        loss=BINARY,
        metrics=["accuracy"],
    )
    history = fitted(model, plan.sampling.batches((x, y)), steps_per_epoch=2).history
    loss, accuracy = model.evaluate(x, y, verbose=0)
    assert history["loss"][0] == pytest.approx(loss, abs=1e-5)
    assert history["accuracy"][0] == pytest.approx(accuracy, abs=1e-5)


def test_subclassed_model_without_training_argument() -> None:
    class Plain(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = keras.layers.Embedding(11, 3), keras.layers.Dense(1)

        def call(self, ids: Any) -> Any:
            return self.head(self.table(ids[:, 0]))

    x, y = clicks(8)
    model, plan = Plain(), plan_for(8, noise_multiplier=0.5)
    model.compile(optimizer=dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0), loss="mse")
    fitted(model, plan.sampling.batches((x, y)), steps_per_epoch=2)
    assert int(model.optimizer.steps_spent) == 2
    assert [table.path for table in model.optimizer.tables] == [model.table.embeddings.path]


@pytest.mark.cases(1)
@pytest.mark.parametrize("make", [dp_sparse.DPAdaFESTOptimizer, dp_sparse.DPSGDOptimizer])
def test_a_table_that_the_model_never_looks_up(make: Any) -> None:
    """Keras trains such a model with a warning; DP-AdaFEST must not treat the table as dense."""

    class Spare(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = keras.layers.Embedding(11, 3), keras.layers.Dense(1)
            self.spare = keras.layers.Embedding(500, 3)
            self.spare.build(None)

        def call(self, ids: Any) -> Any:
            return self.head(self.table(ids[:, 0]))

    x, y = clicks(8)
    model, plan = Spare(), plan_for(8, noise_multiplier=0.5)
    model(x[:1])
    before = model.spare.embeddings.numpy()
    model.compile(optimizer=make("sgd", plan, 1.0), loss="mse")
    fitted(model, plan.sampling.batches((x, y)), steps_per_epoch=2)
    touched = np.any(model.spare.embeddings.numpy() != before, axis=1)
    if make is dp_sparse.DPSGDOptimizer:
        assert np.all(touched)
    else:
        assert 0 < np.mean(touched) < 0.5


@pytest.mark.slow
def test_recompiling_with_sgd_is_stock_keras_again() -> None:
    x, y = clicks(16)
    model, plan = compiled_click(x)
    fitted(model, plan.sampling.batches((x, y)), steps_per_epoch=1)
    model.compile(optimizer=keras.optimizers.SGD(0.3), loss=BINARY)
    assert not {"train_step", "make_train_function", "_symbolic_build"} & set(vars(model))
    assert model.train_step.__func__ is keras.Model.train_step
    stock = click_model()
    stock.set_weights(model.get_weights())
    stock.compile(optimizer=keras.optimizers.SGD(0.3), loss=BINARY)
    for trained in (model, stock):
        trained.fit(x, y, batch_size=4, shuffle=False, epochs=2, verbose=0)
    close(model.get_weights(), stock.get_weights(), 1e-6)


def test_other_optimizers_compile_as_ever() -> None:
    model = click_model()
    model.compile("adam", BINARY)  # positional arguments pass through the hook
    assert not {"train_step", "make_train_function", "_symbolic_build"} & set(vars(model))
    x, y = clicks(8)
    model.fit(x, y, verbose=0)


def test_learning_rate_schedule_and_callbacks_steer_the_wrapped_optimizer() -> None:
    x, y = clicks(8)
    model, plan = compiled_click(x)
    rates = [0.3, 0.2]
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch])
    history = fitted(
        model, plan.sampling.batches((x, y)), epochs=2, steps_per_epoch=2, callbacks=[schedule]
    )
    assert history.history["learning_rate"] == pytest.approx(rates)
    assert float(model.optimizer.optimizer.learning_rate) == pytest.approx(0.2)


def test_mixed_bfloat16_trains() -> None:
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        x, y = clicks(8)
        model, plan = compiled_click(x)
        history = fitted(model, plan.sampling.batches((x, y)), steps_per_epoch=3)
    finally:
        keras.config.set_dtype_policy(previous)
    assert np.isfinite(history.history["loss"][0])
    assert all(variable.dtype == "float32" for variable in model.trainable_variables)


# ---- Bad examples.


@pytest.mark.slow
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 2])
def test_an_example_that_is_not_finite_is_left_out_and_counted(bad: float, where: int) -> None:
    """The others are trained on as if it were padding, on the first step as on any other."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=(5, 1)).astype(np.float32)
    broken = x.copy()
    broken[where, 1] = bad
    results = []
    for inputs, used in ((broken, np.ones(5)), (x, np.arange(5) != where)):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        )
        plan = plan_for(5)
        model.compile(optimizer=dp_sparse.DPSGDOptimizer("sgd", plan, 0.5), loss="mse")
        fitted(model, marked_dataset(plan, inputs, y, steps=2, weights=used.astype(np.float32)))
        results.append(weights_of(model))
        counted = int(model.optimizer.diagnostics.not_finite)
        assert counted == (2 if inputs is broken else 0)
    for with_bad, without in zip(*results, strict=True):
        assert np.all(np.isfinite(with_bad))
        np.testing.assert_array_equal(with_bad, without)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("loss", ["mse", "binary_crossentropy"])
def test_a_nan_label_is_left_out_and_counted(loss: str) -> None:
    x, y = clicks(4)
    y[1] = np.nan
    model, plan = click_model(), plan_for(4)
    model.compile(optimizer=dp_sparse.DPSGDOptimizer("sgd", plan, 0.5), loss=loss)
    fitted(model, marked_dataset(plan, x, y, steps=2))
    assert int(model.optimizer.diagnostics.not_finite) == 2
    assert all(np.all(np.isfinite(w)) for w in weights_of(model))


@pytest.mark.usefixtures("no_noise")
def test_padding_for_which_the_model_is_not_finite_adds_nothing() -> None:
    """log 0 of the padding's zeros must neither stop the run nor reach the weights."""
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, activation="tanh")(keras.ops.log(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    plan = plan_for(3, capacity=5)
    model.compile(optimizer=dp_sparse.DPSGDOptimizer("sgd", plan, 0.5), loss="mse")
    x = np.random.default_rng(0).uniform(1, 2, (3, 3)).astype(np.float32)
    fitted(model, plan.sampling.batches((x, np.ones((3, 1), np.float32))), steps_per_epoch=2)
    assert all(np.all(np.isfinite(w)) for w in weights_of(model))
    assert int(model.optimizer.diagnostics.not_finite) == 0


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("bad", "shown"), [(-1, "got -1"), (11, "got 11")])
def test_an_id_out_of_range_is_named_with_its_layer(bad: int, shown: str, eager: bool) -> None:
    x, y = clicks(4)
    x[2, 0] = bad
    model, plan = compiled_click(x, run_eagerly=eager)
    before = weights_of(model)
    with pytest.raises(dp_sparse.BadExampleError, match=shown) as caught:
        fitted(model, plan.sampling.batches((x, y)))
    assert "Expected ids in [0, 11) at layer embedding" in str(caught.value)
    assert "Hash or clip them" in str(caught.value)
    close(weights_of(model), before, 0)
    assert int(model.optimizer.iterations) == int(model.optimizer.diagnostics.steps) == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("loss", "bad"),
    [(BINARY, 2.0), ("binary_crossentropy", 1.5), ("binary_focal_crossentropy", -1.5)],
)
def test_a_label_out_of_range_is_named(loss: Any, bad: float) -> None:
    x, y = clicks(4)
    y[3] = bad
    model, plan = click_model(), plan_for(4)
    model.compile(optimizer=dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0), loss=loss)
    with pytest.raises(dp_sparse.BadExampleError, match=r"Expected labels in \[0, 1\]") as caught:
        fitted(model, plan.sampling.batches((x, y)))
    assert f"got {bad:g}" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [-1, 4, float("nan")])
def test_a_class_out_of_range_is_named(bad: float) -> None:
    x, y = clicks(4)
    y[3] = bad
    model, plan = flat_model(), plan_for(4)
    model = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(11, 3)])
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(4, activation="softmax"))
    model.compile(
        optimizer=dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0),
        loss="sparse_categorical_crossentropy",
    )
    with pytest.raises(dp_sparse.BadExampleError, match=r"Expected labels in \[0, 4\)"):
        fitted(model, plan.sampling.batches((x, y)))


def test_marked_batches_of_the_wrong_class_are_refused() -> None:
    """The step reads x, y and the weights from one tuple; anything else has no marker."""
    x, y = clicks(4)
    model, plan = compiled_click(x)
    batch = marked(plan, x, y)
    with pytest.raises(dp_sparse.PrivacyError, match="without its marker"):
        model.train_step((batch[0], batch[1]))

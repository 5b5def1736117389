"""A `compute_loss` of the model's own: as a compiled loss, or refused before the first step."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import dp_sparse
from dp_sparse.core.errors import translated
from dp_sparse.sampling import Examples
from dp_sparse.step.loss_kind import measure
from dp_sparse.step.own_loss import OwnLoss, has_own_loss, kind_of
from tests.replicas import strategy_of
from tests.training_cases import (
    click_model,
    clicks,
    fit_on,
    marked_dataset,
    plan_for,
    weights_of,
    without_preflight,
)

SIZE, CAPACITY = 10, 13
Loss = Callable[..., Any]  # of the model, x, y, y_pred and sample_weight


def errors(y: Any, y_pred: Any) -> Any:
    return ops.square(y_pred[:, 0] - y)


def penalised(model: keras.Model, x: Any, losses: Any) -> Any:
    with tf.GradientTape() as tape:
        outputs = model(x)
    return ops.mean(losses) + sum(map(ops.sum, tape.gradient(outputs, model.layers[-1].weights)))


LOSSES: dict[str, Loss] = {
    "each": lambda model, x, y, y_pred, w: w * errors(y, y_pred),
    "mean": lambda model, x, y, y_pred, w: ops.mean(w * errors(y, y_pred)),
    "sum": lambda model, x, y, y_pred, w: ops.sum(w * errors(y, y_pred)),
    "divided by all weights": lambda model, x, y, y_pred, w: (
        ops.sum(w * errors(y, y_pred)) / ops.sum(w)
    ),
    "Keras' own": lambda model, x, y, y_pred, w: keras.losses.MeanSquaredError()(
        y[:, None], y_pred, w
    ),
}


def with_loss(loss: Loss) -> keras.Model:
    """The click model with a loss of its own."""

    class Own(keras.Model):
        def compute_loss(
            self,
            x: Any = None,
            y: Any = None,
            y_pred: Any = None,
            sample_weight: Any = None,
            training: bool = True,
        ) -> Any:
            return loss(self, x, y, y_pred, sample_weight)

    keras.utils.set_random_seed(0)
    source = click_model()
    return Own(source.inputs, source.outputs)


def trained(
    model: keras.Model, optimizer: Any = dp_sparse.DPSGDOptimizer, **arguments: Any
) -> keras.Model:
    """Three steps on batches with padding and weights."""
    arguments = dict(arguments)
    compiled = {name: arguments.pop(name) for name in ("loss", "jit_compile") if name in arguments}
    plan = plan_for(SIZE, capacity=CAPACITY)
    x, y = clicks(CAPACITY)
    weights = np.linspace(0.1, 2.0, CAPACITY).astype(np.float32)
    present = [1.0] * SIZE + [0.0] * (CAPACITY - SIZE)
    model.compile(optimizer(keras.optimizers.SGD(0.1), plan, 0.05, **arguments), **compiled)
    batches = marked_dataset(plan, x, y, steps=3, present=present, weights=weights)
    model.logs = model.fit(batches, verbose=0).history
    return model


@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        (dp_sparse.DPSGDOptimizer, {}),
        (dp_sparse.DPAdaFESTOptimizer, {"threshold": 0.5}),
        (dp_sparse.DPSGDOptimizer, {"microbatch_size": 4}),
        pytest.param(dp_sparse.DPSGDOptimizer, {"jit_compile": True}, marks=pytest.mark.slow),
        pytest.param(dp_sparse.LazyDPSGDOptimizer, {}, marks=pytest.mark.slow),  # a pass before
    ],
)
def test_trains_as_the_same_loss_of_compile(
    name: str, optimizer: Any, arguments: dict[str, Any]
) -> None:
    keras.utils.set_random_seed(0)
    compiled = trained(click_model(), optimizer, loss="mse", **arguments)
    own = trained(with_loss(LOSSES[name]), optimizer, **arguments)
    for one, other in zip(weights_of(compiled), weights_of(own), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    counts = [int(m.optimizer.diagnostics.clipped.numpy()) for m in (compiled, own)]
    assert counts[0] == counts[1] > 0
    if name == "each" or (not arguments and name != "divided by all weights"):  # a batch's own
        assert own.logs["loss"] == pytest.approx(compiled.logs["loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("name", ["each", "mean", "sum"])
def test_on_two_replicas(name: str) -> None:
    keras.utils.set_random_seed(0)
    alone = trained(with_loss(LOSSES[name]))
    with strategy_of(2).scope():
        together = trained(with_loss(LOSSES[name]))
    for one, other in zip(weights_of(alone), weights_of(together), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("no_noise")
def test_layers_that_the_loss_alone_calls_are_clipped_and_train() -> None:
    """A table of targets, as next-item models have it, against its product with the outputs."""

    def make(own: bool) -> keras.Model:
        keras.utils.set_random_seed(0)

        class Targets(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.users = keras.layers.Embedding(11, 4, embeddings_initializer="random_normal")
                self.items = keras.layers.Embedding(7, 4, embeddings_initializer="random_normal")

            def score(self, x: Any, items: Any) -> Any:
                return ops.sum(self.users(x[:, 0]) * self.items(items), axis=1)

            def call(self, x: Any) -> Any:
                return self.users(x[:, 0]) if own else self.score(x, x[:, 1])[:, None]

        class Own(Targets):
            def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
                score = ops.sum(y_pred * self.items(ops.cast(x[:, 1], "int32")), axis=1)
                return ops.mean(ops.square(score - y))

        return Own() if own else Targets()

    def run(own: bool) -> keras.Model:
        model, plan = make(own), plan_for(SIZE)
        x, y = clicks(SIZE)
        optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan, 0.05, threshold=0.5)
        model.compile(optimizer, loss=None if own else "mse")
        model.fit(marked_dataset(plan, x, y, steps=2), verbose=0)
        return model

    compiled, own = run(own=False), run(own=True)
    assert len(own.optimizer.tables) == 2
    by_shape = {v.shape: v.numpy() for v in compiled.trainable_variables}
    for variable in own.trainable_variables:
        np.testing.assert_allclose(variable.numpy(), by_shape[variable.shape], rtol=1e-5, atol=1e-6)


def test_an_example_without_a_finite_loss_does_not_train_and_leaves_the_others() -> None:
    x, y = clicks(SIZE)
    y[3] = np.nan
    model, plan = with_loss(LOSSES["mean"]), plan_for(SIZE)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0))
    with pytest.warns(UserWarning, match="not finite"):
        model.fit(marked_dataset(plan, x, y), verbose=0)
    assert int(model.optimizer.diagnostics.not_finite.numpy()) == 1
    assert all(np.isfinite(weight).all() for weight in weights_of(model))


REFUSED: dict[str, tuple[Loss, str]] = {
    "divided by squares of the batch's weights": (
        lambda model, x, y, y_pred, w: ops.sum(w * errors(y, y_pred)) / ops.sum(w**2),
        r"ops.mean\(losses \* weights\)",
    ),
    "divided by what is positive": (
        lambda model, x, y, y_pred, w: ops.sum(w * errors(y, y_pred)) / (1.0 + ops.sum(y)),
        "compute_loss",
    ),
    "in-batch negatives": (
        lambda model, x, y, y_pred, w: ops.mean(ops.logsumexp(y_pred[:, 0]) - y_pred[:, 0]),
        "in-batch negatives",
    ),
    "a product of means": (
        lambda model, x, y, y_pred, w: ops.mean(errors(y, y_pred)) * ops.mean(y_pred),
        "compute_loss",
    ),
    "losses that know each other": (
        lambda model, x, y, y_pred, w: errors(y, y_pred) - ops.mean(errors(y, y_pred)),
        "depends on",
    ),
    "a sum and a mean": (
        lambda model, x, y, y_pred, w: ops.sum(errors(y, y_pred)) + ops.mean(y_pred),
        "(?s)the sum or the mean of its examples' losses, got a number whose gradient",
    ),
    "a cap that no batch has reached": (
        lambda model, x, y, y_pred, w: ops.minimum(ops.mean(errors(y, y_pred)), 5.0),
        "a cap",
    ),
    "flooding": (
        lambda model, x, y, y_pred, w: ops.abs(ops.mean(errors(y, y_pred)) - 1e3) + 1e3,
        "a cap",
    ),
    "a gradient of its own": (
        lambda model, x, y, y_pred, w: penalised(model, x, errors(y, y_pred)),
        "records a gradient",
    ),
    "the root of a mean": (
        lambda model, x, y, y_pred, w: ops.sqrt(ops.mean(errors(y, y_pred))),
        "compute_loss",
    ),
    "a weight read outside of its layer": (
        lambda model, x, y, y_pred, w: (
            ops.mean(errors(y, y_pred)) + ops.sum(model.layers[-1].kernel)
        ),
        "read outside the layer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_examples_is_refused_before_a_step(name: str) -> None:
    loss, words = REFUSED[name]
    x, y = clicks(SIZE)
    model, plan = with_loss(loss), plan_for(SIZE)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0))
    weights = np.linspace(0.5, 2.0, SIZE).astype(np.float32)
    before = weights_of(model)
    with pytest.raises((dp_sparse.PrivacyError, dp_sparse.UnsupportedLayerError), match=words):
        model.fit(marked_dataset(plan, x, y, weights=weights), verbose=0)
    assert not model.optimizer.built or int(model.optimizer.steps_spent) == 0
    for one, other in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model, x, y, y_pred, w: y_pred, r"got shape \(None, 1\)"),
        (lambda model, x, y, y_pred, w: None, "got NoneType"),
    ],
)
def test_another_shape_is_told(loss: Loss, words: str) -> None:
    x, y = clicks(SIZE)
    model, plan = with_loss(loss), plan_for(SIZE)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0))
    with pytest.raises(ValueError, match=rf"one number or losses \[batch\], {words}"):
        model.fit(marked_dataset(plan, x, y), verbose=0)


def test_weights_decide_for_none_of_the_others() -> None:
    """They are all 1 in the data, so only a check with other weights sees the division."""
    x, y = clicks(SIZE)
    model = with_loss(lambda model, x, y, y_pred, w: errors(y, y_pred) / ops.mean(w))
    plan = plan_for(SIZE)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0))
    with pytest.raises(dp_sparse.PrivacyError, match="depends on another example"):
        model.fit(marked_dataset(plan, x, y), verbose=0)


def test_a_step_that_no_check_has_seen_is_refused() -> None:
    x, y = clicks(SIZE)
    model, plan = with_loss(LOSSES["mean"]), plan_for(SIZE)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0))
    without_preflight(model)
    with pytest.raises(dp_sparse.PrivacyError, match="not seen before its step"), translated():
        model.fit(marked_dataset(plan, x, y), verbose=0)


def test_the_kind_is_measured_anew_after_compile() -> None:
    """A sum that became a mean, and back."""
    x, y = clicks(SIZE)
    scale = [1.0]
    model = with_loss(
        lambda model, x, y, y_pred, w: (
            ops.sum(errors(y, y_pred))
            / (ops.cast(ops.shape(y_pred)[0], "float32") if scale[0] else 1.0)
        )
    )
    for scale[0] in (1.0, 0.0, 1.0):
        assert kind_of(model) != ("mean" if scale[0] else "sum")
        fit_on(model, dp_sparse.DPSGDOptimizer("sgd", plan_for(SIZE), 1.0), plan_for(SIZE), x, y)
        assert kind_of(model) == ("mean" if scale[0] else "sum")


def test_check_model_looks_at_it() -> None:
    x, y = clicks(SIZE)
    good, bad = with_loss(LOSSES["mean"]), with_loss(REFUSED["a product of means"][0])
    assert dp_sparse.check_model(good, (x, y)).ok
    assert "depends on the outputs of another" in dp_sparse.check_model(bad, (x, y)).problems[0]


def test_a_train_step_of_its_own_is_told_what_to_do() -> None:
    kind = type("Own", (keras.Model,), {"train_step": lambda self, data: {}})
    source = click_model()
    model = kind(source.inputs, source.outputs)
    with pytest.raises(dp_sparse.PrivacyError, match=r"into compute_loss\(x, y, y_pred"):
        model.compile(dp_sparse.DPSGDOptimizer("sgd", plan_for(SIZE), 1.0), "mse")


def test_evaluate_and_metrics_are_as_keras_has_them() -> None:
    x, y = clicks(SIZE)
    model, plan = with_loss(LOSSES["Keras' own"]), plan_for(SIZE)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), metrics=["mae"])
    history = model.fit(marked_dataset(plan, x, y), validation_data=(x, y), verbose=0).history
    wanted = float(np.mean((model.predict(x, verbose=0)[:, 0] - y) ** 2))
    assert history["val_loss"] == pytest.approx([wanted], rel=1e-5)
    assert 0 < history["mae"][0] < 1


def test_its_gradient_is_that_of_each_example_alone() -> None:
    """Against one example at a time, each clipped by hand."""
    x, y = clicks(SIZE)
    model = with_loss(LOSSES["sum"])
    wanted = [np.zeros(v.shape) for v in model.trainable_variables]
    for place in range(SIZE):
        with tf.GradientTape() as tape:
            loss = tf.square(model([x[place : place + 1]])[0, 0] - y[place])
        own = [
            tf.convert_to_tensor(g).numpy()
            for g in tape.gradient(loss, [v.value for v in model.trainable_variables])
        ]
        norm = np.sqrt(sum(np.sum(g**2) for g in own))
        for total, gradient in zip(wanted, own, strict=True):
            total += gradient * min(1.0, 0.05 / norm)
    before, plan = weights_of(model), plan_for(SIZE, noise_multiplier=1e-6)
    model.compile(dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1.0), plan, 0.05))
    model.fit(marked_dataset(plan, x, y), verbose=0)
    for old, new, total in zip(before, weights_of(model), wanted, strict=True):
        np.testing.assert_allclose(old - new, total / SIZE, atol=1e-6)


def test_the_example_of_the_page() -> None:
    """Of docs/data.md; its tables stay sparse."""
    page = (Path(__file__).parents[2] / "docs/data.md").read_text().partition("\n## A loss of")[2]
    names: dict[str, Any] = {"keras": keras}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], names)
    model, plan = names["Retrieval"](11, 7), plan_for(SIZE)
    x, ratings = clicks(SIZE)
    y = {"item": x[:, 1], "rating": ratings}
    optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0, threshold=0.5)
    model.compile(optimizer)
    model.fit(marked_dataset(plan, x[:, 0], y, steps=2), verbose=0)
    assert [table.shape[0] for table in optimizer.tables] == [11, 7]
    assert model.evaluate(x[:, 0], y, verbose=0) > 0


def test_a_metric_in_it_is_told_where_to_go() -> None:
    model, plan = with_loss(LOSSES["mean"]), plan_for(SIZE)
    model.tracker = keras.metrics.Mean(name="own")
    inner = model.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = inner(*args, **kwargs)
        model.tracker.update_state(loss)
        return loss

    model.compute_loss = compute_loss
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0))
    with pytest.raises(dp_sparse.UnsupportedLayerError, match=r"(?s)own.*a metric's variable"):
        model.fit(marked_dataset(plan, *clicks(SIZE)), verbose=0)


def test_a_loss_cannot_tell_padding_by_its_weight() -> None:
    """Weights that are all 1 add up to the size of the batch, with its padding: a mean."""
    examples = Examples(
        *map(tf.constant, (*clicks(4), np.array([1.0, 1, 1, 0], np.float32), [1.0, 1.0, 1.0, 0.0]))
    )
    model = with_loss(lambda model, x, y, y_pred, w: w)
    np.testing.assert_array_equal(OwnLoss(model, examples)(tf.zeros([4, 1])), np.ones(4))


def test_one_example_tells_what_the_loss_is() -> None:
    """The first batch may have no other, and one whose weights are all 1."""
    x, y = clicks(SIZE)
    examples = Examples(
        *map(tf.constant, (x[:1], y[:1], np.ones(1, np.float32), np.ones(1, np.float32)))
    )
    for name, kind in [
        ("mean", "mean"),
        ("sum", "sum"),
        ("divided by all weights", "weighted mean"),
    ]:
        model = with_loss(LOSSES[name])
        measure(model, examples, 1)
        assert kind_of(model) == kind


def test_losses_of_most_examples_may_be_0() -> None:
    """As where only those that clicked have one."""
    x, y = clicks(SIZE)
    y[:] = 0
    y[-1] = 1
    model, plan = with_loss(lambda m, x, y, y_pred, w: ops.mean(y * y_pred[:, 0])), plan_for(SIZE)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0))
    model.fit(marked_dataset(plan, x, y), verbose=0)
    assert kind_of(model) == "mean"


def test_random_numbers_in_it() -> None:
    """As of a variational autoencoder."""
    seeds = keras.random.SeedGenerator(1)

    def loss(model: Any, x: Any, y: Any, y_pred: Any, w: Any) -> Any:
        drawn = keras.random.normal(ops.shape(y_pred), seed=seeds)
        return ops.mean(ops.square(y_pred + drawn - y[:, None]))

    model, plan = with_loss(loss), plan_for(SIZE)
    model.seeds = seeds
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0))
    model.fit(marked_dataset(plan, *clicks(SIZE)), verbose=0)
    assert kind_of(model) == "mean"


@pytest.mark.parametrize("kind", ["tf.Variable", "a weight"])
def test_nothing_is_kept_of_an_example_before_it_is_refused(kind: str) -> None:
    """The measurement runs under the guards of training, and in no eager pass."""
    kept = tf.Variable(0.0) if kind == "tf.Variable" else keras.Variable(0.0, trainable=False)
    eager: list[bool] = []

    def loss(model: Any, x: Any, y: Any, y_pred: Any, w: Any) -> Any:
        eager.append(tf.executing_eagerly())
        own = ops.mean(errors(y, y_pred))
        kept.assign(own)
        return own

    model, plan = with_loss(loss), plan_for(SIZE)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0))
    with pytest.raises((dp_sparse.PrivacyError, dp_sparse.UnsupportedLayerError)):
        model.fit(marked_dataset(plan, *clicks(SIZE)), verbose=0)
    assert float(kept.numpy()) == 0.0 and not any(eager)


def test_a_regulariser_is_left_to_the_step() -> None:
    """`super().compute_loss` adds up what the private step applies to its update."""
    inputs = keras.Input((3,))

    class Own(keras.Model):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    model = Own(inputs, keras.layers.Dense(1, kernel_regularizer="l2")(inputs))
    plan = plan_for(SIZE)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), "mse")
    x = np.ones((SIZE, 3), np.float32)
    model.fit(marked_dataset(plan, x, np.ones((SIZE, 1), np.float32)), verbose=0)
    assert model.layers[-1].kernel.regularizer is not None and kind_of(model) == "mean"


def test_a_wrapped_method_is_the_models_own() -> None:
    class Own(keras.Model):
        @functools.wraps(keras.Model.compute_loss)
        def compute_loss(self, x: Any, y: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
            return 0 * errors(y, y_pred)

    source = click_model()
    assert has_own_loss(Own(source.inputs, source.outputs))
    assert not has_own_loss(source)

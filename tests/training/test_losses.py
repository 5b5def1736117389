"""Per-example losses: Keras' own values, one number an example, nothing of the batch in them."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dp_sparse import DPSGDOptimizer, check_model
from dp_sparse.core.errors import BadExampleError, PrivacyError, translated
from dp_sparse.step import losses
from dp_sparse.step.unsupported import replaced_methods
from tests.training_cases import marked_dataset, plan_for

LOSSES = [
    keras.losses.BinaryCrossentropy(),
    keras.losses.BinaryCrossentropy(label_smoothing=0.1),
    keras.losses.BinaryFocalCrossentropy(),
    keras.losses.MeanSquaredError(),
    keras.losses.MeanAbsoluteError(),
    keras.losses.Huber(),
    keras.losses.Poisson(),
    keras.losses.LogCosh(),
    keras.losses.CategoricalCrossentropy(),
    keras.losses.KLDivergence(),
    keras.losses.CosineSimilarity(),
]


def total_losses(*given: Any) -> tf.Tensor:
    return losses.per_example_losses(*given)[0]


def compiled(loss: Any, outputs: int = 4, **arguments: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(outputs, activation="softmax")])
    model.compile(loss=loss, **arguments)
    return model


def each_alone(
    loss: keras.losses.Loss, y: Any, prediction: Any, weights: Any = None
) -> list[float]:
    """Stock Keras on every example as a batch of one."""
    size = len(y)
    return [
        float(
            loss(
                y[i : i + 1], prediction[i : i + 1], None if weights is None else weights[i : i + 1]
            )
        )
        for i in range(size)
    ]


def probabilities(*shape: int) -> np.ndarray:
    values = np.random.default_rng(0).uniform(0.05, 1, shape).astype(np.float32)
    return values / values.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize("weighted", [False, True])
def test_stock_losses(loss: keras.losses.Loss, weighted: bool) -> None:
    y, prediction = probabilities(5, 4), probabilities(5, 4)[::-1].copy()
    weights = np.linspace(0, 2, 5).astype(np.float32) if weighted else None
    values = total_losses(compiled(loss), y, tf.constant(prediction), weights)
    assert values.dtype == tf.float32
    np.testing.assert_allclose(values, each_alone(loss, y, prediction, weights), atol=1e-5)


@pytest.mark.parametrize("from_logits", [False, True])
def test_sparse_labels(from_logits: bool) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
    y, prediction = np.array([0, 3, 1, 2, 2], np.int32), probabilities(5, 4)
    values = total_losses(compiled(loss), y, tf.constant(prediction), None)
    np.testing.assert_allclose(values, each_alone(loss, y[:, None], prediction), atol=1e-5)


def test_flat_labels_against_a_column_of_predictions() -> None:
    """`[batch]` against `[batch, 1]` must not become `[batch, batch]`."""
    loss = keras.losses.MeanSquaredError()
    y, prediction = np.arange(5, dtype=np.float32), probabilities(5, 3)[:, :1]
    values = total_losses(compiled(loss, 1), y, tf.constant(prediction), None)
    np.testing.assert_allclose(values, (y - prediction[:, 0]) ** 2, rtol=1e-5)


def test_positions_are_averaged_within_the_example() -> None:
    loss = keras.losses.MeanSquaredError()
    y, prediction = probabilities(3, 5, 4), probabilities(3, 5, 4)[::-1].copy()
    weights = np.random.default_rng(1).uniform(0, 2, (3, 5)).astype(np.float32)
    for given in (None, weights, weights[:, 0]):
        values = total_losses(compiled(loss), y, tf.constant(prediction), given)
        expected = each_alone(
            loss, y, prediction, given if given is None or given.ndim == 2 else given[:, None]
        )
        np.testing.assert_allclose(values, expected, atol=1e-5)


def test_a_mask_counts_within_the_example_alone() -> None:
    """Keras divides by the unmasked positions of the whole batch, which couples examples."""
    loss = keras.losses.MeanSquaredError()
    y, prediction = probabilities(3, 5, 4), tf.constant(probabilities(3, 5, 4)[::-1].copy())
    mask = np.array([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
    prediction._keras_mask = tf.constant(mask)
    values = total_losses(compiled(loss), y, prediction, None)
    each = np.mean((y - prediction.numpy()) ** 2, axis=-1)
    expected = [each[0].mean(), each[1, 0], 0.0]
    np.testing.assert_allclose(values, expected, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_an_ignored_class_and_the_mask_of_the_outputs_hold_together(weighted: bool) -> None:
    """Neither drops the other: padding does not train, nor does the ignored class."""
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
    y, prediction = np.array([[1, 2, 0, 3], [2, 0, 1, 1]]), tf.constant(probabilities(2, 4, 4))
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
    weights = np.array([[1, 3, 1, 1], [2, 1, 1, 1]], np.float32) if weighted else None
    prediction._keras_mask = tf.constant(mask)
    values = total_losses(compiled(loss), y, prediction, weights)
    each = -np.log(np.take_along_axis(prediction.numpy(), y[..., None], -1))[..., 0]
    each *= 1 if weights is None else weights
    expected = [each[0, :2].mean(), each[1, 0]]
    np.testing.assert_allclose(values, expected, rtol=1e-5)


def test_the_loss_of_an_example_does_not_move_with_the_others() -> None:
    for loss in LOSSES:
        y, prediction = probabilities(5, 4), probabilities(5, 4)[::-1].copy()
        alone = total_losses(compiled(loss), y[:1], tf.constant(prediction[:1]), None)
        both = total_losses(compiled(loss), y, tf.constant(prediction), None)
        np.testing.assert_allclose(alone[0], both[0], rtol=1e-5)


def test_weight_0_hides_a_loss_that_is_not_finite() -> None:
    loss = keras.losses.MeanSquaredError()
    prediction = tf.constant([[1.0], [np.inf], [np.nan]])
    values = total_losses(
        compiled(loss, 1), np.zeros(3, np.float32), prediction, np.array([1, 0, 0], np.float32)
    )
    np.testing.assert_array_equal(values, [1, 0, 0])


def test_keras_is_left_as_it_was() -> None:
    """Also after an error: the compiled loss reduces over the batch, its metrics are back."""
    inputs = keras.Input((3,))
    heads = [keras.layers.Dense(1, name=name)(inputs) for name in "ab"]
    model = keras.Model(inputs, heads)
    model.compile(loss="mse")
    y = [tf.ones((2, 1)), tf.ones((2, 1))]
    prediction = [tf.zeros((2, 1)), 3 * tf.ones((2, 1))]
    np.testing.assert_allclose(total_losses(model, y, prediction, None), [5, 5])
    with pytest.raises(Exception, match="."):
        total_losses(model, y, [tf.zeros((2, 1)), tf.zeros((3, 7))], None)
    assert float(model._compile_loss(y, prediction)) == pytest.approx(5)
    assert [metric.name for metric in model._compile_loss.metrics] == ["a_loss", "b_loss"]


@pytest.mark.parametrize("form", ["list", "dict"])
def test_several_outputs_with_loss_weights(form: str) -> None:
    inputs = keras.Input((3,))
    heads = {name: keras.layers.Dense(1, name=name)(inputs) for name in "ab"}
    model = keras.Model(inputs, heads if form == "dict" else list(heads.values()))
    losses, weights = {"a": "mse", "b": "mae"}, {"a": 1.0, "b": 0.25}
    one, two = tf.constant([[1.0], [2.0]]), tf.constant([[3.0], [5.0]])
    zero = tf.zeros((2, 1))
    if form == "dict":
        model.compile(loss=losses, loss_weights=weights)
        values = total_losses(model, {"a": zero, "b": zero}, {"a": one, "b": two}, None)
    else:
        model.compile(loss=list(losses.values()), loss_weights=list(weights.values()))
        values = total_losses(model, [zero, zero], [one, two], None)
    np.testing.assert_allclose(values, [1 + 0.75, 4 + 1.25])


def test_a_custom_loss_function_per_example() -> None:
    def cubed(y: Any, prediction: Any) -> tf.Tensor:
        return tf.reduce_sum(tf.abs(prediction - y) ** 3, axis=-1)

    values = total_losses(compiled(cubed, 1), tf.zeros((2, 1)), tf.constant([[1.0], [2.0]]), None)
    np.testing.assert_allclose(values, [1, 8])


@pytest.mark.parametrize("reduction", ["sum", "none", None])
def test_other_reductions_are_refused(reduction: str | None) -> None:
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    with pytest.raises(ValueError, match="Expected a loss with reduction='sum_over_batch_size'"):
        total_losses(compiled(loss), tf.zeros((2, 4)), tf.zeros((2, 4)), None)


def test_a_scalar_is_refused() -> None:
    with pytest.raises(ValueError, match="got a scalar, which mixes the examples of a batch"):
        total_losses(
            compiled(lambda y, p: tf.reduce_mean(p)), tf.zeros((2, 4)), tf.zeros((2, 4)), None
        )


@pytest.mark.parametrize("batch", [2, None])
def test_a_value_for_each_column_is_refused(batch: int | None) -> None:
    """Also if a batch of unknown size has as many examples as there are columns."""
    loss = compiled(lambda y, p: tf.reduce_mean(tf.square(y - p), axis=0))

    @tf.function(input_signature=[tf.TensorSpec([batch, 4])])
    def losses(y: tf.Tensor) -> tf.Tensor:
        return total_losses(loss, y, y, None)

    with pytest.raises(ValueError, match="one value for each example, got 4 values whatever"):
        losses(tf.zeros((4 if batch is None else batch, 4)))


@pytest.mark.parametrize("bad", [-0.5, 1.5, 2.0])
@pytest.mark.parametrize("name", ["binary_crossentropy", "binary_focal_crossentropy"])
def test_probabilities_out_of_range_are_shown(name: str, bad: float) -> None:
    refused = rf"\[0, 1\] for loss {name}, got {bad:g}"
    with pytest.raises(BadExampleError, match=refused), translated():
        total_losses(
            compiled(name, 1), tf.constant([[1.0], [bad]]), tf.constant([[0.5], [0.5]]), None
        )


@pytest.mark.parametrize("bad", [-1, 4])
def test_classes_out_of_range_are_shown(bad: int) -> None:
    loss = "sparse_categorical_crossentropy"
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Expected labels in \[0, 4\)"):
        total_losses(compiled(loss), tf.constant([0, bad]), tf.constant(probabilities(2, 4)), None)


def test_any_label_is_good_for_a_regression() -> None:
    values = total_losses(compiled("mse", 1), tf.constant([[-7.0]]), tf.constant([[1.0]]), None)
    np.testing.assert_allclose(values, [64])


# ---- What a loss may not do.


def train(loss: Any, model: keras.Model | None = None, **arguments: Any) -> None:
    """Two steps of DP-SGD."""
    rng, plan = np.random.default_rng(0), plan_for(4)
    model = model or keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(DPSGDOptimizer("sgd", plan, 1.0), loss=loss, **arguments)
    x, y = (rng.normal(size=(4, width)).astype(np.float32) for width in (3, 2))
    model.fit(marked_dataset(plan, x, y, steps=2), verbose=0)
    assert int(model.optimizer.diagnostics.steps) == 2


class Centred(keras.losses.Loss):
    """Subtracts something of its own from the square error."""

    def __init__(self, kept: Any, of: Any = lambda kept, values: kept) -> None:
        super().__init__()
        self.kept, self._of = kept, of

    def call(self, y: Any, prediction: Any) -> Any:
        values = keras.ops.mean(keras.ops.square(y - prediction), -1)
        return values - self._of(self.kept, values)


def running_mean(kept: Any, values: Any) -> Any:
    kept.assign(0.9 * kept + 0.1 * keras.ops.mean(tf.stop_gradient(values)))
    return kept


def around_keras(kept: Any, values: Any) -> Any:
    return kept.value.assign_add(tf.reduce_mean(values))


def drawn(kept: Any, values: Any) -> Any:
    return keras.random.normal(keras.ops.shape(values), seed=kept)


def in_python(kept: Any, values: Any) -> Any:
    return tf.ensure_shape(tf.py_function(tf.sin, [values], tf.float32), [None])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "of", "message"),
    [
        (lambda: keras.Variable(0.0), running_mean, "The loss writes .*without state"),
        (lambda: tf.Variable(0.0), running_mean, r"\(AssignVariableOp\): keeps what was computed"),
        (lambda: keras.Variable(0.0), around_keras, r"\(AssignAddVariableOp\): keeps"),
        (lambda: keras.random.SeedGenerator(1), drawn, "The loss writes .*seed_generator_state"),
        (lambda: 7, drawn, "draws random numbers that can be predicted"),
        (lambda: None, in_python, r"\(EagerPyFunc\): runs Python code"),
    ],
    ids=["running mean", "tf.Variable", "around keras", "random", "known seed", "python"],
)
@pytest.mark.parametrize("way", [{}, {"run_eagerly": True}], ids=["graph", "eager"])
def test_a_loss_with_state_is_refused(make: Any, of: Any, message: str, way: Any) -> None:
    kept = make()
    with pytest.raises(PrivacyError, match=message):
        train(Centred(kept, of), **way)
    if isinstance(kept, tf.Variable | keras.Variable):
        assert float(kept) == 0.0


def test_a_loss_that_reads_a_weight_that_trains_is_refused() -> None:
    """Its gradient through the weight would be left out."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="owner")])
    loss = Centred(None, lambda _, values: keras.ops.sum(model.weights[0]))
    with pytest.raises(PrivacyError, match="The loss reads .*owner/kernel"):
        train(loss, model)


def test_a_loss_that_calls_a_layer_of_the_model_is_refused() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="owner")])
    loss = Centred(None, lambda _, values: model.layers[0](tf.ones([1, 3]))[0, 0])
    with pytest.raises(PrivacyError, match="The loss reads .*owner/kernel"):
        train(loss, model)


def test_a_loss_that_reads_a_metric_is_refused() -> None:
    metric = keras.metrics.MeanSquaredError()
    with pytest.raises(PrivacyError, match="The loss reads .*a statistic without noise"):
        train(Centred(metric, lambda metric, values: metric.result()), metrics=[metric])


@pytest.mark.slow
def test_a_loss_may_read_what_never_changes() -> None:
    for constant in (keras.Variable(0.5), tf.Variable(0.5), tf.constant(0.5)):
        train(Centred(constant))


class WithACallOfItsOwn(keras.losses.Loss):
    """Doubles what Keras' `__call__` gives."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean(tf.square(y_true - y_pred), -1)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return 2 * super().__call__(y_true, y_pred, sample_weight)


class Squares(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean(tf.square(y_true - y_pred), -1)


@pytest.mark.parametrize("form", ["one", "dictionary"])
def test_a_loss_with_a_call_of_its_own_is_refused_by_class(form: str) -> None:
    """`check_model` and `compile` say the same."""
    loss: Any = WithACallOfItsOwn()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="out")])
    model.compile(loss={"out": loss} if form == "dictionary" else loss)
    [problem] = check_model(model).problems
    assert "WithACallOfItsOwn has a __call__" in problem and "call(y_true, y_pred)" in problem
    with pytest.raises(PrivacyError, match="WithACallOfItsOwn has a __call__ of its own"):
        model.compile(DPSGDOptimizer("sgd", plan_for(8), 1.0), loss=model.loss)


def test_what_a_subclass_of_keras_loss_may_do() -> None:
    """One with a `call`, a function and a name are not refused."""
    for loss in (Squares(), tf.square, "mse", keras.losses.MeanSquaredError(), ["mse", None]):
        assert not replaced_methods(keras.Sequential(), loss)


@pytest.mark.parametrize("labels", [(5,), (5, 1)])
def test_labels_of_other_axes_than_the_outputs_are_shown(labels: tuple[int, ...]) -> None:
    outputs = (5, 1) if labels == (5,) else (5,)
    found = {1: r"\[batch\]", 2: r"\[batch, 1\]"}
    match = f"labels {found[len(labels)]} against outputs {found[len(outputs)]}"
    with pytest.raises(PrivacyError, match=match):
        total_losses(compiled(Squares(), 1), tf.ones(labels), tf.ones(outputs), None)


def test_labels_of_other_axes_that_mix_nothing_are_taken() -> None:
    class OfTheFirst(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return tf.square(y_true - y_pred[:, 0])

    values = total_losses(compiled(OfTheFirst(), 1), tf.ones([5]), tf.zeros([5, 1]), None)
    np.testing.assert_array_equal(values, np.ones(5))


def test_labels_that_are_text() -> None:
    y = tf.constant(["yes", "no"])
    with pytest.raises(ValueError, match="Expected numbers as labels y for loss mse") as caught:
        total_losses(compiled("mse", 1), y, tf.zeros([2, 1]), None)
    assert len(str(caught.value).splitlines()) <= 3

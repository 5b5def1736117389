"""What users do with losses, labels, weights and metrics, and what must come of it."""

from typing import Any

import keras
import keras_rs
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from tests.training_cases import marked_dataset, plan_for

SIZE = 8
X = np.random.default_rng(0).normal(size=(SIZE, 3)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(SIZE, 1)).astype(np.float32)


def fit(
    model: keras.Model, y: Any, weights: Any = None, metrics: Any = None, **compiled: Any
) -> dict[str, float]:
    """One step on all examples; the logs of the step."""
    plan = plan_for(SIZE)
    compiled.setdefault("loss", "mse")
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), metrics=metrics, **compiled)
    history = model.fit(marked_dataset(plan, X, y, weights=weights), verbose=0).history
    assert int(model.optimizer.steps_spent) == 1
    return {name: values[-1] for name, values in history.items()}


def one_output(units: int = 1) -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(units)])


def two_outputs(form: str = "dictionary") -> keras.Model:
    inputs = keras.Input((3,))
    heads = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("click", "buy")}
    return keras.Model(inputs, heads if form == "dictionary" else list(heads.values()))


def test_a_loss_with_a_call_of_its_own_is_refused_before_a_step_is_spent() -> None:
    class Doubled(keras.losses.MeanSquaredError):
        def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return 2 * super().__call__(y_true, y_pred, sample_weight)

    model = one_output()
    model.compile(loss=Doubled())
    [problem] = dp_sparse.check_model(model).problems
    assert "The loss Doubled has a __call__ of its own" in problem and "call(y_true" in problem
    with pytest.raises(dp_sparse.PrivacyError, match="Doubled has a __call__ of its own"):
        fit(model, Y, loss=Doubled())


@pytest.mark.parametrize("name", ["train_step", "_compute_loss"])
def test_check_model_refuses_what_compile_refuses(name: str) -> None:
    kind = type("Own", (keras.Sequential,), {name: lambda self, *args, **kwargs: None})
    model = kind([keras.Input((3,)), keras.layers.Dense(1)])
    [problem] = dp_sparse.check_model(model, (X, Y)).problems
    with pytest.raises(dp_sparse.PrivacyError) as refusal:
        fit(model, Y)
    assert str(refusal.value) == problem and f"Own has a {name} of its own" in problem


def test_check_model_finds_a_division_by_the_largest_pixel() -> None:
    """All images of the batch have a white pixel, so the batch itself shows nothing."""
    inputs = keras.Input((3,))
    scaled = keras.layers.Lambda(lambda x: x / tf.reduce_max(x))(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(scaled))
    images = np.abs(X)
    images[:, 0] = images.max()
    [problem] = dp_sparse.check_model(model, (images, Y)).problems
    assert "once other examples hold NaN" in problem


def test_a_ranking_metric_of_keras_rs() -> None:
    """It shuffles ties at random, which reaches no weight."""
    relevant = np.eye(SIZE, 4, dtype=np.float32)
    logs = fit(one_output(4), relevant, metrics=[keras_rs.metrics.NDCG(name="ranking")])
    assert 0 <= logs["ranking"] <= 1


def test_a_refused_metric_is_named() -> None:
    class Keeps(keras.metrics.Mean):
        kept = tf.Variable(0.0)

        def update_state(self, *args: Any, **kwargs: Any) -> None:
            Keeps.kept.assign_add(1.0)

    with pytest.raises(dp_sparse.PrivacyError, match="keeps_it_all/.*keeps what was computed"):
        fit(one_output(), Y, metrics=[Keeps(name="keeps it all")])


def test_a_metric_of_the_model_s_own_in_compute_metrics() -> None:
    class WithMetric(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.spread = keras.layers.Dense(1), keras.metrics.Mean(name="spread")

        def call(self, inputs: Any) -> Any:
            return self.score(inputs)

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            found = super().compute_metrics(x, y, y_pred, sample_weight)
            self.spread.update_state(tf.abs(y_pred))
            return {**found, "spread": self.spread.result()}

    logs = fit(WithMetric(), Y, metrics=["mae"])
    assert logs["spread"] > 0 and logs["mae"] > 0


@pytest.mark.parametrize("built", [False, True])
def test_one_more_output_outside_of_training(built: bool) -> None:
    class Explains(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.score = keras.layers.Dense(1)

        def call(self, inputs: Any, training: bool = False) -> Any:
            score = self.score(inputs)
            return score if training else (score, inputs)

    model = Explains()
    if built:
        model(X)
    assert fit(model, Y)["loss"] > 0
    assert len(model.predict(X, verbose=0)) == 2


@pytest.mark.parametrize("flat", ["labels", "outputs"])
def test_labels_of_other_axes_than_the_outputs(flat: str) -> None:
    class Squares(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return tf.reduce_mean(tf.square(y_true - y_pred), -1)

    model = one_output()
    if flat == "outputs":
        model.add(keras.layers.Reshape(()))
    match = {"labels": r"labels \[batch\] against outputs \[batch, 1\]"}
    match["outputs"] = r"labels \[batch, 1\] against outputs \[batch\]"
    with pytest.raises(dp_sparse.PrivacyError, match=match[flat]):
        fit(model, Y[:, 0] if flat == "labels" else Y, loss=Squares())
    assert int(model.optimizer.steps_spent) == 0


@pytest.mark.parametrize("kind", ["U3", object])
def test_labels_that_are_text(kind: Any) -> None:
    model = one_output()
    labels = np.array(["yes", "no"] * (SIZE // 2), dtype=kind)
    with pytest.raises(ValueError, match="Expected numbers as labels y") as refusal:
        fit(model, labels, loss="binary_crossentropy")
    assert len(str(refusal.value).splitlines()) <= 3
    assert int(model.optimizer.steps_spent) == 0


@pytest.mark.parametrize("form", ["dictionary", "list"])
def test_a_loss_for_one_of_two_outputs(form: str) -> None:
    """The other head must not train; one that is not frozen is named with what to do."""
    loss, labels = {"click": "mse", "buy": None}, {"click": Y, "buy": Y}
    with pytest.raises(dp_sparse.UnsupportedLayerError, match="^buy: .*\nGive its output a loss"):
        fit(two_outputs(form), labels, loss=loss)
    model = two_outputs(form)
    model.get_layer("buy").trainable = False
    before = model.get_layer("buy").get_weights()
    assert fit(model, labels, loss=loss)["loss"] > 0
    np.testing.assert_array_equal(before[0], model.get_layer("buy").get_weights()[0])


def test_labels_for_the_one_output_that_has_a_loss() -> None:
    """The other output is a layer that trains on the way to it."""
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(2, name="hidden")(inputs)
    model = keras.Model(inputs, {"hidden": hidden, "click": keras.layers.Dense(1)(hidden)})
    assert fit(model, {"click": Y}, loss={"click": "mse"})["loss"] > 0


@pytest.mark.parametrize("form", ["dictionary", "list"])
def test_sample_weights_for_one_of_two_outputs(form: str) -> None:
    """The other output has weights of 1."""
    weights = np.zeros(SIZE, np.float32)
    logs = fit(two_outputs(form), {"click": Y, "buy": Y}, {"click": weights})
    assert logs["click_loss"] == 0 and logs["buy_loss"] > 0


def test_sample_weights_for_an_output_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"weights for \['sell'\] and labels as \['buy', 'click'"):
        fit(two_outputs(), {"click": Y, "buy": Y}, {"sell": np.ones(SIZE, np.float32)})


def test_the_kl_term_of_a_vae_as_an_output() -> None:
    """`add_loss` is refused; a second output with the mean as its loss trains the same."""
    inputs = keras.Input((3,))
    mean, log_variance = (keras.layers.Dense(2, name=name)(inputs) for name in ("mean", "spread"))
    noise = keras.layers.GaussianNoise(1.0)(keras.layers.Lambda(tf.zeros_like)(mean))
    code = mean + noise * keras.ops.exp(log_variance / 2)
    divergence = keras.ops.square(mean) + keras.ops.exp(log_variance) - 1 - log_variance
    outputs = {"image": keras.layers.Dense(3)(code), "kl": divergence / 2}
    model, before = keras.Model(inputs, outputs), None
    before = model.get_layer("spread").get_weights()[0]
    given = {"image": "mse", "kl": lambda y, kl: tf.reduce_sum(kl, -1)}
    logs = fit(model, {"image": X, "kl": Y}, loss=given, loss_weights={"image": 1.0, "kl": 0.1})
    assert logs["kl_loss"] > 0 and logs["image_loss"] > 0
    assert np.abs(model.get_layer("spread").get_weights()[0] - before).max() > 0

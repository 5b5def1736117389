"""Calibrated probabilities as a user gets them, and what is refused."""

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import scipy.special
import tensorflow as tf

import dp_sparse
from dp_sparse.core import BadExampleError, PrivacyError
from tests.subprocesses import HANG
from tests.training_cases import plan_for

N = 3000
NOISE = 3.0


def examples(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """x, and labels of probability sigmoid(x)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 2, (N, 1)).astype(np.float32)
    return x, (rng.random(N) < scipy.special.expit(x[:, 0])).astype(np.float32)


def paying_plan(noise: float = NOISE, count: int = N) -> dp_sparse.PrivacyPlan:
    release = dp_sparse.probabilities.score_histogram.release_of(noise)
    return dataclasses.replace(plan_for(count, noise_multiplier=2.0), releases=(release,))


def compiled(model: keras.Model, loss: Any = "binary_crossentropy", **options: Any) -> keras.Model:
    plan = options.pop("plan", None) or paying_plan()
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss=loss)
    return model


def scaled_model(scale: float = 3.0, activation: str | None = "sigmoid") -> keras.Model:
    """Says `scale` times the log odds that labels have."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, activation=activation)])
    model.layers[-1].set_weights([np.array([[scale]]), np.zeros(1)])
    return model


def log_loss(y: np.ndarray, p: np.ndarray) -> float:
    p = np.clip(np.ravel(p), 1e-7, 1 - 1e-7)
    return float(-np.mean(y * np.log(p) + (1 - y) * np.log1p(-p)))


@pytest.mark.parametrize("method", ["platt", "isotonic"])
@pytest.mark.parametrize("logits", [False, True])
def test_probabilities_are_those_of_the_labels_again(method: str, logits: bool) -> None:
    x, y = examples()
    loss = keras.losses.BinaryCrossentropy(from_logits=logits)
    model = compiled(scaled_model(activation=None if logits else "sigmoid"), loss)
    calibration = dp_sparse.calibrate_probabilities(model, (x, y), method=method)
    held_out, labels = examples(1)
    outputs = [each.predict(held_out, verbose=0) for each in (model, calibration(model))]
    before, after = (scipy.special.expit(o) if logits else o for o in outputs)
    assert log_loss(labels, after) < 0.97 * log_loss(labels, before)
    np.testing.assert_allclose(after, scipy.special.expit(held_out), atol=0.15)
    measured = calibration.measures["calibrated_log_loss"]
    found = calibration(model).predict(x, verbose=0)
    right = log_loss(y, scipy.special.expit(found) if logits else found)
    assert measured.standard_error < 0.02
    assert measured.value == pytest.approx(right, abs=5 * measured.standard_error)
    found = model.predict(x, verbose=0)
    wrong = log_loss(y, scipy.special.expit(found) if logits else found)
    assert measured.value != pytest.approx(wrong, abs=5 * measured.standard_error)


def test_the_top_class_of_several_is_calibrated_and_the_others_share_the_rest() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 1, (N, 3)).astype(np.float32)
    chances = scipy.special.softmax(scores, axis=1)
    y = (rng.random((N, 1)) > np.cumsum(chances, axis=1)).sum(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, activation="softmax")])
    model.layers[-1].set_weights([4 * np.eye(3), np.zeros(3)])
    compiled(model, "sparse_categorical_crossentropy")
    calibration = dp_sparse.calibrate_probabilities(model, (scores, y))
    found = calibration(model).predict(scores, verbose=0)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-5)
    own = scores.argmax(1)
    top, accuracy = found[np.arange(N), own], np.mean(own == y)
    before = model.predict(scores, verbose=0).max(1)
    assert abs(top.mean() - accuracy) < 0.02 and before.mean() - accuracy > 0.1
    np.testing.assert_array_equal(found.argmax(1), own)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize(("classes", "scale"), [(10, 3.0), (10, 60.0), (100, 8.0)])
def test_the_top_class_stays_the_top_of_many(classes: int, scale: float, logits: bool) -> None:
    """Also where float32 rounds all others to nothing, or one other has nearly all the rest."""
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 1, (N, classes)).astype(np.float32)
    y = (scores + rng.gumbel(0, 1.5, scores.shape)).argmax(1)
    activation = None if logits else "softmax"
    model = keras.Sequential([keras.Input((classes,)), keras.layers.Dense(classes, activation)])
    model.layers[-1].set_weights([scale * np.eye(classes), np.zeros(classes)])
    compiled(model, keras.losses.SparseCategoricalCrossentropy(from_logits=logits))
    calibration = dp_sparse.calibrate_probabilities(model, (scores, y))
    found = calibration(model).predict(scores, verbose=0)
    found = scipy.special.softmax(found, axis=1) if logits else found
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-4)
    np.testing.assert_array_equal(found.argmax(1), scores.argmax(1))
    assert abs(found.max(1).mean() - np.mean(scores.argmax(1) == y)) < 0.05


def test_one_hot_labels_and_logits_of_several_classes() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 2, (N, 4)).astype(np.float32)
    y = np.eye(4)[(scores + rng.gumbel(size=scores.shape)).argmax(1)]
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model.layers[-1].set_weights([3 * np.eye(4), np.zeros(4)])
    compiled(model, keras.losses.CategoricalCrossentropy(from_logits=True))
    calibration = dp_sparse.calibrate_probabilities(model, (scores, y))
    found = scipy.special.softmax(calibration(model).predict(scores, verbose=0), axis=1)
    assert abs(found.max(1).mean() - calibration.measures["rate"].value) < 0.02


@pytest.mark.parametrize("method", ["platt", "isotonic"])
def test_a_regression_predicts_mean_labels_again(method: str) -> None:
    x, _ = examples()
    y = np.clip(3 + 0.5 * x[:, 0] + np.random.default_rng(1).normal(0, 0.3, N), 1, 5)
    model = scaled_model(1.0, activation=None)
    compiled(model, "mse")
    calibration = dp_sparse.calibrate_probabilities(
        model, (x, y), label_range=(1, 5), method=method
    )
    found = calibration(model).predict(x, verbose=0)[:, 0]
    near = (x[:, 0] > 1) & (x[:, 0] < 3)  # where predictions are inside of the range
    assert abs(found[near].mean() - y[near].mean()) < 0.15 < abs(x[near, 0].mean() - y[near].mean())
    assert "auc" not in calibration.measures


def two_outputs() -> keras.Model:
    x = keras.Input((1,), name="x")
    click = keras.layers.Dense(1, activation="sigmoid", name="click")(x)
    model = keras.Model({"x": x}, {"click": click, "price": keras.layers.Dense(1, name="price")(x)})
    model.get_layer("click").set_weights([np.array([[3.0]]), np.zeros(1)])
    return compiled(model, {"click": "binary_crossentropy", "price": "mse"})


def test_one_of_several_outputs_by_name() -> None:
    x, y = examples()
    model, data = two_outputs(), ({"x": x}, {"click": y, "price": y})
    with pytest.raises(ValueError, match=r"output= to be one of \['click', 'price'\]"):
        dp_sparse.calibrate_probabilities(model, data)
    calibration = dp_sparse.calibrate_probabilities(model, data, output="click")
    before, after = (each.predict({"x": x}, verbose=0) for each in (model, calibration(model)))
    np.testing.assert_array_equal(after["price"], before["price"])
    np.testing.assert_allclose(after["click"], scipy.special.expit(x), atol=0.15)


class Subclassed(keras.Model):
    """Not functional."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, activation="sigmoid")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs["x"])


def test_a_subclassed_model_and_a_stream_of_batches() -> None:
    x, y = examples()
    model = compiled(Subclassed())
    model({"x": x[:1]})
    model.dense.set_weights([np.array([[3.0]]), np.zeros(1)])
    batches = tf.data.Dataset.from_tensor_slices(({"x": x}, y)).batch(700)
    calibration = dp_sparse.calibrate_probabilities(model, batches)
    found = calibration(model).predict({"x": x}, verbose=0)
    np.testing.assert_allclose(found, scipy.special.expit(x), atol=0.15)


def test_weights_count_and_padding_does_not() -> None:
    x, y = examples()
    weights = np.where(np.arange(N) < 1000, 1.0, 0.0)
    model = compiled(scaled_model(), plan=paying_plan(1e-6))
    calibration = dp_sparse.calibrate_probabilities(model, (x, y, weights))
    assert calibration.histogram.cells.sum() == pytest.approx(1000)


def test_an_export_is_calibrated_and_loads_without_the_package(tmp_path: Path) -> None:
    x, y = examples()
    model = compiled(scaled_model())
    calibration = dp_sparse.calibrate_probabilities(model, (x, y), method="isotonic")
    export = dp_sparse.export_model(model, tmp_path / "export", as_model=calibration)
    assert "score histogram of 34 bins" in export.statement
    np.save(tmp_path / "x.npy", x)
    script = (
        "import sys, keras, numpy as np, tensorflow as tf\n"
        f"folder, x = {str(tmp_path)!r}, np.load({str(tmp_path / 'x.npy')!r})\n"
        "found = keras.models.load_model(folder + '/export/keras').predict(x, verbose=0)\n"
        "served = tf.saved_model.load(folder + '/export/saved_model')\n"
        "served = np.array(served.serve(x))\n"
        "assert 'dp_sparse' not in sys.modules and np.allclose(found, served, atol=1e-6)\n"
        "np.save(folder + '/found.npy', found)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=HANG, cwd=tmp_path)
    expected = calibration(model).predict(x, verbose=0)
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), expected, atol=1e-6)


def test_examples_apart_have_a_budget_of_their_own_which_exports_state(tmp_path: Path) -> None:
    x, y = examples()
    model, budget = compiled(scaled_model(), plan=plan_for(N)), dp_sparse.PrivacyBudget(0.5, 1e-6)
    for _ in range(2):  # each pays for itself
        calibration = dp_sparse.calibrate_probabilities(model, (x, y), budget=budget)
    noise = calibration.histogram.noise_multiplier
    spent = dp_sparse.accounting.accountant.epsilon_of(
        dp_sparse.probabilities.score_histogram.release_of(noise).event, 1e-6, 1e-4
    )
    assert 0.49 < spent <= 0.5
    export = dp_sparse.export_model(model, tmp_path / "export", as_model=calibration)
    assert "(0.5, 1e-06)-differential privacy protects one of them" in export.statement


def test_a_reserved_plan_spends_its_budget_with_the_histogram() -> None:
    sampling = dp_sparse.PoissonSampling(20_000, 500, 100)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-6), sampling)
    reserved = dp_sparse.reserve_calibration(plan, share=0.01).calibrate()
    assert 0.999 < reserved.spent(100).epsilon <= 1.0
    without = plan.calibrate().noise_multiplier
    assert without and reserved.noise_multiplier
    assert 1.0 < reserved.noise_multiplier / without < 1.01
    with pytest.raises(ValueError, match="that pays for it"):
        dp_sparse.reserve_calibration(reserved)
    with pytest.raises(ValueError, match="share"):
        dp_sparse.reserve_calibration(plan, share=1.0)


def test_examples_that_cannot_be_read_again(tmp_path: Path) -> None:
    """A generator is enough for a functional model; a histogram that was saved keeps its budget."""
    x, y = examples()
    model, budget = compiled(scaled_model(), plan=plan_for(N)), dp_sparse.PrivacyBudget(0.5, 1e-6)
    parts = ((x[i : i + 1000], y[i : i + 1000]) for i in range(0, N, 1000))
    calibration = dp_sparse.calibrate_probabilities(model, parts, budget=budget, num_examples=N)
    calibration.histogram.save(tmp_path / "scores.npz")
    loaded = dp_sparse.ScoreHistogram.load(tmp_path / "scores.npz")
    again = pickle.loads(pickle.dumps(dp_sparse.probabilities.calibration_of(loaded)))
    expected, found = (c(model).predict(x, verbose=0) for c in (calibration, again))
    np.testing.assert_array_equal(found, expected)
    second = dp_sparse.calibrate_probabilities(model, (x, y), budget=budget)
    twice = second(calibration(model))  # of a calibrated model
    assert twice.predict(x[:3], verbose=0).shape == (3, 1)


def test_too_few_examples_have_measures_and_a_second_call() -> None:
    model, data = compiled(scaled_model(), plan=paying_plan(3000.0)), examples()
    for _ in range(2):
        with pytest.warns(UserWarning, match="predictions stay as they are"):
            calibration = dp_sparse.calibrate_probabilities(model, data)
        assert calibration(model).predict(data[0][:3], verbose=0).shape == (3, 1)


def test_a_model_that_trained_on_is_told() -> None:
    x, y = examples()
    model = compiled(scaled_model())
    first = dp_sparse.calibrate_probabilities(model, (x, y))
    model.fit(model.optimizer.plan.sampling.batches((x, y)), steps_per_epoch=1, verbose=0)
    with pytest.warns(UserWarning, match="after 0 steps, and the model has taken 1"):
        second = dp_sparse.calibrate_probabilities(model, (x, y), method="isotonic")
    assert second.histogram is first.histogram


def test_the_report_has_the_private_measures(tmp_path: Path) -> None:
    x, y = examples()
    model = compiled(scaled_model())
    report = dp_sparse.PrivacyReport(str(tmp_path / "report.html"))
    batches = model.optimizer.plan.sampling.batches((x, y))
    model.fit(batches, steps_per_epoch=2, verbose=0, callbacks=[report])
    calibration = dp_sparse.calibrate_probabilities(model, (x, y))
    report.add_section("Probabilities", calibration.section())
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Probabilities</h2>" in page and "log loss of a constant" in page
    assert str(calibration.measures["auc"]) in page and "as predicted" in page
    calibration.plot(tmp_path / "reliability.png")
    assert (tmp_path / "reliability.png").stat().st_size > 5000
    assert "log loss" in str(calibration) and " -> " in str(calibration)


def data_with(**changes: Any) -> tuple[Any, ...]:
    x, y = examples()
    parts = {"x": x, "y": y, **changes}
    return tuple(parts.values())


NAN_LABEL, TWO = examples()[1].copy(), examples()[1].copy()
NAN_LABEL[7], TWO[7] = np.nan, 2.0


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (data_with(y=TWO), BadExampleError, r"labels in \[0, 1\], got 2.0 in example 7"),
        (data_with(y=NAN_LABEL), BadExampleError, "got nan in example 7"),
        (data_with(w=-np.ones(N)), BadExampleError, "sample weights >= 0"),
        (data_with(y=np.ones((N, 3))), ValueError, "a label for each prediction"),
        ((examples()[0],), ValueError, "with labels"),
    ],
)
def test_bad_examples_are_told_before_anything_is_drawn(
    data: Any, error: type[Exception], message: str
) -> None:
    model = compiled(scaled_model())
    with pytest.raises(error, match=message):
        dp_sparse.calibrate_probabilities(model, data)
    dp_sparse.calibrate_probabilities(model, examples())  # is still paid for


class OwnPredictions(keras.Sequential):
    """Predicts something else than a call gives."""

    def __init__(self) -> None:
        super().__init__([keras.Input((1,)), keras.layers.Dense(1, "sigmoid")])

    def predict_step(self, data: Any) -> Any:
        return 1 - super().predict_step(data)


def test_other_bad_arguments() -> None:
    model, data = compiled(scaled_model()), examples()
    calibrate = dp_sparse.calibrate_probabilities
    with pytest.raises(ValueError, match="num_examples=3000, the length"):
        calibrate(model, data, num_examples=7)
    with pytest.raises(ValueError, match="weight_cap"):
        calibrate(model, data, weight_cap=0.0)
    with pytest.raises(ValueError, match=r"label_range=\(least, largest\)"):
        calibrate(model, data, label_range=(2, 1))
    with pytest.raises(ValueError, match="Expected method in"):
        calibrate(model, data, method="beta")
    with pytest.raises(PrivacyError, match="batches of a sampler"):
        calibrate(model, model.optimizer.plan.sampling.batches(data).take(1))
    several = keras.Sequential([keras.Input((1,)), keras.layers.Dense(3, "sigmoid")])
    with pytest.raises(ValueError, match="3 labels of their own"):
        calibrate(compiled(several), (data[0], np.ones((N, 3))))
    with pytest.raises(ValueError, match="predict_step of its own"):
        calibrate(compiled(OwnPredictions()), data)
    logits = compiled(scaled_model(activation=None))
    with pytest.raises(ValueError, match="from_logits=True"):
        calibrate(logits, data)
    with pytest.raises(ValueError, match="pays for no score histogram"):
        calibrate(compiled(scaled_model(), plan=plan_for(N)), data)
    plain = scaled_model()
    plain.compile("sgd", "mse")
    with pytest.raises(ValueError, match="a model compiled with a private optimizer"):
        calibrate(plain, data)

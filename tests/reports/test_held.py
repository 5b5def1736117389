"""Uses that work and must go on to: what a user does, and what comes out."""

import secrets
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from tests.statements import sentences
from tests.training_cases import without_preflight


def plan_of(epsilon: float = 3.0, examples: int = 64, steps: int = 2) -> dp_sparse.PrivacyPlan:
    return dp_sparse.PrivacyPlan(
        dp_sparse.PrivacyBudget(epsilon, 1e-3),
        dp_sparse.PoissonSampling(examples, 16, steps),
        noise_multiplier=1.0,
        plan_id=secrets.token_hex(16),
    )


def trained(model: keras.Model, x: np.ndarray, plan: dp_sparse.PrivacyPlan) -> keras.Model:
    model.compile(dp_sparse.DPSGDOptimizer(keras.optimizers.Adam(0.1), plan, clip_norm=1.0), "mse")
    without_preflight(model)
    model.fit(plan.sampling.batches((x, np.ones((len(x), 1), np.float32))), verbose=0)
    return model


@pytest.fixture(scope="module")
def click_model() -> keras.Model:
    """Ids of users to a score, after two private steps."""
    ids = keras.Input((2,), dtype="int32")
    values = keras.layers.Flatten()(keras.layers.Embedding(20, 8)(ids))
    values = keras.layers.Dense(16, activation="relu")(values)
    model = keras.Model(ids, keras.layers.Dense(1)(values))
    return trained(model, np.arange(128).reshape(64, 2) % 20, plan_of())


IDS = np.arange(16).reshape(8, 2).astype(np.int32)


def test_a_frozen_backbone_with_batch_normalization() -> None:
    """It uses the statistics that it came with, and neither they nor its weights move."""
    layers = [keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()]
    backbone = keras.Sequential(layers, name="backbone")
    x = np.random.default_rng(0).normal(2.0, 3.0, (64, 4)).astype(np.float32)
    backbone.compile("sgd", "mse")
    backbone.fit(x, np.ones((64, 3)), verbose=0)
    backbone.trainable = False
    before = backbone.get_weights()
    model = keras.Sequential([keras.Input((4,)), backbone, keras.layers.Dense(1, name="head")])
    head = [weight.copy() for weight in model.layers[-1].get_weights()]
    found = dp_sparse.check_model(model, (x, np.ones(64)))
    assert found.ok and [path.split("/")[-2] for path in found.rules] == ["head", "head"]
    trained(model, x, plan_of())
    for old, new in zip(before, backbone.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert not np.array_equal(head[0], model.layers[-1].get_weights()[0])


def test_an_epsilon_of_a_thousandth() -> None:
    """Is met, with the noise that it takes, and said to be hopeless for few examples."""
    sampling = dp_sparse.PoissonSampling(1_000_000, expected_batch_size=1000, steps=10)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1e-3, 1e-6), sampling).calibrate()
    assert 9e-4 < plan.spent(10).epsilon <= 1e-3
    assert plan.noise_multiplier is not None and plan.noise_multiplier > 5
    assert sentences(plan.statement())[0].startswith("(0.001, 1e-06)-differential privacy")
    few = dp_sparse.PoissonSampling(1000, expected_batch_size=100, steps=10)
    with pytest.warns(UserWarning, match="No training can learn from num_examples=1000"):
        dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1e-3, 1e-6), few).calibrate()


def test_tensorflow_lite_reads_an_export(click_model: keras.Model, tmp_path: Path) -> None:
    export = dp_sparse.export_model(click_model, tmp_path / "export")
    converter = tf.lite.TFLiteConverter.from_saved_model(str(export.path / "saved_model"))
    interpreter = tf.lite.Interpreter(model_content=converter.convert())
    runner = interpreter.get_signature_runner()
    (name,) = runner.get_input_details()
    (output,) = runner(**{name: IDS}).values()
    np.testing.assert_allclose(output, click_model.predict(IDS, verbose=0), rtol=1e-4, atol=1e-5)


def test_a_trained_model_is_quantized(click_model: keras.Model, tmp_path: Path) -> None:
    """Its export, that is, whose optimizer stayed behind."""
    dp_sparse.export_model(click_model, tmp_path / "export")
    model = keras.models.load_model(tmp_path / "export" / "keras")
    exact = click_model.predict(IDS, verbose=0)
    model.quantize("int8")
    assert model.layers[1].embeddings.dtype == "int8"
    found = model.predict(IDS, verbose=0)
    np.testing.assert_allclose(found, exact, atol=0.05 * np.abs(exact).max())
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan_of(), clip_norm=1.0), "mse")
    model.save(tmp_path / "quantised.keras")
    with pytest.raises(dp_sparse.UnsupportedLayerError, match="pass compile=False to load_model"):
        keras.models.load_model(tmp_path / "quantised.keras")
    again = keras.models.load_model(tmp_path / "quantised.keras", compile=False)
    np.testing.assert_array_equal(again.predict(IDS, verbose=0), found)

"""Examples that are not finite do not train, do not spoil the loss, and are spoken of."""

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from tests.training_cases import plan_for

N, EMPTY = 40, 10


def examples() -> tuple[np.ndarray, np.ndarray]:
    """The first ones have no id but the masked one, as empty multi-hot features have."""
    ids = np.random.default_rng(0).integers(1, 20, (N, 3))
    ids[:EMPTY] = 0
    return ids, np.ones((N, 1))


def model(**options: Any) -> keras.Model:
    ids = keras.Input((3,), dtype="int32")
    rows = keras.layers.Embedding(20, 2, mask_zero=True)(ids)
    scored = keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(rows))
    trained = keras.Model(ids, scored)
    plan = plan_for(N, steps=4)
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0, **options)
    trained.compile(optimizer, loss="mse", metrics=["mae"])
    return trained


def fit(trained: keras.Model, **options: Any) -> dict[str, list[float]]:
    batches = trained.optimizer.plan.sampling.batches(examples())
    return trained.fit(batches, verbose=0, **options).history


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"microbatch_size": 8}], ids=["whole", "parts"])
def test_the_loss_is_that_of_examples_that_train(options: dict[str, Any]) -> None:
    trained = model(**options)
    ids, _ = examples()
    expected = trained(ids[EMPTY:]).numpy()
    with pytest.warns(UserWarning, match="10 of 40 examples .* did not train"):
        history = fit(trained, steps_per_epoch=1)
    np.testing.assert_allclose(history["loss"], np.mean((expected - 1) ** 2), rtol=1e-5)
    np.testing.assert_allclose(history["mae"], np.mean(np.abs(expected - 1)), rtol=1e-5)


def test_each_epoch_warns_of_what_is_new() -> None:
    trained = model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(trained, epochs=2)
    said = [str(w.message) for w in caught if "did not train" in str(w.message)]
    assert [line.split(" ")[0] for line in said] == ["20", "40"]


def test_a_later_run_warns_of_its_own_alone() -> None:
    trained = model()
    with pytest.warns(UserWarning, match="10 of 40"):
        fit(trained, steps_per_epoch=1)
    ids, y = examples()
    ids[:EMPTY] = 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*did not train")
        batches = trained.optimizer.plan.sampling.batches((ids, y))
        trained.fit(batches, steps_per_epoch=1, verbose=0)


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"microbatch_size": 8}], ids=["whole", "parts"])
def test_a_run_that_diverges_ends_by_the_callback_for_that(options: dict[str, Any]) -> None:
    """No example is finite any more: neither is the loss."""
    plan = plan_for(N, steps=8, noise_multiplier=2.0)
    trained = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1e30), plan, 1.0, **options)
    trained.compile(optimizer, loss="mse")
    x = np.random.default_rng(0).normal(size=(N, 2))
    report = dp_sparse.PrivacyReport(None, diagnostics="non_private")
    callbacks = [report, keras.callbacks.TerminateOnNaN()]
    with pytest.warns(UserWarning, match="lower the learning rate"):
        history = trained.fit(
            plan.sampling.batches((x, np.ones(N))), epochs=8, callbacks=callbacks, verbose=0
        ).history
    assert not np.isfinite(history["loss"][-1]) and trained.optimizer.steps_left > 0


def test_finite_examples_are_not_spoken_of() -> None:
    trained = model()
    ids, y = examples()
    ids[:EMPTY] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*shuffle=True.*")
        trained.fit(trained.optimizer.plan.sampling.batches((ids, y)), verbose=0)


def test_class_weights_in_fit_name_the_way_that_works() -> None:
    trained = model()
    with pytest.raises(ValueError, match=r"batches\(dataset, class_weight=...\)"):
        fit(trained, class_weight={0: 1.0, 1: 2.0})
    assert trained.optimizer.steps_left == 4


class Agreement(keras.Model):
    """Tells how many inputs are what the model says."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2, kernel_initializer="identity")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return self.dense(inputs)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        found["inputs"] = tf.reduce_sum(tf.ones_like(x[:, 0]))
        found["distance"] = tf.reduce_max(tf.abs(x - y_pred))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_compute_metrics_sees_inputs_without_padding(jit_compile: bool) -> None:
    trained, plan = Agreement(), plan_for(N, steps=1, capacity=N + 12)
    optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(0.0), plan, clip_norm=1.0)
    trained.compile(optimizer, loss="mse", jit_compile=jit_compile)
    x = np.random.default_rng(0).normal(size=(N, 2)).astype(np.float32)
    history = trained.fit(plan.sampling.batches((x, x)), verbose=0).history
    assert history["inputs"] == [N]
    np.testing.assert_allclose(history["distance"], 0, atol=1e-6)

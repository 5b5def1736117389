"""Predicted probabilities: what is recommended gives some that can be used, or it is said."""

from pathlib import Path

import keras
import numpy as np
import pytest

import dp_sparse
from pipelines.defaults import run, tasks
from pipelines.defaults.settings import recommended


@pytest.mark.slow
def test_the_first_pages_probabilities_beat_a_constants() -> None:
    """On held-out rows of planted clicks, at the page's epsilon, with what `recommend` says."""
    nowhere = Path("none")  # its rows are made
    task = tasks.load("first_page", tasks.Sources(nowhere, nowhere, nowhere, nowhere))
    found = run.run(task, recommended(task), epsilon=3.0)
    assert found["test_log_loss"] < 0.93 * task.constant_log_loss
    assert found["test_mean_prediction"] == pytest.approx(task.rate, rel=0.25)
    assert found["test"] > 0.73


def click_model() -> keras.Model:
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in ("user", "item")}
    rows = [keras.layers.Embedding(50, 4)(each) for each in inputs.values()]
    scores = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Concatenate()(rows))
    return keras.Model(inputs, scores)


def test_a_clip_norm_that_bends_probabilities_is_told_before_training() -> None:
    """By `check_model` of a batch; the recommended one, which follows the norms, is not blamed."""
    rng = np.random.default_rng(0)
    x = {name: rng.integers(0, 50, 64).astype(np.int32) for name in ("user", "item")}
    y = rng.integers(0, 2, 64).astype(np.float32)
    sampling = dp_sparse.PoissonSampling(num_examples=6400, expected_batch_size=2048, steps=10)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(3.0, 1e-4), sampling).calibrate()
    model = click_model()
    advice = dp_sparse.recommend(model, plan)
    low = dp_sparse.DPSGDOptimizer(keras.optimizers.Adam(0.01), plan, clip_norm=0.3)
    told = []
    for optimizer in (low, advice.optimizer()):
        model.compile(optimizer, "binary_crossentropy")
        warnings = dp_sparse.check_model(model, (x, y)).warnings
        told.append(any("predicted probabilities" in line for line in warnings))
    assert told == [True, False]

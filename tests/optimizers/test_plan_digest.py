"""Steps spent under one plan are never counted as another's."""

import dataclasses
from pathlib import Path

import keras
import numpy as np
import pytest

import dp_sparse


def compiled(plan: dp_sparse.PrivacyPlan) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0)
    model.compile(optimizer=optimizer, loss="mse")
    return model


def test_weights_of_another_plan_are_refused(tmp_path: Path) -> None:
    sampling = dp_sparse.PoissonSampling(num_examples=50, expected_batch_size=10, steps=4)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-3), sampling).calibrate()
    data = np.ones((50, 2), np.float32), np.ones((50, 1), np.float32)
    trained = compiled(plan)
    trained.fit(plan.sampling.batches(data), steps_per_epoch=2, verbose=0)
    trained.save_weights(tmp_path / "w.weights.h5")

    quieter = dataclasses.replace(plan, noise_multiplier=plan.noise_multiplier + 1, plan_id="other")
    model = compiled(quieter)
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(Exception, match="spent 2 steps under another plan"):
        model.load_weights(tmp_path / "w.weights.h5")

    same = compiled(dataclasses.replace(plan, plan_id="again"))
    same.optimizer.build(same.trainable_variables)
    same.load_weights(tmp_path / "w.weights.h5")
    assert int(same.optimizer.steps_spent) == 2


@pytest.mark.parametrize("clip_norm", [1e-42, 1e-13, 1e13])
def test_clip_norms_that_float32_cannot_noise_are_refused(clip_norm: float) -> None:
    sampling = dp_sparse.StreamSampling(num_examples=50, batch_size=10)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-3), sampling).calibrate()
    with pytest.raises(ValueError, match=r"Expected 1e-12 <= clip_norm <= 1e\+12, got"):
        dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=clip_norm)

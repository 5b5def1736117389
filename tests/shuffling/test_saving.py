"""A shuffled run is saved, loaded, resumed and reported as every other."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_sparse
from dp_sparse.clipping import ClippedSums, zero_sums
from dp_sparse.reports import run_diagnosis
from dp_sparse.shuffling import optimizer as optimizer_module
from tests.training_cases import click_model, clicks, plan_for

DATA = clicks(8)


def compiled(plan: dp_sparse.PrivacyPlan) -> keras.Model:
    keras.utils.set_random_seed(5)
    model = click_model()
    adam = keras.optimizers.Adam(0.05)
    model.compile(dp_sparse.ShuffledDPSGDOptimizer(adam, plan, 1.0, 3.0), "binary_crossentropy")
    return model


def fit(model: keras.Model, steps: int, **options: Any) -> None:
    batches = model.optimizer.plan.sampling.batches(DATA)
    model.fit(batches, steps_per_epoch=steps, verbose=0, **options)


def after_five_steps(plan: dp_sparse.PrivacyPlan) -> np.ndarray:
    whole = compiled(plan)
    fit(whole, 5)
    return whole.predict(DATA[0], verbose=0)


@pytest.mark.usefixtures("no_noise")
def test_a_saved_run_ends_where_a_whole_one_does(tmp_path: Path, new_process: Any) -> None:
    """Weights and Adam's moments keep to each other, whatever their order."""
    plan = plan_for(8, steps=5)
    wanted = after_five_steps(plan)
    new_process()
    model = compiled(plan)
    fit(model, 2)
    model.save(tmp_path / "model.keras")
    key = model.optimizer._account.noise_key.words().numpy()
    new_process()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, dp_sparse.ShuffledDPSGDOptimizer)
    assert loaded.optimizer.batch_clip_norm == 3.0 and loaded.optimizer.plan == plan
    assert not np.array_equal(loaded.optimizer._account.noise_key.words().numpy(), key)
    fit(loaded, 3)
    np.testing.assert_allclose(loaded.predict(DATA[0], verbose=0), wanted, rtol=1e-4)
    with pytest.raises(dp_sparse.PrivacyError, match="no steps left: 5 of 5"):
        fit(loaded, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("no_noise")
def test_a_resumed_run_ends_where_a_whole_one_does(tmp_path: Path, new_process: Any) -> None:
    plan = plan_for(8, steps=5)
    wanted = after_five_steps(plan)
    for spent, steps in ((0, 2), (2, 3)):
        new_process()
        model, checkpoint = compiled(plan), dp_sparse.PrivateCheckpoint(str(tmp_path))
        assert checkpoint.restore(model) == spent
        fit(model, steps, callbacks=[checkpoint])
        checkpoint._folder._lock = None  # as when the process ends
    np.testing.assert_allclose(model.predict(DATA[0], verbose=0), wanted, rtol=1e-4)


def test_findings_rest_on_variables_that_stay_in_place() -> None:
    """A permutation moves weights by more than noise does, and teaches nothing."""
    model = compiled(plan_for(8))
    model.optimizer.build(model.trainable_variables)
    kept = set(run_diagnosis.snapshot(model.optimizer).weights)
    names = {v.path for v in model.trainable_variables}
    groups = model.optimizer._groups
    members = {m.variable.path for group in groups for part in group.parts for m in part.members}
    assert members and kept == names - members


def sums_of(values: list[np.ndarray]) -> ClippedSums:
    sums = zero_sums([keras.Variable(v) for v in values], [], [])
    return sums.with_amounts(sums.amounts._replace(dense=[np.float32(v) for v in values]))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 10), st.floats(0.01, 3), st.floats(0.5, 20))
def test_clipping_the_sum_moves_no_two_sums_apart(
    seed: int, size: float, difference: float, norm: float
) -> None:
    """One example less changes the clipped sum by no more than it changes the sum."""
    rng = np.random.default_rng(seed)
    one = [size * rng.normal(size=(3, 2)), size * rng.normal(size=4)]
    other = [v + difference * rng.normal(size=v.shape) for v in one]

    def flat(parts: Any) -> np.ndarray:
        return np.concatenate([np.ravel(part) for part in parts]).astype(np.float64)

    clipped = [flat(optimizer_module._clipped(sums_of(v), norm).dense) for v in (one, other)]
    apart = np.linalg.norm(flat(one) - flat(other))
    assert np.linalg.norm(clipped[0] - clipped[1]) <= apart * (1 + 1e-5)
    assert np.linalg.norm(clipped[0]) <= norm * (1 + 1e-5)
    if np.linalg.norm(flat(one)) <= norm:
        np.testing.assert_allclose(clipped[0], flat(one), rtol=1e-6)

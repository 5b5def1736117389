"""Runs for debugging: the same each time, noise included, and kept apart from private ones."""

import dataclasses
import math
import secrets
from pathlib import Path
from typing import Any

import dp_accounting
import keras
import numpy as np
import pytest
from scipy import stats

import dp_sparse
from dp_sparse import PrivacyError, PrivacyPlan
from dp_sparse.accounting.budget import PrivacyBudget
from dp_sparse.accounting.mechanisms import Release
from dp_sparse.noise import NoiseKey
from dp_sparse.sampling import NotPrivateSampling, PoissonSampling, Sampling, StreamSampling

N, ROWS = 240, 30
BUDGET = PrivacyBudget(2.0, 1e-3)
SAMPLERS = {"poisson": PoissonSampling(N, 40, 6), "stream": StreamSampling(N, 40)}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "DPSGDOptimizer": {},
    "DPAdaFESTOptimizer": {},
    "LazyDPSGDOptimizer": {},
    "ShuffledDPSGDOptimizer": {},
}


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, ROWS, (N, 2)).astype(np.int32)
    return ids, (ids[:, :1] < 10).astype(np.float32)


def plan(sampling: Sampling = SAMPLERS["poisson"]) -> PrivacyPlan:
    sigma, name = 1.5, secrets.token_hex(16)
    return PrivacyPlan(BUDGET, sampling, noise_multiplier=sigma, plan_id=name)


def model_for(given: PrivacyPlan, name: str = "DPSGDOptimizer", **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    ids = keras.Input((2,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 4)(ids))
    rows = keras.layers.Dropout(0.2)(rows)
    trained = keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(rows))
    optimizer = getattr(dp_sparse, name)(
        keras.optimizers.SGD(0.1), given, clip_norm=1.0, **OPTIMIZERS[name]
    )
    trained.compile(optimizer, "binary_crossentropy", **options)
    return trained


def weights_after(given: PrivacyPlan, name: str = "DPSGDOptimizer", **options: Any) -> np.ndarray:
    trained = model_for(given, name, **options)
    trained.fit(given.sampling.batches(data()), verbose=0)
    return np.concatenate([weight.ravel() for weight in trained.get_weights()])


@pytest.mark.cases(1)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_repeats_itself(name: str, sampler: str) -> None:
    given = plan(SAMPLERS[sampler])
    first, second = (weights_after(dp_sparse.not_private_plan(given, 7), name) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert np.any(first != weights_after(dp_sparse.not_private_plan(given, 8), name))


@pytest.mark.slow
def test_a_private_run_does_not_repeat_itself() -> None:
    assert np.any(weights_after(plan()) != weights_after(plan()))


@pytest.mark.slow
def test_the_training_loop_of_several_workers_repeats_itself() -> None:
    found = []
    for _ in range(2):
        trained = model_for(dp_sparse.not_private_plan(plan(), 7))
        dp_sparse.distribution.train(trained, data(), verbose=0)
        found.append(trained.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def noise_of_a_run(given: PrivacyPlan) -> np.ndarray:
    """What T steps add to weights that get no gradient, in units of what they should add."""
    table = keras.layers.Embedding(1000, 8, embeddings_initializer="zeros")
    ids = keras.Input((), dtype="int32")
    trained = keras.Model(ids, table(ids))
    optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1.0), given, clip_norm=0.5)
    trained.compile(optimizer, loss=lambda y, outputs: 0.0 * keras.ops.sum(outputs, -1))
    trained.fit(given.sampling.batches((np.zeros(N, np.int32), np.zeros(N))), verbose=0)
    batch, steps = given.sampling.expected_batch_size, given.sampling.steps
    return table.get_weights()[0].ravel() / (0.5 * 1.5 / batch * math.sqrt(steps))


def test_its_noise_is_that_of_the_plan() -> None:
    found = noise_of_a_run(dp_sparse.not_private_plan(plan(), 3))
    assert stats.kstest(found, "norm").pvalue > 1e-3
    assert stats.kstest(found * 1.1, "norm").pvalue < 1e-3  # it would see a wrong σ
    assert stats.kstest(found / 1.1, "norm").pvalue < 1e-3


def test_no_epsilon_is_shown(tmp_path: Path) -> None:
    given = dp_sparse.not_private_plan(plan(), 7)
    trained, path = model_for(given), tmp_path / "report.html"
    history = trained.fit(
        given.sampling.batches(data()),
        callbacks=[dp_sparse.PrivacyReport(str(path))],
        verbose=0,
    )
    assert "epsilon" not in history.history
    page = path.read_text()
    assert "This run has no privacy" in page and "follow from seed 7" in page
    assert "differential privacy protects" not in page and "Privacy spent" not in page
    assert given.spent(6) == given.budget == PrivacyBudget(math.inf, 1.0)
    assert given.attack_power(0.01) == 1
    assert "no privacy" in given.statement() and "epsilon" not in given.statement()
    saved = tmp_path / "run.keras"
    trained.save(saved)
    restored = keras.saving.load_model(saved)
    assert restored.optimizer.plan == given
    assert "epsilon" not in restored.optimizer.plan.statement()


def test_a_plan_made_by_hand_has_no_epsilon_either() -> None:
    sampling = NotPrivateSampling(SAMPLERS["poisson"], 7)
    given = PrivacyPlan(BUDGET, sampling, noise_multiplier=5.0)
    assert given.budget.epsilon == math.inf and given.spent(6).epsilon == math.inf
    for ask in (given.calibrate, given.rough_noise):
        with pytest.raises(ValueError, match="not_private_plan"):
            ask()
    for budget in ((math.inf, 1e-5), (1.0, 1.0)):
        with pytest.raises(ValueError, match="epsilon|delta"):
            PrivacyBudget(*budget)
    with pytest.raises(ValueError, match="finite epsilon"):
        PrivacyPlan(PrivacyBudget(math.inf, 1.0), SAMPLERS["poisson"])
    with pytest.raises(ValueError, match="finite epsilon"):
        dataclasses.replace(given, sampling=SAMPLERS["poisson"])
    release = Release("cities", dp_accounting.GaussianDpEvent(10.0))
    with pytest.raises(ValueError, match="no prices"):
        dataclasses.replace(given, releases=(release,)).price(release)
    for sampler in (5, None, "poisson"):
        with pytest.raises(ValueError, match="sampler"):
            NotPrivateSampling(sampler, 7)  # type: ignore[arg-type]


def test_an_account_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="finite epsilon"):
        dp_sparse.BudgetAccount(tmp_path / "none.json", PrivacyBudget(math.inf, 1.0))
    account = dp_sparse.BudgetAccount(tmp_path / "budget.json", PrivacyBudget(100.0, 0.5))
    with pytest.raises(ValueError, match="nothing to charge"):
        account.charge(dp_sparse.not_private_plan(plan(), 7))
    assert account.charges == []


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_private_and_repeatable_batches_stay_apart(sampler: str) -> None:
    private = plan(SAMPLERS[sampler])
    debugging = dp_sparse.not_private_plan(private, 7)
    for own, other in ((private, debugging), (debugging, private)):
        trained = model_for(own)
        with pytest.raises(PrivacyError, match="sampler"):
            trained.fit(other.sampling.batches(data()), verbose=0)
        assert trained.optimizer.steps_left == own.sampling.steps
    other = dp_sparse.not_private_plan(private, 8)
    with pytest.raises(PrivacyError, match="sampler"):
        model_for(other).fit(debugging.sampling.batches(data()), verbose=0)


@pytest.mark.slow
def test_private_and_repeatable_state_stay_apart(tmp_path: Path) -> None:
    private = plan()
    debugging = dp_sparse.not_private_plan(private, 7)
    path = tmp_path / "run.weights.h5"
    for own, other in ((debugging, private), (private, debugging)):
        trained = model_for(own)
        trained.fit(own.sampling.batches(data()), steps_per_epoch=2, verbose=0)
        trained.save_weights(path)
        loading = model_for(other)
        loading.optimizer.build(loading.trainable_variables)
        with pytest.raises((PrivacyError, ValueError), match="another plan"):
            loading.load_weights(path)


def test_a_private_plan_refuses_a_model_that_was_trained_without_privacy(tmp_path: Path) -> None:
    debugging = dp_sparse.not_private_plan(plan(), 7)
    trained = model_for(debugging)
    private = dp_sparse.DPSGDOptimizer("sgd", plan(), clip_norm=1.0)
    trained.compile(dp_sparse.DPSGDOptimizer("sgd", plan(), clip_norm=1.0), "mse")  # no step yet
    trained = model_for(debugging)
    trained.fit(debugging.sampling.batches(data()), steps_per_epoch=2, verbose=0)
    trained.save(tmp_path / "run.keras")
    for each in (trained, keras.saving.load_model(tmp_path / "run.keras")):
        with pytest.raises(PrivacyError, match="make the model anew"):
            each.compile(private, "mse")
        again = dp_sparse.not_private_plan(plan(), 7)
        each.compile(dp_sparse.DPSGDOptimizer("sgd", again, clip_norm=1.0), "mse")


def test_a_second_pass_has_other_batches_and_every_run_the_same() -> None:
    runs = []
    for _ in range(2):
        sampling = NotPrivateSampling(SAMPLERS["poisson"], np.int64(7))
        passes = [sampling.batches((np.arange(N), np.zeros(N))) for _ in range(2)]
        runs.append([np.concatenate([x.numpy() for x, _, _ in each]) for each in passes])
    np.testing.assert_array_equal(runs[0], runs[1])
    assert np.any(runs[0][0] != runs[0][1])


def test_arguments_of_the_other_sampler_are_refused() -> None:
    drawn, stream = (NotPrivateSampling(SAMPLERS[name], 7) for name in ("poisson", "stream"))
    with pytest.raises(ValueError, match="first_step"):
        drawn.batches(data(), first_step=3)
    with pytest.raises(ValueError, match="class_weight"):
        stream.batches(data(), class_weight={0: 1.0})
    for first_step in (-3, 6, 100):
        with pytest.raises(ValueError, match="first_step"):
            stream.batches(data(), first_step=first_step)
    assert len(stream.batches(data(), first_step=4)) == 2


@pytest.mark.slow
def test_noise_does_not_repeat_itself_within_a_run() -> None:
    """Three calls of the loop of several workers, each of two steps: their noise is independent."""
    given = dp_sparse.not_private_plan(plan(), 3)
    ids = keras.Input((), dtype="int32")
    table = keras.layers.Embedding(1000, 8, embeddings_initializer="zeros")
    trained = keras.Model(ids, table(ids))
    optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1.0), given, clip_norm=0.5)
    trained.compile(optimizer, loss=lambda y, outputs: 0.0 * keras.ops.sum(outputs, -1))
    source = np.zeros(N, np.int32), np.zeros(N)
    for _ in range(3):
        dp_sparse.distribution.train(trained, source, steps_per_epoch=2, verbose=0)
    expected = 0.5 * 1.5 / 40 * math.sqrt(6)
    assert np.std(table.get_weights()[0]) == pytest.approx(expected, rel=0.05)


def test_batches_with_a_seed_alone_are_still_refused() -> None:
    given = plan()
    with pytest.raises(PrivacyError, match="seed"):
        model_for(given).fit(given.sampling.batches(data(), seed=7), verbose=0)


def test_its_description_is_that_of_both() -> None:
    given = dp_sparse.not_private_plan(plan(), 7)
    assert PrivacyPlan.from_config(given.get_config()) == given
    private = dataclasses.replace(given, sampling=SAMPLERS["poisson"], budget=BUDGET)
    assert given.fingerprint != private.fingerprint
    again = dp_sparse.not_private_plan(given, 7)
    assert again.sampling == given.sampling and again.plan_id != given.plan_id


@pytest.mark.parametrize("seed", [-1, 1.5, True, None, "7"])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed"):
        dp_sparse.not_private_plan(plan(), seed)


def test_a_plan_without_noise_is_refused() -> None:
    with pytest.raises(ValueError, match="calibrate"):
        dp_sparse.not_private_plan(PrivacyPlan(BUDGET, SAMPLERS["poisson"]), 7)


def test_it_trains_with_hardly_any_noise() -> None:
    given = dp_sparse.not_private_plan(plan(), 7).with_noise(1e-3)
    assert given.noise_multiplier == 1e-3 and given.budget.epsilon == math.inf
    assert np.all(np.isfinite(weights_after(given)))
    with pytest.raises(ValueError, match=r"not_private_plan\(plan, seed\)"):
        plan().with_noise(1e-3)


def test_keys_of_a_seed_repeat_and_others_do_not() -> None:
    words = [NoiseKey(seed).words().numpy().tolist() for seed in (7, 7, 8, None, None)]
    assert words[0] == words[1]
    assert len({str(word) for word in words}) == 4
    key = NoiseKey(7)
    before = key.words().numpy()[0, :2]
    key.refresh(3)
    assert np.all(before != key.words().numpy()[0, :2])  # after loading: other noise

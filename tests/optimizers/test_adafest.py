"""DPAdaFESTOptimizer: the split of σ, thresholds, warnings, and what tables refuse."""

import math
import warnings
from typing import Any

import keras
import numpy as np
import pytest
from scipy import stats

import dp_sparse
from tests.training_cases import click_model, clicks, marked_dataset, plan_for, weights_of

Optimizer = dp_sparse.DPAdaFESTOptimizer


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        (name, bad)
        for name in ("contribution_clip_norm", "noise_ratio", "expected_false_rows")
        for bad in (0, -1.0, math.nan, math.inf, "a")
    ],
)
def test_bad_numbers_are_named(name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=f"Expected {name} > 0 and finite") as caught:
        Optimizer("sgd", plan_for(8), 1.0, **{name: bad})
    assert f"got {name}={bad!r}." in str(caught.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "high"])
def test_bad_threshold_is_named(bad: Any) -> None:
    with pytest.raises(ValueError, match="Expected a finite threshold") as caught:
        Optimizer("sgd", plan_for(8), 1.0, threshold=bad)
    assert f"got threshold={bad!r}." in str(caught.value)


@pytest.mark.parametrize("ratio", [0.1, 1.0, 5.0, 30.0])
def test_the_two_releases_are_one_gaussian_of_the_plans_sigma(ratio: float) -> None:
    optimizer = Optimizer("sgd", plan_for(8, noise_multiplier=0.9), 1.0, noise_ratio=ratio)
    one, two = optimizer.contribution_noise_multiplier, optimizer.gradient_noise_multiplier
    assert one / two == pytest.approx(ratio)
    assert (one**-2 + two**-2) ** -0.5 == pytest.approx(0.9)


def test_by_default_votes_have_twice_the_noise_of_gradients() -> None:
    optimizer = Optimizer("sgd", plan_for(8, noise_multiplier=1.0), 1.0)
    assert optimizer.gradient_noise_multiplier == pytest.approx(math.sqrt(5) / 2)
    assert optimizer.contribution_noise_multiplier == pytest.approx(math.sqrt(5))


def false_rows(**arguments: Any) -> list[int]:
    """Survivors of empty batches over tables of 4,000 rows."""
    ids = keras.Input((2,), dtype="int32")
    rows = [keras.layers.Embedding(2000, 2)(ids[:, i]) for i in range(2)]
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))
    plan = plan_for(100, expected_batch_size=10, capacity=4, noise_multiplier=1.5)
    model.compile(optimizer=Optimizer("sgd", plan, 1.0, **arguments), loss="mse")
    x, y = np.zeros((4, 2), np.int32), np.zeros(4, np.float32)
    counts = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: counts.append(
            int(sum(model.optimizer.diagnostics.rows.numpy()))
        )
    )
    model.fit(marked_dataset(plan, x, y, steps=40, present=[0] * 4), verbose=0, callbacks=[watch])
    return list(np.diff([0, *counts]))


@pytest.mark.slow
def test_the_default_threshold_lets_the_expected_false_rows_survive() -> None:
    """An empty batch: binomial(4000, λ/4000) survivors a step, over both tables."""
    for expected in (32, 8):
        total = sum(false_rows(expected_false_rows=expected))
        probability = stats.binomtest(total, 40 * 4000, expected / 4000).pvalue
        assert probability > 1e-5


def test_an_explicit_threshold_is_in_units_of_the_map() -> None:
    """p0 = Ψ(τ/(σ1·C1)), neither squared nor without C1 (which would give 0.27 and 0.01)."""
    plan_sigma_1 = 1.5 * math.sqrt(1 + 2.0**2)
    threshold = 2.0 * plan_sigma_1 * 0.5
    counts = false_rows(threshold=threshold, noise_ratio=2.0, contribution_clip_norm=0.5)
    probability = stats.norm.sf(2.0)
    assert stats.binomtest(sum(counts), 40 * 4000, probability).pvalue > 1e-5


def compiled(**arguments: Any) -> tuple[keras.Model, Any]:
    plan = plan_for(8, noise_multiplier=0.5)
    model = click_model()
    optimizer = Optimizer(arguments.pop("optimizer", "sgd"), plan, 1.0, **arguments)
    model.compile(optimizer=optimizer, loss="binary_crossentropy")
    return model, plan


def test_a_contribution_clip_norm_that_cannot_bind_warns() -> None:
    model, plan = compiled(contribution_clip_norm=1.5)
    with pytest.warns(UserWarning, match="contribution_clip_norm=1.5 can never bind") as caught:
        model.fit(plan.sampling.batches(clicks(8)), steps_per_epoch=1, verbose=0)
    assert any("an example has 2 lookups" in str(w.message) for w in caught)


def test_a_contribution_clip_norm_that_can_bind_does_not_warn() -> None:
    model, plan = compiled(contribution_clip_norm=1.4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(plan.sampling.batches(clicks(8)), steps_per_epoch=1, verbose=0)
    assert not [w for w in caught if "can never bind" in str(w.message)]


def test_the_tables_have_an_optimizer_of_their_own() -> None:
    """lr 0 for the tables, lr 1 for the rest; and a schedule that counts the tables' own steps."""
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.0, 1.0])
    model, plan = compiled(
        optimizer=keras.optimizers.AdamW(1.0, weight_decay=0.1),
        table_optimizer=keras.optimizers.Adagrad(schedule),
        threshold=-1e6,
    )
    x, y = clicks(8)
    start = weights_of(model)
    model.fit(marked_dataset(plan, x, y, steps=2), verbose=0)
    second = weights_of(model)
    tables = {id(table) for table in model.optimizer.tables}
    for variable, old, new in zip(model.trainable_variables, start, second, strict=True):
        assert np.any(old != new) == (id(variable) not in tables)
    model.fit(marked_dataset(plan, x, y), verbose=0)
    assert all(
        np.any(np.array(table) != old)
        for table, old in zip(model.optimizer.tables, start, strict=False)
    )
    assert int(model.optimizer.table_optimizer.iterations) == int(model.optimizer.iterations) == 3


def test_setting_the_learning_rate_keeps_its_ratio_to_the_tables() -> None:
    model, _ = compiled(
        optimizer=keras.optimizers.SGD(0.1), table_optimizer=keras.optimizers.Adagrad(0.4)
    )
    both = model.optimizer, model.optimizer.table_optimizer
    for value, expected in ((0.05, [0.05, 0.2]), (0.0, [0.0, 0.0]), (0.1, [0.1, 0.4])):
        model.optimizer.learning_rate = value
        assert [float(each.learning_rate) for each in both] == pytest.approx(expected)


def test_a_callback_that_stops_learning_stops_the_tables() -> None:
    model, plan = compiled(table_optimizer=keras.optimizers.SGD(0.5), threshold=-1e6)
    batches = plan.sampling.batches(clicks(8))
    start = weights_of(model)
    stopped = [keras.callbacks.LearningRateScheduler(lambda epoch: 0.0)]
    model.fit(batches, steps_per_epoch=1, verbose=0, callbacks=stopped)
    assert all(map(np.array_equal, start, weights_of(model)))
    going = [keras.callbacks.LearningRateScheduler(lambda epoch: 0.01)]
    model.fit(batches, steps_per_epoch=1, verbose=0, callbacks=going)
    assert not any(map(np.array_equal, start, weights_of(model)))


def test_a_ratio_that_is_not_there_is_said() -> None:
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    for dense, tables in (
        (keras.optimizers.SGD(0.1), keras.optimizers.SGD(schedule)),
        (keras.optimizers.SGD(0.0), keras.optimizers.SGD(0.1)),
    ):
        model, _ = compiled(optimizer=dense, table_optimizer=tables)
        with pytest.raises(ValueError, match=r"whose ratio stays, got learning_rate=0\.3"):
            model.optimizer.learning_rate = 0.3


def test_the_table_optimizer_is_saved(tmp_path: Any) -> None:
    model, plan = compiled(
        optimizer=keras.optimizers.Adam(0.1), table_optimizer=keras.optimizers.Adagrad(0.2)
    )
    model.fit(plan.sampling.batches(clicks(8)), steps_per_epoch=2, verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras").optimizer
    assert isinstance(loaded.table_optimizer, keras.optimizers.Adagrad)
    assert float(loaded.table_optimizer.learning_rate) == pytest.approx(0.2)
    assert int(loaded.table_optimizer.iterations) == int(loaded.iterations) == 2
    for ours, theirs in zip(loaded.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.array(ours), np.array(theirs))


def test_configuration_round_trip() -> None:
    optimizer = Optimizer(
        "adagrad",
        plan_for(8),
        2.0,
        0.7,
        noise_ratio=3.0,
        threshold=4.0,
        table_optimizer=keras.optimizers.Adam(0.5),
    )
    twin = Optimizer.from_config(optimizer.get_config())
    for name in (
        "clip_norm",
        "contribution_clip_norm",
        "noise_ratio",
        "threshold",
        "expected_false_rows",
    ):
        assert getattr(twin, name) == getattr(optimizer, name)
    assert isinstance(twin.table_optimizer, keras.optimizers.Adam)
    assert twin.get_config() == optimizer.get_config()


def test_a_threshold_saved_with_false_rows_that_it_does_not_use_loads() -> None:
    config = Optimizer("sgd", plan_for(8), 1.0, threshold=4.0).get_config()
    twin = Optimizer.from_config({**config, "expected_false_rows": 32})
    assert twin.threshold == 4.0


@pytest.mark.parametrize("name", ["regularizer", "constraint"])
def test_what_touches_every_row_of_a_table_is_refused_by_path(name: str) -> None:
    value = {"regularizer": "l2", "constraint": "max_norm"}[name]
    layer = keras.layers.Embedding(11, 3, name="words", **{f"embeddings_{name}": value})
    model = keras.Sequential([keras.Input((2,), dtype="int32"), layer])
    plan = plan_for(8)
    model.compile(optimizer=Optimizer("sgd", plan, 1.0), loss="mse")
    x, y = np.zeros((8, 2), np.int32), np.zeros((8, 2, 3), np.float32)
    with pytest.raises(ValueError, match=f"words/embeddings without a {name}") as caught:
        model.fit(plan.sampling.batches((x, y)), verbose=0)
    assert "Remove it" in str(caught.value)


@pytest.mark.slow
def test_models_of_tables_alone_and_of_dense_layers_alone() -> None:
    x, y = clicks(8)
    for layers in (
        [keras.layers.Embedding(11, 1), keras.layers.GlobalAveragePooling1D()],
        [keras.layers.Dense(1)],
    ):
        model = keras.Sequential([keras.Input((2,), dtype="int32"), *layers])
        plan = plan_for(8, noise_multiplier=0.5)
        model.compile(optimizer=Optimizer("adagrad", plan, 1.0), loss="mse")
        start = weights_of(model)
        model.fit(plan.sampling.batches((x, y)), steps_per_epoch=2, verbose=0)
        assert int(model.optimizer.iterations) == int(model.optimizer.steps_spent) == 2
        assert all(np.any(old != new) for old, new in zip(start, weights_of(model), strict=True))

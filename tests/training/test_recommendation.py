"""What is recommended follows from shapes and the plan, trains, and says where nothing can."""

import dataclasses
import secrets
from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from dp_sparse.reports import recommendation


def plan_of(
    examples: int = 100_000, batch: float = 4096, steps: int = 400, sigma: float = 1.0
) -> dp_sparse.PrivacyPlan:
    return dp_sparse.PrivacyPlan(
        dp_sparse.PrivacyBudget(3.0, 1e-5),
        dp_sparse.PoissonSampling(examples, batch, steps),
        noise_multiplier=sigma,
        plan_id=secrets.token_hex(16),
    )


def model(rows: int = 1000, width: int = 4, lookups: int = 3) -> keras.Model:
    ids = keras.Input((lookups,), dtype="int32")
    user = keras.Input((), dtype="int32")
    of_ids = keras.layers.Flatten()(keras.layers.Embedding(rows, width, name="words")(ids))
    of_user = keras.layers.Embedding(50, 2, name="users")(user)
    both = keras.layers.Concatenate()([of_ids, of_user])
    return keras.Model([ids, user], keras.layers.Dense(1)(both))


@pytest.fixture
def few_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 1,000 rows counts as large."""
    monkeypatch.setattr(recommendation, "MOST_DENSE_ENTRIES", 1000)


def test_small_tables_get_dp_sgd() -> None:
    advice = dp_sparse.recommend(model(), plan_of())
    assert advice.method is dp_sparse.DPSGDOptimizer and advice.forecast is None
    optimizer = advice.optimizer()
    assert isinstance(optimizer.optimizer, keras.optimizers.Adam)
    assert float(optimizer.learning_rate) == pytest.approx(0.01)
    entries = 1000 * 4 + 50 * 2 + (3 * 4 + 2) + 1
    assert advice.signal_per_weight == pytest.approx(np.sqrt(400 / entries) * 4096, rel=0.01)
    assert not advice.warnings and "4,100 entries" in str(advice)


def test_most_gradients_stay_unclipped_without_looking_at_data() -> None:
    """By a clip norm that follows their norms, so that the loss stays what is minimised."""
    optimizer = dp_sparse.recommend(model(), plan_of()).optimizer()
    assert isinstance(optimizer.clipping, dp_sparse.QuantileClipping)
    assert optimizer.clipping.target_quantile >= 0.7
    assert "predicted probabilities" in str(dp_sparse.recommend(model(), plan_of()))
    of_many = keras.Sequential([keras.Input((3,)), keras.layers.Dense(10)])
    assert dp_sparse.recommend(of_many, plan_of()).arguments == {"clip_norm": 0.3}


def test_the_learning_rate_falls_with_long_runs() -> None:
    plan = plan_of()
    sampling = dataclasses.replace(plan.sampling, steps=40_000)
    rate = dp_sparse.recommend(model(), dataclasses.replace(plan, sampling=sampling))
    expected = 0.2 / np.sqrt(40_000)
    falling = rate.wrapped_arguments["learning_rate"]
    assert falling.initial_learning_rate == pytest.approx(expected, rel=0.05)
    assert float(falling(40_000)) == 0.0


def test_a_model_of_one_value_gets_a_rate_that_falls_and_one_of_many_a_rate_that_stays() -> None:
    """Late steps of noise move its only value, and a probability that is made of it, far."""
    inputs = keras.Input((3,))
    one, two = keras.layers.Dense(1), keras.layers.Dense(1)
    models = {
        keras.Model(inputs, one(inputs)): 0.0,
        keras.Model(inputs, keras.layers.Flatten()(one(inputs))[:, 0]): 0.0,
        keras.Model(inputs, [one(inputs), two(inputs)]): 0.01,
        keras.Model(inputs, keras.layers.Dense(10)(inputs)): 0.01,
    }
    given = [dp_sparse.recommend(each, plan_of()).wrapped_arguments for each in models]
    rates = [rate["learning_rate"] for rate in given]
    assert [rate if isinstance(rate, float) else float(rate(400)) for rate in rates] == [
        *models.values()
    ]


def test_large_tables_get_dp_adafest_and_a_forecast(few_dense: None) -> None:
    advice = dp_sparse.recommend(model(), plan_of())
    assert advice.method is dp_sparse.DPAdaFESTOptimizer and advice.forecast is not None
    assert advice.forecast.lookups == 4 and set(advice.forecast.tables) == {"words", "users"}
    words = advice.forecast.tables["words"]
    assert words.rows == 1000 and words.assumed and words.looked_up > 500
    assert "DP-AdaFEST" in str(advice) and "lookups trained" in str(advice)
    assert isinstance(advice.optimizer().optimizer, keras.optimizers.Adam)


def with_numbers() -> keras.Model:
    """The same, and an input of numbers."""
    tables, numbers = model(), keras.Input((2,))
    joined = keras.layers.Concatenate()([tables.output, numbers])
    return keras.Model([*tables.inputs, numbers], keras.layers.Dense(1)(joined))


def with_mask() -> keras.Model:
    """The same, and an input that says which ids are there."""
    tables, mask = model(), keras.Input((3,), dtype="bool")
    share = keras.ops.mean(keras.ops.cast(mask, "float32"), axis=1, keepdims=True)
    return keras.Model([*tables.inputs, mask], tables.output * share)


def with_many_weights() -> keras.Model:
    tables = model()
    return keras.Model(tables.inputs, keras.layers.Dense(1)(keras.layers.Dense(50)(tables.output)))


@pytest.mark.parametrize(
    ("make", "steps", "chosen"),
    [
        (model, 400, (64, 100.0)),
        (model, 100, (25, 100.0)),
        (model, 7, (1, 10.0)),
        (with_mask, 400, (64, 100.0)),
        (with_numbers, 400, (1, 10.0)),
        (with_many_weights, 400, (1, 10.0)),
    ],
)
def test_models_that_are_hardly_more_than_tables_get_a_window(
    few_dense: None, make: Any, steps: int, chosen: tuple[int, float]
) -> None:
    advice = dp_sparse.recommend(make(), plan_of(steps=steps))
    optimizer = advice.optimizer()
    assert (optimizer.window, optimizer.expected_false_rows) == chosen
    assert advice.forecast.window == chosen[0]
    assert optimizer.noise_ratio == (1.0 if chosen[0] > 1 else 2.0)
    assert ("window=" in str(advice)) == (chosen[0] > 1)


def test_windows_that_are_proposed_can_be_built(few_dense: None) -> None:
    """Full batches at a tiny δ, where the noise of a long window's sum would not reach."""
    sampling = dp_sparse.PoissonSampling(100, 100, steps=256)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(20.0, 1e-12), sampling).calibrate()
    assert dp_sparse.recommend(model(), plan).optimizer().window < 64
    found = plan.explain({"words": 1000}, noised_rows=30)
    again = dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0, window=found.window)
    assert again.window == found.window < 64


def test_frequencies_of_the_user_are_taken(few_dense: None) -> None:
    even = np.full(1000, 3 / 1000)
    advice = dp_sparse.recommend(with_numbers(), plan_of(), frequencies={"words": even})
    assumed = dp_sparse.recommend(with_numbers(), plan_of())
    assert advice.forecast and assumed.forecast
    assert not advice.forecast.tables["words"].assumed
    assert advice.forecast.tables["words"].looked_up > assumed.forecast.tables["words"].looked_up


def test_lookups_that_hardly_train_are_told_before_training(few_dense: None) -> None:
    advice = dp_sparse.recommend(model(rows=100_000), plan_of(batch=64, sigma=20.0))
    assert any("words" in w and "fewer than 20%" in w for w in advice.warnings)
    assert any("Batches of 64 are small" in w for w in advice.warnings)


def test_what_will_drown_is_said() -> None:
    advice = dp_sparse.recommend(model(), plan_of(examples=10, batch=5, steps=10, sigma=200.0))
    assert advice.signal_per_weight < 0.7
    assert any("will drown in the noise" in w for w in advice.warnings)
    assert "! Gradients that spread over all weights" in str(advice)


def settings(optimizer: Any) -> dict[str, Any]:
    """The config of a private optimizer, without the name that Keras gives the wrapped one."""
    config = optimizer.get_config()
    del config["optimizer"]["config"]["name"]
    return config


@pytest.mark.cases(1)
@pytest.mark.parametrize("large", [False, True])
def test_what_is_printed_is_what_is_built_and_trains(
    monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    if large:
        monkeypatch.setattr(recommendation, "MOST_DENSE_ENTRIES", 0)
    plan, trained = plan_of(examples=200, batch=40, steps=3), model()
    advice = dp_sparse.recommend(trained, plan)
    names = {"dp_sparse": dp_sparse, "keras": keras, "plan": plan}
    printed = eval(str(advice).splitlines()[0], names)
    assert settings(printed) == settings(advice.optimizer())
    trained.compile(advice.optimizer(), loss="mse")
    x = [np.zeros((200, 3), np.int32), np.zeros(200, np.int32)]
    trained.fit(plan.sampling.batches((x, np.ones(200, np.float32))), verbose=0)
    assert int(trained.optimizer.steps_spent) == 3


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(100, 2, name="table")
        self.head = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.head(keras.ops.mean(self.table(x), axis=1))


def test_other_models_need_a_batch(few_dense: None) -> None:
    ids = keras.Input((None,), dtype="int32")
    rows = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(9, 2, name="t")(ids))
    unknown = keras.Model(ids, keras.layers.Dense(1)(rows))
    with pytest.raises(ValueError, match="lookups of t/embeddings of known number"):
        dp_sparse.recommend(unknown, plan_of())
    assert dp_sparse.recommend(unknown, plan_of(), np.zeros((2, 7), np.int32)).warnings == []
    with pytest.raises(ValueError, match=r"call recommend\(model, plan, batch\)"):
        dp_sparse.recommend(Subclassed(), plan_of())
    subclassed = Subclassed()
    for batch in (np.zeros((2, 7), np.int32), (np.zeros((2, 7), np.int32), np.zeros(2))):
        assert dp_sparse.recommend(subclassed, plan_of(), batch).method is dp_sparse.DPSGDOptimizer


def test_a_model_without_tables() -> None:
    dense = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    advice = dp_sparse.recommend(dense, plan_of())
    assert advice.method is dp_sparse.DPSGDOptimizer and "no table" in str(advice)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": 3}, "Expected a keras.Model, got model=3"),
        ({"plan": 3}, "Expected a PrivacyPlan, got plan=3"),
        (
            {"frequencies": {"words": np.ones(3)}},
            r"\['words'\] of shape \(1000,\).* got shape \(3,\)",
        ),
        ({"plan": "uncalibrated"}, "Expected a calibrated plan"),
        ({"plan": "exponential"}, "mechanism=ExponentialSelection"),
        ({"frequencies": {"items": [0.1]}}, r"\['users', 'words'\], got some of \['items'\]"),
    ],
)
def test_bad_input_is_named(few_dense: None, change: dict[str, Any], message: str) -> None:
    budget, sampling = dp_sparse.PrivacyBudget(3.0, 1e-5), plan_of().sampling
    plans = {
        "uncalibrated": dp_sparse.PrivacyPlan(budget, sampling),
        "exponential": dp_sparse.PrivacyPlan(
            budget, sampling, dp_sparse.ExponentialSelection(3), noise_multiplier=1.0
        ),
    }
    given = {"model": model(), "plan": plan_of(), **change}
    given["plan"] = plans.get(given["plan"], given["plan"]) if "plan" in change else given["plan"]
    with pytest.raises(ValueError, match=message):
        dp_sparse.recommend(**given)


def test_a_model_that_cannot_be_trained_is_refused() -> None:
    layers = [keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    with pytest.raises(dp_sparse.UnsupportedLayerError, match="BatchNormalization"):
        dp_sparse.recommend(keras.Sequential(layers), plan_of())


@pytest.mark.slow
def test_two_tables_of_one_name_go_by_their_paths(few_dense: None) -> None:
    ids = keras.Input((), dtype="int32")
    parts = [
        keras.Sequential([keras.layers.Embedding(1000, 2, name="table")], name=name)
        for name in ("left", "right")
    ]
    joined = keras.layers.Concatenate()([part(ids) for part in parts])
    advice = dp_sparse.recommend(keras.Model(ids, keras.layers.Dense(1)(joined)), plan_of())
    assert advice.forecast is not None
    assert set(advice.forecast.tables) == {"left/table/embeddings", "right/table/embeddings"}


def test_small_batches_are_told_only_where_larger_ones_fit() -> None:
    small = [dp_sparse.recommend(model(), plan_of(examples=n, batch=512)) for n in (100_000, 1000)]
    assert [any("are small" in w for w in advice.warnings) for advice in small] == [True, False]


def test_lora_is_named_where_tables_are_wide(few_dense: None) -> None:
    assert "one number a row instead of 32" in str(dp_sparse.recommend(model(width=32), plan_of()))
    assert "lora" not in str(dp_sparse.recommend(model(), plan_of()))

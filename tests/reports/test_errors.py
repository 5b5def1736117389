"""What a user sees who makes a common mistake, or uses an uncommon part of Keras."""

import secrets
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from tests.training_cases import without_isolation_checks


def plan_of(
    examples: int = 64, batch: float = 16, steps: int = 4, sigma: float = 1.0
) -> dp_sparse.PrivacyPlan:
    return dp_sparse.PrivacyPlan(
        dp_sparse.PrivacyBudget(3.0, 1e-3),
        dp_sparse.PoissonSampling(examples, batch, steps),
        noise_multiplier=sigma,
        plan_id=secrets.token_hex(16),
    )


class WithASpareTable(keras.Model):
    """Has two tables, of which `call` looks one up."""

    def __init__(self) -> None:
        super().__init__()
        self.used = keras.layers.Embedding(20, 2, name="used")
        self.spare = keras.layers.Embedding(30, 2, name="spare")
        self.spare.build()
        self.head = keras.layers.Dense(1)

    def call(self, ids: Any) -> Any:
        return self.head(self.used(ids))


@pytest.mark.parametrize("most", [0, 2e7])
def test_advice_for_a_model_with_a_table_that_it_does_not_look_up(
    monkeypatch: pytest.MonkeyPatch, most: float
) -> None:
    monkeypatch.setattr("dp_sparse.training.recommendation.MOST_DENSE_ENTRIES", most)
    model, x = WithASpareTable(), np.arange(8)
    advice = dp_sparse.recommend(model, plan_of(), x)
    expected = "The model looks up no row of spare, which can learn nothing"
    assert [w for w in advice.warnings if "spare" in w] == [
        w for w in advice.warnings if w.startswith(expected)
    ]
    model.compile(advice.optimizer(), "mse")
    assert any(w.startswith(expected) for w in dp_sparse.check_model(model, x).warnings)


def test_the_signal_of_a_run_is_one_number_in_the_table_of_plans_and_in_the_advice() -> None:
    table = dp_sparse.plan_table(100_000, 3.0, batch_sizes=[4096], epochs=[1])
    plan = plan_of(100_000, 4096, table.rows[0].steps, table.rows[0].noise_multiplier)
    model = keras.Sequential([keras.Input((), dtype="int32"), keras.layers.Embedding(50, 2)])
    advice = dp_sparse.recommend(model, plan)
    assert advice.signal_per_weight == pytest.approx(table.rows[0].signal_to_noise / 10)
    assert f"along one direction, {table.rows[0].signal_to_noise:,.0f}, over" in str(advice)


class Crossing(keras.Model):
    """Two columns to one score; XLA aborts the process, or does not know the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = keras.layers.HashedCrossing(20)
        self.table, self.head = keras.layers.Embedding(20, 2), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.head(self.table(self.cross((x["a"], x["b"]))))


class OfText(keras.Model):
    """Hashes text without a layer, so that only its inputs tell."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = keras.layers.Embedding(20, 2), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.head(self.table(tf.strings.to_hash_bucket_fast(x, 20)))


NUMBERS, TEXT = np.arange(64) % 7, np.array(["a", "b"] * 32, object)


@pytest.mark.parametrize(
    ("model", "x", "named"),
    [
        (Crossing, {"a": NUMBERS, "b": NUMBERS}, "hashed_crossing"),
        (OfText, TEXT, "inputs of text"),
    ],
)
def test_models_that_xla_does_not_support_train_without_it(
    model: type[keras.Model], x: Any, named: str
) -> None:
    trained, plan = model(), plan_of(steps=1)
    with warnings.catch_warnings(record=True) as said:
        trained.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), "mse", jit_compile=True)
        without_isolation_checks(trained.optimizer)
        trained.fit(plan.sampling.batches((x, np.ones(64, np.float32))), verbose=0)
    assert any(str(w.message).startswith(f"XLA does not support {named} of") for w in said)
    assert int(trained.optimizer.steps_spent) == 1 and not trained.optimizer.compiles

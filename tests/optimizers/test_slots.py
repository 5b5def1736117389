"""An optimizer goes on with the slots of the one before it."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse

ROWS, EXAMPLES, BATCH = 20, 24, 4


def data(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return rng.integers(0, ROWS, (EXAMPLES, 2)), rng.random(EXAMPLES).astype(np.float32)


def network() -> keras.Model:
    keras.utils.set_random_seed(1)
    table = keras.layers.Embedding(ROWS, 3, name="table")
    return keras.Sequential(
        [keras.Input((2,)), table, keras.layers.Flatten(), keras.layers.Dense(1)]
    )


def plan_of(examples: int) -> dp_sparse.PrivacyPlan:
    sampling = dp_sparse.StreamSampling(examples, BATCH)
    return dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-3), sampling).calibrate()


def fest(wrapped: Any, plan: dp_sparse.PrivacyPlan, **options: Any) -> Any:
    rows = dp_sparse.SelectedRows.public({"table": range(ROWS)}, {"table": ROWS})
    return dp_sparse.DPFESTOptimizer(wrapped, plan, 1.0, rows, **options)


def dense(wrapped: Any, plan: dp_sparse.PrivacyPlan) -> Any:
    return dp_sparse.DPSGDOptimizer(wrapped, plan, 1.0)


def lazy(wrapped: Any, plan: dp_sparse.PrivacyPlan) -> Any:
    return dp_sparse.LazyDPSGDOptimizer(wrapped, plan, 1.0)


def two_optimizers(wrapped: Any, plan: dp_sparse.PrivacyPlan) -> Any:
    return fest(wrapped, plan, table_optimizer=keras.optimizers.Adagrad(0.2))


def trained(model: keras.Model, optimizer: Any, examples: Any) -> None:
    model.compile(optimizer, loss="mse")
    batches = optimizer.plan.sampling.batches(examples)
    model.fit(batches, verbose=0)


KINDS: dict[str, tuple[Callable[..., Any], Callable[[], keras.optimizers.Optimizer]]] = {
    "fest, Adagrad": (fest, lambda: keras.optimizers.Adagrad(0.1)),
    "fest, Adam": (fest, lambda: keras.optimizers.Adam(0.01)),
    "dense, Adam": (dense, lambda: keras.optimizers.Adam(0.01)),
    "two": (two_optimizers, lambda: keras.optimizers.Adam(0.01)),
    "lazy": (lazy, lambda: keras.optimizers.SGD(0.1)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_noise")
def test_two_parts_train_as_one_run_would(kind: str) -> None:
    """Under one optimizer's slots; without noise, which differs by plan."""
    private, wrapped = KINDS[kind]
    parts = [data(0), data(1)]
    model, previous = network(), None
    for part in parts:
        optimizer = private(wrapped(), plan_of(EXAMPLES))
        model.compile(optimizer, loss="mse")
        if previous is not None:
            optimizer.take_slots(previous)
            assert int(optimizer.steps_spent) == 0
        trained(model, optimizer, part)
        previous = optimizer
    whole = network()
    joined = tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    trained(whole, private(wrapped(), plan_of(2 * EXAMPLES)), joined)
    for got, expected in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("no_noise")
def test_without_them_it_trains_otherwise() -> None:
    """So the test above can fail."""
    model, weights = network(), []
    for part in (data(0), data(1)):
        trained(model, fest(keras.optimizers.Adagrad(0.1), plan_of(EXAMPLES)), part)
        weights = model.get_weights()
    whole = network()
    joined = tuple(np.concatenate(arrays) for arrays in zip(data(0), data(1), strict=True))
    trained(whole, fest(keras.optimizers.Adagrad(0.1), plan_of(2 * EXAMPLES)), joined)
    assert np.abs(weights[0] - whole.get_weights()[0]).max() > 1e-3


@pytest.mark.parametrize("kind", ["dense, Adam", "two", "lazy"])
def test_each_learning_rate_stays_the_own_one(kind: str) -> None:
    private, wrapped = KINDS[kind]
    model, previous = network(), private(wrapped(), plan_of(EXAMPLES))
    model.compile(previous, loss="mse")
    previous.build(model.trainable_variables)
    optimizer = private(wrapped(), plan_of(EXAMPLES))
    for number, slower in enumerate(wrapped_by(optimizer)):
        slower.learning_rate = 1e-4 / (1 + number)
    model.compile(optimizer, loss="mse")
    optimizer.take_slots(previous)
    found = [float(after.learning_rate) for after in wrapped_by(optimizer)]
    assert found == pytest.approx([1e-4, 5e-5][: 2 if kind == "two" else 1])


def wrapped_by(optimizer: Any) -> list[keras.optimizers.Optimizer]:
    both = optimizer.optimizer, getattr(optimizer, "table_optimizer", None)
    return [each for each in both if each is not None]


class TestRefused:
    def pair(self, first: Any, second: Any, plan: Any = None) -> Any:
        model = network()
        before = first(keras.optimizers.Adagrad(0.1), plan or plan_of(EXAMPLES))
        trained(model, before, data(0))
        after = second(keras.optimizers.Adagrad(0.1), plan or plan_of(EXAMPLES))
        model.compile(after, loss="mse")
        return before, after

    def test_another_kind(self) -> None:
        before, after = self.pair(dense, fest)
        with pytest.raises(ValueError, match="Expected the DPFESTOptimizer of an earlier part"):
            after.take_slots(before)

    def test_the_same_plan(self) -> None:
        before, after = self.pair(fest, fest, plan_of(EXAMPLES))
        with pytest.raises(ValueError, match="an optimizer of another plan"):
            after.take_slots(before)

    def test_other_slots(self) -> None:
        before, _ = self.pair(fest, fest)
        model = before._model()
        after = fest(keras.optimizers.Adam(0.1), plan_of(EXAMPLES))
        model.compile(after, loss="mse")
        with pytest.raises(ValueError, match="Expected the slots of an optimizer like this one"):
            after.take_slots(before)

    def test_another_model(self) -> None:
        before, _ = self.pair(fest, fest)
        model = network()
        after = fest(keras.optimizers.Adagrad(0.1), plan_of(EXAMPLES))
        model.compile(after, loss="mse")
        with pytest.raises(ValueError, match="an optimizer that trained the model"):
            after.take_slots(before)

"""Steps are counted alike in all jobs."""

import keras
import pytest

import dp_sparse
from pipelines.steps import steps_taken
from tests.training_cases import click_model, plan_for


@pytest.mark.parametrize(("private", "counted"), [(True, 7), (False, 4)])
def test_steps_whose_weights_were_lost_count(private: bool, counted: int) -> None:
    """Three more steps of the private run were paid for than its weights have."""
    stock = keras.optimizers.SGD()
    optimizer = dp_sparse.DPSGDOptimizer(stock, plan_for(8), 1.0) if private else stock
    model = click_model()
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    optimizer.iterations.assign(4)
    if private:
        optimizer.steps_spent.assign(7)
    assert steps_taken(optimizer) == counted

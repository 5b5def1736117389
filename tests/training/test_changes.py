"""Models changed between two fits, and masks that change between two steps."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import PrivacyError
from dp_sparse.step import metrics
from tests.training_cases import marked_dataset, plan_for, weights_of


def two_layers() -> keras.Sequential:
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2, name="last")]
    )


def freeze(model: keras.Sequential) -> None:
    model.layers[0].trainable = False


def add_lora(model: keras.Sequential) -> None:
    model.layers[0].enable_lora(1)


def add_layer(model: keras.Sequential) -> None:
    model.add(keras.layers.Dense(2))


@pytest.mark.cases(1)
@pytest.mark.parametrize("change", [freeze, add_lora, add_layer], ids=lambda c: c.__name__)
def test_a_change_after_the_first_fit_is_refused(
    change: Callable[[keras.Sequential], None],
) -> None:
    x, y = np.ones((6, 3), np.float32), np.ones((6, 2), np.float32)
    model, plan = two_layers(), plan_for(6, steps=4)
    model.compile(optimizer=dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    for _ in range(2):
        model.fit(marked_dataset(plan, x, y), verbose=0)
    change(model)
    with pytest.raises(PrivacyError, match="Compile the model again"):
        model.fit(marked_dataset(plan, x, y), verbose=0)
    again = plan_for(6, steps=4)
    model.compile(optimizer=dp_sparse.DPSGDOptimizer("sgd", again, 1.0), loss="mse")
    before = weights_of(model)
    model.fit(marked_dataset(again, x, y), verbose=0)
    assert all(np.any(n != o) for n, o in zip(weights_of(model), before, strict=True))


def unfreeze(model: keras.Sequential) -> None:
    model.layers[0].trainable = True


@pytest.mark.parametrize("change", [freeze, unfreeze, add_lora, add_layer])
@pytest.mark.parametrize("when", ["built", "traced"])
def test_the_same_optimizer_does_not_train_other_variables(
    change: Callable[[keras.Sequential], None], when: str
) -> None:
    """A frozen layer would go on to move by noise, and one that is new would not learn."""
    x, y = np.ones((6, 3), np.float32), np.ones((6, 2), np.float32)
    model, plan = two_layers(), plan_for(6, steps=4)
    model.layers[0].trainable = change is not unfreeze
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan, 1.0)
    model.compile(optimizer=optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    if when == "traced":
        model.make_train_function()
    change(model)
    model.compile(optimizer=optimizer, loss="mse")
    before = weights_of(model)
    with pytest.raises(PrivacyError, match="Compile the model with a new optimizer and a new plan"):
        model.fit(marked_dataset(plan, x, y), verbose=0)
    assert all(np.array_equal(n, o) for n, o in zip(weights_of(model), before, strict=True))
    assert optimizer.steps_left == 4


@pytest.mark.cases(1)
@pytest.mark.parametrize("microbatch_size", [None, 50])
def test_masks_change_from_step_to_step_and_from_part_to_part(
    microbatch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen from outside of the pass, in which nothing may be kept: masks are the last layer's."""
    seen: list[np.ndarray] = []
    update = metrics.update

    def watching(model: keras.Model, batch: Any, outputs: Any, *rest: Any, **options: Any) -> Any:
        tf.py_function(lambda values: seen.append(values.numpy() != 0), [outputs], [])
        return update(model, batch, outputs, *rest, **options)

    monkeypatch.setattr(metrics, "update", watching)
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dropout(0.5, seed=1)(keras.layers.Dense(3)(inputs)))
    plan = plan_for(100)
    sgd = keras.optimizers.SGD(1e-3)
    optimizer = dp_sparse.DPSGDOptimizer(sgd, plan, 1.0, microbatch_size=microbatch_size)
    model.compile(optimizer=optimizer, loss="mse")
    x, y = np.ones((100, 3), np.float32), np.ones((100, 3), np.float32)
    model.fit(marked_dataset(plan, x, y, steps=2), verbose=0)
    parts = [part for step in seen for part in step.reshape(-1, 50, 3)]
    assert len(parts) == 4 and len({part.tobytes() for part in parts}) == 4

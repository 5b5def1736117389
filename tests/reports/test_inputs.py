"""What users feed a model: frames of many columns, text, ids of every dtype, odd sources."""

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse

N = 40


def frame() -> dict[str, np.ndarray]:
    """Columns as `dict(frame)` gives them, one of which no model below takes."""
    rows = np.arange(N)
    return {"user": rows % 30, "item": rows % 7, "age": 90 + rows % 9, "name": np.full(N, "Ann")}


def labels() -> np.ndarray:
    return (np.arange(N) % 2).astype(np.float32)


def plan_of(steps: int = 2) -> dp_sparse.PrivacyPlan:
    budget = dp_sparse.PrivacyBudget(3.0, 1e-3)
    return dp_sparse.PrivacyPlan(budget, dp_sparse.PoissonSampling(N, 20, steps)).calibrate()


def compiled(model: keras.Model, **options: Any) -> keras.Model:
    optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(0.1), plan_of(), 1.0)
    model.compile(optimizer, "binary_crossentropy", **options)
    return model


def click_model(form: Any = dict) -> keras.Model:
    """Tables of 7 items and 30 users: a column of another name is out of range."""
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in ("item", "user")}
    rows = [
        keras.layers.Embedding(size, 2, name=f"{name}s")(inputs[name])
        for name, size in (("item", 7), ("user", 30))
    ]
    output = keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()(rows))
    return keras.Model(form(inputs), output)


def backwards(inputs: dict[str, Any]) -> list[Any]:
    return [inputs["user"], inputs["item"]]


def test_a_frame_with_text_that_no_input_takes_trains_under_xla() -> None:
    model = compiled(click_model(), jit_compile=True)
    batches = model.optimizer.plan.sampling.batches((frame(), labels()))
    with pytest.warns(UserWarning, match=r"no input for x\['age'\], x\['name'\]: left out") as told:
        model.fit(batches, verbose=0)
    assert int(model.optimizer.steps_spent) == 2
    assert sum("left out" in str(each.message) for each in told) == 1


@pytest.mark.parametrize("form", [dict, backwards], ids=["dict", "list"])
@pytest.mark.filterwarnings("ignore:.*left out")
def test_the_columns_of_a_frame_reach_the_same_inputs_everywhere(form: Any) -> None:
    model, x = compiled(click_model(form)), frame()
    del x["name"]
    own = {name: x[name] for name in ("user", "item")}
    assert dp_sparse.check_model(model, (x, labels())).ok
    assert str(dp_sparse.recommend(model, plan_of(), (x, labels())))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The structure of `inputs`")
        np.testing.assert_array_equal(model.predict(x, verbose=0), model.predict(own, verbose=0))
        np.testing.assert_array_equal(model(x), model(own))
        assert model.evaluate(x, labels(), verbose=0) == model.evaluate(own, labels(), verbose=0)
    if form is dict:
        batches = model.optimizer.plan.sampling.batches((x, labels()))
        model.fit(batches, validation_data=(x, labels()), verbose=0)


def test_a_missing_column_is_named_beside_those_that_are_there() -> None:
    model, x = compiled(click_model()), frame()
    del x["user"]
    with pytest.raises(ValueError, match=r"\['item', 'user'\].*'age'.*without \['user'\]"):
        dp_sparse.check_model(model, (x, labels()))
    with pytest.raises(ValueError, match=r"without \['user'\]"):
        model.fit(model.optimizer.plan.sampling.batches((x, labels())), verbose=0)
    assert int(model.optimizer.steps_spent) == 0


class Towers(keras.Model):
    """The two functional towers of a retrieval model, each of which gets the whole frame."""

    def __init__(self) -> None:
        super().__init__()
        self.both = [
            keras.Model({name: given}, keras.layers.Embedding(size, 2)(given))
            for name, size in (("item", 7), ("user", 30))
            for given in [keras.Input((), dtype="int32", name=name)]
        ]

    def call(self, features: dict[str, Any]) -> Any:
        return keras.ops.sigmoid(
            keras.ops.sum(self.both[0](features) * self.both[1](features), -1, keepdims=True)
        )


def test_functional_towers_take_their_own_columns_of_a_frame() -> None:
    model, x = compiled(Towers()), frame()
    del x["name"]
    assert dp_sparse.check_model(model, (x, labels())).ok
    model.fit(model.optimizer.plan.sampling.batches((x, labels())), verbose=0)
    item, user = model.both[0]({"item": x["item"]}), model.both[1]({"user": x["user"]})
    expected = tf.sigmoid(tf.reduce_sum(item * user, 1))
    np.testing.assert_allclose(model.predict(x, verbose=0)[:, 0], expected, rtol=1e-5)


def test_rows_are_counted_by_the_names_that_train() -> None:
    tables = {"item": 7, "user": 30}
    rows = dp_sparse.select_top_k(
        (frame(), labels()), tables, k=37, source=dp_sparse.PublicRows(), progress=False
    )
    assert [len(rows.row_ids[name]) for name in tables] == [7, 30]

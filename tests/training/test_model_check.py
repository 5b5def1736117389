"""check_model: every variable with its rule, every problem with its fix, nothing changed."""

from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from tests.training_cases import click_model, plan_for


class Scale(keras.layers.Layer):
    """A layer without a rule of its own."""

    def build(self, input_shape: Any) -> None:
        self.scale = self.add_weight(shape=(input_shape[-1],), name="scale")

    def call(self, inputs: Any) -> Any:
        return inputs * self.scale


def test_every_variable_has_its_rule() -> None:
    ids, x = keras.Input((3,), dtype="int32"), keras.Input((4,))
    table = keras.layers.Flatten()(keras.layers.Embedding(9, 2, name="table")(ids))
    hidden = keras.layers.Dense(5, name="hidden")(keras.layers.Concatenate()([table, x]))
    model = keras.Model([ids, x], Scale(name="own")(keras.layers.LayerNormalization()(hidden)))
    check = dp_sparse.check_model(model)
    assert check.ok and check.traced
    assert list(check.rules) == [v.path for v in model.trainable_variables]
    assert list(check.rules.values()) == [
        "embedding",
        "dense",
        "dense",
        "layer normalization",
        "layer normalization",
        "fallback",
    ]
    assert "table/embeddings" in str(check) and "fallback" in str(check)


def test_all_problems_at_once_with_their_mends() -> None:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, activity_regularizer="l2", name="first"),
            keras.layers.BatchNormalization(name="second"),
        ]
    )
    check = dp_sparse.check_model(model)
    assert not check.ok and len(check.problems) == 2
    shown = str(check)
    for part in ("first", "Remove activity_regularizer", "second", "GroupNormalization"):
        assert part in shown


def test_what_only_a_pass_shows() -> None:
    class Peeks(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs) @ keras.ops.transpose(self.dense.kernel)

    model = Peeks()
    x = np.ones((2, 4), np.float32)
    check = dp_sparse.check_model(model, x)
    assert check.traced and "read outside the layer that owns it" in check.problems[0]
    without = dp_sparse.check_model(model)
    assert not without.traced and "give a batch" in str(without)


def test_the_fallbacks_memory_at_the_batch_of_training() -> None:
    model = keras.Sequential([keras.Input((10_000,)), Scale()])
    assert dp_sparse.check_model(model, batch_size=128).ok
    assert "bytes" in dp_sparse.check_model(model, batch_size=10**6).problems[0]


def test_nothing_changes() -> None:
    model = click_model()
    before = [np.array(v) for v in model.variables]
    dp_sparse.check_model(model)
    for old, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, variable)


def test_neither_weights_nor_inputs() -> None:
    with pytest.raises(ValueError, match="Expected a built model or a batch"):
        dp_sparse.check_model(keras.Sequential([keras.layers.Dense(3)]))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"Expected a keras.Model, got <Dense"):
        dp_sparse.check_model(keras.layers.Dense(3))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="batch_size=0"):
        dp_sparse.check_model(model, batch_size=0)


def test_a_model_with_nothing_to_train() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Flatten()])
    check = dp_sparse.check_model(model)
    assert check.rules == {} and "has no trainable variables" in check.problems[0]


def test_what_only_a_backward_pass_shows() -> None:
    x = keras.Input((4,))
    hidden = keras.layers.Dense(3, name="hidden")(x)
    hard = keras.layers.Lambda(lambda value: keras.ops.sign(keras.ops.stop_gradient(value)))
    model = keras.Model(x, keras.layers.Dense(1)(hard(hidden)))
    check = dp_sparse.check_model(model)
    assert check.traced and not check.ok
    assert check.problems[0].startswith("hidden: its output does not reach the loss")


def test_a_variable_used_in_two_ways() -> None:
    class Twice(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = keras.layers.Embedding(6, 4, name="table")
            self.matrix = keras.layers.Dense(4, use_bias=False, name="matrix")

        def build(self, input_shape: Any) -> None:
            self.table.build()
            self.matrix.build((None, 6))
            self.matrix._tracker.unlock()
            self.matrix._untrack_variable(self.matrix.kernel)
            self.matrix._kernel = self.table.embeddings

        def call(self, inputs: Any) -> Any:
            ids, x = inputs
            return self.table(ids) + self.matrix(x)

    check = dp_sparse.check_model(Twice(), [np.zeros((2,), np.int32), np.ones((2, 6), np.float32)])
    assert "used in different ways" in check.problems[0]
    assert "Give each use a variable of its own" in check.problems[0]


def test_a_batch_shows_whether_examples_mix() -> None:
    """Without a loss by one made up; with one as training would, before any training."""

    def over_the_size(y: Any, prediction: Any) -> Any:
        return (prediction - y) ** 2 / keras.ops.cast(keras.ops.shape(y)[0], "float32")

    x, y = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32), np.ones((9, 1))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    unknown = dp_sparse.check_model(model)
    assert unknown.ok and not unknown.compared and "give a batch of them" in str(unknown)
    assert dp_sparse.check_model(model, x).compared and dp_sparse.check_model(model, (x, y)).ok
    model.compile(loss=over_the_size)
    check = dp_sparse.check_model(model, (x, y))
    assert "depends on another example" in check.problems[0]
    plan = plan_for(9)
    batch = next(iter(plan.sampling.batches((x, y))))
    assert dp_sparse.check_model(model, batch).problems == check.problems


def test_an_empty_batch() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="Expected a batch with examples"):
        dp_sparse.check_model(model, np.zeros((0, 4), np.float32))


@pytest.mark.parametrize("batch", [(np.ones((4, 3)), np.ones((2, 1))), "abc", (np.ones((0, 3)),)])
def test_a_batch_that_is_none(batch: Any) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"Expected (batch to be \(x, y\)|a batch with examples)"):
        dp_sparse.check_model(model, batch)

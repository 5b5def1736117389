"""Every way around the private step raises, and says what to do."""

import copy
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import PrivacyError
from tests.training_cases import click_model, clicks, marked, marked_dataset, plan_for, weights_of

MIXES = "depends on another example"


def private(
    x: np.ndarray, make: Callable[..., Any] = dp_sparse.DPAdaFESTOptimizer, **fields: Any
) -> tuple[keras.Model, Any]:
    model = click_model()
    plan = plan_for(len(x), noise_multiplier=0.5, **fields)
    optimizer = make(keras.optimizers.SGD(0.1), plan, clip_norm=1.0)
    model.compile(optimizer=optimizer, loss="binary_crossentropy")
    return model, plan


def refused(
    call: Callable[[], Any],
    model: keras.Model,
    match: str,
    kind: type[Exception] = PrivacyError,
) -> None:
    """`call` raises the error and no weight moves."""
    before = weights_of(model)
    with pytest.raises(kind, match=match):
        call()
    for old, new in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(old, new)


# ---- Batches that the plan's sampler did not make.


@pytest.mark.parametrize("eager", [False, True])
def test_plain_arrays(eager: bool) -> None:
    x, y = clicks(8)
    model, _ = private(x)
    model.run_eagerly = eager
    refused(lambda: model.fit(x, y, verbose=0), model, r"fit\(plan.sampling.batches\(dataset\)\)")


@pytest.mark.slow
def test_a_refused_fit_can_be_followed_by_the_right_one() -> None:
    x, y = clicks(8)
    model, plan = private(x)
    model.compile(optimizer=model.optimizer, loss="binary_crossentropy", metrics=["accuracy"])
    refused(lambda: model.fit(x, y, verbose=0), model, "without its marker")
    model.fit(plan.sampling.batches((x, y)), steps_per_epoch=2, verbose=0)
    assert int(model.optimizer.steps_spent) == 2


def test_shuffled_fixed_batches() -> None:
    x, y = clicks(8)
    model, _ = private(x)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(8).batch(4)
    refused(lambda: model.fit(dataset, verbose=0), model, "without its marker")


def test_train_on_batch() -> None:
    x, y = clicks(8)
    model, _ = private(x)
    refused(lambda: model.train_on_batch(x, y), model, "without its marker")


def test_a_cached_pass_repeated() -> None:
    x, y = clicks(8)
    model, plan = private(x)
    dataset = plan.sampling.batches((x, y)).take(2).cache().repeat()
    with pytest.raises(PrivacyError, match="got batch 0 again"):
        model.fit(dataset, steps_per_epoch=3, verbose=0)
    assert int(model.optimizer.steps_spent) == 2


@pytest.mark.slow
def test_first_batches_picked_by_what_they_hold() -> None:
    """One of each pass, which a filter chose: no Poisson sample, so none is taken but the first."""
    x, y = clicks(8)
    model, plan = private(x)
    batches = plan.sampling.batches((x, y))
    picked = batches.filter(lambda x, y, weights: weights["marker"][0, 2] >= 3).take(1)
    refused(lambda: model.fit(picked, verbose=0), model, "got Filter")
    refused(lambda: model.fit(batches.skip(2), verbose=0), model, "got batch 2 again or out of")
    model.fit(batches.take(1), verbose=0)
    assert int(model.optimizer.steps_spent) == 1


def test_one_batch_repeated() -> None:
    x, y = clicks(8)
    model, plan = private(x)
    dataset = plan.sampling.batches((x, y)).take(1).repeat(2)
    batch = tf.data.Dataset.from_tensors(next(iter(dataset))).repeat(2)
    with pytest.raises(PrivacyError, match="got batch 0 again"):
        model.fit(batch, verbose=0)


def test_batches_in_another_order() -> None:
    x, y = clicks(8)
    model, plan = private(x)
    first, second = (marked(plan, x, y, index=i, nonce=7) for i in (1, 0))
    dataset = tf.data.Dataset.from_tensors(first).concatenate(tf.data.Dataset.from_tensors(second))
    with pytest.raises(PrivacyError, match="again"):
        model.fit(dataset, verbose=0)


def test_a_cached_pass_cannot_come_back_after_another_one() -> None:
    x, y = clicks(8)
    model, plan = private(x)
    cached, other = (plan.sampling.batches((x, y)).take(2).cache() for _ in range(2))
    for dataset in (cached, other):
        model.fit(dataset, verbose=0)
    refused(lambda: model.fit(cached, verbose=0), model, "again")


@pytest.mark.slow
def test_a_cached_pass_cannot_train_a_second_model_of_the_same_plan() -> None:
    x, y = clicks(8)
    model, plan = private(x)
    cached = plan.sampling.batches((x, y)).take(2).cache()
    model.fit(cached, verbose=0)
    other = click_model()
    other.compile(optimizer=dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="binary_crossentropy")
    refused(lambda: other.fit(cached, verbose=0), other, "again")


def test_seeded_batches() -> None:
    x, y = clicks(8)
    model, plan = private(x)
    dataset = plan.sampling.batches((x, y), seed=1)
    refused(lambda: model.fit(dataset, verbose=0), model, "batches made with a seed")


@pytest.mark.slow
def test_batches_of_another_sampler() -> None:
    x, y = clicks(8)
    model, _ = private(x)
    other = plan_for(8, steps=99)
    refused(
        lambda: model.fit(other.sampling.batches((x, y)), verbose=0),
        model,
        "got one of another sampler",
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("set_back", [False, True])
def test_a_plan_without_steps_left(set_back: bool) -> None:
    """Setting counters back gives no steps back."""
    x, y = clicks(8)
    model, plan = private(x, steps=3)
    model.fit(plan.sampling.batches((x, y)), verbose=0)
    assert int(model.optimizer.steps_spent) == 3
    if set_back:
        model.optimizer.steps_spent.assign(0)
        model.optimizer.iterations.assign(0)
    refused(
        lambda: model.fit(plan.sampling.batches((x, y)), verbose=0),
        model,
        "no steps left: 3 of 3 are spent",
    )


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_batches_of_a_sampler_are_no_held_out_examples(method: str) -> None:
    x, y = clicks(8)
    model, plan = private(x)
    with pytest.raises(ValueError, match=rf"got batches of a sampler.*call model\.{method}\(x"):
        getattr(model, method)(plan.sampling.batches((x, y)), verbose=0)
    assert np.isfinite(model.evaluate(x, y, verbose=0))
    assert len(model.predict(x, verbose=0)) == 8


# ---- Gradients that the private step did not compute.


def test_every_entry_of_the_optimizer_refuses_gradients() -> None:
    x, _ = clicks(8)
    model, _ = private(x)
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    gradients = [tf.ones(v.shape) for v in model.trainable_variables]
    pairs = list(zip(gradients, model.trainable_variables, strict=True))
    for way in (
        lambda: optimizer.apply_gradients(pairs),
        lambda: optimizer.apply(gradients, model.trainable_variables),
        lambda: optimizer.apply(gradients),
        lambda: optimizer.stateless_apply(
            optimizer.variables, gradients, model.trainable_variables
        ),
        lambda: optimizer.update_step(gradients[0], model.trainable_variables[0], 0.1),
    ):
        refused(way, model, "got gradients that its private step did not make")


def test_a_hand_written_loop() -> None:
    x, y = clicks(8)
    model, _ = private(x)

    def loop() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.binary_crossentropy(y[:, None], model(x)))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    refused(loop, model, "without a custom train_step, a hand-written loop")


def test_a_train_step_set_after_compile() -> None:
    x, y = clicks(8)
    model, plan = private(x)
    model.train_step = lambda data: keras.Model.train_step(model, (data[0], data[1]))
    refused(lambda: model.fit(plan.sampling.batches((x, y)), verbose=0), model, "private step")


@pytest.mark.parametrize("name", ["train_step", "_compute_loss"])
def test_a_model_with_a_step_or_a_loss_of_its_own(name: str) -> None:
    stock = getattr(keras.Model, name)
    custom = type(
        "Custom",
        (keras.Model,),
        {name: lambda self, *a, **k: stock(self, *a, **k), "__module__": __name__},
    )
    source = click_model()
    model = custom(source.inputs, source.outputs)
    optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan_for(8), 1.0)
    with pytest.raises(PrivacyError, match=f"Custom has a {name} of its own"):
        model.compile(optimizer=optimizer, loss="binary_crossentropy")


def test_one_optimizer_for_two_models() -> None:
    x, _ = clicks(8)
    model, _ = private(x)
    other = click_model()
    with pytest.raises(PrivacyError, match="already trains another model"):
        other.compile(optimizer=model.optimizer, loss="binary_crossentropy")


@pytest.mark.slow
def test_one_optimizer_recompiled_on_its_own_model() -> None:
    x, y = clicks(8)
    model, plan = private(x)
    model.fit(plan.sampling.batches((x, y)), steps_per_epoch=2, verbose=0)
    model.compile(optimizer=model.optimizer, loss="mse")
    model.fit(plan.sampling.batches((x, y)), steps_per_epoch=2, verbose=0)
    assert int(model.optimizer.steps_spent) == 4


def test_loss_scale_optimizer_around_it() -> None:
    x, y = clicks(8)
    model = click_model()
    inner = dp_sparse.DPAdaFESTOptimizer("sgd", plan_for(8), 1.0)

    def train() -> None:
        around = keras.optimizers.LossScaleOptimizer(inner)
        model.compile(optimizer=around, loss="binary_crossentropy")
        model.fit(x, y, verbose=0)

    refused(train, model, "")


def test_mixed_float16_is_not_wrapped_in_a_loss_scale() -> None:
    model = click_model()
    model.dtype_policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan_for(8), 1.0)
    model.compile(optimizer=optimizer, loss="binary_crossentropy")
    assert model.optimizer is optimizer


@pytest.mark.slow
def test_a_clone_shares_the_budget() -> None:
    x, y = clicks(8)
    model, plan = private(x, steps=3)
    model.fit(plan.sampling.batches((x, y)), steps_per_epoch=2, verbose=0)
    clones = (
        type(model.optimizer).from_config(model.optimizer.get_config()),
        dp_sparse.DPAdaFESTOptimizer("sgd", copy.deepcopy(plan), 1.0),
    )
    assert [clone.steps_left for clone in clones] == [1, 1]
    for clone in clones:
        other = click_model()
        other.compile(optimizer=clone, loss="binary_crossentropy")
        batches = list(plan.sampling.batches((x, y)))
        with pytest.raises(PrivacyError, match="no steps left: 3 of 3"):
            [other.train_on_batch(*batch) for batch in batches]


def dense_model(before: Any = None, between: Any = None) -> keras.Model:
    inputs = keras.Input((3,))
    hidden = inputs if before is None else before(inputs)
    hidden = keras.layers.Dense(4, activation="tanh")(hidden)
    hidden = hidden if between is None else between(hidden)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def train_dense(
    model: keras.Model, loss: Any, match: str = MIXES, kind: type[Exception] = PrivacyError
) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 3)).astype(np.float32), rng.normal(size=(6, 1)).astype(np.float32)
    plan = plan_for(6)
    model.compile(optimizer=dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss=loss)
    refused(lambda: model.fit(marked_dataset(plan, x, y), verbose=0), model, match, kind)


def mean_centred_loss(y: Any, prediction: Any) -> tf.Tensor:
    return tf.reduce_sum(tf.square(prediction - tf.reduce_mean(prediction, axis=0)), axis=-1)


def in_batch_softmax(y: Any, prediction: Any) -> tf.Tensor:
    logits = tf.matmul(prediction, prediction, transpose_b=True)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(logits)[0]), logits)


def label_centred_loss(y: Any, prediction: Any) -> tf.Tensor:
    return tf.reduce_sum(tf.square(prediction - y + tf.reduce_mean(y, axis=0)), axis=-1)


def one_value_for_all(y: Any, prediction: Any) -> tf.Tensor:
    return tf.reduce_mean(tf.square(prediction - y), axis=0)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "loss", [mean_centred_loss, in_batch_softmax], ids=lambda loss: loss.__name__
)
def test_mixing_in_the_loss(loss: Any) -> None:
    train_dense(dense_model(), loss)


def test_one_value_for_all_examples() -> None:
    train_dense(dense_model(), one_value_for_all, "got 1 values whatever the batch", ValueError)


def test_mixing_of_labels_in_the_loss() -> None:
    train_dense(dense_model(), label_centred_loss)


def minus_batch_mean(values: Any) -> tf.Tensor:
    return values - tf.reduce_mean(values, axis=0)


def minus_stopped_batch_mean(values: Any) -> tf.Tensor:
    return values - tf.stop_gradient(tf.reduce_mean(values, axis=0))


def neighbour(values: Any) -> tf.Tensor:
    return values + tf.roll(values, 1, axis=0)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "mix", [minus_batch_mean, minus_stopped_batch_mean, neighbour], ids=lambda mix: mix.__name__
)
@pytest.mark.parametrize("where", ["before", "between"])
def test_mixing_in_the_model(mix: Any, where: str) -> None:
    layer = keras.layers.Lambda(mix, output_shape=(3 if where == "before" else 4,))
    train_dense(dense_model(**{where: layer}), "mse")


def by_place(values: Any) -> tf.Tensor:
    place = tf.range(tf.shape(values)[0])[:, tf.newaxis]
    return values * tf.where(place % 2 == 0, 1.0, -1.0)


def by_batch_size(values: Any) -> tf.Tensor:
    return values / tf.cast(tf.shape(values)[0], tf.float32)


@pytest.mark.slow
@pytest.mark.parametrize("knows", [by_place, by_batch_size], ids=lambda knows: knows.__name__)
def test_a_model_that_knows_the_place_in_the_batch_or_its_size(knows: Any) -> None:
    """One example more would change the gradients of all that follow."""
    train_dense(dense_model(before=keras.layers.Lambda(knows, output_shape=(3,))), "mse")


def test_constant_seeds_of_masks() -> None:
    """keras.random with a number for a seed gives every step the same masks, by place."""
    noisy = keras.layers.Lambda(
        lambda values: keras.random.dropout(values, 0.5, seed=3), output_shape=(3,)
    )
    model, plan = dense_model(before=noisy), plan_for(4)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), "mse")
    x, y = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)
    with pytest.raises(dp_sparse.UnsupportedLayerError, match="can be predicted"):
        model.fit(marked_dataset(plan, x, y), verbose=0)


def test_mixing_inside_a_layer_of_the_fallback() -> None:
    class Centred(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, values: Any) -> Any:
            return self.scale * minus_batch_mean(values)

    train_dense(dense_model(before=Centred()), "mse")


def test_mixing_is_found_when_the_first_batch_is_all_padding() -> None:
    x, y = np.zeros((4, 3), np.float32), np.zeros((4, 1), np.float32)
    model, plan = (
        dense_model(between=keras.layers.Lambda(minus_batch_mean, output_shape=(4,))),
        plan_for(4),
    )
    model.compile(optimizer=dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    real = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    padding = marked_dataset(plan, x, y, present=[0, 0, 0, 0])
    batches = padding.concatenate(marked_dataset(plan, real, y + 1))
    with pytest.raises(PrivacyError, match=MIXES):
        model.fit(batches, verbose=0)


def test_a_loss_that_returns_one_number() -> None:
    def batch_mean(y: Any, prediction: Any) -> tf.Tensor:
        return tf.reduce_mean(tf.square(prediction - y))

    x, y = clicks(8)
    model, plan = private(x)
    model.compile(optimizer=model.optimizer, loss=batch_mean)
    with pytest.raises(
        ValueError, match="loss batch_mean to give one value for each example, got a scalar"
    ):
        model.fit(plan.sampling.batches((x, y)), verbose=0)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_loss_that_is_not_a_mean(reduction: str) -> None:
    x, y = clicks(8)
    model, plan = private(x)
    loss = keras.losses.BinaryCrossentropy(reduction=reduction)
    model.compile(optimizer=model.optimizer, loss=loss)
    with pytest.raises(ValueError, match=f"got reduction='{reduction}' in binary_crossentropy"):
        model.fit(plan.sampling.batches((x, y)), verbose=0)


def test_no_loss() -> None:
    x, y = clicks(8)
    model, plan = click_model(), plan_for(8)
    model.compile(optimizer=dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0))
    with pytest.raises(ValueError, match="got loss=None: pass loss= to compile"):
        model.fit(plan.sampling.batches((x, y)), verbose=0)

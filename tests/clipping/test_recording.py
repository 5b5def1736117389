"""What is recorded, and what is refused, each refusal with the layer's path and the fix."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dp_sparse import UnsupportedLayerError, clipping, noise
from dp_sparse.clipping import rules
from dp_sparse.step.forward_backward import secret_seeds
from tests.clipping.brute_force import assert_as_brute_force, clipped, refusal, values
from tests.replicas import strategy_of


def stack(*layers: keras.layers.Layer, width: int = 3) -> keras.Model:
    return keras.Sequential([keras.Input((width,)), *layers])


def subclassed(call: Callable[..., Any], **layers: keras.layers.Layer) -> keras.Model:
    """A model of these layers with this call, built on three features."""

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            for name, layer in layers.items():
                setattr(self, name, layer)

        def call(self, inputs: Any) -> Any:
            return call(self, inputs)

    model = Model()
    model(values(2, 3))
    return model


# ---- Refusals.


def test_batch_normalization_names_group_normalization() -> None:
    layer = keras.layers.BatchNormalization()
    message = refusal(stack(keras.layers.Dense(4), layer), 3)
    assert f"{layer.path} (BatchNormalization): mixes the examples" in message
    assert "Use keras.layers.GroupNormalization instead" in message


def test_every_bad_layer_is_named_at_once() -> None:
    bad = [keras.layers.BatchNormalization(), keras.layers.Dense(2, activity_regularizer="l2")]
    message = refusal(stack(keras.layers.Dense(4), *bad), 3)
    assert all(layer.path in message for layer in bad)


def test_batch_normalization_without_variables_inside_another_model() -> None:
    """No trainable variable leads there; its running statistics still give it away."""
    layer = keras.layers.BatchNormalization(center=False, scale=False)
    inner = keras.Sequential([keras.layers.Rescaling(2.0), layer])
    message = refusal(stack(inner, keras.layers.Dense(1)), 3)
    assert layer.path in message


def test_activity_regularizer() -> None:
    layer = keras.layers.Dense(4, activity_regularizer="l2")
    message = refusal(stack(layer), 3)
    assert f"{layer.path} (Dense): activity regularizers add a loss" in message
    assert "Remove activity_regularizer" in message


def test_activity_regularization_layer_and_add_loss() -> None:
    class AddsLoss(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(tf.reduce_mean(inputs))
            return inputs

    for layer in (AddsLoss(), keras.layers.ActivityRegularization(l2=0.1)):
        message = refusal(stack(keras.layers.Dense(4), layer), 3)
        assert "a loss over the whole batch" in message
        assert "loss= of compile" in message or "Remove activity_regularizer" in message


def test_a_variable_read_outside_its_layer() -> None:
    def call(model: Any, inputs: Any) -> Any:
        return model.dense(inputs) + tf.reduce_sum(model.dense.kernel)

    model = subclassed(call, dense=keras.layers.Dense(2, name="d"))
    message = refusal(model, 3)
    assert model.dense.kernel.path in message
    assert "read outside the layer that owns it; call the layer" in message


def test_a_variable_read_in_another_layers_call() -> None:
    class Borrows(keras.layers.Layer):
        def __init__(self, owner: Any) -> None:
            super().__init__()
            self.lend = lambda: owner.kernel

        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(), name="scale")

        def call(self, inputs: Any) -> Any:
            return self.scale * inputs @ self.lend()

    dense = keras.layers.Dense(3)
    message = refusal(stack(dense, Borrows(dense)), 3)
    assert dense.kernel.path in message


def test_a_variable_of_the_model_itself_is_clipped_by_the_fallback_or_refused() -> None:
    class Scaled(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2)
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

        def call(self, inputs: Any) -> Any:
            return self.scale * self.dense(inputs)

    model = Scaled()
    model(values(1, 3))
    assert_as_brute_force(model, values(4, 3))


def test_running_statistics_written_in_the_forward_pass() -> None:
    class Counts(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

        def call(self, inputs: Any) -> Any:
            self.seen.assign_add(tf.reduce_mean(inputs))
            return inputs

    layer = Counts()
    message = refusal(stack(layer, keras.layers.Dense(1)), 3)
    assert layer.seen.path in message
    assert "written in the forward pass; running statistics are not private" in message
    assert float(layer.seen) == 0


def test_a_trainable_variable_written_in_the_forward_pass() -> None:
    class Shrinks(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

        def call(self, inputs: Any) -> Any:
            self.scale.assign(0.5 * self.scale)
            return self.scale * inputs

    layer = Shrinks()
    model = stack(layer)
    assert layer.scale.path in refusal(model, 3)


def test_lora_of_a_layer_without_a_rule_for_it() -> None:
    layer = keras.layers.Conv1D(4, 2)
    model = keras.Sequential([keras.Input((5, 3)), layer, keras.layers.Dense(1)])
    layer.enable_lora(2)
    with pytest.raises(UnsupportedLayerError) as caught:
        clipping.tapped_layers(model)
    assert f"{layer.path} (Conv1D): LoRA has a clipping rule for Dense" in str(caught.value)
    assert "freeze it with trainable=False" in str(caught.value)
    layer.trainable = False
    assert_as_brute_force(model, values(4, 5, 3))  # the fix that the message names


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["while_loop", "map_fn", "cond", "function"])
def test_a_layer_in_a_loop_or_a_branch(kind: str) -> None:
    def call(model: Any, inputs: Any) -> Any:
        if kind == "function":
            return tf.function(lambda inputs: model.dense(inputs))(inputs)
        if kind == "map_fn":
            return tf.map_fn(lambda row: model.dense(row[tf.newaxis])[0], inputs)
        if kind == "cond":
            positive = tf.reduce_sum(inputs) > 0
            return tf.cond(
                positive, lambda: model.dense(inputs), lambda: tf.zeros([tf.shape(inputs)[0], 3])
            )
        _, hidden = tf.while_loop(
            lambda i, _: i < 2, lambda i, h: (i + 1, model.dense(h)), (tf.constant(0), inputs)
        )
        return hidden

    model = subclassed(call, dense=keras.layers.Dense(3, name="looped"))
    with pytest.raises(UnsupportedLayerError, match="looped") as caught:
        recorded_in_a_graph(model)
    assert "called inside a loop, a branch or a function" in str(caught.value)
    assert "Call the layer outside" in str(caught.value)


def test_a_refusal_leaves_strategies_usable() -> None:
    """`tf.map_fn` does not tidy up when the layer that it calls is refused."""

    def call(model: Any, inputs: Any) -> Any:
        return tf.map_fn(lambda row: model.dense(row[tf.newaxis])[0], inputs)

    with pytest.raises(UnsupportedLayerError, match="called inside a loop"):
        recorded_in_a_graph(subclassed(call, dense=keras.layers.Dense(3)))
    assert tf.compat.v1.get_variable_scope().caching_device is None
    with strategy_of(2).scope():
        assert keras.layers.Dense(2)(values(1, 2)).shape == (1, 2)


@pytest.mark.parametrize("nested", [False, True])
def test_a_layer_in_a_function_that_was_traced_before(nested: bool) -> None:
    def call(model: Any, inputs: Any) -> Any:
        made = vars(model).setdefault("made", tf.function(lambda inputs: model.dense(inputs)))
        if not nested:
            return made(inputs)
        return tf.cond(tf.reduce_sum(inputs) > 0, lambda: made(inputs), lambda: 2 * made(inputs))

    model = subclassed(call, dense=keras.layers.Dense(3))
    traced = tf.function(model, autograph=False)
    traced.get_concrete_function(tf.TensorSpec([3, 3]))
    with pytest.raises(UnsupportedLayerError, match="dense.*/kernel where its gradient cannot"):
        recorded_in_a_graph(model)
    model.dense.trainable = False
    recorded_in_a_graph(model)  # as the fix says


def test_a_weight_read_past_keras() -> None:
    def call(model: Any, inputs: Any) -> Any:
        return model.dense(inputs) @ tf.transpose(model.dense.kernel._value)

    model = subclassed(call, dense=keras.layers.Dense(3))
    with pytest.raises(UnsupportedLayerError, match="dense.*/kernel where its gradient cannot"):
        recorded_in_a_graph(model)


def recorded_in_a_graph(model: keras.Model) -> None:
    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            clipping.record(model, x, tape, batch_capacity=3)
        return x

    step(tf.constant(values(3, 3)))


def test_a_disconnected_output() -> None:
    def call(model: Any, inputs: Any) -> Any:
        return model.used(inputs) + tf.stop_gradient(model.cut(inputs))

    model = subclassed(call, used=keras.layers.Dense(2), cut=keras.layers.Dense(2, name="cut_off"))
    message = refusal(model, 3)
    assert model.cut.path in message
    assert "its output does not reach the loss" in message
    assert "trainable=False" in message


def test_rematerialisation() -> None:
    with keras.RematScope(mode="full"):
        layer = keras.layers.Dense(4)
    message = refusal(stack(layer, keras.layers.Dense(1)), 3)
    assert layer.path in message
    assert "remove keras.RematScope" in message


# ---- What is recorded.


def test_layers_are_found_through_nested_models() -> None:
    inner = keras.Sequential([keras.layers.Dense(4), keras.layers.LayerNormalization()])
    outer = keras.Sequential([keras.Input((5, 3)), inner, keras.layers.Dense(2)])
    inputs = keras.Input((5, 3))
    model = keras.Model(inputs, keras.layers.Dense(2)(outer(inputs)))
    assert_as_brute_force(model, values(3, 5, 3))


def test_a_wrapper_that_calls_its_layer_once_a_step() -> None:
    model = keras.Sequential(
        [
            keras.Input((5, 3)),
            keras.layers.TimeDistributed(keras.layers.Dense(2)),
            keras.layers.Dense(2),
        ]
    )
    assert_as_brute_force(model, values(3, 5, 3))


def test_a_layer_that_is_not_called_counts_as_zero() -> None:
    def call(model: Any, inputs: Any) -> Any:
        return model.used(inputs)

    spare = keras.layers.Dense(2)
    spare.build((None, 3))
    model = subclassed(call, used=keras.layers.Dense(2), spare=spare)
    assert len(model.trainable_variables) == 4
    assert_as_brute_force(model, values(4, 3))


def test_gradients_flow_through_frozen_layers_and_models() -> None:
    frozen = keras.Sequential([keras.layers.Dense(3, "tanh"), keras.layers.Dense(3)])
    model = stack(keras.layers.Dense(3), frozen, keras.layers.Dense(1))
    frozen.trainable = False
    assert_as_brute_force(model, values(4, 3))


def test_every_layer_is_left_as_it_was_even_after_an_error() -> None:
    dense = keras.layers.Dense(4, activation="relu")
    model = stack(
        dense, keras.layers.Lambda(lambda v: tf.ensure_shape(v, [None, 4])), keras.layers.Dense(1)
    )
    x = values(2, 3)
    clipped(model, x, np.ones(2, np.float32), 1.0)
    with pytest.raises(Exception, match="."):
        clipped(model, values(2, 5), np.ones(2, np.float32), 1.0)
    for layer in model.layers:
        assert "call" not in vars(layer)
    assert dense.activation is keras.activations.relu
    np.testing.assert_allclose(model(x), model.predict(x, verbose=0), atol=1e-6)


class Peek(keras.layers.Layer):
    """Uses the kernel of a layer inside without calling it, or calls it, too."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.inner, self.calls = keras.layers.Dense(3, use_bias=False), calls

    def build(self, shape: Any) -> None:
        self.inner.build(shape)

    def call(self, values: Any) -> Any:
        outputs = values @ keras.ops.convert_to_tensor(self.inner.kernel)
        return self.inner(outputs) if self.calls else outputs


@pytest.mark.parametrize("calls", [False, True])
def test_a_weight_of_an_activation_read_outside_its_layer(calls: bool) -> None:
    model = stack(keras.layers.Dense(3, activation=Peek(calls)))
    model(values(3, 3))
    assert "dense" in refusal(model, 3) and "read outside the layer" in refusal(model, 3)


def test_a_layer_inside_one_of_the_fallback_and_used_elsewhere_too() -> None:
    shared = keras.layers.PReLU(alpha_initializer="random_normal")

    class Scaled(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = shared

        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, inputs: Any) -> Any:
            return self.inner(inputs) * self.scale

    model = stack(Scaled(), shared, keras.layers.Dense(2))
    assert_as_brute_force(model, values(4, 3))


@pytest.mark.parametrize("kind", [keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN])
def test_batch_normalization_in_a_cell(kind: Any) -> None:
    activation = keras.layers.BatchNormalization(center=False, scale=False)
    model = keras.Sequential([keras.Input((4, 3)), kind(3, activation=activation)])
    assert "GroupNormalization" in refusal(model, 4, 3)


def masks(model: keras.Model, seeds: clipping.Seeds | None) -> np.ndarray:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        recording = clipping.record(model, tf.ones([200, 3]), tape, batch_capacity=200, seeds=seeds)
    assert recording.seeds_drawn == 2
    return recording.outputs.numpy()


@pytest.mark.parametrize("dropout_seed", [None, 7])
def test_masks_come_from_the_given_seeds_alone(dropout_seed: int | None) -> None:
    """Each random layer has its own, and what Keras holds as a state plays no part."""
    dropouts = [keras.layers.Dropout(0.5, seed=dropout_seed) for _ in range(2)]
    model = stack(*dropouts)
    draw = noise.NoiseKey().next_draw()
    state = dropouts[0].seed_generator.state
    before = np.array(state)
    first = masks(model, secret_seeds(draw))
    np.testing.assert_array_equal(np.array(state), before)
    state.assign(before + 1)
    np.testing.assert_array_equal(masks(model, secret_seeds(draw)), first)
    assert np.mean(first != 0) == pytest.approx(0.25, abs=0.1)  # two independent masks
    others = [secret_seeds(draw, 1), secret_seeds(noise.NoiseKey().next_draw()), None]
    for seeds in others:
        assert np.mean(masks(model, seeds) != first) > 0.1


def test_without_seeds_the_masks_are_those_of_stock_keras() -> None:
    model = stack(keras.layers.Dropout(0.5, seed=1), keras.layers.Dropout(0.5, seed=2))
    own = masks(model, None)
    np.testing.assert_allclose(own, model(np.ones((200, 3), np.float32), training=True), atol=1e-6)


def adapted(layer: keras.layers.Layer) -> keras.layers.Layer:
    layer.adapt(np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32))
    return layer


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: adapted(keras.layers.Normalization()), "as mean="),
        (lambda: keras.Sequential([adapted(keras.layers.Normalization())]), "as mean="),
        (lambda: adapted(keras.layers.Discretization(num_bins=4)), "as bin_boundaries="),
    ],
    ids=["normalization", "nested", "discretization"],
)
def test_layers_adapted_to_the_data_are_refused(make: Any, fix: str) -> None:
    model = keras.Sequential([keras.Input((3,)), make(), keras.layers.Dense(1)])
    with pytest.raises(UnsupportedLayerError, match=f"by adapt, which reads data.*{fix}"):
        clipping.tapped_layers(model)


def test_a_vocabulary_that_was_set_by_hand_is_refused_by_the_layers_name() -> None:
    words = keras.layers.StringLookup(name="words")
    words.set_vocabulary(["a", "b"])
    layers = [words, keras.layers.Embedding(3, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((1,), dtype="string"), *layers])
    with pytest.raises(UnsupportedLayerError, match=r"words \(StringLookup\).*as vocabulary="):
        clipping.tapped_layers(model)


def test_layers_with_public_statistics_are_fine() -> None:
    layers = [keras.layers.Normalization(mean=0.0, variance=1.0), keras.layers.Dense(1)]
    assert len(clipping.tapped_layers(keras.Sequential([keras.Input((3,)), *layers]))) == 1


def unwatched(layer: Any, call: Any, tap: Any, x: tf.Tensor, **options: Any) -> tf.Tensor:
    return call(x)


def without_terms(layer: Any, call: Any, tap: Any, x: tf.Tensor, **options: Any) -> tf.Tensor:
    outputs = call(x)
    tap.watch([outputs], lambda cotangents: [])
    return outputs


@pytest.mark.parametrize("rule", [unwatched, without_terms])
def test_a_rule_that_leaves_a_variable_out(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would get noise alone."""
    monkeypatch.setitem(rules._RULES, keras.layers.Dense, rule)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="out")])
    message = refusal(model, 3)
    assert "out/kernel, " in message and "gave no gradient term" in message

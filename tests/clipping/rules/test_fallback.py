"""Any other layer: exact by a per-example product, or a refusal that names it and the fix."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dp_sparse import DPSGDOptimizer, PrivacyError, UnsupportedLayerError, clipping
from dp_sparse.clipping import layer_rules
from dp_sparse.clipping.rules import fallback
from tests.clipping.brute_force import assert_as_brute_force, clipped, refusal, square_loss, values
from tests.training_cases import plan_for


class Affine(keras.layers.Layer):
    """Two variables of its own, used in a way no rule knows."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="random_normal", name="scale")
        self.shift = self.add_weight(shape=(shape[-1],), initializer="random_normal", name="shift")

    def call(self, inputs: Any) -> Any:
        return keras.ops.sin(inputs * self.scale) + self.shift**2


class Gated(keras.layers.Layer):
    """Owns a variable and layers; takes two inputs and gives two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.gate = self.add_weight(shape=(3,), initializer="random_normal", name="gate")

    def call(self, inputs: Any, other: Any) -> Any:
        hidden = self.dense(inputs)
        return hidden * self.gate, keras.ops.tanh(hidden + other)


@pytest.fixture
def no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer goes to the fallback."""
    monkeypatch.setattr(layer_rules, "rule_for", lambda layer: None)


def sequential(layer: keras.layers.Layer, *shape: int) -> keras.Model:
    return keras.Sequential(
        [keras.Input(shape), layer, keras.layers.Flatten(), keras.layers.Dense(2)]
    )


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Affine, (3,)),
        (Affine, (4, 3)),
        (
            lambda: keras.layers.EinsumDense("abc,cd->abd", output_shape=(4, 5), bias_axes="d"),
            (4, 3),
        ),
        (lambda: keras.layers.Conv2D(2, 2, activation="relu"), (4, 4, 3)),
        (lambda: keras.layers.Conv1D(2, 2, strides=2, padding="same"), (5, 3)),
        (lambda: keras.layers.PReLU(alpha_initializer="random_normal"), (4,)),
        (lambda: keras.layers.GroupNormalization(groups=2), (3, 4)),
        (lambda: keras.layers.UnitNormalization(), (4,)),
        (lambda: keras.layers.MultiHeadAttention(2, 3), None),
    ],
    ids=[
        "affine",
        "affine on sequences",
        "einsum dense",
        "conv2d",
        "conv1d",
        "prelu",
        "group norm",
        "nothing to train",
        "attention",
    ],
)
@pytest.mark.usefixtures("no_rules")
def test_layers_without_a_rule(make: Any, shape: tuple[int, ...] | None) -> None:
    if shape is None:
        inputs = keras.Input((4, 3))
        model = keras.Model(inputs, make()(inputs, inputs))
        shape = (4, 3)
    else:
        model = sequential(make(), *shape)
    assert_as_brute_force(model, values(3, *shape), padding=1, tolerance=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.layers.LSTM(3),
        lambda: keras.layers.GRU(3, return_sequences=True),
        lambda: keras.layers.SimpleRNN(3),
        lambda: keras.layers.RNN([keras.layers.LSTMCell(3), keras.layers.GRUCell(2)]),
    ],
    ids=["LSTM", "GRU", "SimpleRNN", "stacked cells"],
)
@pytest.mark.parametrize("examples", [3, 1])
@pytest.mark.usefixtures("no_rules")
def test_recurrent_layers_without_dropout(make: Any, examples: int) -> None:
    assert_as_brute_force(sequential(make(), 4, 3), values(examples, 4, 3), tolerance=2e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("no_rules")
def test_batches_of_unknown_size() -> None:
    model = sequential(keras.layers.LSTM(3), 4, 3)

    @tf.function(input_signature=[tf.TensorSpec([None, 4, 3])], autograph=False)
    def squared_norms(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            recording = clipping.record(model, x, tape, 8)
            total = tf.reduce_sum(tf.square(recording.outputs))
        terms = recording.terms(tape.gradient(total, recording.targets))
        return tf.add_n([term.squared_norms() for _, term in terms])

    x = values(3, 4, 3)
    alone = tf.concat([squared_norms(x[i : i + 1]) for i in range(3)], 0)
    np.testing.assert_allclose(squared_norms(x), alone, rtol=1e-5)
    assert squared_norms(x[:0]).shape == [0]


def test_two_inputs_two_outputs_and_inner_layers() -> None:
    one, two = keras.Input((4,)), keras.Input((3,))
    model = keras.Model([one, two], list(Gated()(one, two)))
    assert_as_brute_force(model, [values(5, 4), values(5, 3, seed=1)])


def test_a_subclass_of_dense_may_do_anything() -> None:
    class Squared(keras.layers.Dense):
        def call(self, inputs: Any, training: Any = None) -> Any:
            return keras.ops.square(super().call(inputs))

    assert_as_brute_force(sequential(Squared(4), 3), values(4, 3))


def test_called_twice() -> None:
    inputs = keras.Input((3,))
    layer = Affine()
    assert_as_brute_force(keras.Model(inputs, layer(layer(inputs))), values(4, 3))


def test_arguments_that_are_no_tensors_pass_through() -> None:
    class Power(Affine):
        def call(self, inputs: Any, exponent: int = 1, names: Any = None) -> Any:
            assert names == ["a"]
            return super().call(inputs) ** exponent

    inputs = keras.Input((3,))
    assert_as_brute_force(
        keras.Model(inputs, Power()(inputs, exponent=2, names=["a"])), values(4, 3)
    )


def test_a_frozen_variable_of_the_layer() -> None:
    layer = Affine()
    model = sequential(layer, 3)
    layer.shift.trainable = False
    assert len(model.trainable_variables) == 3
    assert_as_brute_force(model, values(4, 3))


class Noisy(Affine):
    """Dropout inside, so that a second call would draw another mask."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, inputs: Any) -> Any:
        return self.dropout(super().call(inputs))


def test_dropout_inside_is_refused() -> None:
    layer = Noisy()
    message = refusal(sequential(layer, 3), 3)
    assert layer.path in message
    assert "(Noisy)" in message
    assert "ropout" in message


def test_dropout_beside_is_fine() -> None:
    inputs = keras.Input((3,))
    outputs = keras.layers.Dropout(0.5)(Affine()(inputs))
    result = clipped(keras.Model(inputs, outputs), values(4, 3), np.ones(4, np.float32), 1.0)
    assert result.finite.all()


def test_recurrent_dropout_is_refused() -> None:
    class OwnLSTM(keras.layers.LSTM):
        """A subclass has no rule."""

    layer = OwnLSTM(3, dropout=0.5)
    message = refusal(sequential(layer, 4, 3), 4, 3)
    assert layer.path in message
    assert "dropout" in message


def test_above_the_memory_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "MEMORY_BUDGET", 4 * 4 * 6 - 1)  # 4 examples of 6 parameters
    layer = Affine()
    message = refusal(sequential(layer, 3), 3)
    assert layer.path in message
    assert "96 bytes at a batch of 4 (limit 95)" in message
    assert "Use microbatch_size" in message
    monkeypatch.setattr(fallback, "MEMORY_BUDGET", 4 * 4 * 6)
    assert_as_brute_force(sequential(Affine(), 3), values(4, 3))


def test_the_memory_budget_counts_the_capacity_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the examples of the batch that happened to come first."""
    monkeypatch.setattr(fallback, "MEMORY_BUDGET", 20 * 4 * 6 - 1)
    model, plan = sequential(Affine(), 3), plan_for(4, capacity=20)
    model.compile(optimizer=DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    x, y = values(4, 3), values(4, 2)
    with pytest.raises(UnsupportedLayerError, match=r"at a batch of 20 \(limit 479\)"):
        model.fit(plan.sampling.batches((x, y)), verbose=0)


def test_a_tensor_without_a_batch_axis_is_refused() -> None:
    class Scaled(Affine):
        def call(self, inputs: Any, factor: Any = None) -> Any:
            return super().call(inputs) * factor

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Scaled(name="scaled")

        def call(self, inputs: Any) -> Any:
            return self.scaled(inputs, factor=tf.constant(2.0))

    model = Model()
    model(values(1, 3))
    message = refusal(model, 3)
    assert "scaled" in message
    assert "without a batch axis; pass constants as attributes" in message


# ---- A layer called again on one example, while something still holds the whole batch.


def traced(model: keras.Model, *shape: int) -> None:
    """A forward and a backward pass in a graph, as training has it, of a batch of unknown size."""

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, *shape])])
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            recording = clipping.record(model, x, tape, batch_capacity=8)
            total = tf.reduce_sum(recording.outputs)
        recording.terms(tape.gradient(total, recording.targets))

    step.get_concrete_function()


class Keeps(Affine):
    """Multiplies with what an attribute holds, set in its first call or by somebody else."""

    context: Any = None

    def call(self, inputs: Any) -> Any:
        if self.context is None:
            self.context = keras.ops.sum(inputs, -1, keepdims=True)
        return super().call(inputs) * self.context


class Lends(keras.Model):
    """Its own call gives the layer a tensor of the batch, with the batch leading or summed."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.layer, self.what = Keeps(name="keeps"), what
        self.head = keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        self.layer.context = self.what(inputs)
        return self.head(self.layer(inputs))


@pytest.mark.parametrize(
    "what",
    [
        lambda x: x,
        lambda x: x[:, :1],
        lambda x: tf.reduce_sum(x),
        lambda x: tf.stop_gradient(tf.reduce_mean(x, 0)),
        lambda x: tf.shape(x)[0] * tf.constant([1, 2, 3]),
    ],
    ids=["whole", "column", "sum", "mean", "size"],
)
def test_a_tensor_of_the_batch_in_an_attribute_is_refused(what: Any) -> None:
    model = Lends(lambda x: tf.cast(what(x), tf.float32))
    model(values(4, 3))
    with pytest.raises(
        UnsupportedLayerError, match=r"keeps \(Keeps\): uses .* made outside of its call"
    ):
        traced(model, 3)
    plan = plan_for(4)
    model.compile(optimizer=DPSGDOptimizer("sgd", plan, 1.0), loss="mse", run_eagerly=True)
    with pytest.raises(
        UnsupportedLayerError, match=r"keeps \(Keeps\): uses .* made outside of its call"
    ):
        model.fit(plan.sampling.batches((values(4, 3), values(4, 2))), verbose=0)


def test_an_attribute_set_in_the_first_call_is_refused() -> None:
    layer = Keeps(name="keeps")
    inputs = keras.Input((3,))
    model = keras.Model(inputs, layer(inputs))
    layer.context = None
    with pytest.raises(
        UnsupportedLayerError, match=r"keeps \(Keeps\): uses .* made outside of its call"
    ):
        traced(model, 3)


def test_a_constant_in_an_attribute_is_fine() -> None:
    for constant in (tf.constant([1.0, 2.0, 3.0]), tf.ones([200, 3])[:1], 2.0):
        model = Lends(lambda x, constant=constant: constant)
        model(values(1, 3))
        traced(model, 3)
        assert_as_brute_force(model, values(4, 3))


def test_a_constant_made_in_the_call_is_fine() -> None:
    model = Lends(lambda x: tf.constant([1.0, 2.0, 3.0]) + 1.0)
    model(values(1, 3))
    traced(model, 3)
    assert_as_brute_force(model, values(4, 3))


def test_an_attribute_that_each_call_sets_anew_is_fine() -> None:
    class Sets(Keeps):
        def call(self, inputs: Any) -> Any:
            self.context = None
            return super().call(inputs)

    model = sequential(Sets(), 3)
    traced(model, 3)
    assert_as_brute_force(model, values(4, 3))


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: h[:, tf.newaxis] * tf.ones([1, 3, 1]),
        lambda h: tf.concat([h, h], 0),
        lambda h: tf.reshape(h, [-1]),
        lambda h: tf.transpose(h),
    ],
)
def test_an_output_without_the_batch_in_front_is_refused(mix: Any) -> None:
    """Or whose shape is another for one example."""

    class Mixes(Affine):
        def call(self, inputs: Any) -> Any:
            hidden = super().call(inputs)
            return mix(hidden) if hidden.shape[0] == 1 else hidden

    with pytest.raises(UnsupportedLayerError, match=r"mixes \(Mixes\): gives .* for one example"):
        traced(sequential(Mixes(name="mixes"), 3), 3)


def test_inputs_of_different_numbers_of_examples_are_refused() -> None:
    """Folded positions would give an example the row of another."""

    class Adds(Affine):
        def call(self, inputs: Any, other: Any) -> Any:
            return super().call(inputs) + 0 * keras.ops.mean(other, 0)

    class Folds(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.adds = Adds(name="adds")

        def call(self, inputs: Any) -> Any:
            return self.adds(inputs[:, 0], keras.ops.reshape(inputs, (-1, 3)))

    model = Folds()
    model(values(4, 2, 3))
    with pytest.raises(UnsupportedLayerError, match=r"adds \(Adds\).* 4 and 8|8 and 4"):
        clipped(model, values(4, 2, 3), np.ones(4, np.float32), 1.0)
    plan = plan_for(4)
    model.compile(optimizer=DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    with pytest.raises(PrivacyError, match=r"adds \(Adds\).* with 4 and 8 examples"):
        model.fit(plan.sampling.batches((values(4, 2, 3), values(4, 3))), verbose=0)


# ---- The one-example call is the same call.


def test_masks_that_inputs_carry_reach_the_layers_inside() -> None:
    class Pools(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.supports_masking = True
            self.pool = keras.layers.GlobalAveragePooling1D()

        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(shape[-1],), initializer="random_normal")

        def compute_mask(self, inputs: Any, mask: Any = None) -> None:
            return None

        def call(self, inputs: Any) -> Any:
            return self.pool(inputs) * self.scale

    ids = keras.Input((5,), dtype="int32")
    model = keras.Model(ids, Pools()(keras.layers.Embedding(7, 3, mask_zero=True)(ids)))
    assert_as_brute_force(model, np.array([[1, 2, 0, 0, 0], [3, 0, 4, 5, 0], [6, 6, 6, 6, 6]]))


def test_layers_inside_know_that_they_train() -> None:
    class Doubles(keras.layers.Layer):
        def call(self, inputs: Any, training: Any = None) -> Any:
            return inputs * 2 if training else inputs

    class Wraps(Affine):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Doubles()

        def call(self, inputs: Any) -> Any:
            return super().call(self.inner(inputs))

    layer = Wraps()
    model = sequential(layer, 3)
    x, y = values(4, 3), np.ones(4, np.float32)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(square_loss(y, model(x, training=True)))
    expected = tape.gradient(loss, [v.value for v in model.trainable_variables])
    found = clipped(model, x, y, 1e6).sums
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_mixed_precision() -> None:
    class Multiplies(Affine):
        def call(self, inputs: Any) -> Any:
            return tf.sin(inputs * self.scale) + tf.convert_to_tensor(self.shift)

    layer = Multiplies(dtype="mixed_bfloat16")
    result = clipped(sequential(layer, 3), values(4, 3), np.ones(4, np.float32), 1.0)
    assert result.finite.all()


class Decorated(Affine):
    """Its work is in a function that TensorFlow traces by itself."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.work = tf.function(lambda inputs: tf.sin(inputs * self.scale) + self.shift**2)

    def call(self, inputs: Any) -> Any:
        return self.work(inputs)


class Kept(Affine):
    """Uses its variable past Keras."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.kept = self.scale.value

    def call(self, inputs: Any) -> Any:
        return tf.sin(inputs * self.kept) + self.shift


@pytest.mark.parametrize("make", [Decorated, Kept])
def test_a_layer_whose_weights_keras_does_not_see_is_refused(make: Any) -> None:
    layer = make()
    message = refusal(sequential(layer, 3), 3)
    assert layer.path in message and "scale" in message and "leave tf.function out" in message

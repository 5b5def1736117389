"""Convolutions: exact against brute force for every class, geometry and way of recording."""

import functools
import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse.clipping import rules
from dp_sparse.clipping.recording import record
from dp_sparse.clipping.rules import convolution, rule_for
from tests.clipping.brute_force import assert_as_brute_force, clipped, square_loss, values

CONVOLUTIONS = {1: keras.layers.Conv1D, 2: keras.layers.Conv2D, 3: keras.layers.Conv3D}
TRANSPOSED = {
    1: keras.layers.Conv1DTranspose,
    2: keras.layers.Conv2DTranspose,
    3: keras.layers.Conv3DTranspose,
}
DEPTHWISE = {1: keras.layers.DepthwiseConv1D, 2: keras.layers.DepthwiseConv2D}
SEPARABLE = {1: keras.layers.SeparableConv1D, 2: keras.layers.SeparableConv2D}
LONGEST = {1: 9, 2: 6, 3: 4}  # spatial sizes, by rank


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, rule in convolution.RULES.items():
        if kind not in rules._RULES:
            monkeypatch.setitem(rules._RULES, kind, rule)


@pytest.fixture(params=["one block", "rows", "linear"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways of recording a kernel, rows of it as one block and as several."""
    if request.param == "linear":
        monkeypatch.setattr(convolution, "DIRECT_BUDGET", 0)
    if request.param != "one block":
        monkeypatch.setattr(convolution, "_FEW_CHANNELS", 0)
        monkeypatch.setattr(convolution, "_BLOCK_WIDTH", 4)


def model_of(layer: keras.layers.Layer, *inner: int | None) -> keras.Model:
    """The layer and a nonlinearity, so that cotangents differ by position."""
    return keras.Sequential([keras.Input(inner), layer, keras.layers.Activation("tanh")])


@st.composite
def geometries(
    draw: Any, ranks: tuple[int, ...] = (1, 2, 3), causal: bool = False, square: bool = False
) -> dict:
    """Rank, spatial sizes and arguments of a layer whose output is not empty."""
    rank = draw(st.sampled_from(ranks))
    sizes = draw(st.tuples(*[st.integers(2, LONGEST[rank])] * rank))
    kernel_size = tuple(draw(st.integers(1, min(3, size))) for size in sizes)
    arguments = {"kernel_size": kernel_size}
    paddings = ["valid", "same"] + (["causal"] if causal and rank == 1 else [])
    arguments["padding"] = draw(st.sampled_from(paddings))
    widened = draw(st.sampled_from(["strides", "dilation_rate", None]))
    if widened == "strides":
        strides = st.integers(1, 3)  # the same on every axis, where TensorFlow has no other
        arguments["strides"] = draw(strides if square else st.tuples(*[strides] * rank))
    if widened == "dilation_rate":
        arguments["dilation_rate"] = draw(st.integers(1, 2)) if rank < 3 else 1
    arguments["activation"] = draw(st.sampled_from([None, "relu", "softplus"]))
    arguments["use_bias"] = draw(st.booleans())
    return {"rank": rank, "sizes": sizes, "arguments": arguments}


def fits(geometry: dict) -> bool:
    """The output is not empty, and stock Keras survives its own gradient at a batch of 1.

    TensorFlow 2.21 corrupts memory there for strided kernels of size 1.
    """
    if math.prod(geometry["arguments"]["kernel_size"]) == 1 and "strides" in geometry["arguments"]:
        return False
    rate = geometry["arguments"].get("dilation_rate", 1)
    if geometry["arguments"]["padding"] != "valid":
        return True
    kernel_size = geometry["arguments"]["kernel_size"]
    return all((k - 1) * rate < s for k, s in zip(kernel_size, geometry["sizes"], strict=True))


@pytest.mark.usefixtures("_way")
class TestGeometries:
    @pytest.mark.slow
    @settings(max_examples=20, deadline=None)
    @given(
        geometry=geometries(causal=True).filter(fits),
        groups=st.sampled_from([1, 1, 1, 2, 3]),
        widths=st.tuples(st.integers(1, 2), st.integers(1, 3)),
        batch=st.integers(1, 4),
        seed=st.integers(0, 1000),
    )
    def test_convolution(
        self, geometry: dict, groups: int, widths: tuple[int, int], batch: int, seed: int
    ) -> None:
        keras.utils.set_random_seed(seed)
        width_in, filters = groups * widths[0], groups * widths[1]
        kind = CONVOLUTIONS[geometry["rank"]]
        layer = kind(filters, groups=groups, **geometry["arguments"])
        model = model_of(layer, *geometry["sizes"], width_in)
        x = values(batch, *geometry["sizes"], width_in, seed=seed)
        assert_as_brute_force(model, x, seed=seed)

    @pytest.mark.cases(1)
    @settings(max_examples=15, deadline=None)
    @given(
        geometry=geometries().filter(fits),
        width_in=st.integers(1, 3),
        filters=st.integers(1, 3),
        seed=st.integers(0, 1000),
    )
    def test_transposed(self, geometry: dict, width_in: int, filters: int, seed: int) -> None:
        keras.utils.set_random_seed(seed)
        layer = TRANSPOSED[geometry["rank"]](filters, **geometry["arguments"])
        model = model_of(layer, *geometry["sizes"], width_in)
        x = values(3, *geometry["sizes"], width_in, seed=seed)
        assert_as_brute_force(model, x, seed=seed)

    @pytest.mark.cases(1)
    @settings(max_examples=15, deadline=None)
    @given(
        geometry=geometries(ranks=(1, 2), square=True).filter(fits),
        width_in=st.integers(1, 3),
        multiplier=st.integers(1, 3),
        separable=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def test_depthwise_and_separable(
        self, geometry: dict, width_in: int, multiplier: int, separable: bool, seed: int
    ) -> None:
        keras.utils.set_random_seed(seed)
        arguments = geometry["arguments"] | {"depth_multiplier": multiplier}
        if separable:
            layer = SEPARABLE[geometry["rank"]](2, **arguments)
        else:
            layer = DEPTHWISE[geometry["rank"]](**arguments)
        model = model_of(layer, *geometry["sizes"], width_in)
        x = values(3, *geometry["sizes"], width_in, seed=seed)
        assert_as_brute_force(model, x, seed=seed)

    @pytest.mark.parametrize(("kernel_size", "width_in"), [(5, 3), (2, 9)])
    def test_too_wide_for_one_block(self, kernel_size: int, width_in: int) -> None:
        model = model_of(keras.layers.Conv2D(3, kernel_size, padding="same"), 6, 7, width_in)
        assert_as_brute_force(model, values(3, 6, 7, width_in))

    def test_few_positions_take_the_gram_matrices(self) -> None:
        model = model_of(keras.layers.Conv1D(20, 2), 4, 20)
        assert_as_brute_force(model, values(3, 4, 20))

    def test_strides_and_dilation_of_a_depthwise_layer(self) -> None:
        layer = keras.layers.DepthwiseConv2D(3, 2, "same", dilation_rate=2)
        assert_as_brute_force(model_of(layer, 7, 8, 2), values(3, 7, 8, 2))

    @pytest.mark.parametrize("output_padding", [0, 1])
    @pytest.mark.parametrize("padding", ["valid", "same"])
    def test_output_padding(self, padding: str, output_padding: int) -> None:
        layer = keras.layers.Conv2DTranspose(
            2, 3, strides=2, padding=padding, output_padding=output_padding
        )
        assert_as_brute_force(model_of(layer, 4, 3, 2), values(3, 4, 3, 2))

    def test_groups_of_one_channel(self) -> None:
        layer = keras.layers.Conv2D(6, 2, groups=3)
        assert_as_brute_force(model_of(layer, 4, 5, 3), values(3, 4, 5, 3))

    @pytest.mark.parametrize(
        "layer",
        [
            keras.layers.Conv2D(4, 2, strides=2, padding="same"),
            keras.layers.Conv2D(4, 2, groups=2),
            keras.layers.Conv2DTranspose(2, 2, strides=2),
            keras.layers.DepthwiseConv2D(2, padding="same"),
            keras.layers.SeparableConv2D(3, 2),
        ],
    )
    def test_reused_on_inputs_of_different_sizes(self, layer: keras.layers.Layer) -> None:
        """Gradients of the calls add before they are squared."""
        layer = type(layer).from_config(layer.get_config())
        one, two = keras.Input((5, 4, 2)), keras.Input((3, 6, 2))
        pooled = [keras.layers.GlobalAveragePooling2D()(layer(image)) for image in (one, two)]
        model = keras.Model([one, two], keras.layers.Subtract()(pooled))
        assert_as_brute_force(model, [values(4, 5, 4, 2), values(4, 3, 6, 2, seed=1)])

    def test_padding_of_the_batch_and_weights(self) -> None:
        model = model_of(keras.layers.Conv2D(3, 2, activation="relu"), 4, 4, 2)
        assert_as_brute_force(model, values(6, 4, 4, 2), padding=4, weighted=True)

    def test_two_convolutions_and_a_dense(self) -> None:
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(3, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Conv2D(4, 2, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )
        assert_as_brute_force(model, values(5, 8, 8, 1))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "layer",
        [
            keras.layers.Conv2D(3, 3, strides=2, padding="same"),
            keras.layers.Conv2D(4, 2, groups=2),
            keras.layers.Conv2DTranspose(3, 2, strides=2),
            keras.layers.SeparableConv2D(3, 2, depth_multiplier=2),
        ],
    )
    def test_unknown_sizes_in_a_graph(self, layer: keras.layers.Layer) -> None:
        """What is traced for batches and images of any size equals what is computed for one."""
        layer = type(layer).from_config(layer.get_config())
        model = model_of(layer, None, None, 2)
        signature = [tf.TensorSpec([None, None, None, 2]), tf.TensorSpec([None])]
        of_model = functools.partial(norms_and_sums, model)
        traced = tf.function(of_model, input_signature=signature)
        for batch, *size in ((3, 5, 4), (4, 6, 7)):
            x, y = tf.constant(values(batch, *size, 2)), tf.constant(values(batch))
            for in_graph, eager in zip(traced(x, y), of_model(x, y), strict=True):
                np.testing.assert_allclose(in_graph, eager, rtol=1e-4, atol=1e-4)

    def test_an_example_that_is_not_finite(self) -> None:
        model = model_of(keras.layers.Conv2D(3, 2), 4, 4, 2)
        x, y = values(4, 4, 4, 2), values(4)
        others = clipped(model, x[1:], y[1:], 1.0)
        x[0, 1, 1, 0] = np.inf
        found = clipped(model, x, y, 1.0)
        assert found.finite.tolist() == [False, True, True, True]
        for ours, theirs in zip(found.sums, others.sums, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)

    @pytest.mark.parametrize(
        ("layer", "inner"),
        [
            (keras.layers.Conv1D(4, 2, data_format="channels_first"), (2, 5)),
            (keras.layers.Conv1D(4, 2, padding="causal", data_format="channels_first"), (2, 5)),
            (keras.layers.Conv3D(4, 2, data_format="channels_first"), (2, 3, 4, 3)),
            (keras.layers.DepthwiseConv1D(2, data_format="channels_first"), (2, 5)),
            (keras.layers.DepthwiseConv2D(2, data_format="channels_first"), (2, 5, 4)),
            (keras.layers.SeparableConv1D(3, 2, data_format="channels_first"), (2, 5)),
            (keras.layers.SeparableConv2D(3, 2, data_format="channels_first"), (2, 5, 4)),
            (keras.layers.Conv2DTranspose(3, 2, data_format="channels_first"), (2, 5, 4)),
            (keras.layers.Conv2D(4, 2, data_format="channels_first"), (2, 5, 4)),
        ],
    )
    def test_channels_first(self, layer: keras.layers.Layer, inner: tuple[int, ...]) -> None:
        layer = type(layer).from_config(layer.get_config())
        assert_as_brute_force(model_of(layer, *inner), values(3, *inner))


def norms_and_sums(model: keras.Model, x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
    """Squared norms, and each variable's sum weighted by 0, 1, 2..."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        recording = record(model, x, tape, batch_capacity=4)
        loss = tf.reduce_sum(square_loss(y, recording.outputs))
    terms = [term for _, term in recording.terms(tape.gradient(loss, recording.targets))]
    factors = tf.range(tf.cast(tf.shape(x)[0], tf.float32))
    norms = tf.add_n([term.squared_norms() for term in terms])
    return [norms, *(term.clipped_sum(factors) for term in terms)]


@pytest.mark.parametrize("magnitude", [1e-30, 1e3, 1e18])
def test_one_example_moves_a_sum_by_at_most_the_clip_norm(magnitude: float) -> None:
    form = convolution.Convolution((2, 3, 4), (1,), (1,), "valid")
    x, dz = values(5, 6, 3), values(5, 5, 4)
    dz[0] *= magnitude
    sums = []
    for present in (slice(0, 5), slice(1, 5)):
        parts = form.example_gradients(tf.constant(x[present]), tf.constant(dz[present]))
        term = convolution.KernelGradients(parts, form)
        norms = np.sqrt(term.squared_norms().numpy())
        factors = tf.constant(1 / np.maximum(1, norms))
        sums.append(term.clipped_sum(factors).numpy().astype(np.float64))
    assert np.linalg.norm(sums[0] - sums[1]) <= 1.00001


LAYERS = [
    keras.layers.Conv1D(4, 2, padding="causal"),
    keras.layers.Conv2D(4, 2, groups=2),
    keras.layers.Conv3D(2, 2),
    keras.layers.DepthwiseConv1D(2, depth_multiplier=2),
    keras.layers.DepthwiseConv2D(2, depth_multiplier=2),
    keras.layers.SeparableConv1D(3, 2, strides=2),
    keras.layers.SeparableConv2D(3, 2, padding="same", activation="relu"),
    keras.layers.Conv1DTranspose(3, 2),
    keras.layers.Conv2DTranspose(3, 2, strides=2),
    keras.layers.Conv3DTranspose(3, 2),
]


@pytest.fixture(params=LAYERS, ids=lambda layer: type(layer).__name__)
def fresh(request: pytest.FixtureRequest) -> tuple[keras.layers.Layer, keras.Model, np.ndarray]:
    """A layer, its model and a batch."""
    layer = type(request.param).from_config(request.param.get_config())
    rank = 3 if "3D" in layer.name or "3d" in layer.name else len(layer.kernel_size)
    inner = (4, 5, 3)[:rank]
    return layer, model_of(layer, *inner, 2), values(4, *inner, 2)


def test_every_class_has_its_rule(fresh: Any) -> None:
    layer, model, x = fresh
    assert rule_for(layer) is convolution.RULES[type(layer)]
    assert_as_brute_force(model, x)


def test_every_layer_class_is_tried() -> None:
    assert {type(layer) for layer in LAYERS} == set(convolution.RULES)


def test_the_outputs_are_the_layers_own(fresh: Any) -> None:
    layer, model, x = fresh
    activation = layer.activation
    layer.bias.assign(values(*layer.bias.shape))
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        outputs = record(model, x, tape, batch_capacity=len(x)).outputs
    np.testing.assert_allclose(outputs, model(x), rtol=0, atol=1e-6)
    assert layer.activation is activation
    assert "call" not in vars(layer)


def test_frozen_kernels_and_trained_bias(fresh: Any) -> None:
    layer, model, x = fresh
    for variable in layer.trainable_variables:
        variable.trainable = variable is layer.bias
    assert len(model.trainable_variables) == 1
    assert_as_brute_force(model, x)


@pytest.mark.parametrize("trained", ["depthwise_kernel", "pointwise_kernel"])
def test_one_kernel_of_a_separable_layer(trained: str) -> None:
    layer = keras.layers.SeparableConv1D(3, 2)
    model = model_of(layer, 5, 2)
    for variable in layer.trainable_variables:
        variable.trainable = variable is getattr(layer, trained)
    assert_as_brute_force(model, values(3, 5, 2))


def test_mixed_precision(fresh: Any) -> None:
    layer, _, x = fresh
    config = layer.get_config() | {"dtype": keras.DTypePolicy("mixed_bfloat16")}
    model = model_of(type(layer).from_config(config), *x.shape[1:])
    assert_as_brute_force(model, x, tolerance=5e-2)


@pytest.mark.parametrize("kind", [keras.layers.Conv1D, keras.layers.SeparableConv1D])
def test_bias_where_keras_adds_it_along_the_last_axis(kind: type) -> None:
    """With channels first, if there are as many filters as positions."""
    layer = kind(4, 2, data_format="channels_first")
    model, x = model_of(layer, 2, 5), values(3, 2, 5)
    layer.bias.assign(values(4))
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        outputs = record(model, x, tape, batch_capacity=len(x)).outputs
    np.testing.assert_allclose(outputs, model(x), rtol=0, atol=1e-6)
    assert_as_brute_force(model, x)


@pytest.mark.parametrize("layer", [keras.layers.Conv2D, keras.layers.Conv2DTranspose])
def test_strided_kernels_of_size_one(layer: type) -> None:
    """By hand, since the stock gradient of such a kernel is not safe one example at a time."""
    bare = layer(3, 1, strides=2, use_bias=False)
    model = keras.Sequential([keras.Input((4, 4, 2)), bare])
    x = tf.constant(values(5, 4, 4, 2))
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        recording = record(model, x, tape, 5)
        losses = tf.reduce_sum(recording.outputs**2, axis=[1, 2, 3])
    [(_, term)] = recording.terms(tape.gradient(losses, recording.targets))
    outputs = recording.outputs.numpy()
    if layer is keras.layers.Conv2D:
        gradients = np.einsum("bhwc,bhwo->bco", x[:, ::2, ::2], 2 * outputs)
    else:
        gradients = np.einsum("bhwc,bhwo->boc", x, 2 * outputs[:, ::2, ::2])
    np.testing.assert_allclose(term.squared_norms(), np.sum(gradients**2, (1, 2)), rtol=1e-4)
    factors = np.arange(5, dtype=np.float32)
    expected = np.einsum("b,bco->co", factors, gradients)
    np.testing.assert_allclose(term.clipped_sum(tf.constant(factors))[0, 0], expected, rtol=1e-4)

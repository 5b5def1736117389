"""SimpleRNN, LSTM, GRU: exact against brute force, and the forward pass that of Keras."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dp_sparse import clipping
from dp_sparse.clipping import rules
from dp_sparse.clipping.rules import recurrent, rule_for
from dp_sparse.core.errors import UnsupportedLayerError
from tests.clipping.brute_force import assert_as_brute_force, values


def of_a_cell(units: int, **kwargs: Any) -> keras.layers.RNN:
    """Keras' general layer, which leaves the LSTM to a cell."""
    names = "activation", "use_bias", "dropout", "recurrent_dropout", "seed"
    own = {name: kwargs.pop(name) for name in names if name in kwargs}
    return keras.layers.RNN(
        keras.layers.LSTMCell(units, **own, dtype=kwargs.get("dtype")), **kwargs
    )


KINDS: dict[str, Callable[..., keras.layers.RNN]] = {
    "cell": of_a_cell,
    "simple": keras.layers.SimpleRNN,
    "lstm": keras.layers.LSTM,
    "gru": keras.layers.GRU,
    "gru_before": lambda *args, **kwargs: keras.layers.GRU(*args, reset_after=False, **kwargs),
}


@pytest.fixture(autouse=True)
def _no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which could stand in for the rules."""

    def refuse(layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"{layer.path} went to the fallback")

    monkeypatch.setattr(rules.fallback, "call_any_layer", refuse)


def padded(batch: int, steps: int, width: int, seed: int = 0) -> np.ndarray:
    """Values of which about a third of the steps are zeros, anywhere, and some examples all."""
    x = values(batch, steps, width, seed=seed)
    x[np.random.default_rng(seed).random((batch, steps)) < 0.35] = 0
    x[0] = 0
    return x


def randomised(model: keras.Model, seed: int = 0) -> keras.Model:
    """The model with biases, too, that are not 0."""
    for i, variable in enumerate(model.trainable_variables):
        variable.assign(values(*variable.shape, seed=seed + i) * 0.5)
    return model


def recorded(model: keras.Model, x: Any) -> Any:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        x = tf.nest.map_structure(tf.convert_to_tensor, x)
        return clipping.record(model, x, tape, batch_capacity=8).outputs


def assert_forward_unchanged(model: keras.Model, x: Any) -> None:
    ours = tf.nest.flatten(recorded(model, x))
    for one, other in zip(ours, tf.nest.flatten(model(x, training=True)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    steps=st.integers(1, 4),
    width=st.integers(1, 4),
    units=st.integers(1, 4),
    flags=st.fixed_dictionaries(
        {
            name: st.booleans()
            for name in (
                "use_bias",
                "return_sequences",
                "go_backwards",
                "unroll",
                "zero_output_for_mask",
            )
        }
    ),
    activation=st.sampled_from(["tanh", "relu", None]),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_layers(
    kind: str,
    steps: int,
    width: int,
    units: int,
    flags: dict[str, bool],
    activation: str | None,
    masked: bool,
    seed: int,
) -> None:
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((steps, width))
    hidden = keras.layers.Masking()(inputs) if masked else inputs
    outputs = KINDS[kind](units, activation=activation, **flags)(hidden)
    model = randomised(keras.Model(inputs, outputs), seed)
    x = padded(3, steps, width, seed) if masked else values(3, steps, width, seed=seed)
    assert_forward_unchanged(model, x)
    assert_as_brute_force(model, x, seed=seed, tolerance=2e-5)


@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_stacked_on_an_embedding_with_masked_ids(kind: str) -> None:
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(6, 3, mask_zero=True),
            KINDS[kind](4, return_sequences=True),
            KINDS[kind](3, go_backwards=True),
            keras.layers.Dense(2),
        ]
    )
    ids = np.array([[0, 0, 1, 2, 0], [3, 4, 5, 1, 1], [2, 0, 0, 0, 0], [0, 0, 0, 0, 0]], np.int32)
    assert_forward_unchanged(randomised(model), ids)
    assert_as_brute_force(model, ids)


@pytest.mark.cases(2)
@pytest.mark.parametrize("merge_mode", ["concat", "sum", "ave", "mul", None])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_bidirectional(kind: str, merge_mode: str | None) -> None:
    for unroll, return_sequences in ((False, True), (True, True), (False, False)):
        layer = KINDS[kind](3, return_sequences=return_sequences, unroll=unroll)
        inputs = keras.Input((4, 2))
        both = keras.layers.Bidirectional(layer, merge_mode=merge_mode)
        outputs = both(keras.layers.Masking()(inputs))
        model = randomised(keras.Model(inputs, outputs))
        assert_forward_unchanged(model, padded(4, 4, 2))
        assert_as_brute_force(model, padded(4, 4, 2))


def test_bidirectional_without_masks_and_with_states() -> None:
    inputs = keras.Input((4, 2))
    both = keras.layers.Bidirectional(keras.layers.LSTM(3, return_state=True))
    outputs, *states = both(inputs)
    again = keras.layers.Bidirectional(keras.layers.LSTM(3))(inputs, initial_state=states)
    model = randomised(keras.Model(inputs, [outputs, again]))
    assert_as_brute_force(model, values(4, 4, 2))


@pytest.mark.cases(6)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_gradients_flow_through_states(kind: str, masked: bool) -> None:
    """An encoder whose loss comes from its decoder alone."""
    source, target = keras.Input((4, 2)), keras.Input((3, 2))
    hidden = [keras.layers.Masking()(x) if masked else x for x in (source, target)]
    _, *states = KINDS[kind](3, return_state=True)(hidden[0])
    sequence, *last = KINDS[kind](3, return_sequences=True, return_state=True)(
        hidden[1], initial_state=states
    )
    model = randomised(keras.Model([source, target], [keras.layers.Dense(1)(sequence), *last]))
    x = [padded(4, 4, 2), padded(4, 3, 2, seed=1)] if masked else [values(4, 4, 2), values(4, 3, 2)]
    assert_forward_unchanged(model, x)
    assert_as_brute_force(model, x)


@pytest.mark.parametrize("flags", ["", "unroll", "zero", "unroll zero", "all", "all unroll zero"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_example_without_a_valid_step_keeps_its_given_state(kind: str, flags: str) -> None:
    """Its output is 0 all the same; others start late, or end early."""
    layer = KINDS[kind](
        3,
        unroll="unroll" in flags,
        zero_output_for_mask="zero" in flags,
        return_sequences="all" in flags,
        return_state=True,
    )
    sequence = keras.Input((3, 2))
    states = [keras.Input((3,)) for _ in layer.state_size]
    outputs = layer(keras.layers.Masking()(sequence), initial_state=states)
    model = randomised(keras.Model([sequence, *states], list(outputs)))
    x = values(4, 3, 2)
    x[0], x[1, :2], x[2, 2:], x[3, 1] = 0, 0, 0, 0
    given_states = [values(4, 3, seed=seed) for seed, _ in enumerate(states, 1)]
    assert_forward_unchanged(model, [x, *given_states])
    assert_as_brute_force(model, [x, *given_states])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_layer_called_twice(kind: str) -> None:
    one, two = keras.Input((4, 2)), keras.Input((2, 2))
    shared = KINDS[kind](3)
    model = randomised(keras.Model([one, two], keras.layers.Add()([shared(one), shared(two)])))
    assert_as_brute_force(model, [values(4, 4, 2), values(4, 2, 2, seed=1)])


def fix_masks(layer: keras.layers.RNN, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the cell dropout masks that are the same for each example, so that brute force holds.

    They differ by gate where the cell's do.
    """
    cell = layer.cell
    count = getattr(cell, "dropout_mask_count", None)

    def mask_of(width: int, seed: int) -> tf.Tensor:
        kept = np.random.default_rng(seed).random((1, width)) < 0.6
        return tf.constant(kept / 0.6, tf.float32)

    def getter(rate: float, width: int, start: int) -> Callable[[Any], Any]:
        one = mask_of(width, start)
        several = [mask_of(width, start + gate) for gate in range(count or 0)]
        return lambda _: None if rate == 0 else several or one

    width, units = cell.kernel.shape[0], cell.units
    monkeypatch.setattr(cell, "get_dropout_mask", getter(cell.dropout, width, 1))
    monkeypatch.setattr(
        cell, "get_recurrent_dropout_mask", getter(cell.recurrent_dropout, units, 50)
    )


@pytest.mark.cases(6)
@pytest.mark.parametrize(("dropout", "recurrent_dropout"), [(0.4, 0.0), (0.0, 0.4), (0.4, 0.4)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_dropout_with_given_masks(
    kind: str,
    masked: bool,
    dropout: float,
    recurrent_dropout: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = keras.Input((4, 5))
    layer = KINDS[kind](6, dropout=dropout, recurrent_dropout=recurrent_dropout)
    outputs = layer(keras.layers.Masking()(inputs) if masked else inputs)
    model = randomised(keras.Model(inputs, outputs))
    fix_masks(layer, monkeypatch)
    x = padded(4, 4, 5) if masked else values(4, 4, 5)
    assert_forward_unchanged(model, x)
    assert_as_brute_force(model, x)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_layer_with_dropout_called_twice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = keras.Input((4, 2)), keras.Input((2, 2))
    shared = KINDS[kind](3, dropout=0.4, recurrent_dropout=0.4)
    model = randomised(keras.Model([one, two], keras.layers.Add()([shared(one), shared(two)])))
    fix_masks(shared, monkeypatch)
    assert_as_brute_force(model, [values(4, 4, 2), values(4, 2, 2, seed=1)])


@pytest.mark.parametrize("recurrent_dropout", [0.0, 0.4])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_dropout_draws_what_keras_draws(kind: str, recurrent_dropout: float) -> None:
    layer = KINDS[kind](6, dropout=0.4, recurrent_dropout=recurrent_dropout, seed=3)
    model = keras.Sequential([keras.Input((4, 5)), layer])
    x = values(4, 4, 5)
    state = layer.cell.seed_generator.state
    before = np.array(state)
    ours = recorded(model, x)
    np.testing.assert_array_equal(state, before)
    np.testing.assert_allclose(ours, model(x, training=True), rtol=1e-5, atol=1e-6)


def test_drawn_masks_differ_by_example_and_are_used_in_the_gradient() -> None:
    """Per-example gradients by one tape over the whole batch, the masks drawn from one seed."""
    layer = keras.layers.LSTM(3, dropout=0.5, recurrent_dropout=0.5, seed=3)
    model = randomised(keras.Sequential([keras.Input((4, 5)), layer]))
    x = np.repeat(values(1, 4, 5), 4, axis=0)
    seed = np.array(layer.cell.seed_generator.state)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        recording = clipping.record(model, tf.constant(x), tape, batch_capacity=4)
        total = tf.reduce_sum(tf.square(recording.outputs))
    terms = {v.path: u for v, u in recording.terms(tape.gradient(total, recording.targets))}
    squared = np.zeros((4, 3))
    for i in range(4):
        layer.cell.seed_generator.state.assign(seed)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True)[i]))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        squared[i] = [float(tf.reduce_sum(g**2)) for g in gradients]
    for column, variable in enumerate(model.trainable_variables):
        found = terms[variable.path].squared_norms()
        np.testing.assert_allclose(found, squared[:, column], rtol=1e-4)
    assert len({round(value, 4) for value in squared[:, 0]}) == 4


@pytest.mark.parametrize("frozen", ["kernel", "recurrent_kernel", "bias", "layer"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_is_frozen_has_no_gradient(kind: str, frozen: str) -> None:
    layer = KINDS[kind](3)
    model = keras.Sequential([keras.Input((4, 2)), layer, keras.layers.Dense(1)])
    (layer if frozen == "layer" else getattr(layer.cell, frozen)).trainable = False
    assert len(model.trainable_variables) == (2 if frozen == "layer" else 4)
    assert_as_brute_force(model, values(4, 4, 2))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_layer_is_left_as_it_was(kind: str) -> None:
    layer = KINDS[kind](3, zero_output_for_mask=True)
    model = keras.Sequential([keras.Input((4, 2)), layer])
    before, cell_before = set(vars(layer)), set(vars(layer.cell))
    recorded(model, values(2, 4, 2))
    assert set(vars(layer)) == before
    assert set(vars(layer.cell)) - cell_before <= {"_dropout_mask", "_recurrent_dropout_mask"}
    assert layer.return_sequences is False
    assert layer.zero_output_for_mask is True


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_in_a_graph_with_unknown_length_and_batch(kind: str) -> None:
    """As eagerly; the loop is a while loop there, outside of which the projection is watched."""
    inputs = keras.Input((None, 2))
    hidden = KINDS[kind](3, return_sequences=True)(keras.layers.Masking()(inputs))
    model = randomised(keras.Model(inputs, KINDS[kind](3, go_backwards=True)(hidden)))

    def norms(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            recording = clipping.record(model, x, tape, batch_capacity=4)
            total = tf.reduce_sum(tf.square(recording.outputs))
        terms = recording.terms(tape.gradient(total, recording.targets))
        return tf.stack([term.squared_norms() for _, term in terms])

    x = tf.constant(padded(4, 5, 2))
    traced = tf.function(norms, input_signature=[tf.TensorSpec([None, None, 2])])
    np.testing.assert_allclose(traced(x), norms(x), rtol=1e-4, atol=1e-7)


def test_cotangents_compiled_by_xla() -> None:
    model = randomised(keras.Sequential([keras.Input((4, 2)), keras.layers.LSTM(3)]))

    def cotangents(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            recording = clipping.record(model, x, tape, batch_capacity=4)
            total = tf.reduce_sum(tf.square(recording.outputs))
        return tape.gradient(total, recording.targets)

    x = tf.constant(values(4, 4, 2))
    (compiled,) = tf.function(cotangents, jit_compile=True)(x)
    np.testing.assert_allclose(compiled, cotangents(x)[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_bfloat16_records_float32(kind: str) -> None:
    keras.utils.set_random_seed(0)
    layer = KINDS[kind](8, dtype="mixed_bfloat16", dropout=0.2, recurrent_dropout=0.2, seed=1)
    model = keras.Sequential([keras.Input((4, 5)), layer])
    x = values(4, 4, 5)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        recording = clipping.record(model, tf.constant(x), tape, batch_capacity=4)
        total = tf.reduce_sum(tf.square(recording.outputs))
    assert recording.outputs.dtype == tf.bfloat16
    terms = recording.terms(tape.gradient(total, recording.targets))
    for variable, term in terms:
        assert term.clipped_sum(tf.ones(4)).dtype in (tf.float32, tf.float64)
        assert term.clipped_sum(tf.ones(4)).shape == variable.shape
    expected = tf.cast(model(x, training=True), tf.float32)
    np.testing.assert_allclose(tf.cast(recording.outputs, tf.float32), expected, atol=0.03)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_stateful_layers_are_refused(kind: str) -> None:
    inputs = keras.Input((4, 2), batch_size=2)
    model = keras.Model(inputs, KINDS[kind](3, stateful=True)(inputs))
    with pytest.raises(UnsupportedLayerError, match="written in the forward pass"):
        recorded(model, values(2, 4, 2))


def test_a_cell_with_weights_in_its_activation_is_refused() -> None:
    layer = keras.layers.SimpleRNN(3, activation=keras.layers.PReLU())
    model = keras.Sequential([keras.Input((4, 2)), layer])
    model(values(2, 4, 2))
    with pytest.raises(UnsupportedLayerError, match=r"simple_rnn.*an activation without weights"):
        recorded(model, values(2, 4, 2))


def test_another_cell_has_no_rule() -> None:
    class Own(keras.layers.LSTMCell):
        """A subclass may do anything."""

    layer = keras.layers.LSTM(3)
    assert rule_for(layer) is rule_for(of_a_cell(3)) is recurrent.call_lstm
    layer.cell = Own(3)
    assert rule_for(layer) is None
    assert rule_for(keras.layers.RNN(Own(3))) is None
    layer = of_a_cell(3)
    layer.cell.call = lambda inputs, states, training=None: (inputs, states)
    assert rule_for(layer) is None


def test_padding_of_the_batch_adds_nothing() -> None:
    model = keras.Sequential([keras.Input((3, 2)), keras.layers.GRU(2)])
    assert_as_brute_force(model, values(6, 3, 2), padding=4)


def test_column_blocks_are_the_whole_kernel() -> None:
    form = recurrent.ColumnBlocks((4, 2))
    x, dz = tf.constant(values(3, 5, 2 * 7)), tf.constant(values(3, 5, 6, seed=1))
    first, second = form.blocks(x, dz)
    expected = [
        np.einsum("bti,bto->io", x[..., :7], dz[..., :4]),
        np.einsum("bti,bto->io", x[..., 7:], dz[..., 4:]),
    ]
    np.testing.assert_allclose(form.gradient(x, dz), np.concatenate(expected, 1), atol=1e-4)
    assert (first.cotangents.shape[-1], second.cotangents.shape[-1]) == (4, 2)

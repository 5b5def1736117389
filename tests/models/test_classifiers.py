"""The small classifiers have the paper's shape, and each takes a private step."""

from collections.abc import Callable

import keras
import numpy as np
import pytest

from models import classifiers
from tests.training_cases import assert_a_private_step_moves_every_weight


def parameters_by_hand(name: str) -> int:
    """Weights and biases, layer by layer, for images of 28×28 and reviews of 256 words."""
    return {
        "mlp": (784 * 128 + 128) + (128 * 256 + 256) + (256 * 10 + 10),
        # 28 - 4 = 24, pooled 12; 12 - 4 = 8, pooled 4
        "cnn": (25 * 20 + 20) + (25 * 20 * 50 + 50) + (4 * 4 * 50 * 128 + 128) + (128 * 10 + 10),
        "rnn": (28 * 128 + 128 * 128 + 128) + (128 * 10 + 10),
        "lstm": 4 * (28 * 128 + 128 * 128 + 128) + (128 * 10 + 10),
        # words; query, key, value and output; two normalisations; two layers; logits
        "transformer": 20_000 * 200
        + 4 * 200 * 200
        + 2 * (200 + 200)
        + (200 * 800 + 800)
        + (800 * 200 + 200)
        + (200 * 2 + 2),
    }[name]


@pytest.mark.parametrize("name", ["mlp", "cnn", "rnn", "lstm", "transformer"])
def test_parameters(name: str) -> None:
    assert getattr(classifiers, name)().count_params() == parameters_by_hand(name)


@pytest.mark.parametrize("name", ["mlp", "cnn", "rnn", "lstm"])
def test_images_with_channels(name: str) -> None:
    model = getattr(classifiers, name)((32, 32, 3), num_classes=7)
    assert model.output_shape == (None, 7)
    assert model.layers[-1].activation is keras.activations.linear


@pytest.mark.parametrize("depth", [2, 4, 6, 8])
def test_depth_of_the_mlp(depth: int) -> None:
    model = classifiers.mlp((4, 4), num_classes=3, hidden=(5,) * depth)
    hidden = [layer for layer in model.layers if isinstance(layer, keras.layers.Dense)][:-1]
    assert [layer.activation.__name__ for layer in hidden] == ["sigmoid"] * depth
    assert model.count_params() == (16 * 5 + 5) + (depth - 1) * (5 * 5 + 5) + (5 * 3 + 3)


def test_depth_of_recurrent_layers_and_blocks() -> None:
    deep = classifiers.rnn((4, 3), num_classes=2, units=(5, 6))
    assert deep.count_params() == (3 * 5 + 5 * 5 + 5) + (5 * 6 + 6 * 6 + 6) + (6 * 2 + 2)
    one, two = (
        classifiers.transformer(6, vocabulary=9, width=8, heads=2, feed_forward=12, blocks=blocks)
        for blocks in (1, 2)
    )
    block = 4 * 8 * 8 + 2 * (8 + 8) + (8 * 12 + 12) + (12 * 8 + 8)
    assert two.count_params() - one.count_params() == block


def test_rows_are_the_steps() -> None:
    model = classifiers.lstm((28, 20, 3))
    assert model.get_layer("rows").output.shape == (None, 28, 60)


@pytest.mark.parametrize("width", [9, 10])
def test_widths_that_heads_do_not_divide_are_refused(width: int) -> None:
    with pytest.raises(ValueError, match=f"heads=3 divides, got width={width}"):
        classifiers.transformer(width=width, heads=3)


def test_positions_are_sines_and_cosines() -> None:
    encoded = classifiers.PositionalEncoding()(np.zeros((1, 3, 4), np.float32))
    expected = [[np.sin(p), np.sin(p / 100), np.cos(p), np.cos(p / 100)] for p in range(3)]
    np.testing.assert_allclose(encoded[0], expected, rtol=1e-6)
    ones = classifiers.PositionalEncoding()(np.ones((1, 3, 4), np.float32))
    np.testing.assert_allclose(ones - encoded, np.full((1, 3, 4), 2.0), rtol=1e-6)


def test_word_order_matters() -> None:
    model = classifiers.transformer(6, vocabulary=9, width=8, heads=2)
    forwards = np.array([[1, 2, 3, 4, 5, 6]], np.int32)
    assert not np.allclose(model(forwards), model(forwards[:, ::-1]), atol=1e-4)


def test_a_saved_transformer_is_the_same(tmp_path) -> None:
    model = classifiers.transformer(6, vocabulary=9, width=8, heads=2)
    model.save(tmp_path / "model.keras")
    tokens = np.arange(12).reshape(2, 6) % 9
    restored = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(model(tokens), restored(tokens))


SMALL: dict[str, Callable[[], keras.Model]] = {
    "mlp": lambda: classifiers.mlp((6, 5), num_classes=3),
    "cnn": lambda: classifiers.cnn((16, 16), num_classes=3, kernels=(2, 3), hidden=(4,)),
    "rnn": lambda: classifiers.rnn((6, 5), num_classes=3, units=(4,)),
    "lstm": lambda: classifiers.lstm((6, 5), num_classes=3, units=(4,)),
    "transformer": lambda: classifiers.transformer(
        6, vocabulary=9, num_classes=3, width=8, heads=2, feed_forward=12
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_private_step_moves_every_weight(name: str) -> None:
    model = SMALL[name]()
    rng = np.random.default_rng(0)
    shape = (16, *model.input_shape[1:])
    x = rng.integers(0, 9, shape) if name == "transformer" else rng.random(shape, np.float32)
    assert_a_private_step_moves_every_weight(model, x, 3)

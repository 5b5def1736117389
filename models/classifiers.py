"""The five small classifiers of Lee and Kifer, section 6.1.1 (arXiv 2009.03106), giving logits.

An MLP, a CNN, an RNN and an LSTM on images, and a Transformer encoder on token ids. The depth
arguments are those that the paper's figures 5 to 7 vary. Where the paper does not say something,
the docstring of the function says what was chosen.
"""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from models.parts import classifier, with_channels


def mlp(
    input_shape: Sequence[int] = (28, 28),
    num_classes: int = 10,
    hidden: Sequence[int] = (128, 256),
    activation: str = "sigmoid",
) -> keras.Model:
    """The multi-layer perceptron: 128 and 256 sigmoid units.

    Args:
        input_shape: Of one image, with or without channels.
        num_classes: Logits.
        hidden: Units of each hidden layer; its length is the depth that figure 7 varies.
        activation: Of the hidden layers.

    Returns:
        A model from `[batch, *input_shape]` to `[batch, num_classes]`.
    """
    images = keras.Input(tuple(input_shape), name="images")
    values = keras.layers.Flatten(name="pixels")(images)
    for index, units in enumerate(hidden, start=1):
        values = keras.layers.Dense(units, activation=activation, name=f"hidden_{index}")(values)
    return classifier(images, values, num_classes, "mlp")


def cnn(
    input_shape: Sequence[int] = (28, 28),
    num_classes: int = 10,
    kernels: Sequence[int] = (20, 50),
    hidden: Sequence[int] = (128,),
    activation: str = "sigmoid",
) -> keras.Model:
    """The convolutional network: 20 and 50 kernels of 5×5 without padding, 128 units.

    Each convolution has stride 1 and is followed by 2×2 max-pooling of stride 2.

    Args:
        input_shape: Of one image, with or without channels.
        num_classes: Logits.
        kernels: Kernels of each convolution.
        hidden: Units of each fully connected layer before the logits.
        activation: Of convolutions and hidden layers; sigmoid is the paper's default.

    Returns:
        A model from `[batch, *input_shape]` to `[batch, num_classes]`.
    """
    images = keras.Input(tuple(input_shape), name="images")
    values = with_channels(images)
    for index, count in enumerate(kernels, start=1):
        convolution = keras.layers.Conv2D(count, 5, activation=activation, name=f"conv_{index}")
        values = convolution(values)
        values = keras.layers.MaxPooling2D(2, name=f"pool_{index}")(values)
    values = keras.layers.Flatten(name="features")(values)
    for index, units in enumerate(hidden, start=1):
        values = keras.layers.Dense(units, activation=activation, name=f"hidden_{index}")(values)
    return classifier(images, values, num_classes, "cnn")


def rnn(
    input_shape: Sequence[int] = (28, 28), num_classes: int = 10, units: Sequence[int] = (128,)
) -> keras.Model:
    """The vanilla recurrent network: 128 tanh units that read an image row by row.

    Args:
        input_shape: Of one image, with or without channels; a step sees a row of all channels.
        num_classes: Logits.
        units: Units of each recurrent layer.

    Returns:
        A model from `[batch, *input_shape]` to `[batch, num_classes]`.
    """
    return _recurrent(keras.layers.SimpleRNN, input_shape, num_classes, units, "rnn")


def lstm(
    input_shape: Sequence[int] = (28, 28), num_classes: int = 10, units: Sequence[int] = (128,)
) -> keras.Model:
    """The LSTM: 128 units that read an image row by row.

    Args: as `rnn`.

    Returns:
        A model from `[batch, *input_shape]` to `[batch, num_classes]`.
    """
    return _recurrent(keras.layers.LSTM, input_shape, num_classes, units, "lstm")


def transformer(
    sequence_length: int = 256,
    vocabulary: int = 20_000,
    num_classes: int = 2,
    width: int = 200,
    heads: int = 8,
    feed_forward: int = 800,
    blocks: int = 1,
) -> keras.Model:
    """The Transformer of the paper's figure 4: word embedding, positions, one encoder block.

    Words have 200 dimensions, as the paper's do; its attention has no biases (section 5.6). The
    paper states neither lengths, nor heads, nor the width between the two layers of a block, nor
    how positions are reduced to one vector: here they are averaged, padding included.

    Args:
        sequence_length: Token ids of one example.
        vocabulary: Rows of the word embedding.
        num_classes: Logits; 2 for the sentiment of a review.
        width: d_m of the embedding and the attention, a multiple of `heads`.
        heads: Attention heads, each of width / heads dimensions.
        feed_forward: ReLU units between the two fully connected layers of a block.
        blocks: Encoder blocks.

    Returns:
        A model from int `[batch, sequence_length]` to `[batch, num_classes]`.

    Raises:
        ValueError: When `width` is not even or not a multiple of `heads`.
    """
    if width % heads or width % 2:
        raise ValueError(f"Expected an even width that heads={heads} divides, got width={width}.")
    tokens = keras.Input((sequence_length,), dtype="int32", name="tokens")
    values = keras.layers.Embedding(vocabulary, width, name="words")(tokens)
    values = PositionalEncoding(name="positions")(values)
    for index in range(blocks):
        values = _encoder_block(values, heads, feed_forward, f"block_{index + 1}")
    values = keras.layers.GlobalAveragePooling1D(name="mean")(values)
    return classifier(tokens, values, num_classes, "transformer")


@keras.saving.register_keras_serializable(package="dp_sparse_models")
class PositionalEncoding(keras.layers.Layer):
    """√d·x plus the sines and cosines of the position (Vaswani et al., 2017, section 3.5).

    It has no parameters; sines fill the first half of the dimensions, cosines the second.
    """

    def call(self, inputs: tf.Tensor) -> tf.Tensor:  # [batch, positions, width]
        """The inputs, scaled, with each position's encoding added."""
        positions, width = inputs.shape[1:]
        encoding = keras.ops.convert_to_tensor(_sinusoids(positions, width), inputs.dtype)
        return inputs * keras.ops.cast(width**0.5, inputs.dtype) + encoding


def _sinusoids(positions: int, width: int) -> np.ndarray:
    """float32 `[positions, width]`; wavelengths grow geometrically from 2π to 20,000π."""
    frequencies = 10_000.0 ** (-2 * np.arange(width // 2) / width)
    angles = np.arange(positions)[:, None] * frequencies  # [positions, width / 2]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _encoder_block(
    values: keras.KerasTensor, heads: int, feed_forward: int, name: str
) -> keras.KerasTensor:
    """Self-attention, then two fully connected layers; each is added and normalised."""
    width = values.shape[-1]
    attention = keras.layers.MultiHeadAttention(
        heads, width // heads, use_bias=False, name=f"{name}_attention"
    )
    values = keras.layers.Add(name=f"{name}_attended")([values, attention(values, values)])
    values = keras.layers.LayerNormalization(name=f"{name}_attention_norm")(values)
    inner = keras.layers.Dense(feed_forward, activation="relu", name=f"{name}_inner")(values)
    outer = keras.layers.Dense(width, name=f"{name}_outer")(inner)
    values = keras.layers.Add(name=f"{name}_sum")([values, outer])
    return keras.layers.LayerNormalization(name=f"{name}_norm")(values)


def _recurrent(
    layer: type[keras.layers.Layer],
    input_shape: Sequence[int],
    num_classes: int,
    units: Sequence[int],
    name: str,
) -> keras.Model:
    images = keras.Input(tuple(input_shape), name="images")
    values = keras.layers.Reshape((input_shape[0], -1), name="rows")(images)
    for index, count in enumerate(units, start=1):
        inner = index < len(units)  # the next layer reads every step, not the last one alone
        values = layer(count, return_sequences=inner, name=f"{name}_{index}")(values)
    return classifier(images, values, num_classes, name)

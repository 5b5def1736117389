"""The first and the last layers that the image models have in common."""

import keras


def with_channels(images: keras.KerasTensor) -> keras.KerasTensor:
    """Adds one channel to images `[batch, height, width]`; leaves images with channels."""
    if len(images.shape) == 4:
        return images
    return keras.layers.Reshape((*images.shape[1:], 1), name="one_channel")(images)


def classifier(
    inputs: keras.KerasTensor, values: keras.KerasTensor, num_classes: int, name: str
) -> keras.Model:
    """A fully connected layer to the logits; the loss applies the softmax."""
    logits = keras.layers.Dense(num_classes, name="logits")(values)
    return keras.Model(inputs, logits, name=name)

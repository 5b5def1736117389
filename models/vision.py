"""ResNet-18, ResNet-101 (He et al., 2016) and VGG-16 (Simonyan and Zisserman, 2015), giving logits.

Each example must be normalised by itself, so GroupNormalization (Wu and He, 2018) replaces the
BatchNormalization of the published networks, or of their later variants. Its scale and offset are
trained, and parameter counts are the published ones. Lee and Kifer, sections 6.5 to 6.7, vary the
image size and the batch. There is no dropout, which private noise replaces.
"""

from collections.abc import Callable, Sequence

import keras

from models.parts import classifier, with_channels

_VGG16_STAGES = (2, 2, 3, 3, 3)  # convolutions before each pooling


def resnet18(
    input_shape: Sequence[int] = (224, 224, 3),
    num_classes: int = 1000,
    width: int = 64,
    groups: int = 32,
) -> keras.Model:
    """ResNet-18: stages of 2, 2, 2 and 2 basic blocks, 11.7 million parameters.

    Args:
        input_shape: Of one image, with or without channels.
        num_classes: Logits.
        width: Kernels of the first stage, a multiple of `groups`; each later stage doubles them.
        groups: Of channels normalised together.

    Returns:
        A model from `[batch, *input_shape]` to `[batch, num_classes]`.
    """
    return _resnet(_basic_block, (2, 2, 2, 2), input_shape, num_classes, width, groups, "resnet18")


def resnet101(
    input_shape: Sequence[int] = (224, 224, 3),
    num_classes: int = 1000,
    width: int = 64,
    groups: int = 32,
) -> keras.Model:
    """ResNet-101: stages of 3, 4, 23 and 3 bottleneck blocks, 44.5 million parameters.

    Args: as `resnet18`.

    Returns:
        A model from `[batch, *input_shape]` to `[batch, num_classes]`.
    """
    stages = (3, 4, 23, 3)
    return _resnet(_bottleneck, stages, input_shape, num_classes, width, groups, "resnet101")


def vgg16(
    input_shape: Sequence[int] = (224, 224, 3),
    num_classes: int = 1000,
    width: int = 64,
    groups: int = 32,
    hidden: Sequence[int] = (4096, 4096),
) -> keras.Model:
    """VGG-16 with normalised convolutions: 138 million parameters at 224×224.

    The first fully connected layer has all pixels of the last stage as inputs, so its size depends
    on the image's, unlike that of the ResNets.

    Args:
        input_shape: Of one image of at least 32×32, with or without channels.
        num_classes: Logits.
        width: Kernels of the first stage, a multiple of `groups`; up to 8 times as many later.
        groups: Of channels normalised together.
        hidden: Units of the fully connected layers.

    Returns:
        A model from `[batch, *input_shape]` to `[batch, num_classes]`.
    """
    images = keras.Input(tuple(input_shape), name="images")
    values = with_channels(images)
    for stage, convolutions in enumerate(_VGG16_STAGES):
        kernels = width * min(2**stage, 8)
        for index in range(convolutions):
            name = f"stage_{stage + 1}_conv_{index + 1}"
            values = keras.layers.Conv2D(kernels, 3, padding="same", name=name)(values)
            values = _normalized(values, groups, name)
        values = keras.layers.MaxPooling2D(2, name=f"stage_{stage + 1}_pool")(values)
    values = keras.layers.Flatten(name="features")(values)
    for index, units in enumerate(hidden, start=1):
        values = keras.layers.Dense(units, activation="relu", name=f"hidden_{index}")(values)
    return classifier(images, values, num_classes, "vgg16")


def _resnet(
    block: Callable[..., keras.KerasTensor],
    stages: Sequence[int],
    input_shape: Sequence[int],
    num_classes: int,
    width: int,
    groups: int,
    name: str,
) -> keras.Model:
    images = keras.Input(tuple(input_shape), name="images")
    values = with_channels(images)
    values = _normalized(_convolution(values, width, 7, 2, "stem"), groups, "stem")
    values = keras.layers.MaxPooling2D(3, strides=2, padding="same", name="stem_pool")(values)
    for stage, blocks in enumerate(stages):
        for index in range(blocks):
            strides = 2 if stage > 0 and index == 0 else 1
            block_name = f"stage_{stage + 1}_block_{index + 1}"
            values = block(values, width * 2**stage, strides, groups, block_name)
    values = keras.layers.GlobalAveragePooling2D(name="mean")(values)
    return classifier(images, values, num_classes, name)


def _basic_block(
    values: keras.KerasTensor, kernels: int, strides: int, groups: int, name: str
) -> keras.KerasTensor:
    """Two 3×3 convolutions beside the shortcut."""
    inner = _convolution(values, kernels, 3, strides, f"{name}_conv_1")
    inner = _normalized(inner, groups, f"{name}_conv_1")
    inner = _convolution(inner, kernels, 3, 1, f"{name}_conv_2")
    return _added(values, inner, strides, groups, name)


def _bottleneck(
    values: keras.KerasTensor, kernels: int, strides: int, groups: int, name: str
) -> keras.KerasTensor:
    """1×1, 3×3 and 1×1 convolutions, the last of four times the kernels, beside the shortcut.

    The 3×3 convolution has the stride, not the first 1×1: the later of the two published variants.
    """
    inner = _convolution(values, kernels, 1, 1, f"{name}_conv_1")
    inner = _normalized(inner, groups, f"{name}_conv_1")
    inner = _convolution(inner, kernels, 3, strides, f"{name}_conv_2")
    inner = _normalized(inner, groups, f"{name}_conv_2")
    inner = _convolution(inner, 4 * kernels, 1, 1, f"{name}_conv_3")
    return _added(values, inner, strides, groups, name)


def _added(
    values: keras.KerasTensor, inner: keras.KerasTensor, strides: int, groups: int, name: str
) -> keras.KerasTensor:
    """The normalised block plus its input, which is projected where shapes differ; then ReLU."""
    inner = _group_normalization(groups, f"{name}_last_norm")(inner)
    if strides > 1 or values.shape[-1] != inner.shape[-1]:
        values = _convolution(values, inner.shape[-1], 1, strides, f"{name}_shortcut")
        values = _group_normalization(groups, f"{name}_shortcut_norm")(values)
    values = keras.layers.Add(name=f"{name}_sum")([values, inner])
    return keras.layers.ReLU(name=f"{name}_relu")(values)


def _convolution(
    values: keras.KerasTensor, kernels: int, size: int, strides: int, name: str
) -> keras.KerasTensor:
    """Without bias: the normalisation after it has one."""
    return keras.layers.Conv2D(
        kernels, size, strides=strides, padding="same", use_bias=False, name=name
    )(values)


def _normalized(values: keras.KerasTensor, groups: int, name: str) -> keras.KerasTensor:
    values = _group_normalization(groups, f"{name}_norm")(values)
    return keras.layers.ReLU(name=f"{name}_relu")(values)


def _group_normalization(groups: int, name: str) -> keras.layers.Layer:
    return keras.layers.GroupNormalization(groups, name=name)

"""The vision networks have the published shapes, and each takes a private step."""

import itertools

import keras
import numpy as np
import pytest

from models import vision
from tests.training_cases import assert_a_private_step_moves_every_weight


def basic_block(before: int, after: int) -> int:
    """Two 3×3 convolutions with a scale and an offset, and the projection where widths differ."""
    projection = before * after + 2 * after if before != after else 0
    return 9 * before * after + 9 * after * after + 2 * 2 * after + projection


def bottleneck(before: int, inner: int) -> int:
    """Convolutions of 1×1, 3×3 and 1×1, normalised, and the projection where widths differ."""
    after = 4 * inner
    projection = before * after + 2 * after if before != after else 0
    norms = 2 * inner + 2 * inner + 2 * after
    return before * inner + 9 * inner * inner + inner * after + norms + projection


def stem(channels: int) -> int:
    return 49 * channels * 64 + 2 * 64


def test_parameters_of_resnet18() -> None:
    widths = [(64, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512)]
    body = sum(basic_block(*pair) for pair in [*widths, (512, 512)])
    model = vision.resnet18((32, 32, 3), num_classes=1000)
    assert stem(3) + body + 512 * 1000 + 1000 == 11_689_512  # as published
    assert model.count_params() == 11_689_512


def test_parameters_of_resnet101() -> None:
    before, body = 64, 0
    for inner, blocks in [(64, 3), (128, 4), (256, 23), (512, 3)]:
        for _ in range(blocks):
            body += bottleneck(before, inner)
            before = 4 * inner
    model = vision.resnet101((32, 32, 1), num_classes=10)
    assert stem(3) + body + 2048 * 1000 + 1000 == 44_549_160  # as published
    assert model.count_params() == stem(1) + body + 2048 * 10 + 10


def test_parameters_of_vgg16() -> None:
    kernels = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    body = sum(
        9 * before * after + after + 2 * after for before, after in itertools.pairwise(kernels)
    )
    head = (4096 * 4096 + 4096) + (4096 * 1000 + 1000)
    assert body + (7 * 7 * 512 * 4096 + 4096) + head == 138_365_992  # as published, at 224×224
    model = vision.vgg16((32, 32, 3), hidden=(16,))
    assert model.count_params() == body + (512 * 16 + 16) + (16 * 1000 + 1000)


def small(name: str, shape: tuple[int, ...]) -> keras.Model:
    options = {"hidden": (16, 16)} if name == "vgg16" else {}
    return getattr(vision, name)(shape, num_classes=3, width=4, groups=2, **options)


@pytest.mark.cases(4)
@pytest.mark.parametrize("shape", [(32, 32), (48, 40, 3), (64, 64, 2)])
@pytest.mark.parametrize("name", ["resnet18", "resnet101", "vgg16"])
def test_any_size_and_channels(name: str, shape: tuple[int, ...]) -> None:
    logits = small(name, shape)(np.zeros((2, *shape), np.float32))
    assert logits.shape == (2, 3)


@pytest.mark.parametrize("name", ["resnet18", "resnet101", "vgg16"])
def test_resolution_shrinks_as_published(name: str) -> None:
    model = small(name, (64, 96, 3))
    last = "stage_5_pool" if name == "vgg16" else model.layers[-3].name
    assert model.get_layer(last).output.shape[1:3] == (2, 3)


def test_examples_are_normalised_alone() -> None:
    """An example's logits do not depend on its batch, in training either."""
    model = small("resnet18", (32, 32))
    images = np.random.default_rng(0).random((4, 32, 32), np.float32)
    together = model(images, training=True)
    np.testing.assert_allclose(together[:1], model(images[:1], training=True), atol=1e-5)
    assert not any(isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers)


NETWORKS = [
    "resnet18",
    "vgg16",
    pytest.param("resnet101", marks=pytest.mark.slow),  # a minute to trace 104 convolutions
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_private_step_moves_every_weight(name: str) -> None:
    model = small(name, (32, 32))
    images = np.random.default_rng(0).random((8, 32, 32), np.float32)
    assert_a_private_step_moves_every_weight(model, images, 3)

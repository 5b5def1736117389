"""The pCTR model has the paper's shape."""

import keras
import numpy as np
import pytest

from models.pctr import embedding_width, pctr
from pipelines.criteo.schema import TABLE3_VOCABULARIES


@pytest.mark.parametrize(("vocabulary", "width"), [(1472, 12), (82_741, 33), (3, 2), (56_473, 30)])
def test_widths_follow_the_paper(vocabulary: int, width: int) -> None:
    assert embedding_width(vocabulary) == width


def test_layers_and_parameters() -> None:
    model = pctr(TABLE3_VOCABULARIES)
    tables = [layer for layer in model.layers if isinstance(layer, keras.layers.Embedding)]
    hidden = [layer for layer in model.layers if isinstance(layer, keras.layers.Dense)]
    assert sum(layer.embeddings.shape[0] for layer in tables) == 338_782
    assert sum(layer.count_params() for layer in tables) == 9_599_632
    assert [layer.units for layer in hidden] == [598, 598, 598, 598, 1]
    assert [layer.activation.__name__ for layer in hidden] == ["relu"] * 4 + ["linear"]


def test_one_logit_an_example() -> None:
    model = pctr([5, 7], num_integers=3, hidden=(4,))
    x = {"integers": np.zeros((6, 3), np.float32), "categories": np.ones((6, 2), np.int32)}
    assert model(x).shape == (6, 1)

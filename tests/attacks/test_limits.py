"""What docs/guarantees.md says is not found, measured: its figures are those of these attacks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest

from tests.attacks.mixing_batch import by_place
from tests.attacks.towers import Made, problem
from tests.attacks.ways import WAYS, Way, measured

GUARANTEES = Path(__file__).parents[2] / "docs" / "guarantees.md"


class PlaceAndMasks(keras.layers.Layer):
    """Random, and what it gives follows from an example's place in its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, values: Any, training: bool = False) -> Any:
        return by_place(self.dropout(values, training=training))


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize(
    ("figure", "words", "attack"),
    [
        (1.54, "a sensitivity of {} was measured", measured(problem(between=Made(PlaceAndMasks)))),
    ],
    ids=["place and masks"],
)
def test_figures_of_what_is_not_found(
    figure: float, words: str, attack: Callable[[Way], float]
) -> None:
    assert attack(WAYS["graph"]) == pytest.approx(figure, abs=0.005)
    assert words.format(figure) in " ".join(GUARANTEES.read_text().split())

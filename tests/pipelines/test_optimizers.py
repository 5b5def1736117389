"""The optimizer that a config names."""

from typing import Any

import ml_collections
import pytest

from pipelines.optimizers import optimizer_of


def config(name: str, **options: Any) -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict({"optimizer": {"name": name, "options": options}})


def test_options_go_before_defaults() -> None:
    optimizer = optimizer_of(config("SGD", momentum=0.5), momentum=0.9, learning_rate=0.25)
    assert optimizer.momentum == 0.5
    assert float(optimizer.learning_rate) == 0.25


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config("Nowhere"), "name='Nowhere' and options={}"),
        (config("Adam", momentum=0.9), r"name='Adam' and options={'momentum': 0.9}"),
        (config("SGD", momentum=7), r"options={'momentum': 7}: `momentum` must be"),
        (config("SGD", learning_rate=[1]), r"options={'learning_rate'"),
    ],
)
def test_what_keras_does_not_have(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"Expected optimizer.name.*{message}"):
        optimizer_of(given)

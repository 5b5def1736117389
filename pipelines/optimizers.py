"""The Keras optimizer that a config names."""

from collections.abc import Mapping
from typing import Any

import keras
import ml_collections


def optimizer_of(config: ml_collections.ConfigDict, **defaults: Any) -> keras.optimizers.Optimizer:
    """`config.optimizer.name`, made with `config.optimizer.options` on top of `defaults`.

    Raises:
        ValueError: Keras has no such optimizer, or the optimizer no such option.
    """
    name, options = config.optimizer.name, _plain(config.optimizer.options)
    try:
        return keras.optimizers.get({"class_name": name, "config": {**defaults, **options}})
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Expected optimizer.name and optimizer.options that Keras has, got name={name!r} and "
            f"options={options!r}: {_first_sentence(error)}"
        ) from error


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in options}


def _first_sentence(error: Exception) -> str:
    """The first line of Keras' message; later lines print whole configs."""
    return str(error).splitlines()[0]

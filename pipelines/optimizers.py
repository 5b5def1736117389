"""The Keras optimizer that a config names."""

from collections.abc import Mapping
from typing import Any

import keras
import ml_collections


def optimizer_of(
    config: ml_collections.ConfigDict, of: str = "optimizer", **defaults: Any
) -> keras.optimizers.Optimizer:
    """The optimizer that `config.optimizer` names, with its `options` on top of `defaults`.

    Args:
        config: Of a run.
        of: Its part that has `name` and `options`.
        **defaults: Options of Keras' optimizer.

    Raises:
        ValueError: Keras has no such optimizer, or the optimizer no such option.
    """
    name, options = config[of].name, _plain(config[of].options)
    kind = getattr(keras.optimizers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer)):
        raise ValueError(
            f"Expected {of}.name to be an optimizer of keras.optimizers, such as Adam, got "
            f"{of}.name={name!r}."
        )
    try:
        return keras.optimizers.get({"class_name": name, "config": {**defaults, **options}})
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Expected {of}.options that {name} has, got {of}.options={options!r}: "
            f"{_first_sentence(error)}"
        ) from error


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in options}


def _first_sentence(error: Exception) -> str:
    """The first line of Keras' message; later lines print whole configs."""
    return str(error).splitlines()[0]

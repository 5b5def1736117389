"""The Keras optimizer that a config names."""

import math
from collections.abc import Mapping
from typing import Any

import keras
import ml_collections


def optimizer_of(
    config: ml_collections.ConfigDict,
    of: str = "optimizer",
    steps: int | None = None,
    noisy: bool = True,
    **defaults: Any,
) -> keras.optimizers.Optimizer:
    """The optimizer that `config.optimizer` names, with its `options` on top of `defaults`.

    Args:
        config: Of a run.
        of: Its part that has `name` and `options`, and may have `decays` and `walk`.
        steps: Of the run, over which the learning rate falls to 0 along a line if it `decays`.
        noisy: Whether gradients have noise: the rate is at most walk / √steps then, if walk > 0.
        **defaults: Options of Keras' optimizer.

    Raises:
        ValueError: Keras has no such optimizer, the optimizer no such option, or a rate that is to
            decay or to be lowered is not given.
    """
    name, options = config[of].name, _plain(config[of].options)
    kind = getattr(keras.optimizers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer)):
        raise ValueError(
            f"Expected {of}.name to be an optimizer of keras.optimizers, such as Adam, got "
            f"{of}.name={name!r}."
        )
    decays, walk = config[of].get("decays", False), noisy and config[of].get("walk", 0.0)
    if steps is not None and (decays or walk):
        if "learning_rate" not in options:
            raise ValueError(
                f"Expected {of}.options.learning_rate where it decays or has a walk, got {options}."
            )
        if walk:
            options["learning_rate"] = min(options["learning_rate"], walk / math.sqrt(steps))
        if decays:
            rate = options["learning_rate"]
            falling = keras.optimizers.schedules.PolynomialDecay(rate, steps, 0.0)
            options["learning_rate"] = keras.optimizers.schedules.serialize(falling)
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

"""Models with GroupNormalization in place of BatchNormalization, which mixes examples."""

import math
from typing import Any

import keras
from keras.src.models import Functional

from dp_sparse.optimizers import take_over

_GROUPS = 8


def without_batch_normalization(model: keras.Model) -> tuple[keras.Model, list[str]]:
    """The model, not compiled, with other normalisation and the same weights elsewhere.

    Also what it has now, with its path; the same model if there is nothing to replace.

    Raises:
        ValueError: A model of a class of its own, one that is not built, a normalisation inside of
            another layer, or a layer that cannot be copied.
    """
    old = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    if not old:
        return model, []
    _require_copies(model, old)
    changed: list[str] = []

    def cloned(layer: keras.layers.Layer) -> keras.layers.Layer:
        if not isinstance(layer, keras.layers.BatchNormalization):
            return _copied(layer)
        made = _in_groups(layer)
        changed.append(f"GroupNormalization({made.groups}) at {layer.path or layer.name}")
        return made

    call = None if isinstance(model, keras.Sequential) else _called_as_before
    made = keras.models.clone_model(model, clone_function=cloned, call_function=call)
    for before, after in zip(model.layers, made.layers, strict=True):
        kept = before.weights
        if isinstance(before, keras.layers.BatchNormalization):
            kept = [weight for weight in (before.gamma, before.beta) if weight is not None]
        after.set_weights([weight.numpy() for weight in kept])
        after.trainable = before.trainable
        take_over([*zip(kept, after.weights, strict=True)])
    return made, changed


def _require_copies(model: keras.Model, old: list[keras.layers.Layer]) -> None:
    """Raises ValueError for a model whose copy would be another one."""
    if type(model) not in (keras.Sequential, Functional):
        raise ValueError(
            f"Expected a functional or Sequential model with fix=True, got "
            f"{type(model).__name__}: replace its BatchNormalization by GroupNormalization."
        )
    if not model.built or len(old) > sum(layer in model.layers for layer in old):
        raise ValueError(
            f"Expected {model.name} built, with BatchNormalization among its own layers, and fix="
            "True, got it unbuilt or with one inside of another layer.\nCall it on a batch first, "
            "or replace it by GroupNormalization by hand."
        )


def _copied(layer: keras.layers.Layer) -> keras.layers.Layer:
    try:
        return type(layer).from_config(layer.get_config())
    except (NotImplementedError, TypeError) as error:
        raise ValueError(
            f"Expected layers with get_config and fix=True, got {layer.path or layer.name}, which "
            "cannot be copied.\nReplace BatchNormalization by GroupNormalization by hand."
        ) from error


def _in_groups(layer: keras.layers.BatchNormalization) -> keras.layers.GroupNormalization:
    """Normalisation of each example, by groups of the same channels."""
    axes = layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis]
    channels = int(layer.gamma.shape[0] if layer.scale else layer.moving_mean.shape[0])
    return keras.layers.GroupNormalization(
        math.gcd(channels, _GROUPS),
        axis=axes[0],
        epsilon=layer.epsilon,
        center=layer.center,
        scale=layer.scale,
        name=layer.name,
    )


def _called_as_before(layer: keras.layers.Layer, *inputs: Any, **arguments: Any) -> Any:
    """A layer of a functional model; of BatchNormalization's arguments, only the input is left."""
    if isinstance(layer, keras.layers.GroupNormalization):
        arguments = {n: given for n, given in arguments.items() if n not in ("mask", "training")}
    return layer(*inputs, **arguments)

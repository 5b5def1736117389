"""What an optimizer's updates have gathered, so that the optimizer of another plan may go on."""

from collections.abc import Iterator, Sequence
from typing import Any

import keras


def gathered_by(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The slots of a Keras optimizer and its count of updates; not its learning rate."""
    rate = optimizer._learning_rate
    return [variable for variable in optimizer.variables if variable is not rate]


def check_successor(optimizer: Any, previous: Any) -> None:
    """Raises ValueError unless `previous` trained the model of `optimizer` under another plan."""
    if type(previous) is not type(optimizer):
        raise ValueError(
            f"Expected the {type(optimizer).__name__} of an earlier part of the data, got "
            f"{type(previous).__name__}: train all parts with one kind of optimizer."
        )
    if previous.plan.run_id == optimizer.plan.run_id:
        raise ValueError(
            "Expected an optimizer of another plan, got one of the same: to go on with a plan, use "
            "PrivateCheckpoint or a saved model."
        )
    models = [None if o._model is None else o._model() for o in (optimizer, previous)]
    if models[0] is None or models[0] is not models[1] or not previous.built:
        raise ValueError(
            "Expected an optimizer that trained the model with which this one is compiled: compile "
            "the model with this one first, and pass the one before it, which has taken steps."
        )


def same_slots(
    own: Sequence[keras.Variable], previous: Sequence[keras.Variable]
) -> Iterator[tuple[keras.Variable, keras.Variable]]:
    """Pairs of slots that serve the same purpose.

    Raises:
        ValueError: They are not those of the same model under optimizers with the same settings.
    """
    described = [[(v.name, tuple(v.shape), v.dtype) for v in slots] for slots in (own, previous)]
    if described[0] != described[1]:
        pairs = zip([*described[0], None], [*described[1], None], strict=False)
        wanted, got = next(pair for pair in pairs if pair[0] != pair[1])
        raise ValueError(
            f"Expected the slots of an optimizer like this one on the same model, got {got} where "
            f"this one has {wanted}: wrap the same Keras optimizer, and train the same model."
        )
    return zip(own, previous, strict=True)

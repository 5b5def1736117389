"""The trained model, for use on the items of the data: histories in, a score for each item out."""

import keras
import numpy as np

import dp_sparse
from models.sequence_transformer import last_position

NEVER = -1e9  # the score of items that were filtered out, and of padding
_LONGEST = 2**30  # more than any row has numbers


def write_export(
    path: str, model: keras.Model, kept: np.ndarray, items: np.ndarray, note: str
) -> dp_sparse.Export:
    """Exports a model under the plan it trained with.

    Args:
        path: A folder that is not there yet.
        model: The trained one, of the items that were kept.
        kept: int64, the item of each of its numbers from 1 on.
        items: int64, the declared item set, from 1 on: the export has its numbers.
        note: Whom the statement protects.

    Raises:
        ValueError: As `dp_sparse.export_model`.
    """

    def of_all_items(trained: keras.Model) -> keras.Model:
        return with_numbers(last_position(trained), kept, items)

    return dp_sparse.export_model(model, path, as_model=of_all_items, note=note)


def with_numbers(model: keras.Model, kept: np.ndarray, items: np.ndarray) -> keras.Model:
    """From the items of users to a score for each item, by the numbers of the item set.

    Args:
        model: From numbers of kept items `[batch, length]` to logits `[batch, kept + 1]`.
        kept: int64, the item of each of its numbers from 1 on.
        items: int64, the item set, whose numbers begin with 1, too.

    Returns:
        A model of Keras' own operations: int32 `[batch, any length]`, each user's items in the
        order of time, 0 for padding, to `[batch, items + 1]`. Items that were not kept are left out
        of what a user had, as in training, and are never found. Of the others the last `length` are
        read. A number beyond the set is an error on a CPU.
    """
    of_set = np.zeros(len(items) + 1, np.int32)  # the model's number of each of the set
    order = np.argsort(items)
    of_set[order[np.searchsorted(items[order], kept)] + 1] = np.arange(1, len(kept) + 1)
    given = keras.Input((None,), dtype="int32")
    numbers = keras.ops.take(keras.ops.convert_to_tensor(of_set), given, axis=0)
    logits = model(_last(numbers, model.input.shape[1]))
    never = keras.ops.full_like(logits[:, :1], NEVER)
    found = keras.ops.concatenate([never, logits[:, 1:]], axis=1)
    return keras.Model(given, keras.ops.take(found, keras.ops.convert_to_tensor(of_set), axis=1))


def _last(numbers: keras.KerasTensor, length: int) -> keras.KerasTensor:
    """The last numbers above 0 of each row, in their order, behind zeros: `[batch, length]`."""
    numbers = keras.ops.pad(numbers, [[0, 0], [length, 0]])
    places = keras.ops.cumsum(keras.ops.ones_like(numbers), axis=1)
    behind = keras.ops.cast(numbers > 0, "int32") * _LONGEST
    order = keras.ops.argsort(places + behind, axis=1)[:, -length:]
    return keras.ops.take_along_axis(numbers, order, axis=1)

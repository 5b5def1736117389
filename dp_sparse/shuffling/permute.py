"""Random permutations of groups, by index gathers. O(weights of the groups)."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.shuffling.groups import Group

FollowersOf = Callable[[keras.Variable], Sequence[keras.Variable]]


def shuffle(groups: Sequence[Group], draw: noise.Draw, followers: FollowersOf) -> None:
    """Permutes every group's variables, and what follows each of them (slots of optimizers)."""
    values: dict[int, tf.Tensor] = {}
    variables: dict[int, keras.Variable] = {}
    for number, group in enumerate(groups):
        for part, places in zip(group.parts, permutations(group, draw, number), strict=True):
            for member in part.members:
                for variable in (member.variable, *followers(member.variable)):
                    before = values.get(id(variable), tf.convert_to_tensor(variable.value))
                    values[id(variable)] = permuted(before, member.axis, places)
                    variables[id(variable)] = variable
    for key, value in values.items():
        variables[key].assign(value)


def permutations(group: Group, draw: noise.Draw, number: int) -> list[tf.Tensor]:
    """Of each part's units, int32 `[heads · size]`: which unit comes to each place.

    Heads, and the units of each head and part, have uniform and independent permutations, of 53
    random bits each.
    """
    heads, sizes = group.heads or 1, [part.size for part in group.parts]
    count = tf.constant(heads * (1 + sum(sizes)))
    keys = noise.uniform(draw, noise.Purpose.DENSE + number, count)
    of_heads, *of_units = tf.split(keys, [heads, *(heads * size for size in sizes)])
    order = tf.argsort(of_heads)[:, tf.newaxis]
    found = []
    for size, units in zip(sizes, of_units, strict=True):
        within = tf.argsort(tf.reshape(units, [heads, size]), axis=1)
        found.append(tf.reshape(size * order + within, [-1]))
    return found


def permuted(values: tf.Tensor, axis: int, places: tf.Tensor) -> tf.Tensor:
    """`values` with unit `places[i]` at place i.

    Args:
        values: Of any static shape.
        axis: From which on as many axes hold the units, flattened, as there are places.
        places: int32 `[units]`.
    """
    outer = values.shape[:axis].num_elements()
    flat = tf.reshape(values, [outer, places.shape[0], -1])
    gathered = tf.gather(flat, places, axis=1) if outer == 1 else _inner(flat, places)
    return tf.reshape(gathered, values.shape)


@tf.function(jit_compile=True, autograph=False)
def _inner(values: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Along the second of three axes; TensorFlow's own gather is several times slower there."""
    return tf.gather(values, places, axis=1)

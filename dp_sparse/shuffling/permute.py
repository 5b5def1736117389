"""Random permutations of groups, by index gathers. O(weights of the groups)."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.shuffling.groups import Group, Member

FollowersOf = Callable[[keras.Variable], Sequence[keras.Variable]]


def permutations(group: Group, draw: noise.Draw, number: int) -> tf.Tensor:
    """Uniform and independent permutations, int32 `[permutations, size]`, of 53 random bits."""
    count = group.size * group.permutations
    keys = noise.uniform(draw, noise.Purpose.DENSE + number, tf.constant(count))
    return tf.argsort(tf.reshape(keys, [group.permutations, group.size]), axis=1)


def shuffle(groups: Sequence[Group], draw: noise.Draw, followers: FollowersOf) -> None:
    """Permutes every group's variables, and what follows each of them (slots of optimizers)."""
    values: dict[int, tf.Tensor] = {}
    variables: dict[int, keras.Variable] = {}
    for number, group in enumerate(groups):
        places = permutations(group, draw, number)
        for member in group.members:
            for variable in (member.variable, *followers(member.variable)):
                before = values.get(id(variable), tf.convert_to_tensor(variable.value))
                values[id(variable)] = permuted(before, member, places)
                variables[id(variable)] = variable
    for key, value in values.items():
        variables[key].assign(value)


def permuted(values: tf.Tensor, member: Member, places: tf.Tensor) -> tf.Tensor:
    """`values` with entry `places[i]` of the axis at i."""
    if member.head_axis is None:
        return tf.gather(values, places[0], axis=member.axis)
    order = [member.head_axis, member.axis]
    order += [axis for axis in range(values.shape.rank) if axis not in order]
    moved = tf.gather(tf.transpose(values, order), places, axis=1, batch_dims=1)
    return tf.transpose(moved, [order.index(axis) for axis in range(len(order))])

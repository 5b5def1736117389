"""Models whose forward pass lets one example, its place or the batch's size reach the others."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.attacks.entries import MEASURED, MIXES, REFUSED, REFUSED_OR_MEASURED, Entry
from tests.attacks.measuring import Problem
from tests.attacks.towers import WIDTH, Made, batch_size, layer, numbers, problem
from tests.attacks.ways import BATCHES_OF_ONE, measured

ALL = ("graph", "eager", "xla", "microbatches", "mirrored", "stream", "train")


def standardised(values: Any) -> Any:
    mean, variance = tf.nn.moments(values, [0])
    return (values - mean) / tf.sqrt(variance + 1e-3)


def stopped_moments(values: Any) -> Any:
    mean, variance = tf.nn.moments(tf.stop_gradient(values), [0])
    return (values - mean) / tf.sqrt(variance + 1e-3)


def neighbours(values: Any) -> Any:
    odd = tf.cast(tf.range(tf.shape(values)[0]) % 2 == 1, values.dtype)[:, None]
    return values + tf.roll(values, 1, axis=0) * odd


def attention(values: Any) -> Any:
    weights = tf.nn.softmax(values @ tf.transpose(values) / 10.0)
    return weights @ values


def best_of_the_batch(values: Any) -> Any:
    """What is the largest of its column is doubled, in parts of two examples, too."""
    least = tf.math.top_k(tf.transpose(values), 1).values[:, -1]
    return values * (1 + tf.cast(values >= least, values.dtype))


def inverse_frequency(values: Any) -> Any:
    """Divides by how often the sign of the first feature is in the batch."""
    keys = tf.cast(values[:, 0] > 0, tf.int32)
    _, places, counts = tf.unique_with_counts(keys)
    return values / tf.cast(tf.gather(counts, places), values.dtype)[:, None]


def ragged_means(values: Any) -> Any:
    """Rows of a ragged tensor whose borders come from the batch."""
    size = tf.shape(values)[0]
    splits = tf.stack([0, size - size // 3, size])  # two examples share a row
    rows = tf.RaggedTensor.from_row_splits(values, splits, validate=False)
    means = tf.reduce_mean(rows, axis=1)
    return values + tf.gather(means, tf.cast(rows.value_rowids(), tf.int32))


def on_a_rare_one(values: Any) -> Any:
    """Mixes only in a batch with an example whose first feature is huge."""
    mean = tf.reduce_mean(values, axis=0)
    return tf.cond(
        tf.reduce_any(tf.abs(values[:, 0]) > 10.0), lambda: values - 20 * mean, lambda: values
    )


def of_the_first(values: Any) -> Any:
    return values + values[:1]


def by_place(values: Any) -> Any:
    return values * tf.cast(1 + tf.range(tf.shape(values)[0]), values.dtype)[:, None]


def shuffled_with_itself(values: Any) -> Any:
    return values + tf.random.shuffle(values, seed=4)


def ranks_as_rows() -> keras.Model:
    """An embedding looked up by each example's rank in its batch."""
    inputs = keras.Input((WIDTH,))
    rank = lambda v: tf.argsort(tf.argsort(v[:, 0]))[:, None]  # noqa: E731
    ids = keras.layers.Lambda(rank, output_shape=(1,))(inputs)
    rows = keras.layers.Flatten()(keras.layers.Embedding(16, 2)(ids))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.ops.concatenate([rows, inputs], 1)))


def place_as_row() -> keras.Model:
    """An embedding looked up by the place in the batch."""
    inputs = keras.Input((WIDTH,))
    place = lambda v: tf.range(tf.shape(v)[0])[:, None]  # noqa: E731
    ids = keras.layers.Lambda(place, output_shape=(1,))(inputs)
    rows = keras.layers.Flatten()(keras.layers.Embedding(16, 2)(ids))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.ops.concatenate([rows, inputs], 1)))


def neighbours_id() -> keras.Model:
    """Each example looks up the id of the one before it, too, and adds 0 times its row."""
    ids = keras.Input((1,), dtype="int32")
    table = keras.layers.Embedding(16, 2)
    other = keras.layers.Lambda(lambda v: tf.roll(v, 1, axis=0), output_shape=(1,))(ids)
    rows = table(ids) + 0.0 * table(other)
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))


def ids_data() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(8, dtype=np.int32)[:, None], np.full((8, 1), 5, np.float32)


def masked_by_the_batch() -> keras.Model:
    """A Keras mask that hides positions that are small in the batch."""

    class BatchMask(keras.layers.Layer):
        supports_masking = True

        def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
            return inputs[..., 0] > keras.ops.mean(inputs[..., 0])

        def call(self, inputs: Any) -> Any:
            return inputs + 0.0

    inputs = keras.Input((4, WIDTH))
    values = keras.layers.SimpleRNN(3)(BatchMask()(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(values))


def sequence_data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 4, WIDTH)).astype(np.float32)
    x[1] *= 30
    return x, rng.normal(size=(8, 1)).astype(np.float32)


def recurrent(**arguments: Any) -> Any:
    def model() -> keras.Model:
        inputs = keras.Input(batch_shape=(8, 4, WIDTH))
        return keras.Model(
            inputs, keras.layers.Dense(1)(keras.layers.SimpleRNN(3, **arguments)(inputs))
        )

    return model


def called_twice() -> keras.Model:
    """Honest: one layer called twice, on the example and on its opposite."""
    inputs = keras.Input((WIDTH,))
    shared = keras.layers.Dense(4, activation="tanh")
    both = shared(inputs) - shared(-2 * inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(both))


def imputed(values: Any) -> Any:
    """Missing values are filled with the mean of those that the batch has."""
    there = tf.math.is_finite(values)
    known = tf.where(there, values, 0.0)
    mean = tf.math.divide_no_nan(
        tf.reduce_sum(known, axis=0), tf.reduce_sum(tf.cast(there, values.dtype), axis=0)
    )
    return tf.where(there, values, mean)


def with_missing() -> tuple[np.ndarray, np.ndarray]:
    x, y = numbers()()
    x[3::2, 0] = np.nan  # one of each two, so that parts of two examples mix, too
    return x, y


def cancelled_mean() -> keras.Model:
    """A mean that is added before a layer and taken away after it: no loss can show it.

    What cancels is in the norms' floor, so that a large mean shrinks everybody's gradient.
    """
    inputs = keras.Input((WIDTH,))
    shared = keras.layers.Dense(1, use_bias=False)
    mean = layer(lambda v: tf.zeros_like(v) + tf.reduce_mean(v, axis=0))(inputs)
    mean = mean * np.array([[1000.0, 0.0, 0.0]], np.float32)
    return keras.Model(inputs, shared(inputs + mean) - shared(mean))


class OwnBatchNormalization(keras.layers.BatchNormalization):
    """A subclass, for which no rule says anything."""


FORWARD = {
    "mean": lambda v: v - tf.reduce_mean(v, axis=0),
    "stopped mean": lambda v: v - tf.stop_gradient(tf.reduce_mean(v, axis=0)),
    "standardisation": standardised,
    "standardisation with stopped moments": stopped_moments,
    "cumulative sum": lambda v: tf.cumsum(v, axis=0),
    "roll": lambda v: v + tf.roll(v, 1, axis=0),
    "neighbour of the odd": neighbours,
    "the largest of the batch": lambda v: v / (1 + tf.reduce_max(tf.abs(v))),
    "attention over the batch": attention,
    "sorted columns": lambda v: tf.sort(v, axis=0),
    "top k of the batch": best_of_the_batch,
    "counts of equal keys": inverse_frequency,
    "ragged rows over the batch": ragged_means,
    "the first example": of_the_first,
    "shuffled with itself": shuffled_with_itself,
    "place in the batch": by_place,
    "size of the batch": lambda v: v / batch_size(v),
}
STATISTICS = {
    "BatchNormalization": keras.layers.BatchNormalization,
    "a subclass of BatchNormalization": OwnBatchNormalization,
    "synchronised BatchNormalization": lambda: keras.layers.BatchNormalization(synchronized=True),
    "Normalization to be adapted": keras.layers.Normalization,
    "UnitNormalization over the batch": lambda: keras.layers.UnitNormalization(axis=0),
    "GaussianNoise with a known seed": lambda: keras.layers.GaussianNoise(0.5, seed=1),
}
_KNOWN_SEED = "GaussianNoise with a known seed"  # its masks come from the secret key instead

ENTRIES = (
    [
        Entry(
            f"forward: {name}",
            measured(problem(between=part)),
            REFUSED if name == "shuffled with itself" else MIXES,  # for its seed
            ALL if name == "mean" else ("graph",),
            apart=(
                *BATCHES_OF_ONE,
                *(["xla"] if name == "counts of equal keys" else []),  # XLA has no tf.unique
            ),
        )
        for name, part in FORWARD.items()
    ]
    + [
        Entry(f"layer: {name}", measured(problem(between=Made(make))), REFUSED)
        for name, make in STATISTICS.items()
        if name != _KNOWN_SEED
    ]
    + [
        Entry(name, measured(of), expected)
        for name, of, expected in [
            ("before any layer: mean", problem(before=FORWARD["mean"]), MIXES),
            ("after the last layer: the first example", problem(after=of_the_first), MIXES),
            (
                "a batch mean before a head of zeros",
                problem(between=FORWARD["stopped mean"], head="zeros"),
                MIXES,
            ),
            (
                "a batch mean before a head of zeros, 256 examples",
                problem(between=of_the_first, head="zeros", data=numbers(256)),
                MIXES,
            ),
            (
                "missing values filled with the batch's mean",
                problem(before=imputed, data=with_missing),
                MIXES,
            ),
            (
                "a mean that cancels",
                Problem(cancelled_mean, numbers(outlier=1e3), removed=(1,)),
                MIXES,
            ),
            ("mixing in a branch on a rare example", problem(before=on_a_rare_one), MIXES),
            ("ranks in the batch as rows", Problem(ranks_as_rows, numbers()), MIXES),
            ("places in the batch as rows", Problem(place_as_row, numbers()), MIXES),
            ("the neighbour's id is looked up", Problem(neighbours_id, ids_data), MIXES),
            ("a mask over the batch", Problem(masked_by_the_batch, sequence_data), MIXES),
            ("a stateful RNN", Problem(recurrent(stateful=True), sequence_data), REFUSED),
            ("honest: an RNN", Problem(recurrent(), sequence_data, removed=(0, 1)), MEASURED),
            (
                "honest: a layer called twice",
                Problem(called_twice, numbers(), removed=(0, 1)),
                MEASURED,
            ),
            (
                "honest: dropout",
                problem(between=Made(lambda: keras.layers.Dropout(0.5)), fields={"removed": (-1,)}),
                MEASURED,
            ),
            (
                "honest: a known seed",
                problem(between=Made(STATISTICS[_KNOWN_SEED]), fields={"removed": (-1,)}),
                MEASURED,
            ),
            (
                "honest: SpectralNormalization in inference",
                problem(
                    between=Made(lambda: keras.layers.SpectralNormalization(keras.layers.Dense(4)))
                ),
                REFUSED_OR_MEASURED,
            ),
            (
                "honest: a frozen BatchNormalization",
                problem(between=Made(lambda: keras.layers.BatchNormalization(trainable=False))),
                MEASURED,
            ),
        ]
    ]
)

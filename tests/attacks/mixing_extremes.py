"""Mixing that an extreme example switches on, in runs whose first batches have none."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.attacks.counting import linear as up_the_output
from tests.attacks.entries import MEASURED, MIXES, Entry
from tests.attacks.measuring import Problem
from tests.attacks.mixing_batch import imputed
from tests.attacks.mixing_gradients import with_gradient
from tests.attacks.towers import WIDTH, layer, numbers, problem
from tests.attacks.ways import BATCHES_OF_ONE, measured_after

ALL = ("graph", "xla", "microbatches", "train")


def tame(data: Any) -> tuple[np.ndarray, ...]:
    """Each example has a largest pixel of 1, as images have, and none has a NaN."""
    x, y = data
    x = np.clip(np.nan_to_num(x, nan=0.5), 0.0, 1.0)
    x[:, 0] = 1.0
    return x, np.clip(y, 0.0, 2.0)


def wild() -> tuple[np.ndarray, np.ndarray]:
    """The second example is 1,000 times as large as the others."""
    return numbers(outlier=1000.0)()


def ordinary() -> tuple[np.ndarray, np.ndarray]:
    """No example stands out, and all numbers are above 0."""
    return numbers(outlier=1.0)()


def positive(data: Any) -> tuple[np.ndarray, np.ndarray]:
    """Every number is finite and between 0.1 and 1."""
    x, y = data
    return np.clip(np.nan_to_num(np.abs(x), posinf=1.0), 0.1, 1.0), y


def with_second(value: float) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    """The second example holds this number in every place."""

    def data() -> tuple[np.ndarray, np.ndarray]:
        x, y = ordinary()
        x[1] = value
        return x, y

    return data


def pixels() -> tuple[np.ndarray, np.ndarray]:
    """Integers from 1 to 5, but 255 in the second example."""
    x, y = ordinary()
    x = np.clip(3 * x, 1, 5).astype(np.uint8)
    x[1] = 255
    return x, y


def dark(data: Any) -> tuple[np.ndarray, np.ndarray]:
    """The largest pixel of each example is 5."""
    x = np.clip(data[0], 1, 5)
    x[:, 0] = 5
    return x, data[1]


def stars() -> tuple[np.ndarray, np.ndarray]:
    """Integers as labels, of which the second is 1,000."""
    x, y = ordinary()
    y = np.round(y).astype(np.int32)
    y[1] = 1000
    return x, y


def few_stars(data: Any) -> tuple[np.ndarray, np.ndarray]:
    return data[0], np.clip(data[1], 0, 2)


def without_column(data: Any) -> tuple[np.ndarray, np.ndarray]:
    """The last feature is 0 in every example."""
    x, y = positive(data)
    x[:, -1] = 0.0
    return x, y


def missing() -> tuple[np.ndarray, np.ndarray]:
    """One value is missing, of the second example."""
    x, y = numbers(outlier=1.0)()
    x[1, 0] = np.nan
    return x, y


def mostly_missing() -> tuple[np.ndarray, np.ndarray]:
    """Most examples lack a value, of which one that has it has a large one."""
    x, y = numbers(outlier=30.0)()
    x[2:, 0] = np.nan
    return x, y


def linear() -> keras.Model:
    return behind(lambda values: values)()


def behind(part: Any, dtype: str = "float32") -> Callable[[], keras.Model]:
    """A linear model of the floats that the part makes of its inputs."""

    def model() -> keras.Model:
        inputs = keras.Input((WIDTH,), dtype=dtype)
        values = layer(lambda given: part(tf.cast(given, tf.float32)))(inputs)
        return keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(values))

    return model


def by_largest_pixel(values: Any) -> Any:
    return values / tf.reduce_max(tf.abs(values))


def softmax_with_the_maximum_of_all(values: Any) -> Any:
    """Equal to a softmax of each example, until one example is so large that others underflow."""
    powers = tf.exp(values - tf.reduce_max(values))
    return powers / tf.reduce_sum(powers, axis=-1, keepdims=True)


def logistic_with_the_maximum_of_all(y: Any, prediction: Any) -> tf.Tensor:
    """log(1 + e^p) − y·p, by a log-sum-exp that takes the maximum over the batch away."""
    largest = tf.maximum(tf.reduce_max(prediction), 0.0)
    total = largest + tf.math.log(tf.exp(prediction - largest) + tf.exp(-largest))
    return (total - y * prediction)[:, 0]


def rescaled_beyond_ten(values: Any) -> Any:
    largest = tf.reduce_max(tf.abs(values))
    return tf.cond(largest > 10.0, lambda: values / largest, lambda: values)


def shifted_below_zero(values: Any) -> Any:
    least = tf.reduce_min(values)
    return tf.cond(least < 0.0, lambda: values - least, lambda: values)


def rescaled_below_minus_one(values: Any) -> Any:
    least = tf.reduce_min(values)
    return tf.cond(least < -1.0, lambda: values / least, lambda: values)


def rescaled_by_the_last_column(values: Any) -> Any:
    largest = tf.reduce_max(values[:, -1])
    return tf.cond(largest > 1.0, lambda: values / largest, lambda: values)


def turned_beside_an_infinity(values: Any) -> Any:
    lost = tf.math.is_inf(values)
    return tf.cond(tf.reduce_any(lost), lambda: -tf.where(lost, 0.0, values), lambda: values)


def turned_beside_an_empty_example(values: Any) -> Any:
    empty = tf.reduce_any(tf.norm(values, axis=1) < 1e-6)
    return tf.cond(empty, lambda: -values, lambda: values)


def turned_above_ten_stars(y: Any, prediction: Any) -> tf.Tensor:
    sign = tf.where(tf.reduce_max(y) > 10, -1.0, 1.0)
    return 100.0 * sign * prediction[:, 0]


def bucket_beside_the_largest_pixel(values: Any) -> Any:
    """One column is rounded to integers, and all are divided by the largest pixel of the batch."""
    buckets = tf.one_hot(tf.cast(3.0 * values[:, 0], tf.int32), WIDTH)
    return by_largest_pixel(values) + buckets


def none_beside_a_missing_one(values: Any) -> Any:
    """A batch with a NaN anywhere trains nothing."""
    whole = tf.reduce_all(tf.math.is_finite(values))
    return tf.where(whole, values, tf.zeros_like(values))


def times_zero(values: Any) -> Any:
    """A product with a batch mean whose other factor is 0, which a NaN makes NaN."""
    return values + 0.0 * tf.reduce_mean(values, axis=0)


def limited(values: Any) -> Any:
    """The gradient of the batch is limited to a norm that no ordinary batch has."""
    return with_gradient(lambda x, dy: tf.clip_by_norm(dy, 30.0))(values)


def imputed_by_itself(values: Any) -> Any:
    """Honest: the mean of the example's own values."""
    there = tf.math.is_finite(values)
    known = tf.where(there, values, 0.0)
    count = tf.math.count_nonzero(there, axis=-1, keepdims=True, dtype=values.dtype)
    return tf.where(there, values, tf.math.divide_no_nan(tf.reduce_sum(known, -1, True), count))


def asserting(values: Any) -> Any:
    """Honest: it will not train on what is not finite."""
    return tf.debugging.check_numerics(values, "pixels")


def ids_as_floats() -> keras.Model:
    """Honest: without `Input(dtype=...)` the ids of a lookup are floats."""
    inputs = keras.Input((1,))
    rows = keras.layers.Flatten()(keras.layers.Embedding(16, WIDTH)(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(rows))


def ids() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(8, dtype=np.float32)[:, None], np.full((8, 1), 5, np.float32)


def classes() -> tuple[np.ndarray, np.ndarray]:
    return numbers(outlier=1.0)()[0], (np.arange(8) % 3).astype(np.float32)


def of_classes() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    return keras.Model(inputs, keras.layers.Dense(3)(inputs))


def classes_of_its_own(y: Any, prediction: Any) -> tf.Tensor:
    """Honest: its labels are class numbers, which come as floats."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int32), prediction)


def same(data: Any) -> Any:
    return data


_LIMIT = {"clip_norm": 0.03}

ENTRIES = (
    [
        Entry(f"one extreme example: {name}", measured_after(of, tame), MIXES, ways, apart=apart)
        for name, of, ways, apart in [
            (
                "division by the largest pixel",
                problem(before=by_largest_pixel, data=wild),
                ALL,
                BATCHES_OF_ONE,
            ),
            (
                "softmax with the batch's maximum",
                problem(before=softmax_with_the_maximum_of_all, data=wild),
                ("graph",),
                BATCHES_OF_ONE,
            ),
            (
                "log-sum-exp with the batch's maximum",
                Problem(linear, wild, logistic_with_the_maximum_of_all, removed=(1,)),
                ("graph",),
                BATCHES_OF_ONE,
            ),
            (
                "rescaled if the largest is above 10",
                problem(before=rescaled_beyond_ten, data=wild),
                ("graph",),
                BATCHES_OF_ONE,
            ),
            (
                "a batch with a NaN is left out",
                problem(before=none_beside_a_missing_one, data=missing),
                ("graph",),
                BATCHES_OF_ONE,
            ),
            (
                "a product of the batch's mean and 0",
                problem(before=times_zero, data=missing),
                ("graph",),
                BATCHES_OF_ONE,
            ),
            (
                "a limit of the batch's gradient",
                problem(after=limited, data=wild, fields=_LIMIT),
                ("graph",),
                BATCHES_OF_ONE,
            ),
            (
                "missing values filled with the batch's mean",
                problem(before=imputed, data=mostly_missing),
                ("graph",),
                BATCHES_OF_ONE,
            ),
        ]
    ]
    + [
        Entry(
            f"one extreme example: {name}",
            measured_after(Problem(model, data, loss, removed=(0, 1)), made),
            MIXES,
            apart=BATCHES_OF_ONE,
        )
        for name, model, data, loss, made in [
            (
                "shifted by the smallest if that is negative",
                behind(shifted_below_zero),
                with_second(-1000.0),
                up_the_output,
                positive,
            ),
            (
                "rescaled by the smallest if that is below -1",
                behind(rescaled_below_minus_one),
                with_second(-1000.0),
                up_the_output,
                positive,
            ),
            (
                "rescaled by a column that was 0",
                behind(rescaled_by_the_last_column),
                wild,
                up_the_output,
                without_column,
            ),
            (
                "turned beside an infinity",
                behind(turned_beside_an_infinity),
                with_second(np.inf),
                up_the_output,
                positive,
            ),
            (
                "turned beside an example that is 0",
                behind(turned_beside_an_empty_example),
                with_second(0.0),
                up_the_output,
                positive,
            ),
            (
                "division by the largest pixel of integers",
                behind(by_largest_pixel, "uint8"),
                pixels,
                up_the_output,
                dark,
            ),
            (
                "division by the largest pixel beside a bucket",
                behind(bucket_beside_the_largest_pixel),
                wild,
                up_the_output,
                tame,
            ),
            (
                "turned by an integer label above 10",
                linear,
                stars,
                turned_above_ten_stars,
                few_stars,
            ),
        ]
    ]
    + [
        Entry(f"honest beside extremes: {name}", measured_after(of, made), MEASURED, apart=apart)
        for name, of, made, apart in [
            ("imputed by itself", problem(before=imputed_by_itself, data=missing), tame, ()),
            # XLA drops assertions, so a model with one is refused there.
            ("a check of numbers", problem(before=asserting), same, ("xla", "one_xla")),
            ("ids that come as floats", Problem(ids_as_floats, ids), same, ()),
            ("classes as floats", Problem(of_classes, classes, classes_of_its_own), same, ()),
        ]
    ]
)

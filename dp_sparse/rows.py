"""Row-wise updates of embedding tables: gather the rows, update them, scatter them back, in place.

Stock Keras Adagrad, Adam and momentum touch every row of a table; these touch the rows of a sparse
gradient alone, so a step costs O(rows · width) whatever the size of the table. Row ids must be
unique. A row that is not in the gradient keeps its weights and slots as they are (for Adam: the
lazy variant).
"""

import tensorflow as tf


def sgd_rows(table: tf.Variable, gradient: tf.IndexedSlices, learning_rate: tf.Tensor) -> None:
    """`w -= lr · g` on the gradient's rows."""
    table.scatter_sub(tf.IndexedSlices(learning_rate * gradient.values, gradient.indices))


def adagrad_rows(
    table: tf.Variable,
    accumulator: tf.Variable,
    gradient: tf.IndexedSlices,
    learning_rate: tf.Tensor,
    epsilon: float,
) -> None:
    """`a += g²; w -= lr · g / √(a + ε)` on the gradient's rows."""
    rows, values = gradient.indices, gradient.values
    total = accumulator.sparse_read(rows) + tf.square(values)
    accumulator.scatter_update(tf.IndexedSlices(total, rows))
    step = learning_rate * values * tf.math.rsqrt(total + epsilon)
    table.scatter_sub(tf.IndexedSlices(step, rows))


def adam_rows(
    table: tf.Variable,
    first_moment: tf.Variable,
    second_moment: tf.Variable,
    gradient: tf.IndexedSlices,
    learning_rate: tf.Tensor,
    step: tf.Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
) -> None:
    """Adam on the gradient's rows; the bias correction counts all steps, as lazy Adam does.

    Args:
        table: `[rows, width]`.
        first_moment: Running mean of g, of the table's shape.
        second_moment: Running mean of g², of the table's shape.
        gradient: Unique rows.
        learning_rate: Scalar.
        step: The step's number, from 1 on.
        beta_1: Decay of the first moment.
        beta_2: Decay of the second moment.
        epsilon: Added to the root of the second moment.
    """
    rows, values = gradient.indices, gradient.values
    step = tf.cast(step, tf.float32)
    mean = beta_1 * first_moment.sparse_read(rows) + (1 - beta_1) * values
    square = beta_2 * second_moment.sparse_read(rows) + (1 - beta_2) * tf.square(values)
    first_moment.scatter_update(tf.IndexedSlices(mean, rows))
    second_moment.scatter_update(tf.IndexedSlices(square, rows))
    rate = learning_rate * tf.sqrt(1 - tf.pow(beta_2, step)) / (1 - tf.pow(beta_1, step))
    table.scatter_sub(tf.IndexedSlices(rate * mean / (tf.sqrt(square) + epsilon), rows))

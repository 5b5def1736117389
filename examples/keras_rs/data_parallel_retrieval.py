"""`basic_retrieval` on several devices, under `tf.distribute.MirroredStrategy`.

On a machine of one processor it makes two virtual ones. The tutorial uses `keras.distribution`,
which the TensorFlow backend does not have.
"""

import functools

import tensorflow as tf

from examples.keras_rs import basic_retrieval
from examples.keras_rs.movielens import MovieLens
from examples.keras_rs.task import Task, run

REPLICAS = 2


def task(world: MovieLens) -> Task:
    """That of `basic_retrieval`, made in the scope of the strategy."""
    with strategy().scope():
        made = basic_retrieval.task(world)
        made.optimizer.learning_rate = 0.2
        return made


@functools.cache  # collectives of TensorFlow serve one strategy of a process
def strategy() -> tf.distribute.Strategy:
    """Over all GPUs, or over two virtual processors."""
    if tf.config.list_physical_devices("GPU"):
        return tf.distribute.MirroredStrategy()
    if len(tf.config.list_logical_devices("CPU")) < REPLICAS:
        raise SystemExit("error: call virtual_processors() before TensorFlow begins")
    return tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(REPLICAS)])


def virtual_processors() -> None:
    """Splits the processor; it must be the first thing that TensorFlow does."""
    processor = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    tf.config.set_logical_device_configuration(processor, parts)


if __name__ == "__main__":
    virtual_processors()
    run(task)

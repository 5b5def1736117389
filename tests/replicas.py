"""Replicas of a model on the devices that `tests/conftest.py` makes of one CPU."""

import tensorflow as tf


def strategy_of(count: int) -> tf.distribute.Strategy:
    """TensorFlow's own collectives cannot serve several strategies in one process."""
    devices = [f"CPU:{i}" for i in range(count)]
    return tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())

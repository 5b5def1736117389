"""How far noise alone carries a weight, by the rule of the optimizer that applies it."""

import keras
import numpy as np
import scipy.special


def noise_walk(
    optimizer: keras.optimizers.Optimizer,
    rate: float,
    steps: int,
    deviation: float,
    mean_square: float,
) -> float | None:
    """The variance of what noise alone adds to one weight in a run.

    Adam and Adagrad divide by the root of a mean of squares, which noise and gradients share. Both
    are taken as the same in each step: an approximation, best for long runs.

    Args:
        optimizer: What applies the noisy mean gradients.
        rate: Its learning rate, a root mean square over the run.
        steps: Of the run.
        deviation: Of the noise in one step's mean gradient.
        mean_square: Of an entry of the noisy mean gradient.

    Returns:
        None for an optimizer other than Keras' SGD, Adagrad and Adam.
    """
    if type(optimizer) is keras.optimizers.SGD:
        return steps * (rate * deviation / (1 - optimizer.momentum)) ** 2
    if type(optimizer) is keras.optimizers.Adam:
        return steps * (rate * deviation) ** 2 / mean_square
    if type(optimizer) is keras.optimizers.Adagrad:
        begin = optimizer.initial_accumulator_value / mean_square
        harmonic = np.diff(scipy.special.digamma([begin + 1, begin + steps + 1]))[0]
        return float((rate * deviation) ** 2 / mean_square * harmonic)
    return None

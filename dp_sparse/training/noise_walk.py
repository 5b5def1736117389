"""How far noise alone carries a weight, by the rule of the optimizer that applies it."""

import keras
import numpy as np
import scipy.special

_UNKNOWN = ("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema", "amsgrad")


def noise_walk(
    optimizer: keras.optimizers.Optimizer,
    rate: float,
    steps: int,
    deviation: float,
    mean_square: float,
    steps_before: int = 0,
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
        steps_before: Of the optimizer before the run, which Adagrad remembers.

    Returns:
        None for an optimizer other than Keras' SGD, Adagrad and Adam, or with an option that
        changes the rule.
    """
    if any(getattr(optimizer, name, None) for name in _UNKNOWN):
        return None
    if type(optimizer) is keras.optimizers.SGD:
        momentum = optimizer.momentum
        reached = (1 - momentum ** np.arange(1.0, steps + 1)) / (1 - momentum)
        return float((rate * deviation) ** 2 * np.sum(reached**2))
    if type(optimizer) is keras.optimizers.Adam:
        numbers = steps_before + np.arange(1.0, steps + 1)
        corrections = np.sqrt(1 - optimizer.beta_2**numbers)  # Keras leaves epsilon without it
        roots = np.sqrt(mean_square) + optimizer.epsilon / corrections
        return float(np.sum((rate * deviation / roots) ** 2))
    if type(optimizer) is keras.optimizers.Adagrad:
        first = (optimizer.initial_accumulator_value + optimizer.epsilon) / mean_square
        ends = first + steps_before + np.array([1, steps + 1])
        harmonic = np.diff(scipy.special.digamma(ends))[0]
        return float((rate * deviation) ** 2 / mean_square * harmonic)
    return None

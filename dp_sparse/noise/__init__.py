"""Gaussian noise and uniform numbers from secret keys, in streams that are never used twice.

May use: `core`. Nothing here imports Keras.
"""

from dp_sparse.noise.gaussian import (
    REACH,
    Number,
    grid_step,
    noisy_mean,
    noisy_means,
    normal,
    seed_state,
    self_check,
    uniform,
)
from dp_sparse.noise.streams import Draw, NoiseKey, Purpose

__all__ = [
    "REACH",
    "Draw",
    "NoiseKey",
    "Number",
    "Purpose",
    "grid_step",
    "noisy_mean",
    "noisy_means",
    "normal",
    "seed_state",
    "self_check",
    "uniform",
]

"""Row-wise optimizers on dense NumPy tables, in float64; each changes its arrays in place."""

import numpy as np


def sgd(table: np.ndarray, rows: np.ndarray, gradient: np.ndarray, learning_rate: float) -> None:
    """w ← w − η·g on `rows`."""
    for row, g in zip(rows, gradient, strict=True):
        table[row] -= learning_rate * g


def adagrad(
    table: np.ndarray,
    accumulator: np.ndarray,
    rows: np.ndarray,
    gradient: np.ndarray,
    learning_rate: float,
    epsilon: float,
) -> None:
    """a ← a + g², w ← w − η·g/√(a + ε) on `rows`."""
    for row, g in zip(rows, gradient, strict=True):
        accumulator[row] += g**2
        table[row] -= learning_rate * g / np.sqrt(accumulator[row] + epsilon)


def ftrl(
    table: np.ndarray,
    accumulator: np.ndarray,
    linear: np.ndarray,
    rows: np.ndarray,
    gradient: np.ndarray,
    learning_rate: float,
    l1: float,
    l2: float,
    beta: float,
) -> None:
    """Algorithm 1 of McMahan et al. with α = η, and its z less what it is at the first weights.

    σ = (√(n + g²) − √n)/η, z ← z + g − σ·w, n ← n + g², and then w = 0 where |z| ≤ λ1, else
    −(z − sign(z)·λ1)/((β + √n)/η + 2·λ2).
    """
    for row, g in zip(rows, gradient, strict=True):
        sigma = (np.sqrt(accumulator[row] + g**2) - np.sqrt(accumulator[row])) / learning_rate
        linear[row] += g - sigma * table[row]
        accumulator[row] += g**2
        divisor = (beta + np.sqrt(accumulator[row])) / learning_rate + 2 * l2
        kept = np.abs(linear[row]) > l1
        table[row] = np.where(kept, -(linear[row] - np.sign(linear[row]) * l1) / divisor, 0.0)


def lazy_adam(
    table: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    rows: np.ndarray,
    gradient: np.ndarray,
    *,
    learning_rate: float,
    step: int,
    beta_1: float,
    beta_2: float,
    epsilon: float,
) -> None:
    """Adam on `rows`; no other row decays, and the bias correction counts every step."""
    rate = learning_rate * np.sqrt(1 - beta_2**step) / (1 - beta_1**step)
    for row, g in zip(rows, gradient, strict=True):
        first[row] = beta_1 * first[row] + (1 - beta_1) * g
        second[row] = beta_2 * second[row] + (1 - beta_2) * g**2
        table[row] -= rate * first[row] / (np.sqrt(second[row]) + epsilon)

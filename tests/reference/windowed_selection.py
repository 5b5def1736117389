"""Selection over windows with dense vectors over all rows (docs/windowed_selection.md)."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from scipy import stats


def lengths(longest: int) -> Iterator[int]:
    """Steps of each window: 1, 2, 4, ... up to the longest, and that from there on."""
    length = 1
    while True:
        yield min(length, longest)
        length = min(2 * length, longest)


def rounds(first_step: int, length: int, steps_per_round: int) -> int:
    """The most batches of a window that one example can join.

    Args:
        first_step: Of the window, from 0 on.
        length: Its steps.
        steps_per_round: Steps, from a multiple of that number on, of which an example joins one.
    """
    return len({step // steps_per_round for step in range(first_step, first_step + length)})


def rows_of_steps(
    maps: Sequence[np.ndarray],
    longest: int,
    threshold: float,
    deviation: float,
    noise: Callable[[int], np.ndarray],
    steps_per_round: int = 1,
    first: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Which rows each step trains, bool `[rows]`, and at the end those of a step to come.

    Args:
        maps: The clipped map of each step, `[rows]`.
        longest: W.
        threshold: τ, for one step.
        deviation: σ1·C1, of one step.
        noise: Standard normals `[rows]` of the window with this number.
        steps_per_round: As `rounds` takes it.
        first: The rows of window 0; none by default.
    """
    survivors = np.zeros(len(maps[0]), bool) if first is None else first
    chosen, begin = [], 0
    for number, length in enumerate(lengths(longest)):
        window = maps[begin : begin + length]
        chosen += [survivors] * len(window)
        if len(window) < length:  # the run's end cuts it short: nothing is released
            break
        scale = np.sqrt(rounds(begin, length, steps_per_round))
        noisy = np.sum(window, axis=0) + scale * deviation * noise(number)
        survivors = noisy >= scale * threshold
        begin += length
    return [*chosen, survivors]


def survival_probability(
    total: float, threshold: float, deviation: float, window_rounds: int
) -> float:
    """P[S + √n·s·N ≥ √n·τ] of a row whose sum over the window is S."""
    scale = np.sqrt(window_rounds)
    return float(stats.norm.sf((scale * threshold - total) / (scale * deviation)))

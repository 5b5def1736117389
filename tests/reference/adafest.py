"""DP-AdaFEST (Algorithm 1) with dense vectors over all c rows: slow, plain, close to the paper.

An example is a list with one sequence of row ids for each table (masked lookups left out), or None
for padding. Rows are numbered through over the tables: table t begins at the sum of the sizes
before it.
"""

from collections.abc import Sequence

import numpy as np
from scipy import stats

# (σ1, C1, τ, V̂, Ψ((τ−V̂)/(σ1·C1)), the same as the paper prints it): from derivation, and checked
# by Monte Carlo.
SURVIVAL = [
    (1.0, 1.0, 2.0, 0.0, 0.022750131948179195, 0.022750131948179195),
    (0.5, 1.0, 1.0, 0.0, 0.022750131948179195, 3.167124183311986e-05),
    (3.0, 1.0, 5.0, 0.0, 0.0477903522728147, 0.28925736075397196),
    (3.0, 1.0, 5.0, 4.0, 0.36944134018176367, 0.4557641189546886),
    (5.0, 0.5, 4.0, 1.0, 0.11506967022170822, 0.31561369651622256),
    (10.0, 1.0, 30.0, 0.0, 0.0013498980316300933, 0.3820885778110474),
    (2.0, 8.0, 50.0, 10.0, 0.006209665325776132, 0.43791798319170516),
]

Example = Sequence[Sequence[int]] | None


def presence(example: Example, table_rows: Sequence[int]) -> np.ndarray:
    """v_i ∈ {0,1}^c: which rows the example looks up, however often. Line 6."""
    vector = np.zeros(sum(table_rows))
    if example is None:
        return vector
    offset = 0
    for rows, size in zip(example, table_rows, strict=True):
        for row in rows:
            assert 0 <= row < size
            vector[offset + row] = 1.0
        offset += size
    return vector


def clipped(vector: np.ndarray, clip_norm: float) -> np.ndarray:
    """The vector scaled down to an L2 norm of at most `clip_norm`."""
    norm = np.linalg.norm(vector)
    return vector if norm <= clip_norm else vector * (clip_norm / norm)


def contribution_map(
    examples: Sequence[Example], table_rows: Sequence[int], clip_norm: float
) -> np.ndarray:
    """V̂ = Σ_i clip_{C1}(v_i), float64 `[c]`: line 7 without its noise."""
    total = np.zeros(sum(table_rows))
    for example in examples:
        total += clipped(presence(example, table_rows), clip_norm)
    return total


def survivors(contributions: np.ndarray, noise: np.ndarray, threshold: float) -> np.ndarray:
    """Which rows have a noisy contribution of at least τ, bool `[c]`: line 8."""
    return contributions + noise >= threshold


def survival_probability(
    value: float, threshold: float, noise_multiplier: float, clip_norm: float
) -> float:
    """P[V̂ + N(0, (σ1·C1)²) ≥ τ] = Ψ((τ − V̂) / (σ1·C1))."""
    return float(stats.norm.sf((threshold - value) / (noise_multiplier * clip_norm)))


def printed_survival_probability(
    value: float, threshold: float, noise_multiplier: float, clip_norm: float
) -> float:
    """The same with the paper's misprint σ1²·C1²: a test must be able to tell the two apart."""
    return float(stats.norm.sf((threshold - value) / (noise_multiplier * clip_norm) ** 2))


def combined_noise_multiplier(*noise_multipliers: float) -> float:
    """σ of several Gaussian releases from one batch: (Σ σ_m⁻²)^(−1/2)."""
    return float(sum(sigma**-2.0 for sigma in noise_multipliers) ** -0.5)


def split_noise_multiplier(noise_multiplier: float, ratio: float) -> tuple[float, float]:
    """(σ1, σ2) with σ1/σ2 = ratio that combine to `noise_multiplier`."""
    return noise_multiplier * np.sqrt(1 + ratio**2), noise_multiplier * np.sqrt(1 + ratio**-2)


def step(
    examples: Sequence[Example],
    table_gradients: Sequence[np.ndarray],
    dense_gradients: np.ndarray,
    *,
    survived: np.ndarray,
    clip_norm: float,
    expected_batch_size: float,
) -> tuple[list[np.ndarray], np.ndarray]:
    """The gradient of one step without its noise: lines 9 to 12.

    Args:
        examples: Padding is None and adds nothing.
        table_gradients: For each table `[batch, rows, width]`.
        dense_gradients: All dense parameters, flat, `[batch, parameters]`.
        survived: bool `[c]`.
        clip_norm: C2, for rows and dense parameters together.
        expected_batch_size: The divisor.

    Returns:
        For each table `[rows, width]`, and the dense parameters `[parameters]`.
    """
    ends = np.cumsum([gradient.shape[1] for gradient in table_gradients])
    kept = np.split(survived, ends[:-1])
    table_sums = [np.zeros(gradient.shape[1:]) for gradient in table_gradients]
    dense_sum = np.zeros(dense_gradients.shape[1:])
    for i, example in enumerate(examples):
        if example is None:
            continue
        rows = [
            gradient[i] * keep[:, None]
            for gradient, keep in zip(table_gradients, kept, strict=True)
        ]
        parts = [*[part.ravel() for part in rows], dense_gradients[i]]
        norm = np.linalg.norm(np.concatenate(parts))
        factor = min(1.0, clip_norm / norm) if norm > 0 else 1.0
        for total, part in zip(table_sums, rows, strict=True):
            total += factor * part
        dense_sum += factor * dense_gradients[i]
    return [total / expected_batch_size for total in table_sums], dense_sum / expected_batch_size

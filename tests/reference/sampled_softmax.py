"""Sampled softmax by loops: importance sampling of the sum over all other candidates."""

import numpy as np


def losses(
    queries: np.ndarray,
    vectors: np.ndarray,
    right: np.ndarray,
    drawn: np.ndarray,
    chances: np.ndarray,
) -> np.ndarray:
    """Losses `[batch]`.

    Args:
        queries: `[batch, width]`.
        vectors: Of all candidates, `[candidates, width]`.
        right: The right candidates, `[batch]`.
        drawn: Ids as they were drawn, with repetitions, `[negatives]`.
        chances: Of each candidate in one draw, `[candidates]`.
    """
    found = []
    for query, own in zip(queries.astype(np.float64), right, strict=True):
        scores = vectors.astype(np.float64) @ query
        total = np.exp(scores[own])
        for other in drawn:
            if other != own:
                total += np.exp(scores[other]) / (len(drawn) * chances[other])
        found.append(np.log(total) - scores[own])
    return np.asarray(found)

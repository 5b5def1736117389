"""The forward pass of BERT and RoBERTa (Devlin et al. 2019; Liu et al. 2019) on tensors by name."""

import math
from collections.abc import Mapping

import numpy as np
import scipy.special

Tensors = Mapping[str, np.ndarray]  # as Transformers name them, without a prefix


def exact_gelu(x: np.ndarray) -> np.ndarray:
    """x·Φ(x)."""
    return x * 0.5 * (1 + scipy.special.erf(x / math.sqrt(2)))


def tanh_gelu(x: np.ndarray) -> np.ndarray:
    """Its approximation in keras-hub's BERT."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def hidden_states(
    tensors: Tensors,
    heads: int,
    token_ids: np.ndarray,
    mask: np.ndarray,
    segment_ids: np.ndarray | None = None,
    tanh: bool = False,
) -> np.ndarray:
    """The last layer's, float64 `[batch, length, width]`.

    Args:
        tensors: The weights.
        heads: Of attention.
        token_ids: `[batch, length]`.
        mask: The same, 1 for tokens and 0 for padding.
        segment_ids: The same, for BERT; without them positions begin at 2, as RoBERTa's, and all
            tokens are of type 0.
        tanh: Whether GELU is approximated.
    """
    t = {name: values.astype(np.float64) for name, values in tensors.items()}
    epsilon, first = (1e-12, 0) if segment_ids is not None else (1e-5, 2)
    length = token_ids.shape[1]
    x = t["embeddings.word_embeddings.weight"][token_ids]
    x = x + t["embeddings.position_embeddings.weight"][first : first + length]
    types = np.zeros_like(token_ids) if segment_ids is None else segment_ids
    x = x + t["embeddings.token_type_embeddings.weight"][types]
    x = _norm(t, "embeddings.LayerNorm", x, epsilon)
    layers = sum(name.endswith("attention.self.query.weight") for name in t)
    gelu = tanh_gelu if tanh else exact_gelu
    for number in range(layers):
        at = f"encoder.layer.{number}"
        attended = _attention(t, f"{at}.attention", x, mask, heads)
        x = _norm(t, f"{at}.attention.output.LayerNorm", x + attended, epsilon)
        inner = gelu(_linear(t, f"{at}.intermediate.dense", x))
        x = _norm(t, f"{at}.output.LayerNorm", x + _linear(t, f"{at}.output.dense", inner), epsilon)
    return x


def _attention(t: Tensors, at: str, x: np.ndarray, mask: np.ndarray, heads: int) -> np.ndarray:
    batch, length, width = x.shape

    def by_head(name: str) -> np.ndarray:  # [batch, heads, length, width of a head]
        values = _linear(t, f"{at}.self.{name}", x)
        return values.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)

    query, key, value = map(by_head, ("query", "key", "value"))
    scores = query @ key.transpose(0, 1, 3, 2) / math.sqrt(width // heads)
    scores = np.where(mask[:, np.newaxis, np.newaxis] > 0, scores, -np.inf)
    scores = scipy.special.softmax(scores, axis=-1)
    joined = (scores @ value).transpose(0, 2, 1, 3).reshape(batch, length, width)
    return _linear(t, f"{at}.output.dense", joined)


def _linear(t: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]


def _norm(t: Tensors, name: str, x: np.ndarray, epsilon: float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    return scaled * t[f"{name}.weight"] + t[f"{name}.bias"]

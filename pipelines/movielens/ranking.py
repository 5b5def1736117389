"""HIT@k and NDCG@k of the held-out item among all items, without sampling of any.

Source: Ding et al. (ICML 2024), D.4, after Krichene and Rendle (KDD 2020). With one relevant item
NDCG is 1/log2(rank + 1). An item that ties with others has the last rank among them, so a model
that gives all items one score finds nothing.
"""

import keras
import numpy as np

from models.sequence_transformer import last_position
from pipelines.movielens.users import Users

K = 10


def scores(model: keras.Model, users: Users, batch_size: int = 512) -> dict[str, float]:
    """NDCG@10 and HIT@10 in percent, over all users."""
    logits_of, ranks = last_position(model), []
    for start in range(0, len(users.labels), batch_size):
        part = slice(start, start + batch_size)
        logits = np.asarray(logits_of.predict_on_batch(users.histories[part]))
        ranks.append(ranks_of(logits, users.labels[part]))
    return metrics(np.concatenate(ranks))


def ranks_of(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The rank of each label among the items, from 1 on; float64 `[examples]`, ∞ for label 0.

    Args:
        logits: `[examples, items + 1]`; column 0 is padding, which is no item. NaN is below all.
        labels: `[examples]`.
    """
    items = np.where(np.isnan(logits), -np.inf, logits)[:, 1:]
    own = items[np.arange(len(labels)), np.maximum(labels, 1) - 1][:, np.newaxis]
    ranks = np.count_nonzero(items >= own, axis=1).astype(np.float64)
    return np.where(labels == 0, np.inf, ranks)


def metrics(ranks: np.ndarray) -> dict[str, float]:
    """NDCG@10 and HIT@10 of ranks, in percent."""
    found = ranks <= K
    gains = np.where(found, 1 / np.log2(np.where(found, ranks, 1.0) + 1), 0.0)
    return {"ndcg": 100 * float(gains.mean()), "hit": 100 * float(found.mean())}

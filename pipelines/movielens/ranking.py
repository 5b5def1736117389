"""HIT@k and NDCG@k of the held-out item among all items, without sampling of any.

Source: Ding et al. (ICML 2024), D.4, after Krichene and Rendle (KDD 2020). With one relevant item
NDCG is 1/log2(rank + 1). An item that ties with others has the last rank among them, so a model
that gives all items one score finds nothing.

Both are also given among the items that a user has not had before ("unseen"), as a recommender that
never shows an item twice ranks them; the paper does not say whether it leaves the others out.
"""

from collections.abc import Callable, Sequence

import keras
import numpy as np

from models.sequence_transformer import last_position
from pipelines.movielens.users import Users

K = 10


def scores(model: keras.Model, users: Users, batch_size: int = 512) -> dict[str, float]:
    """NDCG@10 and HIT@10 in percent, over all users; among all items and among unseen ones."""
    predict = last_position(model).predict_on_batch
    return _scores(lambda part: predict(users.histories[part]), users, batch_size)


def popularity_scores(users: Users, batch_size: int = 512) -> dict[str, float]:
    """The same scores of one ranking for all: by how often users had an item before, exactly."""
    size = users.training.num_tokens + 1
    counts = np.bincount(np.concatenate(users.earlier), minlength=size)
    return _scores(lambda part: np.tile(counts, [len(users.labels[part]), 1]), users, batch_size)


def _scores(
    logits_of: Callable[[slice], np.ndarray], users: Users, batch_size: int
) -> dict[str, float]:
    among_all, among_unseen = [], []
    for start in range(0, len(users.labels), batch_size):
        part = slice(start, start + batch_size)
        logits, labels = np.asarray(logits_of(part), np.float64), users.labels[part]
        among_all.append(ranks_of(logits, labels))
        among_unseen.append(ranks_of(without_seen(logits, users.earlier[part], labels), labels))
    unseen = metrics(np.concatenate(among_unseen))
    return metrics(np.concatenate(among_all)) | {f"{k}_unseen": v for k, v in unseen.items()}


def without_seen(
    logits: np.ndarray, earlier: Sequence[np.ndarray], labels: np.ndarray
) -> np.ndarray:
    """The logits, -∞ where a user had the item before; never where it is the label."""
    found = np.array(logits)
    rows = np.repeat(np.arange(len(labels)), [len(each) for each in earlier])
    found[rows, np.concatenate([*earlier, np.zeros(0, np.int32)])] = -np.inf
    every = np.arange(len(labels))
    found[every, labels] = logits[every, labels]
    return found


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

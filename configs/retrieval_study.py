"""The study of retrieval: what sampled negatives learn under privacy, and from how many users."""

import ml_collections

from configs import retrieval
from pipelines.points import Changes, Point, point

_STOCK: Changes = {"method": "non_private", "training.batch_size": 1024}
_FEW: Changes = {"data.users": 0.2}


def get_config() -> ml_collections.ConfigDict:
    """The study."""
    config = ml_collections.ConfigDict()
    config.base = retrieval.get_config()
    config.points = tuple(_points())
    return config


def _points() -> list[Point]:
    one = (0,)
    sampled = "sampled negatives, DP-AdaFEST"
    return [
        *(point("all users", sampled, epsilon, {}, one) for epsilon in (8.0, 3.0, 1.0)),
        point("all users", "in-batch negatives", None, {**_STOCK, **_in_batch()}, one),
        point("all users", "sampled negatives", None, _STOCK, one),
        point("all users", "sampled negatives, DP-SGD", 3.0, {"method": "dp_sgd"}, one),
        point("all users", "all candidates, DP-SGD", 3.0, _full(), one),
        point("a fifth", "in-batch negatives", None, {**_STOCK, **_FEW, **_in_batch()}, one),
        *(point("a fifth", sampled, epsilon, _FEW, one) for epsilon in (8.0, 3.0, 1.0)),
    ]


def _in_batch() -> Changes:
    return {"model.loss": "in_batch"}


def _full() -> Changes:
    return {"method": "dp_sgd", "model.loss": "full"}

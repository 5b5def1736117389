"""Dicts of outputs of which only some have a loss, as recommenders return them."""

from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from tests.training_cases import marked_dataset, plan_for, weights_of

SIZE = 10


class Ratings(keras.Model):
    """A rating, and the vector of the user, which serving looks for."""

    def __init__(self, with_vector: bool = True, with_other: bool = False) -> None:
        super().__init__()
        self.users, self.items = keras.layers.Embedding(9, 3), keras.layers.Embedding(7, 3)
        self.dense, self.other = keras.layers.Dense(1), keras.layers.Dense(2)
        self.with_vector, self.with_other = with_vector, with_other

    def call(self, x: dict[str, Any]) -> dict[str, Any]:
        user = self.users(x["user"])
        outputs = {"rating": self.dense(user * self.items(x["item"]))}
        if self.with_vector:
            outputs["vector"] = user
        if self.with_other:
            outputs["other"] = self.other(user)
        return outputs


class OwnLoss(Ratings):
    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return keras.ops.mean(keras.ops.square(y_pred["rating"] - y["rating"][:, None]))


def trained(model: keras.Model, loss: Any, more: dict[str, Any] | None = None) -> list[np.ndarray]:
    rng, plan = np.random.default_rng(0), plan_for(SIZE)
    x = {"user": rng.integers(0, 9, SIZE), "item": rng.integers(0, 7, SIZE)}
    y = {"rating": rng.random(SIZE).astype(np.float32), **(more or {})}
    optimizer = dp_sparse.DPAdaFESTOptimizer(keras.optimizers.SGD(0.5), plan, 0.1, threshold=0.5)
    model.compile(optimizer, loss)
    model(x)
    rng = np.random.default_rng(1)
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
    model.fit(marked_dataset(plan, x, y, steps=2), verbose=0)
    return weights_of(model)


@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (Ratings, {"rating": "mse"}),
        (Ratings, {"rating": "mse", "vector": None}),
        (OwnLoss, None),
    ],
)
def test_they_train_as_the_output_alone(make: Any, loss: Any) -> None:
    alone = trained(Ratings(with_vector=False), {"rating": "mse"})
    for one, other in zip(alone, trained(make(), loss), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("make", "loss"), [(Ratings, {"rating": "mse"}), (OwnLoss, None)])
def test_a_layer_of_such_an_output_alone_is_named(make: Any, loss: Any) -> None:
    with pytest.raises(dp_sparse.UnsupportedLayerError, match="return only outputs that have one"):
        trained(make(with_other=True), loss)


def test_labels_of_what_is_no_output_are_named() -> None:
    with pytest.raises(ValueError, match=r"(?s)got y\['item'\].*from y to x.*compute_loss"):
        trained(Ratings(), {"rating": "mse"}, {"item": np.zeros(SIZE, np.int32)})

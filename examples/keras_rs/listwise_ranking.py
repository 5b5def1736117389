"""Listwise ranking: five films of one user are an example, in a pairwise hinge loss."""

from typing import Any

import keras
import keras_rs
import numpy as np

from examples.keras_rs.movielens import MovieLens
from examples.keras_rs.task import Task, run

LISTS, LENGTH = 30, 5  # of a user


class RankingModel(keras.Model):
    """A score of each film of a list."""

    def __init__(self, users: int, films: int, width: int = 32) -> None:
        super().__init__()
        self.user_embedding = keras.layers.Embedding(users, width)
        self.candidate_embedding = keras.layers.Embedding(films, width)
        self.ratings = keras.Sequential(
            [
                keras.layers.Dense(256, activation="relu"),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(1),
            ]
        )

    def call(self, inputs: dict[str, Any]) -> Any:
        films = self.candidate_embedding(inputs["movie_id"])
        user = keras.ops.expand_dims(self.user_embedding(inputs["user_id"]), axis=1)
        users = keras.ops.repeat(user, keras.ops.shape(films)[1], axis=1)
        scores = self.ratings(keras.ops.concatenate([users, films], axis=-1))
        return keras.ops.squeeze(scores, axis=-1)


def task(world: MovieLens) -> Task:
    """The model, lists of three quarters of each user's films, and a list of the others."""
    rng = np.random.default_rng(0)
    ours, others = [], []
    for seen in world.of_users():
        rng.shuffle(seen)
        cut = len(seen) * 3 // 4
        ours += [rng.choice(seen[:cut], LENGTH, replace=False) for _ in range(LISTS)]
        others.append(seen[cut : cut + LENGTH])
    test_x, test_y = _columns(world, np.stack(others))

    def scores(model: keras.Model) -> dict[str, float]:
        ndcg = keras_rs.metrics.NDCG(k=LENGTH)
        ndcg.update_state(test_y, model.predict(test_x, batch_size=4096, verbose=0))
        return {"NDCG": float(ndcg.result())}

    metric = keras_rs.metrics.NDCG(k=LENGTH, name="ndcg")
    return Task(
        model=RankingModel(world.num_users, world.num_films),
        train=_columns(world, np.stack(ours)),
        scores=scores,
        optimizer=keras.optimizers.Adagrad(0.1),
        batch_size=1024,
        epochs=4,
        compiled={"loss": keras_rs.losses.PairwiseHingeLoss(), "metrics": [metric]},
    )


def _columns(world: MovieLens, lists: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    x = {"user_id": world.user_id[lists[:, 0]], "movie_id": world.movie_id[lists]}
    return x, (world.rating[lists] - 1) / 4


if __name__ == "__main__":
    run(task)

"""Ranking: which rating a user gives a film. Two tables and three dense layers."""

from typing import Any

import keras

from examples.keras_rs.movielens import MovieLens
from examples.keras_rs.scores import in_stars
from examples.keras_rs.task import Task, run, split


class RankingModel(keras.Model):
    """A rating from the rows of a user and a film."""

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
        user = self.user_embedding(inputs["user_id"])
        film = self.candidate_embedding(inputs["movie_id"])
        return self.ratings(keras.ops.concatenate([user, film], axis=1))


def task(world: MovieLens) -> Task:
    """The model and four fifths of the ratings."""
    x = {"user_id": world.user_id, "movie_id": world.movie_id}
    ours, (test_x, test_y) = split((x, (world.rating - 1) / 4))

    def scores(model: keras.Model) -> dict[str, float]:
        predicted = model.predict(test_x, batch_size=4096, verbose=0)
        return {"RMSE": in_stars(predicted, 4 * test_y + 1)}

    return Task(
        model=RankingModel(world.num_users, world.num_films),
        train=ours,
        scores=scores,
        optimizer=keras.optimizers.Adagrad(0.1),
        batch_size=1000,
        epochs=4,
        compiled={
            "loss": keras.losses.MeanSquaredError(),
            "metrics": [keras.metrics.RootMeanSquaredError()],
        },
    )


if __name__ == "__main__":
    run(task)

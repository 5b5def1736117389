"""Retrieval by ratings: the product of a user's and a film's rows, in a loss of the model's own."""

from typing import Any

import keras
import keras_rs
import numpy as np

from examples.keras_rs.movielens import MovieLens
from examples.keras_rs.scores import in_stars
from examples.keras_rs.task import Task, run, split


class RetrievalModel(keras.Model):
    """Users against films; outside of training it also returns the ten best films."""

    def __init__(self, users: int, films: int, width: int = 32) -> None:
        super().__init__()
        self.user_embedding = keras.layers.Embedding(users, width)
        self.candidate_embedding = keras.layers.Embedding(films, width)
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=10, return_scores=False)
        self.loss_fn = keras.losses.MeanSquaredError()

    def build(self, input_shape: Any) -> None:
        self.user_embedding.build(input_shape)
        self.candidate_embedding.build(input_shape)
        self.retrieval.candidate_embeddings = self.candidate_embedding.embeddings
        self.retrieval.build(input_shape)
        super().build(input_shape)

    def call(self, inputs: Any, training: bool = False) -> dict[str, Any]:
        user = self.user_embedding(inputs)
        if training:
            return {"user_embeddings": user}
        return {"user_embeddings": user, "predictions": self.retrieval(user)}

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        film = self.candidate_embedding(y["movie_id"])
        score = keras.ops.sum(y_pred["user_embeddings"] * film, axis=1, keepdims=True)
        return self.loss_fn(keras.ops.expand_dims(y["rating"], -1), score, sample_weight)


def task(world: MovieLens) -> Task:
    """The model and four fifths of the ratings."""
    labels = {"movie_id": world.movie_id, "rating": (world.rating - 1) / 4}
    ours, (users, test) = split((world.user_id, labels))

    def scores(model: keras.Model) -> dict[str, float]:
        rows = np.asarray(model.user_embedding(users))
        films = np.asarray(model.candidate_embedding(test["movie_id"]))
        return {"RMSE": in_stars(np.sum(rows * films, axis=1), 4 * test["rating"] + 1)}

    return Task(
        model=RetrievalModel(world.num_users, world.num_films),
        train=ours,
        scores=scores,
        optimizer=keras.optimizers.Adagrad(0.1),
        batch_size=1000,
        epochs=16,
    )


if __name__ == "__main__":
    run(task)

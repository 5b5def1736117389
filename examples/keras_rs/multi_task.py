"""Two tasks of one model: the rating of a film, and which film it is.

The tutorial compares a user with the films of the other examples of the batch, which no noise of
one example covers. `Sampled` compares with drawn films instead. Both take the mean over the batch,
where the tutorial sums.
"""

from typing import Any

import keras
import keras_rs

import dp_sparse
from examples.keras_rs.movielens import MovieLens
from examples.keras_rs.scores import in_stars, predictions, recall
from examples.keras_rs.task import Task, run, split


class MultiTaskModel(keras.Model):
    """Two tables, a product for retrieval and dense layers for the rating."""

    def __init__(self, users: int, films: int, width: int = 32) -> None:
        super().__init__()
        self.user_embedding = keras.layers.Embedding(users, width)
        self.candidate_embedding = keras.layers.Embedding(films, width)
        hidden = [keras.layers.Dense(units, activation="relu") for units in (256, 128)]
        self.rating_model = keras.Sequential([*hidden, keras.layers.Dense(1)])
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=10, return_scores=False)
        self.ranking_loss_fn = keras.losses.MeanSquaredError()

    def build(self, input_shape: Any) -> None:
        self.user_embedding.build(input_shape["user_id"])
        self.candidate_embedding.build(input_shape["movie_id"])
        self.retrieval.candidate_embeddings = self.candidate_embedding.embeddings
        self.retrieval.build(input_shape)
        super().build(input_shape)

    def call(self, inputs: dict[str, Any], training: bool = False) -> dict[str, Any]:
        user = self.user_embedding(inputs["user_id"])
        film = self.candidate_embedding(inputs["movie_id"])
        rating = self.rating_model(keras.ops.concatenate([user, film], axis=1))
        found = {"user_embeddings": user, "candidate_embeddings": film, "rating": rating}
        return found if training else {**found, "predictions": self.retrieval(user)}

    def ranking_loss(self, y: Any, y_pred: dict[str, Any], sample_weight: Any) -> Any:
        """How far the rating is off."""
        return self.ranking_loss_fn(keras.ops.expand_dims(y, -1), y_pred["rating"], sample_weight)


class InBatch(MultiTaskModel):
    """With negatives of the batch, as in the tutorial."""

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        film = y_pred["candidate_embeddings"]
        scores = keras.ops.matmul(y_pred["user_embeddings"], keras.ops.transpose(film))
        right = keras.ops.arange(keras.ops.shape(scores)[0])
        losses = keras.losses.sparse_categorical_crossentropy(right, scores, from_logits=True)
        return keras.ops.mean(losses) + self.ranking_loss(y, y_pred, sample_weight)


class Sampled(MultiTaskModel):
    """With the loss that privacy allows."""

    def __init__(self, users: int, films: int) -> None:
        super().__init__(users, films)
        self.softmax = dp_sparse.losses.SampledSoftmax(self.candidate_embedding)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        losses = self.softmax(y_pred["user_embeddings"], x["movie_id"])
        return keras.ops.mean(losses) + self.ranking_loss(y, y_pred, sample_weight)


def task(world: MovieLens, model: type[MultiTaskModel] = Sampled) -> Task:
    """The model and four fifths of the ratings."""
    x = {"user_id": world.user_id, "movie_id": world.movie_id}
    ours, (test_x, test_y) = split((x, (world.rating - 1) / 4))

    def scores(model: keras.Model) -> dict[str, float]:
        error = in_stars(predictions(model, test_x, "rating"), 4 * test_y + 1)
        found = recall(predictions(model, test_x, "predictions"), test_x["movie_id"])
        return {"RMSE": error, "recall@10, %": found}

    return Task(
        model=model(world.num_users, world.num_films),
        train=ours,
        scores=scores,
        optimizer=keras.optimizers.Adagrad(0.1),
        batch_size=1000,
        epochs=4,
    )


def stock(world: MovieLens) -> Task:
    """That of the tutorial."""
    return task(world, InBatch)


if __name__ == "__main__":
    run(task, stock)

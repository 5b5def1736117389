"""The next film from the ten before it: a GRU against the rows of a table of films.

The tutorial compares with the films of the other examples of the batch, which no noise of one
example covers. `Sampled` compares with drawn films instead.
"""

from typing import Any

import keras
import keras_rs
import numpy as np

import dp_sparse
from examples.keras_rs.movielens import MovieLens
from examples.keras_rs.scores import predictions, recall
from examples.keras_rs.task import Task, run

CONTEXT, WIDTH = 10, 32


class SequentialModel(keras.Model):
    """A query from a sequence; outside of training it also returns the ten best films."""

    def __init__(self, films: int) -> None:
        super().__init__()
        rows = keras.layers.Embedding(films, WIDTH)
        self.query_model = keras.Sequential([rows, keras.layers.GRU(WIDTH)])
        self.candidate_model = keras.layers.Embedding(films, WIDTH)
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=10, return_scores=False)

    def build(self, input_shape: Any) -> None:
        self.query_model.build(input_shape)
        self.candidate_model.build(input_shape)
        self.retrieval.candidate_embeddings = self.candidate_model.embeddings
        self.retrieval.build(input_shape)
        super().build(input_shape)

    def call(self, inputs: Any, training: bool = False) -> dict[str, Any]:
        query = self.query_model(inputs)
        if training:
            return {"query_embeddings": query}
        return {"query_embeddings": query, "predictions": self.retrieval(query)}


class InBatch(SequentialModel):
    """With the loss of the tutorial."""

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        films = self.candidate_model(y)
        scores = keras.ops.matmul(y_pred["query_embeddings"], keras.ops.transpose(films))
        right = keras.ops.arange(keras.ops.shape(scores)[0])
        losses = keras.losses.sparse_categorical_crossentropy(right, scores, from_logits=True)
        return keras.ops.mean(losses)


class Sampled(SequentialModel):
    """With the loss that privacy allows."""

    def __init__(self, films: int) -> None:
        super().__init__(films)
        self.softmax = dp_sparse.losses.SampledSoftmax(self.candidate_model)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return self.softmax(y_pred["query_embeddings"], y)


def task(world: MovieLens, model: type[SequentialModel] = Sampled) -> Task:
    """The model and all films of each user but the last, which judges."""
    windows = [_windows(films) for films in world.sequences()]
    ours = np.concatenate([own[:-1] for own in windows])
    test = np.stack([own[-1] for own in windows])

    def scores(model: keras.Model) -> dict[str, float]:
        return {
            "recall@10, %": recall(predictions(model, test[:, :-1], "predictions"), test[:, -1])
        }

    return Task(
        model=model(world.num_films),
        train=(ours[:, :-1], ours[:, -1]),
        scores=scores,
        optimizer=keras.optimizers.AdamW(0.005),
        batch_size=4096,
        epochs=2,
    )


def stock(world: MovieLens) -> Task:
    """That of the tutorial."""
    return task(world, InBatch)


def _windows(films: np.ndarray) -> np.ndarray:
    """Ten films and the one after them, int32 `[films - 1, 11]`; zeros stand before the first."""
    padded = np.pad(films, (CONTEXT - 1, 0))
    return np.lib.stride_tricks.sliding_window_view(padded, CONTEXT + 1)


if __name__ == "__main__":
    run(task, stock)

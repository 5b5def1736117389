"""SASRec: a transformer over a user's films, with one drawn film against each right one.

A user is an example. The loss is divided by the sum of the weights, which are 0 at padding: with
privacy that is the number of an example's positions, a constant.
"""

from typing import Any

import keras
import keras_hub
import keras_rs
import numpy as np
from keras import ops

from examples.keras_rs.movielens import MovieLens
from examples.keras_rs.scores import predictions, recall
from examples.keras_rs.task import Task, run

LENGTH, WIDTH, LAYERS, DROPOUT = 50, 50, 2, 0.2


class SasRec(keras.Model):
    """The vector of each position; outside of training also the ten best films after the last."""

    def __init__(self, films: int) -> None:
        super().__init__()
        self.item_embedding = keras.layers.Embedding(
            films,
            WIDTH,
            embeddings_initializer="glorot_uniform",
            embeddings_regularizer=keras.regularizers.L2(0.001),
        )
        self.position_embedding = keras_hub.layers.PositionEmbedding(LENGTH)
        self.embeddings_add = keras.layers.Add()
        self.embeddings_dropout = keras.layers.Dropout(DROPOUT)
        self.transformer_layers = [
            keras_hub.layers.TransformerDecoder(
                intermediate_dim=WIDTH,
                num_heads=1,
                dropout=DROPOUT,
                activation="relu",
                normalize_first=True,
            )
            for _ in range(LAYERS)
        ]
        self.layer_norm = keras.layers.LayerNormalization(epsilon=1e-8)
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=10, return_scores=False)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)

    def build(self, input_shape: Any) -> None:
        shape = (*input_shape["item_ids"], WIDTH)
        self.item_embedding.build(input_shape["item_ids"])
        self.position_embedding.build(shape)
        for layer in self.transformer_layers:
            layer.build(decoder_sequence_shape=shape)
        self.layer_norm.build(shape)
        self.retrieval.candidate_embeddings = self.item_embedding.embeddings
        self.retrieval.build(input_shape["item_ids"])
        super().build(input_shape)

    def call(self, inputs: dict[str, Any], training: bool = False) -> dict[str, Any]:
        x = self.item_embedding(inputs["item_ids"])
        x = self.embeddings_dropout(self.embeddings_add((x, self.position_embedding(x))))
        for layer in self.transformer_layers:
            x = layer(x, decoder_padding_mask=inputs["padding_mask"])
        x = self.layer_norm(x)
        if training:
            return {"sequence": x}
        last = ops.sum(ops.cast(inputs["padding_mask"], "int32"), axis=1) - 1
        place = ops.expand_dims(ops.maximum(last, 0), (-2, -1))
        found = self.retrieval(ops.squeeze(ops.take_along_axis(x, place, axis=1), axis=1))
        return {"sequence": x, "predictions": found}

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        right = ops.sum(self.item_embedding(y["positive"]) * y_pred["sequence"], axis=-1)
        wrong = ops.sum(self.item_embedding(y["negative"]) * y_pred["sequence"], axis=-1)
        labels = ops.concatenate([ops.ones_like(right), ops.zeros_like(wrong)], axis=1)
        weights = ops.concatenate([sample_weight, sample_weight], axis=1)
        scores = ops.concatenate([right, wrong], axis=1)
        losses = self.loss_fn(labels[..., None], scores[..., None], sample_weight=weights)
        return ops.sum(losses) / ops.sum(weights)


def task(world: MovieLens) -> Task:
    """The model and the last films of each user but one, which judges."""
    sequences = world.sequences()
    ours = np.stack([_padded(films[:-1], LENGTH + 1) for films in sequences])
    test = np.stack([_padded(films[:-1], LENGTH) for films in sequences])
    answers = np.array([films[-1] for films in sequences])
    negative = np.random.default_rng(0).integers(1, world.num_films, (len(ours), LENGTH), np.int32)
    x, positive = _inputs(ours[:, :-1]), ours[:, 1:]
    weights = (positive != 0).astype(np.float32)

    def scores(model: keras.Model) -> dict[str, float]:
        return {"recall@10, %": recall(predictions(model, _inputs(test), "predictions"), answers)}

    return Task(
        model=SasRec(world.num_films),
        train=(x, {"positive": positive, "negative": negative}, weights),
        scores=scores,
        optimizer=keras.optimizers.Adam(0.001, beta_2=0.98),
        batch_size=128,
        epochs=10,
    )


def _padded(films: np.ndarray, length: int) -> np.ndarray:
    """The last films, with zeros behind them."""
    kept = films[-length:]
    return np.pad(kept, (0, length - len(kept)))


def _inputs(films: np.ndarray) -> dict[str, np.ndarray]:
    return {"item_ids": films, "padding_mask": films != 0}


if __name__ == "__main__":
    run(task)

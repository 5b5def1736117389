"""Two towers of several features each: a user's facts, a film's title and genres."""

from typing import Any

import keras
import keras_rs
import numpy as np

from examples.keras_rs.movielens import AGES, GENDERS, GENRES, OCCUPATIONS, WORDS, MovieLens
from examples.keras_rs.scores import in_stars, predictions, recall
from examples.keras_rs.task import Task, run, split

LAYERS, WIDTH, BEST = (64, 32), 32, 100


def tower() -> keras.Sequential:
    """Dense layers, the last one linear."""
    hidden = [keras.layers.Dense(units, activation="relu") for units in LAYERS[:-1]]
    return keras.Sequential([*hidden, keras.layers.Dense(LAYERS[-1])])


def mean_of_rows(size: int) -> keras.Sequential:
    """The mean of the rows of several ids; 0 is padding."""
    rows = keras.layers.Embedding(size, WIDTH, mask_zero=True)
    return keras.Sequential([rows, keras.layers.GlobalAveragePooling1D()])


class QueryModel(keras.Model):
    """A user's vector."""

    def __init__(self, users: int) -> None:
        super().__init__()
        sizes = {"user_id": users, "age": AGES, "gender": GENDERS, "occupation": OCCUPATIONS}
        self.tables = {name: keras.layers.Embedding(size, WIDTH) for name, size in sizes.items()}
        self.crossed = keras.layers.Embedding(AGES * GENDERS, WIDTH)
        self.dense_layers = tower()

    def call(self, x: dict[str, Any]) -> Any:
        rows = [table(x[name]) for name, table in self.tables.items()]
        rows.append(self.crossed(x["age"] * GENDERS + x["gender"]))
        return self.dense_layers(keras.ops.concatenate(rows, axis=1))


class CandidateModel(keras.Model):
    """A film's vector."""

    def __init__(self, films: int) -> None:
        super().__init__()
        self.movie_embedding = keras.layers.Embedding(films, WIDTH)
        self.title_embedding = mean_of_rows(WORDS + 1)
        self.genres_embedding = mean_of_rows(GENRES + 1)
        self.dense_layers = tower()

    def call(self, x: dict[str, Any]) -> Any:
        film = self.movie_embedding(x["movie_id"])
        rows = [film, self.title_embedding(x["title"]), self.genres_embedding(x["genres"])]
        return self.dense_layers(keras.ops.concatenate(rows, axis=1))


class RetrievalModel(keras.Model):
    """Both towers; outside of training it also returns the best films."""

    def __init__(self, users: int, films: dict[str, np.ndarray]) -> None:
        super().__init__()
        self.films = films
        self.query_model = QueryModel(users)
        self.candidate_model = CandidateModel(len(films["movie_id"]))
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=BEST, return_scores=False)
        self.update_candidates()
        self.loss_fn = keras.losses.MeanSquaredError()

    def update_candidates(self) -> None:
        """Computes all films' vectors anew."""
        vectors = self.candidate_model.predict(self.films, batch_size=4096, verbose=0)
        self.retrieval.update_candidates(vectors)

    def call(self, inputs: dict[str, Any], training: bool = False) -> dict[str, Any]:
        query = self.query_model({name: inputs[name] for name in USER})
        film = self.candidate_model({name: inputs[name] for name in FILM})
        found = {"query_embeddings": query, "candidate_embeddings": film}
        return found if training else {**found, "predictions": self.retrieval(query)}

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        product = y_pred["query_embeddings"] * y_pred["candidate_embeddings"]
        score = keras.ops.sum(product, axis=1, keepdims=True)
        return self.loss_fn(keras.ops.expand_dims(y, -1), score, sample_weight)


USER, FILM = ("user_id", "age", "gender", "occupation"), ("movie_id", "title", "genres")


def task(world: MovieLens) -> Task:
    """The model and four fifths of the ratings."""
    x = {"user_id": world.user_id}
    x |= {name: world.users[name][world.user_id] for name in USER[1:]}
    x |= films_of(world, world.movie_id)
    ours, (test_x, test_y) = split((x, (world.rating - 1) / 4))

    def scores(model: keras.Model) -> dict[str, float]:
        model.update_candidates()
        query = predictions(model, test_x, "query_embeddings")
        film = predictions(model, test_x, "candidate_embeddings")
        liked = test_y > 0.9
        best = predictions(model, {k: v[liked] for k, v in test_x.items()}, "predictions")
        error = in_stars(np.sum(query * film, axis=1), 4 * test_y + 1)
        return {"RMSE": error, f"recall@{BEST}, %": recall(best, test_x["movie_id"][liked])}

    return Task(
        model=RetrievalModel(world.num_users, films_of(world, np.arange(world.num_films))),
        train=ours,
        scores=scores,
        optimizer=keras.optimizers.Adagrad(0.05),
        batch_size=1000,
        epochs=4,
    )


def films_of(world: MovieLens, films: np.ndarray) -> dict[str, np.ndarray]:
    """What is known of them."""
    ids = films.astype(np.int32)
    return {"movie_id": ids, "title": world.titles[ids], "genres": world.genres[ids]}


if __name__ == "__main__":
    run(task)

"""`basic_retrieval`, with films found by clusters of their vectors in place of all of them.

The tutorial calls ScaNN, which has no wheel beside this TensorFlow. Clusters of k-means, of which
the nearest are searched, show the same: how films are found is no matter of training.
"""

import dataclasses

import keras
import numpy as np
from scipy.cluster.vq import kmeans2

from examples.keras_rs import basic_retrieval
from examples.keras_rs.movielens import MovieLens
from examples.keras_rs.task import Task, run

LEAVES, SEARCHED, BEST = 64, 16, 10


def task(world: MovieLens) -> Task:
    """That of `basic_retrieval`, which also says how many of the best films the clusters find."""
    made = basic_retrieval.task(world)

    def scores(model: keras.Model) -> dict[str, float]:
        users = np.asarray(model.user_embedding.embeddings)[1:1000]
        films = np.asarray(model.candidate_embedding.embeddings)
        exact = np.argsort(-users @ films.T, axis=1)[:, :BEST]
        near = _by_clusters(users, films)
        same = [len(np.intersect1d(*rows)) / BEST for rows in zip(exact, near, strict=True)]
        return {**made.scores(model), "of the ten best, found, %": 100 * float(np.mean(same))}

    return dataclasses.replace(made, scores=scores)


def _by_clusters(users: np.ndarray, films: np.ndarray) -> np.ndarray:
    """The best films among those of the clusters with the best centres, `[users, best]`."""
    centres, of_film = kmeans2(films, min(LEAVES, len(films)), seed=0, minit="points")
    scores = users @ films.T
    best_centres = np.argsort(-users @ centres.T, axis=1)[:, :SEARCHED]
    searched = np.any(of_film[None, :, None] == best_centres[:, None, :], axis=2)
    return np.argsort(-np.where(searched, scores, -np.inf), axis=1)[:, :BEST]


if __name__ == "__main__":
    run(task)

"""Deep and cross network: a rating from six features, crossed by a low-rank layer."""

import keras
import keras_rs

from examples.keras_rs.movielens import AGES, AREAS, GENDERS, OCCUPATIONS, MovieLens
from examples.keras_rs.scores import in_stars
from examples.keras_rs.task import Task, run, split

WIDTH, PROJECTION, UNITS = 32, 20, (192, 192)


def model_of(world: MovieLens) -> keras.Model:
    """A functional model."""
    sizes = {"user_id": world.num_users, "movie_id": world.num_films}
    sizes |= {"age": AGES, "gender": GENDERS, "occupation": OCCUPATIONS, "area": AREAS}
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in sizes}
    rows = [keras.layers.Embedding(sizes[name], WIDTH)(inputs[name]) for name in sizes]
    x = keras.ops.concatenate(rows, axis=1)
    x = keras_rs.layers.FeatureCross(projection_dim=PROJECTION)(x)
    for units in UNITS:
        x = keras.layers.Dense(units, activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


def task(world: MovieLens) -> Task:
    """The model and four fifths of the ratings."""
    about = {name: column[world.user_id] for name, column in world.users.items()}
    x = {"user_id": world.user_id, "movie_id": world.movie_id, **about}
    ours, (test_x, test_y) = split((x, (world.rating - 1) / 4))

    def scores(model: keras.Model) -> dict[str, float]:
        predicted = model.predict(test_x, batch_size=4096, verbose=0)
        return {"RMSE": in_stars(predicted, 4 * test_y + 1)}

    return Task(
        model=model_of(world),
        train=ours,
        scores=scores,
        optimizer=keras.optimizers.AdamW(0.01),
        batch_size=1024,
        epochs=4,
        compiled={"loss": "mse", "metrics": [keras.metrics.RootMeanSquaredError()]},
    )


if __name__ == "__main__":
    run(task)

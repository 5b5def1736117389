"""A loss of the model's own against the same loss of `compile`, retrieval, and a CSV to records.

All models are two towers on MovieLens' numbers of users and items, width 32, batch 1,024, and step
in turns. Retrieval compares with as many negatives as a batch has examples: sampled ones under
DP-AdaFEST with Adam, and those of the batch with stock Keras. The CSV file has five columns: two of
text, which are hashed, and three of numbers.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from benchmarks import harness

USERS, ITEMS, WIDTH, BATCH = 6_040, 3_706, 32, 1024
ROUNDS, QUICK_ROUNDS, WARM_UP = 200, 20, 6
ROWS, QUICK_ROWS = 2_000_000, 50_000


class Compiled(keras.Model):
    """Two towers whose product is the prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.users = keras.layers.Embedding(USERS, WIDTH)
        self.items = keras.layers.Embedding(ITEMS, WIDTH)
        self.tower = keras.layers.Dense(WIDTH)

    def call(self, x: dict[str, Any]) -> Any:
        product = self.tower(self.users(x["user"])) * self.items(x["item"])
        return keras.ops.sum(product, axis=-1, keepdims=True)


class Own(Compiled):
    """The same; the loss looks the item up."""

    def call(self, x: dict[str, Any]) -> Any:
        return self.tower(self.users(x["user"]))

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        score = keras.ops.sum(y_pred * self.items(x["item"]), axis=-1)
        return keras.ops.mean(keras.ops.square(score - y))


class Sampled(Own):
    """Retrieval with negatives that the step draws."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = dp_sparse.losses.SampledSoftmax(self.items, BATCH)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return self.softmax(y_pred, x["item"])


class InBatch(Own):
    """Retrieval with the items of the other examples, which no privacy allows."""

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        scores = keras.ops.matmul(y_pred, keras.ops.transpose(self.items(x["item"])))
        right = keras.ops.arange(keras.ops.shape(scores)[0])
        losses = keras.losses.sparse_categorical_crossentropy(right, scores, from_logits=True)
        return keras.ops.mean(losses)


def examples(count: int) -> Any:
    """Users, items as popular as MovieLens', and numbers to predict."""
    rng = np.random.default_rng(0)
    x = {"user": rng.integers(0, USERS, count), "item": rng.zipf(1.3, count) % ITEMS}
    return x, rng.normal(size=count).astype(np.float32)


def stock_step_of(model: keras.Model, steps: int) -> Callable[[], object]:
    """One call is one step of stock Keras."""
    model.compile(keras.optimizers.Adam())
    data = tf.data.Dataset.from_tensor_slices(examples(BATCH * steps)).batch(BATCH, True)
    batches = iter(list(data))
    model.make_train_function()
    return lambda: model.train_function(iter([next(batches)]))


def step_of(model: keras.Model, loss: str | None, steps: int) -> Callable[[], object]:
    """One call is one private step on a fresh batch."""
    count = BATCH * steps
    x, y = examples(count)
    sampling = dp_sparse.StreamSampling(num_examples=count, batch_size=BATCH)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-6), sampling).calibrate()
    model.compile(dp_sparse.DPAdaFESTOptimizer(keras.optimizers.Adam(), plan, 1.0), loss)
    batches = iter(list(sampling.batches(tf.data.Dataset.from_tensor_slices((x, y)))))
    model.make_train_function()
    return lambda: model.train_function(iter([next(batches)]))


def csv_rows_per_second(rows: int) -> float:
    """How fast `write_records` is; the file is in the memory of the system."""
    rng = np.random.default_rng(0)
    users, cities = rng.zipf(1.2, rows) % 100_000, rng.integers(0, 3_000, rows)
    numbers = rng.zipf(1.3, rows) % 20_000, rng.integers(1, 6, rows), rng.random(rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        form = "u%d,city %d,%d,%d,%.3f"
        columns = np.stack([users, cities, *numbers], axis=1)
        header = "user,city,item,rating,age"
        np.savetxt(path, columns, form, header=header, comments="")
        begun = time.perf_counter()
        hashed = {"user": 100_000, "city": 4_096}
        dp_sparse.write_records(path, path.with_suffix(".npy"), label="rating", hashed=hashed)
        return rows / (time.perf_counter() - begun)


def main() -> None:
    """Prints ms a step, their ratio, and rows a second."""
    options = harness.arguments(__doc__)
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    steps = rounds + WARM_UP
    candidates = {
        "compiled": step_of(Compiled(), "mse", steps),
        "compute_loss": step_of(Own(), None, steps),
        "sampled negatives": step_of(Sampled(), None, steps),
        "stock, in-batch negatives": stock_step_of(InBatch(), steps),
    }
    seconds = harness.in_turns(candidates, rounds, WARM_UP)
    speed = csv_rows_per_second(QUICK_ROWS if options.quick else ROWS)
    rows = [(f"{name}, ms a step", 1000 * each) for name, each in seconds.items()]
    rows.append(("CSV to records, rows a second", speed))
    metrics = {
        "custom_over_compiled": seconds["compute_loss"] / seconds["compiled"],
        "sampled_over_in_batch": seconds["sampled negatives"]
        / seconds["stock, in-batch negatives"],
        "csv_rows_per_second": speed,
    }
    harness.report("custom_loss", ("", "measured"), rows, metrics, options)


if __name__ == "__main__":
    main()

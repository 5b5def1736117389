"""What all ten scripts share: a task, the two lines that privacy changes, and a command line."""

import argparse
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from examples.keras_rs import movielens
from examples.keras_rs.names import OPTIMIZERS, PRIVATE, SPARSE, TWO_LINES

EXPECTED_BATCH = 4096  # of private runs, or a twelfth of the examples if that is less


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data and what judges it.

    Attributes:
        model: Not compiled.
        train: `(x, y)` or `(x, y, sample_weight)`, arrays.
        scores: From the trained model to its scores on rows that did not train.
        optimizer: Of the tutorial.
        batch_size: Of the tutorial, likewise.
        epochs: Passes, with and without privacy.
        compiled: `loss` and `metrics` of `compile`, if the model has no `compute_loss`.
    """

    model: keras.Model
    train: tuple[Any, ...]
    scores: Callable[[keras.Model], dict[str, float]]
    optimizer: keras.optimizers.Optimizer
    batch_size: int
    epochs: int
    compiled: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def train(task: Task) -> Any:
    """Trains as the tutorial does; Keras' history."""
    return task.model.fit(compile_stock(task), epochs=task.epochs, verbose=0)


def train_privately(task: Task, epsilon: float, optimizer: str) -> Any:
    """The same, with another optimizer and another data line; Keras' history."""
    return task.model.fit(compile_private(task, epsilon, optimizer), epochs=task.epochs, verbose=0)


def compile_stock(task: Task) -> Any:
    """The batches of the tutorial; its optimizer is in the model."""
    task.model.compile(optimizer=task.optimizer, **task.compiled)
    data = tf.data.Dataset.from_tensor_slices(task.train).shuffle(examples_of(task))
    return data.batch(task.batch_size).cache()


def compile_private(task: Task, epsilon: float, optimizer: str) -> Any:
    """The batches of a private run; its optimizer is in the model.

    Args:
        task: What trains.
        epsilon: Of the run; δ is 1 / examples.
        optimizer: Of `OPTIMIZERS`.
    """
    plan = plan_of(task, epsilon)
    if optimizer == SPARSE:
        _without_regularizers(task.model)
    with task.model.distribute_strategy.scope():
        own = private_optimizer(task, plan, optimizer)
    task.model.compile(optimizer=own, **task.compiled)
    return plan.sampling.batches(task.train)


def _without_regularizers(model: keras.Model) -> None:
    """Removes those of tables, which would touch every row in every step."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Embedding):
            layer.embeddings_regularizer = None
            if layer.built:
                layer._embeddings.regularizer = None


def plan_of(task: Task, epsilon: float) -> dp_sparse.PrivacyPlan:
    """A plan of as many passes as the tutorial's."""
    count = examples_of(task)
    sampling = dp_sparse.PoissonSampling(count, expected_batch(task), epochs=task.epochs)
    return dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(epsilon, 1 / count), sampling).calibrate()


def private_optimizer(task: Task, plan: dp_sparse.PrivacyPlan, name: str) -> Any:
    """What `recommend` says for these shapes, or DP-AdaFEST with the same Adam and clipping."""
    advice = advice_of(task, plan)
    if name == PRIVATE:
        return advice.optimizer()
    return dp_sparse.DPAdaFESTOptimizer(adam_of(advice), plan, **advice.arguments)


def advice_of(task: Task, plan: dp_sparse.PrivacyPlan) -> dp_sparse.Recommendation:
    """From shapes and noise."""
    return dp_sparse.recommend(
        task.model, plan, tf.nest.map_structure(lambda column: column[:1], task.train[:2])
    )


def adam_of(advice: dp_sparse.Recommendation) -> keras.optimizers.Optimizer:
    """The Keras optimizer that it would wrap."""
    return getattr(keras.optimizers, advice.wrapped)(**advice.wrapped_arguments)


def expected_batch(task: Task) -> int:
    """Examples that a private run expects in a batch."""
    return min(EXPECTED_BATCH, -(-examples_of(task) // 12))


def examples_of(task: Task) -> int:
    """How many train."""
    return len(tf.nest.flatten(task.train)[0])


def lines_changed(stock: type, private: type) -> int:
    """How many lines differ where privacy needs another model than the tutorial's."""
    sources = [inspect.getsource(each).splitlines() for each in (stock, private)]
    return sum(line.startswith("+ ") for line in difflib.ndiff(*sources)) + TWO_LINES


def split(columns: Any, share: float = 0.8, seed: int = 42) -> tuple[Any, Any]:
    """Rows that train, and the others, drawn without looking."""
    count = len(tf.nest.flatten(columns)[0])
    order = np.random.default_rng(seed).permutation(count)
    parts = order[: int(share * count)], order[int(share * count) :]
    ours, others = (tf.nest.map_structure(lambda c, i=part: c[i], columns) for part in parts)
    return ours, others


def run(make: Callable[..., Task], stock: Callable[..., Task] | None = None) -> None:
    """The command line of a script: trains without privacy and with it, and prints the scores."""
    parser = argparse.ArgumentParser(description=inspect.getmodule(make).__doc__)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=PRIVATE)
    parser.add_argument("--users", type=int, default=movielens.USERS, help="fewer end sooner")
    parser.add_argument("--films", type=int, default=movielens.FILMS)
    options = parser.parse_args()
    world = movielens.made_up(options.users, options.films)
    for name in ("without privacy", f"epsilon = {options.epsilon:g}"):
        keras.utils.set_random_seed(0)
        if name == "without privacy":
            task = (stock or make)(world)
            train(task)
        else:
            task = make(world)
            train_privately(task, options.epsilon, options.optimizer)
        told = ", ".join(f"{key} {value:.4g}" for key, value in task.scores(task.model).items())
        print(f"{name}: {told}")

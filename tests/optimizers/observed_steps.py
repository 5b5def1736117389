"""Steps of every private optimizer on every way that has code of its own, taken apart.

Noise drowns the gradients (σ = 1,000), so that what a step adds to the weights is the noise, and
tables and kernels are large enough that one step of it tells 5 % of σ at five standard errors.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import distribution, noise
from dp_sparse.sampling.batch import new_nonce
from dp_sparse.shuffling.groups import permutations
from tests.replicas import strategy_of
from tests.training_cases import marked, plan_for

ROWS, WIDTH, HIDDEN = 4000, 16, 800  # two tables, and two kernels of 25,600 entries
SIZE, CLIP, SIGMA, RATE = 1500, 0.5, 1000.0, 0.1
PENALTY = 0.01  # of the second kernel; its gradient is nothing beside the noise
TABLES = ("first", "second")
E = tf.tpu.experimental.embedding


@dataclasses.dataclass(frozen=True)
class Method:
    """An optimizer, and what the noise multiplier of its gradients must be."""

    make: Callable[..., Any]
    sigma: float = SIGMA


def half_of(model: keras.Model, step: int = 2) -> dp_sparse.SelectedRows:
    names = [w.path.split("/")[-2] for w in model.weights if "embeddings" in w.path]
    rows = {name: [i for i in range(ROWS) if i % step] for name in names}
    return dp_sparse.SelectedRows.public(rows, dict.fromkeys(names, ROWS))


def adafest(wrapped: Any, plan: Any, **arguments: Any) -> Any:
    """The map costs as much as the gradients; half of all rows survive."""
    arguments = {"threshold": 0.0, "noise_ratio": 1.0, **arguments}
    return dp_sparse.DPAdaFESTOptimizer(wrapped, plan, CLIP, **arguments)


def exponential(wrapped: Any, plan: Any, rows: int = 3000, **arguments: Any) -> Any:
    mechanism = dp_sparse.ExponentialSelection(rows)
    plan = dataclasses.replace(plan, mechanism=mechanism)
    return dp_sparse.ExponentialSelectionOptimizer(wrapped, plan, CLIP, **arguments)


METHODS = {
    "dpsgd": Method(lambda m, w, p, **a: dp_sparse.DPSGDOptimizer(w, p, CLIP, **a)),
    "fest": Method(lambda m, w, p, **a: dp_sparse.DPFESTOptimizer(w, p, CLIP, half_of(m), **a)),
    "adafest": Method(lambda m, w, p, **a: adafest(w, p, **a), SIGMA * math.sqrt(2)),
    "adafest_plus": Method(
        lambda m, w, p, **a: adafest(w, p, rows=half_of(m, 4), **a), SIGMA * math.sqrt(2)
    ),
    "exponential": Method(lambda m, w, p, **a: exponential(w, p, **a)),
    "lazy": Method(lambda m, w, p, **a: dp_sparse.LazyDPSGDOptimizer(w, p, CLIP, **a)),
    "shuffled": Method(lambda m, w, p, **a: dp_sparse.ShuffledDPSGDOptimizer(w, p, CLIP, **a)),
    "quantile": Method(
        lambda m, w, p, **a: dp_sparse.DPSGDOptimizer(
            w, p, CLIP, clipping=dp_sparse.QuantileClipping(noise_ratio=1.1), **a
        ),
        SIGMA / math.sqrt(1 - 1.1**-2),
    ),
}
WAYS = {
    "graph": tuple(METHODS),
    "xla": ("adafest", "lazy"),
    "microbatches": ("dpsgd",),
    "mirrored": ("adafest",),
    "train_tables": ("adafest",),
}
REST = {
    "xla": ("dpsgd", "fest", "adafest_plus", "exponential", "shuffled"),
    "microbatches": ("fest", "adafest", "adafest_plus", "shuffled"),
    "mirrored": ("dpsgd", "fest", "adafest_plus", "exponential"),
}


def cases(*of: str) -> list[Any]:
    """Pairs of a method and a way, all or of these methods; the rest marked slow."""

    def pairs(ways: dict[str, tuple[str, ...]], *marks: Any) -> list[Any]:
        wanted = [(m, way) for way, methods in ways.items() for m in methods if m in (of or m)]
        return [pytest.param(*pair, id="-".join(pair), marks=marks) for pair in wanted]

    return pairs(WAYS) + pairs(REST, pytest.mark.slow)


@dataclasses.dataclass
class Run:
    """What a run did.

    Attributes:
        names: Of the variables: both tables, then kernels and biases.
        weights: The variables before the first step and after each.
        clip_norms: C of each step.
        slots: By the name of the variable and of the slot.
        losses: The training loss of each step.
    """

    names: list[str]
    weights: list[list[np.ndarray]]
    clip_norms: list[float]
    slots: dict[str, np.ndarray]
    losses: list[float]

    def gradients(self, step: int) -> list[np.ndarray]:
        """The noisy mean gradients of a step of SGD."""
        pairs = zip(self.weights[step], self.weights[step + 1], strict=True)
        return [(old.astype(np.float64) - new) / RATE for old, new in pairs]

    def noise(self, step: int, sigma: float) -> list[np.ndarray]:
        """The same in units of what their deviation must be."""
        return [g * SIZE / (self.clip_norms[step] * sigma) for g in self.gradients(step)]


class _Weights(keras.callbacks.Callback):
    def __init__(
        self, read: Callable[[], list[np.ndarray]], clip_norm: Callable[[], float]
    ) -> None:
        super().__init__()
        self._read, self._clip_norm = read, clip_norm
        self.weights, self.clip_norms = [read()], [clip_norm()]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.weights.append(self._read())
        self.clip_norms.append(self._clip_norm())


class UnPermuted:
    """The weights of a model, all permutations since the first reading undone by the noise key."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._orders: dict[tuple[int, int], np.ndarray] | None = None

    def __call__(self) -> list[np.ndarray]:
        optimizer, variables = self._model.optimizer, self._model.trainable_variables
        values = {id(v): np.array(v) for v in variables}
        if self._orders is None:
            self._orders = {}
            return list(values.values())
        key = optimizer._account.noise_key
        last = noise.Draw(key._key + 0, key._draws - 1, key._offset[0])
        for number, group in enumerate(optimizer._groups):
            for part, places in zip(group.parts, permutations(group, last, number), strict=True):
                for member in part.members:
                    at = id(member.variable), member.axis
                    before = self._orders.get(at, np.arange(len(places)))
                    self._orders[at] = before[places.numpy()]
        for (variable, axis), order in self._orders.items():
            values[variable] = np.take(values[variable], np.argsort(order), axis)
        return list(values.values())


def data(lookups: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    ids = rng.integers(0, lookups, (SIZE, 2)).astype(np.int32)
    return ids, rng.normal(size=(SIZE, 1)).astype(np.float32)


def top(rows: list[Any]) -> Any:
    hidden = keras.layers.Concatenate()(rows)
    hidden = keras.layers.Dense(HIDDEN, activation="tanh", name="hidden")(hidden)
    penalty = keras.regularizers.L2(PENALTY)
    hidden = keras.layers.Dense(2 * WIDTH, kernel_regularizer=penalty, name="middle")(hidden)
    return keras.layers.Dense(1, name="output")(hidden)


def model_of_two_tables() -> keras.Model:
    ids = keras.Input((2,), dtype="int32")
    rows = [keras.layers.Embedding(ROWS, WIDTH, name=n)(ids[:, i]) for i, n in enumerate(TABLES)]
    return keras.Model(ids, top(rows))


def marked_batches(plan: Any, batches: Sequence[Any], weights: np.ndarray | None) -> Any:
    """One after the other, as the plan's sampler would make them."""
    nonce = new_nonce(None)
    made = [
        marked(plan, *examples, index=index, nonce=nonce, weights=weights)
        for index, examples in enumerate(batches)
    ]
    dataset = tf.data.Dataset.from_tensors(made[0])
    for batch in made[1:]:
        dataset = dataset.concatenate(tf.data.Dataset.from_tensors(batch))
    return dataset


def expected_loss(weights: list[np.ndarray], examples: Any) -> float:
    """The mean loss over all examples, and the penalty once."""
    first, second, *dense = (each.astype(np.float64) for each in weights)
    ids, y = examples
    values = np.concatenate([first[ids[:, 0]], second[ids[:, 1]]], 1)
    values = np.tanh(values @ dense[0] + dense[1]) @ dense[2] + dense[3]
    return float(np.mean((values @ dense[4] + dense[5] - y) ** 2) + PENALTY * np.sum(dense[2] ** 2))


def run(
    method: str,
    way: str,
    *,
    wrapped: Callable[[], Any] = lambda: keras.optimizers.SGD(RATE),
    steps: int = 1,
    sigma: float = SIGMA,
    epochs: int | None = None,
    batches: Sequence[Any] = (),
    sample_weight: np.ndarray | None = None,
    **arguments: Any,
) -> Run:
    """Steps from always the same weights, under always the same noise key.

    Args:
        method: Of `METHODS`.
        way: Of `WAYS`.
        wrapped: Makes the wrapped optimizer.
        steps: How many, each on all examples.
        sigma: The plan's.
        epochs: After each of which weights are taken; by default as many as steps.
        batches: The examples of each step, `data()` by default.
        sample_weight: Of the examples, the same in each step.
        **arguments: Of the private optimizer.
    """
    batches = batches or [data()] * steps
    epochs = epochs or steps
    keras.utils.set_random_seed(3)
    if way == "train_tables":
        return _by_train_tables(wrapped(), steps, sigma, batches[0], sample_weight, arguments)
    strategy = strategy_of(2) if way == "mirrored" else tf.distribute.get_strategy()
    if way == "microbatches":
        arguments = {"microbatch_size": 600, **arguments}
    with strategy.scope():
        model = model_of_two_tables()
        plan = plan_for(SIZE, steps=steps, noise_multiplier=sigma, capacity=SIZE)
        optimizer = METHODS[method].make(model, wrapped(), plan, **arguments)
        optimizer.use_noise_key(tf.constant([123, 456], tf.int64))
        model.compile(optimizer, "mse", jit_compile=way == "xla")
    read = lambda: [np.array(v) for v in model.trainable_variables]  # noqa: E731
    if method == "shuffled":
        read = UnPermuted(model)
    taken = _Weights(read, lambda: float(optimizer.current_clip_norm))
    dataset = marked_batches(optimizer.plan, batches, sample_weight)
    kept = model.fit(
        dataset, epochs=epochs, steps_per_epoch=steps // epochs, callbacks=[taken], verbose=0
    )
    slots = {v.path.split("/", 1)[1]: v.numpy() for v in optimizer.variables}
    names = [v.path.replace("/", "_") for v in model.trainable_variables]
    return Run(names, taken.weights, taken.clip_norms, slots, kept.history["loss"])


def _by_train_tables(
    wrapped: Any,
    steps: int,
    sigma: float,
    examples: Any,
    sample_weight: np.ndarray | None,
    arguments: dict[str, Any],
) -> Run:
    plan = plan_for(SIZE, steps=steps, noise_multiplier=sigma, capacity=SIZE)
    optimizer = adafest(wrapped, plan, **arguments)
    configs = [E.TableConfig(ROWS, WIDTH, name=name) for name in TABLES]
    features = {c.name: E.FeatureConfig(c, name=c.name) for c in configs}
    tables = distribution.PrivateTables(features, optimizer)
    layer = E.TPUEmbeddingForServing(tables.feature_config, None)
    inputs = {name: keras.Input((WIDTH,), name=name) for name in TABLES}
    model = keras.Model(inputs, top(list(inputs.values())))
    model.compile(optimizer, "mse")

    def read() -> list[np.ndarray]:
        own = {t.name: v.numpy() for t, v in layer.embedding_tables.items()}
        return [*(own[name] for name in TABLES), *(np.array(v) for v in model.trainable_variables)]

    ids, y = examples
    source: Any = ({name: ids[:, i] for i, name in enumerate(TABLES)}, y)
    source = source if sample_weight is None else (*source, sample_weight)
    taken = _Weights(read, lambda: CLIP)
    kept = distribution.train_tables(model, tables, layer, source, epochs=steps, callbacks=[taken])
    made = zip(layer.embedding_tables, tables.updates._slots, strict=False)
    slots = {f"{table.name}_embeddings_accumulator": value.numpy() for table, value in made}
    slots |= {v.path.split("/", 1)[1]: v.numpy() for v in optimizer.variables}
    names = [v.path.replace("/", "_") for v in model.trainable_variables]
    names = [*(f"{name}_embeddings" for name in TABLES), *names]
    return Run(names, taken.weights, taken.clip_norms, slots, kept.history["loss"])

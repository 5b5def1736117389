"""Small plans, batches and models for the tests of the private step."""

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from scipy import stats

import dp_sparse
from dp_sparse import DPSGDOptimizer, PoissonSampling, PrivacyBudget, PrivacyPlan
from dp_sparse.sampling.batch import Marker, new_nonce, sampled_batch

TINY_SIGMA = (
    1e-3  # makes a threshold of 0.5 unreachable by noise, so that selection is deterministic
)
VOCABULARIES = (11, 7)
BINARY = keras.losses.BinaryCrossentropy()


def plan_for(
    num_examples: int,
    *,
    expected_batch_size: float | None = None,
    steps: int = 100,
    capacity: int | None = None,
    noise_multiplier: float = TINY_SIGMA,
) -> PrivacyPlan:
    """A plan with a given σ, uncalibrated; by default every batch is the whole data set."""
    sampling = PoissonSampling(
        num_examples=num_examples,
        expected_batch_size=num_examples if expected_batch_size is None else expected_batch_size,
        steps=steps,
        capacity=capacity,
    )
    plan = PrivacyPlan(PrivacyBudget(epsilon=1.0, delta=1e-5), sampling)
    return dataclasses.replace(
        plan, noise_multiplier=noise_multiplier, plan_id=secrets.token_hex(16)
    )


def marked(
    plan: PrivacyPlan,
    x: Any,
    y: Any,
    *,
    index: int = 0,
    nonce: int | None = None,
    present: Sequence[int] | None = None,
    weights: Any = None,
) -> Any:
    """One batch as the plan's sampler would make it, of any content."""
    size = len(tf.nest.flatten(x)[0])
    present = np.ones(size, np.float32) if present is None else np.asarray(present, np.float32)
    weights = np.ones(size, np.float32) if weights is None else weights
    nonce = new_nonce(None) if nonce is None else nonce
    mark = Marker(plan.sampling.fingerprint, nonce, index)
    batch = sampled_batch(x, y, weights, present, mark)
    return tf.nest.map_structure(tf.convert_to_tensor, batch)


def marked_dataset(
    plan: PrivacyPlan, x: Any, y: Any, *, steps: int = 1, **fields: Any
) -> tf.data.Dataset:
    """The same examples `steps` times, each time under a marker of its own, as at q = 1."""
    nonce = new_nonce(None)
    batches = [marked(plan, x, y, index=index, nonce=nonce, **fields) for index in range(steps)]
    stacked = tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *batches)
    return tf.data.Dataset.from_tensor_slices(stacked)


def fit_on(
    model: keras.Model, optimizer: Any, plan: PrivacyPlan, x: Any, y: Any, **fields: Any
) -> None:
    """Compiles a click model, and trains it on batches that `marked_dataset` makes."""
    model.compile(optimizer=optimizer, loss=BINARY)
    model.fit(marked_dataset(plan, x, y, **fields), verbose=0)


def assert_deviation(samples: np.ndarray, deviation: float) -> None:
    """KS accepts N(0, deviation²) and rejects it at 2/3 and 3/2 of the deviation."""
    samples = np.ravel(samples)
    assert stats.kstest(samples, stats.norm(0, deviation).cdf).pvalue > 1e-5
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(samples, stats.norm(0, wrong * deviation).cdf).pvalue < 1e-9


def weights_of(model: keras.Model) -> list[np.ndarray]:
    """Copies of the trainable weights."""
    return [np.array(variable) for variable in model.trainable_variables]


def click_model(vocabularies: Sequence[int] = VOCABULARIES, width: int = 3) -> keras.Model:
    """One id per table and one dense hidden layer, as a click model has it."""
    ids = keras.Input((len(vocabularies),), dtype="int32")
    rows = [
        keras.layers.Embedding(size, width, embeddings_initializer="random_normal")(ids[:, i])
        for i, size in enumerate(vocabularies)
    ]
    hidden = keras.layers.Dense(4, activation="tanh")(keras.layers.Concatenate()(rows))
    return keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(hidden))


def clicks(
    num_examples: int, vocabularies: Sequence[int] = VOCABULARIES, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Ids `[n, tables]` int32 and labels `[n]` float32."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.integers(0, size, num_examples) for size in vocabularies], axis=1)
    return ids.astype(np.int32), rng.integers(0, 2, num_examples).astype(np.float32)


def assert_a_private_step_moves_every_weight(
    model: keras.Model, x: np.ndarray, num_classes: int
) -> None:
    """One step of DP-SGD on random labels, by `fit`."""
    plan = plan_for(len(x), steps=1, noise_multiplier=1.0)
    model.compile(
        optimizer=DPSGDOptimizer(keras.optimizers.SGD(1.0), plan, clip_norm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    before = weights_of(model)
    labels = np.random.default_rng(0).integers(0, num_classes, len(x))
    model.fit(plan.sampling.batches((x, labels)), verbose=0)
    for old, weight in zip(before, model.trainable_variables, strict=True):
        assert np.isfinite(weight).all() and not np.array_equal(old, weight), weight.path


def selected_rows(model: keras.Model) -> dp_sparse.SelectedRows:
    tables = {w.path.split("/")[-2]: w.shape[0] for w in model.weights if "embeddings" in w.path}
    return dp_sparse.SelectedRows.public(
        {name: range(0, n, 2) for name, n in tables.items()}, tables
    )


CHOOSING: dict[str, Callable[..., Any]] = {
    "dpsgd": lambda model, plan: dp_sparse.DPSGDOptimizer("sgd", plan, 0.5),
    "adafest": lambda model, plan: dp_sparse.DPAdaFESTOptimizer(
        "adagrad", plan, 0.5, threshold=1.2
    ),
    "fest": lambda model, plan: dp_sparse.DPFESTOptimizer("adam", plan, 0.5, selected_rows(model)),
    "adafest_plus": lambda model, plan: dp_sparse.DPAdaFESTOptimizer(
        "sgd", plan, 0.5, threshold=1.2, rows=selected_rows(model)
    ),
}


def without_preflight(model: keras.Model) -> None:
    """No batch is looked at, so that other checks are seen to find something by themselves."""
    preflight = model.train_step.preflight
    preflight._proves = lambda examples, whole, replica: True
    preflight.require = lambda data: None


def checks_of(model: keras.Model) -> int:
    """How many batches of the run were looked at."""
    return model.train_step.preflight.schedule.checks

"""Retrieval with negatives that a step draws: the rows that get noise, the same on every way."""

import dataclasses
import functools
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse.core import xla
from dp_sparse.layers import losses
from dp_sparse.step import forward_backward, own_loss
from tests.replicas import strategy_of
from tests.training_cases import marked_dataset, plan_for, weights_of, without_preflight

USERS, ITEMS, WIDTH, SIZE = 12, 40, 3, 10


class Retrieval(keras.Model):
    """Users against items, with the loss of its own."""

    def __init__(self, negatives: int = 6, tower: bool = False, **options: Any) -> None:
        super().__init__()
        self.users = keras.layers.Embedding(USERS, WIDTH, name="users")
        self.items = keras.layers.Embedding(ITEMS, WIDTH, name="items")
        dense = keras.layers.Dense(WIDTH, activation="tanh")
        self.candidates = keras.Sequential([self.items, dense]) if tower else self.items
        self.softmax = dp_sparse.losses.SampledSoftmax(
            self.candidates, negatives, num_candidates=ITEMS, **options
        )

    def call(self, users: Any) -> Any:
        return self.users(users)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return self.softmax(y_pred, y)


def pairs(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, USERS, SIZE), rng.integers(0, ITEMS, SIZE)


SELECTED = dp_sparse.SelectedRows.public(
    {"users": range(USERS), "items": range(0, ITEMS, 2)}, {"users": USERS, "items": ITEMS}
)
OPTIMIZERS: dict[str, Any] = {
    "dpsgd": dp_sparse.DPSGDOptimizer,
    "adafest": functools.partial(dp_sparse.DPAdaFESTOptimizer, threshold=0.5),
    "fest": functools.partial(dp_sparse.DPFESTOptimizer, rows=SELECTED),
    "adafest+": functools.partial(dp_sparse.DPAdaFESTOptimizer, threshold=0.5, rows=SELECTED),
    "exponential": dp_sparse.ExponentialSelectionOptimizer,
    "lazy": dp_sparse.LazyDPSGDOptimizer,
}


def trained(
    optimizer: Any,
    steps: int = 2,
    sigma: float | None = None,
    compiled: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **arguments: Any,
) -> keras.Model:
    keras.utils.set_random_seed(0)
    made = Retrieval(**(model or {}))
    noise = {} if sigma is None else {"noise_multiplier": sigma}
    plan = plan_for(SIZE, **noise)
    made.compile(optimizer(keras.optimizers.SGD(0.5), plan, 0.2, **arguments), **(compiled or {}))
    made(pairs()[0])
    made.softmax(np.zeros((1, WIDTH), np.float32), np.zeros(1))
    made.before = weights_of(made)
    made.fit(marked_dataset(plan, *pairs(), steps=steps), verbose=0)
    return made


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The same negatives in each step, known here; two of them twice."""
    ids = [3, 8, 8, 21, 30, 30]
    monkeypatch.setattr(
        losses.SampledSoftmax,
        "_ids_at",
        lambda self, uniforms: tf.constant(ids, tf.int64),
    )
    return ids


def moved(model: keras.Model) -> set[int]:
    """Items whose rows are not what they were."""
    changed = np.any(model.items.embeddings.numpy() != model.before[1], axis=1)
    return set(np.flatnonzero(changed).tolist())


@pytest.mark.parametrize("tower", [False, True])
def test_negatives_get_noise_and_have_no_vote(drawn: list[int], tower: bool) -> None:
    """A threshold that no row reaches, and noise far above gradients."""
    optimizer = functools.partial(dp_sparse.DPAdaFESTOptimizer, threshold=1e9)
    model = trained(optimizer, 1, sigma=50.0, model={"tower": tower})
    assert moved(model) == set(drawn)
    sizes = np.abs(model.items.embeddings.numpy() - model.before[1])[list(set(drawn))]
    assert np.median(sizes) > 0.2 * 0.5 * 50 * 0.2 / SIZE  # of the gradients alone: at most 0.01


@pytest.mark.parametrize("name", ["fest", "adafest+"])
def test_of_selected_rows_only_those_are_drawn(drawn: list[int], name: str) -> None:
    model = trained(OPTIMIZERS[name], 1, sigma=1.0)
    even = {row for row in drawn if row % 2 == 0}
    assert even <= moved(model) <= set(range(0, ITEMS, 2))


@pytest.mark.usefixtures("no_noise", "drawn")
@pytest.mark.parametrize("name", ["adafest", "fest", "adafest+", "lazy"])
def test_as_dpsgd_on_the_rows_of_the_step(name: str) -> None:
    """Without noise, and with each lookup's row in the step or selected, all are one gradient."""
    rows = range(0, ITEMS, 2) if name in ("fest", "adafest+") else range(ITEMS)
    dpsgd, other = trained(OPTIMIZERS["dpsgd"], 1), trained(OPTIMIZERS[name], 1)
    if len(rows) == ITEMS:
        for one, two in zip(weights_of(dpsgd), weights_of(other), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    assert moved(other) <= set(rows) and len(moved(other)) > 3


@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("tower", [False, True])
@pytest.mark.parametrize("name", ["dpsgd", "adafest"])
def test_in_parts_as_whole(monkeypatch: pytest.MonkeyPatch, name: str, tower: bool) -> None:
    """All parts of a step have the same negatives, and the next step others."""
    monkeypatch.setattr(forward_backward, "shared_uniforms", by_number)
    make = functools.partial(trained, OPTIMIZERS[name], model={"tower": tower})
    for one, other in zip(weights_of(make()), weights_of(make(microbatch_size=4)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def by_number(draw: Any, number: int, count: int) -> tf.Tensor:
    """Numbers that follow from the step's, not from its key."""
    step = tf.cast(draw.number, tf.float64) + number + 1
    return tf.math.floormod(tf.cast(tf.range(1, count + 1), tf.float64) * step * 0.618034, 1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("tower", [False, True])
def test_compiled_by_xla_as_traced(monkeypatch: pytest.MonkeyPatch, tower: bool) -> None:
    monkeypatch.setattr(forward_backward, "shared_uniforms", by_number)
    make = functools.partial(trained, OPTIMIZERS["adafest"], model={"tower": tower})
    one, other = make(), make(compiled={"jit_compile": True})
    for mine, its in zip(weights_of(one), weights_of(other), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-6)


def test_kernels_of_xla_draw_the_same_negatives() -> None:
    """LazyDP adds the noise that rows are due in a pass before the kernel that reads them."""
    draw = dp_sparse.noise.NoiseKey(1).next_draw()
    inside = tf.function(
        lambda: xla.compiled(lambda: forward_backward.shared_uniforms(draw, 2, 7)), autograph=False
    )
    outside = forward_backward.shared_uniforms(draw, 2, 7)
    np.testing.assert_array_equal(inside(), outside)
    assert not np.array_equal(outside, forward_backward.shared_uniforms(draw, 3, 7))


@pytest.mark.slow
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("tower", [False, True])
def test_on_two_replicas(monkeypatch: pytest.MonkeyPatch, tower: bool) -> None:
    monkeypatch.setattr(forward_backward, "shared_uniforms", by_number)
    make = functools.partial(trained, OPTIMIZERS["adafest"], model={"tower": tower})
    alone = make()
    with strategy_of(2).scope():
        together = make()
    for one, other in zip(weights_of(alone), weights_of(together), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_each_step_draws_others(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = functools.partial(dp_sparse.DPAdaFESTOptimizer, threshold=1e9)
    one, two = (moved(trained(optimizer, steps, sigma=5.0)) for steps in (1, 6))
    assert len(one) <= 6 < len(two)
    assert (
        moved(trained(optimizer, 1, sigma=5.0)) != one
        or moved(trained(optimizer, 1, sigma=5.0)) != one
    )  # by the key of the system, once in millions the same twice


def test_noisy_frequencies_are_paid_by_the_plan() -> None:
    noisy = dp_sparse.RowFrequencies("items", np.full(ITEMS, 0.1), dp_sparse.GaussianTopK(5.0), 1)
    with pytest.raises(dp_sparse.PrivacyError, match="pays for 'frequencies of the 40 rows"):
        trained(OPTIMIZERS["dpsgd"], model={"frequencies": noisy})


def test_ids_that_depend_on_the_batch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a layer drew negatives from its batch, against all that the layer does."""
    own = losses.SampledSoftmax.call

    def call(self: Any, queries: Any, ids: Any) -> Any:
        first = tf.cast(ids[0], tf.int64)
        monkeypatch.setattr(
            losses.SampledSoftmax,
            "_ids_at",
            lambda self, uniforms: (first + tf.range(6, dtype=tf.int64)) % ITEMS,
        )
        return own(self, queries, ids)

    monkeypatch.setattr(losses.SampledSoftmax, "call", call)
    with pytest.raises(dp_sparse.PrivacyError, match="(?s)depend|example|batch"):
        trained(OPTIMIZERS["adafest"])


def test_negatives_of_a_tower_that_differ_by_example_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = losses.tf.broadcast_to
    monkeypatch.setattr(
        losses.tf,
        "broadcast_to",
        lambda ids, shape: (real(ids, shape) + tf.range(shape[0], dtype=tf.int64)[:, None]) % ITEMS,
    )
    with pytest.raises(dp_sparse.PrivacyError, match="the same for all examples"):
        trained(OPTIMIZERS["adafest"], model={"tower": True})


def test_a_step_that_was_not_looked_at_still_draws(drawn: list[int]) -> None:
    keras.utils.set_random_seed(0)
    model, plan = Retrieval(), plan_for(SIZE, noise_multiplier=5.0)
    model.compile(dp_sparse.DPAdaFESTOptimizer("sgd", plan, 0.2, threshold=1e9))
    without_preflight(model)
    own_loss.set_kind(model, own_loss.EACH)
    model(pairs()[0])
    model.softmax(np.zeros((1, WIDTH), np.float32), np.zeros(1))
    model.before = weights_of(model)
    model.fit(marked_dataset(plan, *pairs()), verbose=0)
    assert moved(model) == set(drawn)


class Catalogue(keras.Model):
    """All items as candidates, by a table that is multiplied in the loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.users = keras.layers.Embedding(USERS, WIDTH)
        self.items = keras.layers.ReversibleEmbedding(ITEMS, WIDTH)
        self.softmax = dp_sparse.losses.FullSoftmax(self.items)

    def call(self, users: Any) -> Any:
        return self.users(users)

    compute_loss = Retrieval.compute_loss


def test_full_softmax_noises_every_candidate() -> None:
    model, plan = Catalogue(), plan_for(SIZE, noise_multiplier=1.0)
    model.compile(dp_sparse.DPAdaFESTOptimizer("sgd", plan, 0.2, threshold=1e9))
    model(pairs()[0])
    model.softmax(np.zeros((1, WIDTH), np.float32), np.zeros(1))
    before = model.items._embeddings.numpy()
    model.fit(marked_dataset(plan, *pairs()), verbose=0)
    assert np.all(np.any(model.items._embeddings.numpy() != before, axis=1))
    assert [table.path for table in model.optimizer.tables] == [model.users._embeddings.path]


def test_a_layer_that_is_not_the_models_is_refused() -> None:
    """A plan would not be asked for what it was made from."""
    hidden = []

    class Hiding(Retrieval):
        def compute_loss(self, x: Any, y: Any, y_pred: Any, *others: Any, **more: Any) -> Any:
            return hidden[0](y_pred, y)

    model, plan = Hiding(), plan_for(SIZE)
    hidden.append(dp_sparse.losses.SampledSoftmax(model.items, 6))
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 0.2))
    with pytest.raises(dp_sparse.UnsupportedLayerError, match="attribute of the model"):
        model.fit(marked_dataset(plan, *pairs()), verbose=0)


def test_a_run_without_privacy_pays_for_nothing() -> None:
    noisy = dp_sparse.RowFrequencies("items", np.full(ITEMS, 0.1), dp_sparse.GaussianTopK(5.0), 1)
    paying = dataclasses.replace(plan_for(SIZE), releases=(noisy.release,))
    plan = dp_sparse.not_private_plan(paying, seed=1)
    model = Retrieval(frequencies=noisy)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 0.2))
    model.fit(plan.sampling.batches(pairs()), steps_per_epoch=1, verbose=0)
    assert not model.softmax.is_paid


def test_a_trained_model_is_saved_and_loaded(tmp_path: pathlib.Path) -> None:
    model = trained(OPTIMIZERS["dpsgd"], model={"tower": True})
    model.get_config = lambda: {"tower": True}
    model.save(tmp_path / "model.keras")
    objects = {"Retrieval": Retrieval}
    again = keras.models.load_model(tmp_path / "model.keras", objects, compile=False)
    for one, other in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)

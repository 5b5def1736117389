"""LazyDP: the distribution of DP-SGD's weights, when noise arrives, and who may not look before."""

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import dp_sparse
from dp_sparse import noise
from dp_sparse.optimizers import lazy_noise
from dp_sparse.optimizers.lazy_noise import DelayedNoise
from tests.training_cases import click_model, clicks, marked, marked_dataset, plan_for, weights_of

RUNS = 4000  # of which the wrong noise is told from the right one
ROWS, STEPS = 5, 5
LOOKED_UP = ([1, 2], [1, 1], [2, 1], [0, 0], [0, 0])  # by two examples, in each of the steps
RATE = keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [0.5, 1.0, 0.75])
RATES = (0.5, 0.5, 1.0, 0.75, 0.75)
SIGMA, CLIP_NORM = 0.6, 0.8
DEVIATION = SIGMA * CLIP_NORM / 2  # σ·C/B


def runs(make: Callable[..., Any], count: int, jit_compile: bool = False) -> np.ndarray:
    """Final weights of independent runs of five steps, `[count, weights]`."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((1,), dtype="int32"),
            keras.layers.Embedding(ROWS, 2),
            keras.layers.Flatten(),
            keras.layers.Dense(1, use_bias=False),
        ]
    )
    plan = plan_for(2, steps=STEPS * count, noise_multiplier=SIGMA)
    optimizer = make(keras.optimizers.SGD(RATE), plan, clip_norm=CLIP_NORM)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=jit_compile)
    model.make_train_function()
    start, found = model.get_weights(), []
    y = np.array([[3.0], [3.0]], np.float32)
    for _ in range(count):
        optimizer.iterations.assign(0)
        model.set_weights(start)
        for rows in LOOKED_UP:
            batch = marked(plan, np.array(rows, np.int32)[:, None], y)
            model.train_function(iter([batch]))
        found.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    return np.array(found)


def p_values(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Of two samples of weights: the distribution and the spread of each, and of signed sums."""
    signs = np.sign(np.random.default_rng(0).normal(size=(found.shape[1], 6)))
    both = [np.concatenate([w, w @ signs], axis=1).T for w in (found, wanted)]
    pairs = list(zip(*both, strict=True))
    tests = [test(*pair).pvalue for pair in pairs for test in (stats.ks_2samp, stats.levene)]
    return np.array(tests)


@pytest.fixture(scope="module")
def dpsgd_runs() -> np.ndarray:
    return runs(dp_sparse.DPSGDOptimizer, RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_weights_have_the_distribution_of_dpsgds(
    jit_compile: bool, dpsgd_runs: np.ndarray
) -> None:
    found = runs(dp_sparse.LazyDPSGDOptimizer, RUNS, jit_compile)
    assert p_values(found, dpsgd_runs).min() > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_noise_that_comes_after_the_read_is_another_distribution(
    jit_compile: bool, monkeypatch: pytest.MonkeyPatch, dpsgd_runs: np.ndarray
) -> None:
    monkeypatch.setattr(dp_sparse.LazyDPSGDOptimizer, "before_lookup", lambda self, draw: None)
    found = runs(dp_sparse.LazyDPSGDOptimizer, RUNS, jit_compile)
    assert p_values(found, dpsgd_runs).min() < 1e-9


@pytest.mark.slow
def test_noise_of_another_deviation_is_another_distribution(
    monkeypatch: pytest.MonkeyPatch, dpsgd_runs: np.ndarray
) -> None:
    delay = DelayedNoise.delay
    monkeypatch.setattr(
        DelayedNoise, "delay", lambda self, deviation, given: delay(self, 0.8 * deviation, given)
    )
    assert p_values(runs(dp_sparse.LazyDPSGDOptimizer, RUNS), dpsgd_runs).min() < 1e-9


def test_an_untouched_row_gets_the_noise_of_all_steps_and_their_rates() -> None:
    found = runs(dp_sparse.LazyDPSGDOptimizer, 1200)
    noise = (found[:, 6:10] - found[:, 6:10].mean(axis=0)).ravel()  # rows 3 and 4
    deviation = DEVIATION * np.sqrt(np.sum(np.square(RATES)))
    assert stats.kstest(noise, stats.norm(0, deviation).cdf).pvalue > 1e-5
    for wrong in (0.75, 4 / 3):
        assert stats.kstest(noise, stats.norm(0, wrong * deviation).cdf).pvalue < 1e-9


def test_a_row_that_two_features_look_up_is_settled_once() -> None:
    """Row 3 lacks one step's noise when the second step reads it twice, then gets its own."""
    width, plan = 4_000, plan_for(2, steps=2, noise_multiplier=1.0)
    table = keras.layers.Embedding(6, width, embeddings_initializer="zeros")
    inputs = keras.Input((2,), dtype="int32")
    both = [table(inputs[:, :1]), table(inputs[:, 1:])]
    model = keras.Model(inputs, keras.ops.mean(keras.ops.concatenate(both, axis=1), axis=(1, 2)))
    optimizer = dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(1.0), plan, clip_norm=1.0)
    model.compile(optimizer, loss=lambda y, found: keras.ops.square(y - found))
    model.make_train_function()
    y = np.zeros((2, 1), np.float32)
    for row in (0, 3):
        model.train_function(iter([marked(plan, np.full((2, 2), row, np.int32), y)]))
    found = model.get_weights()[0][3]
    assert np.std(found) == pytest.approx(np.sqrt(2) * 0.5, rel=0.06)  # σ·C/B is 0.5


@pytest.mark.slow
@pytest.mark.usefixtures("no_noise")
def test_without_noise_it_is_dpsgd() -> None:
    x, y = clicks(8)
    start, results = click_model().get_weights(), []
    for make in (dp_sparse.DPSGDOptimizer, dp_sparse.LazyDPSGDOptimizer):
        model, plan = click_model(), plan_for(8)
        model.set_weights(start)
        model.compile(optimizer=make(keras.optimizers.SGD(0.5), plan, 0.1), loss="mse")
        model.fit(plan.sampling.batches((x, y)), steps_per_epoch=5, verbose=0)
        results.append(weights_of(model))
    for lazy, eager in zip(*results, strict=True):
        np.testing.assert_allclose(lazy, eager, rtol=0, atol=1e-6)


def started(**fields: Any) -> tuple[keras.Model, Any, list[np.ndarray]]:
    """A model with most rows lacking noise, as between two steps, and its first weights."""
    model, plan = click_model((400, 300), width=8), plan_for(8, noise_multiplier=1.0, **fields)
    optimizer = dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(1.0), plan, 1.0)
    model.compile(optimizer=optimizer, loss="mse")
    model.make_train_function()
    before = weights_of(model)
    model.train_function(iter([marked(plan, *clicks(8, (400, 300)))]))
    assert 0 < noisy_rows(model, before) < 0.05
    return model, plan, before


def noisy_rows(model: keras.Model, before: list[np.ndarray]) -> float:
    """The fraction of table rows that have changed."""
    changed = [
        np.any(new != old, axis=1) for new, old in zip(weights_of(model)[:2], before, strict=False)
    ]
    return float(np.concatenate(changed).mean())


def test_between_steps_only_rows_that_were_read_have_changed() -> None:
    model, plan, before = started()
    first = noisy_rows(model, before)
    model.train_function(iter([marked(plan, *clicks(8, (400, 300), seed=5))]))
    assert first < noisy_rows(model, before) < 0.1
    model.optimizer.flush()
    assert noisy_rows(model, before) == 1.0
    settled = weights_of(model)
    model.optimizer.flush()
    assert noisy_rows(model, settled) == 0.0  # nothing is added twice


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "way",
    [
        lambda model, path: model.evaluate(*clicks(8, (400, 300)), verbose=0),
        lambda model, path: model.predict(clicks(8, (400, 300))[0], verbose=0),
        lambda model, path: model.test_on_batch(*clicks(8, (400, 300))),
        lambda model, path: model.predict_on_batch(clicks(8, (400, 300))[0]),
        lambda model, path: model.save(path / "m.keras"),
        lambda model, path: model.save_weights(path / "m.weights.h5"),
        lambda model, path: model.export(path / "m", verbose=False),
        lambda model, path: keras.saving.save_model(model, path / "m.keras"),
        lambda model, path: model.get_weights(),
        lambda model, path: model.get_state_tree(),
        lambda model, path: model.compile("sgd", "mse"),
        lambda model, path: keras.models.clone_model(model).set_weights(model.get_weights()),
    ],
)
def test_every_way_out_settles_first(way: Any, tmp_path: pathlib.Path) -> None:
    model, _, before = started()
    way(model, tmp_path)
    assert noisy_rows(model, before) == 1.0


@pytest.mark.slow
def test_what_is_saved_is_settled_and_names_no_row(tmp_path: pathlib.Path) -> None:
    model, _, before = started()
    keras.saving.save_model(model, tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    for new, old in zip(again.get_weights()[:2], before, strict=False):
        assert np.all(np.any(new != old, axis=1))
    shapes = [tuple(v.shape) for v in again.optimizer.variables]
    assert all(400 not in shape and 300 not in shape for shape in shapes)
    assert isinstance(again.optimizer, dp_sparse.LazyDPSGDOptimizer)


class Peeks(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[np.ndarray]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(weights_of(self.model))


@pytest.mark.slow
def test_epochs_end_with_settled_tables_and_so_does_an_error() -> None:
    model, plan = click_model((400, 300), width=8), plan_for(8, noise_multiplier=1.0)
    optimizer = dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(1.0), plan, 1.0)
    model.compile(optimizer=optimizer, loss="mse")
    before, peeks, data = weights_of(model), Peeks(), clicks(8, (400, 300))
    model.fit(
        plan.sampling.batches(data), steps_per_epoch=2, epochs=2, verbose=0, callbacks=[peeks]
    )
    for seen in peeks.seen:
        assert all(np.all(np.any(n != o, axis=1)) for n, o in zip(seen[:2], before, strict=False))
    before = weights_of(model)
    with pytest.raises(dp_sparse.PrivacyError):  # the third batch is of another sampler
        model.fit(_two_good_batches_and_a_bad_one(plan, data), verbose=0)
    assert noisy_rows(model, before) == 1.0


def _two_good_batches_and_a_bad_one(plan: Any, data: Any) -> Any:
    good = marked_dataset(plan, *data).repeat(1)
    other = plan_for(8, steps=7, noise_multiplier=1.0)
    return good.concatenate(marked_dataset(other, *data))


def test_a_step_outside_fit_settles_too() -> None:
    model, plan, before = started()
    batch = marked(plan, *clicks(8, (400, 300), seed=5))
    model.train_on_batch(*batch)
    for layer in model.layers:
        layer.get_weights()
    assert noisy_rows(model, before) == 1.0


@pytest.mark.slow
def test_a_second_optimizer_takes_the_layers_over(tmp_path: pathlib.Path) -> None:
    model, plan, _ = started()
    keras.saving.save_model(model, tmp_path / "first.keras")
    plan = plan_for(8, noise_multiplier=1.0)
    model.compile(dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(1.0), plan, 1.0), loss="mse")
    model.make_train_function()
    before = weights_of(model)
    model.train_function(iter([marked(plan, *clicks(8, (400, 300)))]))
    keras.saving.save_model(model, tmp_path / "second.keras")
    assert noisy_rows(model, before) == 1.0
    model.compile("sgd", "mse")
    replaced = "fit", "save", "evaluate", "train_on_batch", "save_own_variables"
    for owner in (model, *model.layers):
        assert not [name for name in replaced if name in vars(owner)]


def test_a_list_of_callbacks_made_before_compile_is_guarded() -> None:
    model, plan = click_model(), plan_for(8, noise_multiplier=1.0)
    model.compile("sgd", "mse")
    acts = {"on_train_batch_end": lambda self, batch, logs=None: None}
    acting = type("Acting", (keras.callbacks.Callback,), acts)()
    made = keras.callbacks.CallbackList([acting], model=model)
    model.compile(dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(1.0), plan, 1.0), loss="mse")
    with pytest.raises(dp_sparse.PrivacyError, match="acts on every batch"):
        model.fit(plan.sampling.batches(clicks(8)), callbacks=made, steps_per_epoch=1, verbose=0)


def test_a_loss_that_reads_a_table_is_refused() -> None:
    model, plan = click_model(), plan_for(8)

    def peeking(y: Any, prediction: Any) -> Any:
        return keras.ops.square(y - prediction) + 0 * keras.ops.sum(model.weights[0])

    model.compile(dp_sparse.LazyDPSGDOptimizer("sgd", plan, 1.0), loss=peeking)
    with pytest.raises(dp_sparse.PrivacyError, match="The loss reads .*/embeddings"):
        model.fit(plan.sampling.batches(clicks(8)), steps_per_epoch=1, verbose=0)


@pytest.mark.slow
def test_noise_that_float32_cannot_hold_is_refused() -> None:
    """Roundings of rows that are looked up would stand out among those of the others."""
    for rate, fits in ((1.0, True), (0.0, True), (1e-8, False)):
        model, plan = click_model(), plan_for(8, noise_multiplier=1.0)
        model.compile(dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(rate), plan, 1.0), "mse")
        batches = plan.sampling.batches(clicks(8))
        if fits:
            model.fit(batches, steps_per_epoch=1, verbose=0)
            continue
        with pytest.raises(dp_sparse.PrivacyError, match="less than float32 can hold"):
            model.fit(batches, steps_per_epoch=1, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("coarse", [0, 1])
def test_a_refused_step_writes_nothing(coarse: int) -> None:
    """One table's weights are too large for the noise; the other's are not."""
    model, plan = click_model(), plan_for(8, noise_multiplier=1.0)
    optimizer = dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(1.0), plan, 1.0)
    model.compile(optimizer, "mse")
    tables = [w for w in model.trainable_variables if "embeddings" in w.path]
    tables[coarse].assign(1e6 * tf.ones(tables[coarse].shape))
    before = model.get_weights()
    with pytest.raises(dp_sparse.PrivacyError, match="less than float32 can hold"):
        model.fit(plan.sampling.batches(clicks(8)), steps_per_epoch=1, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.cases(1)
@pytest.mark.parametrize("large", [0, 3])
def test_whether_a_step_is_refused_does_not_tell_which_rows_were_read(large: int) -> None:
    """Row 0 is looked up, row 3 is not: a large weight of either stops the run."""
    model, plan = row_model(), plan_for(2, noise_multiplier=1.0)
    model.compile(dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(1.0), plan, 1.0), "mse")
    weights = np.zeros((ROWS, 2), np.float32)
    weights[large] = 1e7
    model.layers[0].set_weights([weights])
    batch = marked_dataset(plan, np.zeros((2, 1), np.int32), np.zeros((2, 1), np.float32))
    with pytest.raises(dp_sparse.PrivacyError, match="less than float32 can hold beside weights"):
        model.fit(batch, verbose=0)


def row_model() -> keras.Model:
    layers = keras.layers.Embedding(ROWS, 2), keras.layers.Flatten(), keras.layers.Dense(1)
    return keras.Sequential([keras.Input((1,), dtype="int32"), *layers])


@pytest.mark.slow
def test_the_bound_on_weights_is_the_same_for_all_data() -> None:
    found = []
    for row, label in ((0, 1e6), (3, 0.0)):
        model, plan = row_model(), plan_for(2, noise_multiplier=1.0)
        optimizer = dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(0.5), plan, 1.0)
        model.compile(optimizer, "mse")
        model.layers[0].set_weights([np.full((ROWS, 2), 0.5, np.float32)])
        model.make_train_function()
        x, y = np.full((2, 1), row, np.int32), np.full((2, 1), label, np.float32)
        bounds = []
        for _ in range(3):
            model.train_function(iter([marked(plan, x, y)]))
            bounds.append(float(optimizer._delayed._largest))
        found.append(bounds)
    step = 0.5 + 9.2 * 0.5 / 2  # η·capacity·C/B, and the noise
    assert found[0] == found[1] == pytest.approx([0.5 + step, 0.5 + 2 * step, 0.5 + 3 * step])


@pytest.mark.cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_bound_too_coarse_settles_all_rows_and_measures_them(
    jit_compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step and the third; the rows of the others lack noise meanwhile."""

    monkeypatch.setattr(lazy_noise, "_UNITS", 1 / 24)  # room for 6, and a step adds 2.8
    monkeypatch.setattr(lazy_noise, "_ENTRIES_AT_ONCE", 4)
    model, plan = row_model(), plan_for(2, noise_multiplier=1.0)
    optimizer = dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(0.5), plan, 1.0)
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    model.layers[0].set_weights([np.zeros((ROWS, 2), np.float32)])
    model.make_train_function()
    bounds, settled = [], []
    for row in (0, 3, 0):
        batch = marked(plan, np.full((2, 1), row, np.int32), np.zeros((2, 1), np.float32))
        model.train_function(iter([batch]))
        table = optimizer.tables[0].numpy()
        bounds.append(float(optimizer._delayed._largest))
        settled.append(bool(np.all(table[4] != 0)))
        assert np.abs(table).max() <= bounds[-1]
    assert bounds[:2] == pytest.approx([2.8, 5.6]) and 2.8 < bounds[2] < 5.6
    assert settled == [False, False, True]


def test_a_rate_that_drops_does_not_lose_its_noise() -> None:
    """What rows lack starts again at 0 with every flush; within an epoch it may not vanish."""
    delayed = DelayedNoise(click_model().trainable_variables[:2])
    delayed.delay(tf.constant(1.0, tf.float64), [])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="vanishes beside what rows lack already"
    ):
        delayed.refuse_vanishing(tf.constant(1e-9, tf.float64))
    delayed.settle_all(noise.NoiseKey())
    delayed.refuse_vanishing(tf.constant(1e-9, tf.float64))
    delayed.delay(tf.constant(1e-9, tf.float64), [])
    assert float(delayed._variance) == 1e-18


def test_a_step_takes_no_other_step_s_noise_from_the_rows_it_gives_theirs() -> None:
    """A second thread's step ends after a row was settled and before its own noise is added."""
    (table, *_) = click_model().trainable_variables
    delayed, key = DelayedNoise([table]), noise.NoiseKey()
    row, one, two = tf.constant([0], tf.int64), *(tf.constant(d, tf.float64) for d in (1.0, 2.0))
    delayed.settle(table, row, key.next_draw(), noise.Purpose.DELAYED)
    delayed.delay(two, [])  # of the other thread
    delayed.delay(one, [(table, row)])
    due = float(delayed._variance) - delayed._settled[id(table)].numpy()
    assert due[0] == 4.0 and set(due[1:]) == {5.0}


def test_weights_are_released_on_a_grid_of_the_smallest_noise_that_is_due() -> None:
    """The same for rows that were read in one step, in both and in none."""
    model, plan = row_model(), plan_for(2, noise_multiplier=1.0)
    rates = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.25, 1.0])
    optimizer = dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(rates), plan, 1.0)
    model.compile(optimizer, "mse")
    model.make_train_function()
    y, found = np.zeros((2, 1), np.float32), []
    for rows in ([0, 1], [0, 2]):
        model.train_function(iter([marked(plan, np.array(rows, np.int32)[:, None], y)]))
        found.append(optimizer.tables[0].numpy()[rows])
    optimizer.flush()
    grid = 2.0**-20 * 0.125  # of the first step's η·σ·C/B, a power of two here
    for weights in (*found, optimizer.tables[0].numpy()):
        points = weights.astype(np.float64) / grid
        np.testing.assert_array_equal(points, np.round(points))
        assert np.any(points % 16)  # no coarser than that


def test_a_step_without_noise_rounds_nothing() -> None:
    delayed = DelayedNoise(click_model().trainable_variables[:1])
    weights = tf.constant([0.1, -3e-12], tf.float64)
    none = tf.constant(0.0, tf.float64)
    delayed.delay(none, [])
    found = delayed.on_grid(weights, none).numpy()
    np.testing.assert_array_equal(found, weights.numpy().astype(np.float32))


def test_weights_that_were_set_after_a_flush_are_measured() -> None:
    """A bound from before it would let a step through whose noise such weights swallow."""
    model, plan = row_model(), plan_for(2, noise_multiplier=1.0)
    model.compile(dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(1.0), plan, 1.0), "mse")
    batch = np.zeros((2, 1), np.int32), np.zeros((2, 1), np.float32)
    model.fit(marked_dataset(plan, *batch), verbose=0)
    model.layers[0].set_weights([np.full((ROWS, 2), 1e7, np.float32)])
    with pytest.raises(dp_sparse.PrivacyError, match="less than float32 can hold beside weights"):
        model.fit(marked_dataset(plan, *batch), verbose=0)


def test_coarse_tables_are_refused() -> None:
    layer = keras.layers.Embedding(11, 3, dtype="bfloat16")
    model = keras.Sequential([keras.Input((2,), dtype="int32"), layer])
    optimizer = dp_sparse.LazyDPSGDOptimizer("sgd", plan_for(8), 1.0)
    model.compile(optimizer=optimizer, loss="mse")
    with pytest.raises(ValueError, match="in float32, got bfloat16"):
        optimizer.build(model.trainable_variables)


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_batch_begin", "on_batch_end"])
def test_callbacks_that_act_on_batches_are_refused(hook: str) -> None:
    model, plan, _ = started()
    acting = type(
        "Acting", (keras.callbacks.Callback,), {hook: lambda self, batch, logs=None: None}
    )
    data = plan.sampling.batches(clicks(8, (400, 300)))
    refused = [acting()]
    if hook.startswith("on_train"):
        refused.append(keras.callbacks.LambdaCallback(**{hook: lambda batch, logs: None}))
    for callback in refused:
        with pytest.raises(dp_sparse.PrivacyError, match="acts on every batch"):
            model.fit(data, callbacks=[callback], steps_per_epoch=1, verbose=0)
    harmless = acting()
    harmless.reads_weights = False
    allowed = [dp_sparse.PrivacyReport(), harmless]
    model.fit(data, callbacks=allowed, steps_per_epoch=1, verbose=0)


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.Adam(),
        keras.optimizers.SGD(momentum=0.9),
        keras.optimizers.SGD(weight_decay=0.1),
        keras.optimizers.SGD(use_ema=True),
        keras.optimizers.SGD(clipnorm=1.0),
    ],
)
def test_optimizers_whose_noise_cannot_be_delayed(optimizer: Any) -> None:
    with pytest.raises(ValueError, match=r"Expected keras.optimizers.SGD without.*DPSGDOptimizer"):
        dp_sparse.LazyDPSGDOptimizer(optimizer, plan_for(8), 1.0)


def test_tables_that_every_step_reads_whole_are_refused() -> None:
    layer = keras.layers.Embedding(11, 3, embeddings_regularizer="l2")
    model = keras.Sequential([keras.Input((2,), dtype="int32"), layer])
    plan = plan_for(8)
    optimizer = dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(), plan, 1.0)
    model.compile(optimizer=optimizer, loss="mse")
    with pytest.raises(ValueError, match="without a regularizer"):
        optimizer.build(model.trainable_variables)


def test_tied_output_layers_are_refused() -> None:
    ids = keras.Input((3,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(11, 4, name="words")
    model = keras.Model(ids, table(table(ids), reverse=True))
    optimizer = dp_sparse.LazyDPSGDOptimizer("sgd", plan_for(8), 1.0)
    model.compile(optimizer=optimizer, loss="mse")
    with pytest.raises(ValueError, match="tied output layer words.*DPSGDOptimizer"):
        optimizer.build(model.trainable_variables)


def test_it_is_saved_with_its_config() -> None:
    optimizer = dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(0.3), plan_for(8), 0.5)
    again = dp_sparse.LazyDPSGDOptimizer.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()

"""`fit` under MirroredStrategy: what one device computes, with noise and rows drawn once."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import distribution, noise
from dp_sparse.core import replicas
from dp_sparse.core.errors import PrivacyError
from dp_sparse.step import environment
from dp_sparse.step.forward_backward import secret_seeds
from tests.replicas import strategy_of
from tests.subprocesses import run_python
from tests.training_cases import (
    CHOOSING,
    checks_of,
    click_model,
    clicks,
    marked_dataset,
    plan_for,
)

VOCABULARIES = (40, 25)


def none_or_mirrored(count: int) -> tf.distribute.Strategy:
    return strategy_of(count) if count > 1 else tf.distribute.get_strategy()


METHODS: dict[str, Callable[..., Any]] = {
    **CHOOSING,
    "exponential": lambda model, plan: dp_sparse.ExponentialSelectionOptimizer(
        "sgd", dataclasses.replace(plan, mechanism=dp_sparse.ExponentialSelection(9)), 0.5
    ),
    "microbatches": lambda model, plan: dp_sparse.DPAdaFESTOptimizer(
        "adagrad", plan, 0.5, threshold=1.2, microbatch_size=2
    ),
    "quantile": lambda model, plan: dp_sparse.DPSGDOptimizer(
        "sgd", plan, 0.5, clipping=dp_sparse.QuantileClipping(target_quantile=0.5)
    ),
    "table_optimizer": lambda model, plan: dp_sparse.DPAdaFESTOptimizer(
        keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
        plan,
        0.5,
        threshold=1.2,
        table_optimizer=keras.optimizers.Adagrad(0.3),
    ),
}


def trained(
    count: int,
    make: Callable[..., Any],
    *,
    size: int = 12,
    present: int | None = None,
    steps: int = 3,
    noise_multiplier: float = 1e-6,
    strategy: tf.distribute.Strategy | None = None,
    **fit: Any,
) -> tuple[keras.Model, dict[str, list[float]]]:
    """A click model after `steps` on one batch, under so many replicas; always the same noise."""
    x, y = clicks(size, VOCABULARIES)
    there = [1.0] * size if present is None else [1.0] * present + [0.0] * (size - present)
    plan = plan_for(size, steps=steps, noise_multiplier=noise_multiplier, capacity=size)
    with (strategy or none_or_mirrored(count)).scope():
        keras.utils.set_random_seed(3)
        model = click_model(VOCABULARIES)
        optimizer = make(model, plan)
        optimizer.use_noise_key(tf.constant([123, 456], tf.int64))
        model.compile(optimizer, loss="binary_crossentropy", metrics=["accuracy", "auc"])
    batches = marked_dataset(optimizer.plan, x, y, steps=steps, present=there)
    history = model.fit(batches, verbose=0, **fit)
    return model, history.history


def assert_same(one: keras.Model, other: keras.Model) -> None:
    for left, right in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
    for name in ("steps", "examples", "clipped", "not_finite", "rows"):
        np.testing.assert_array_equal(
            *(getattr(model.optimizer.diagnostics, name).numpy() for model in (one, other))
        )
    assert int(one.optimizer.iterations.numpy()) == int(other.optimizer.iterations.numpy())


def test_advice_inside_of_the_scope_is_that_outside() -> None:
    """Where a model is made, its optimizer is made, too, and `recommend` looks at the model."""
    plan = plan_for(12, steps=3, noise_multiplier=0.5, capacity=12)
    x, _ = clicks(12, VOCABULARIES)
    outside = dp_sparse.recommend(click_model(VOCABULARIES), plan, x)
    with strategy_of(2).scope():
        inside = dp_sparse.recommend(click_model(VOCABULARIES), plan, x)
        checked = dp_sparse.check_model(click_model(VOCABULARIES), (x, np.ones(12, np.float32)))
    assert (inside.arguments, inside.reasons) == (outside.arguments, outside.reasons) and checked.ok


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_without_noise_as_on_one_device(method: str, count: int) -> None:
    one, history = trained(1, METHODS[method])
    several, of_several = trained(count, METHODS[method])
    assert_same(one, several)
    for name, values in history.items():
        np.testing.assert_allclose(of_several[name], values, rtol=1e-5)
    assert checks_of(several) == 3


def assert_copies_agree(model: keras.Model, count: int) -> None:
    """Every replica has the same weights and slots; `get_weights` reads those of the first."""
    for variable in (*model.variables, *model.optimizer.variables):
        copies = model.distribute_strategy.experimental_local_results(variable.value)
        assert len(copies) == count
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy.numpy(), copies[0].numpy())


@pytest.mark.cases(1)
@pytest.mark.parametrize("method", ["dpsgd", "adafest", "adafest_plus", "exponential", "quantile"])
def test_noise_and_rows_are_drawn_once(method: str) -> None:
    """With one key the very same noise and survivors as on one device, not several times either."""
    one, _ = trained(1, METHODS[method], noise_multiplier=0.8)
    several, _ = trained(3, METHODS[method], noise_multiplier=0.8)
    assert_same(one, several)
    assert_copies_agree(several, 3)
    quiet, _ = trained(1, METHODS[method], noise_multiplier=1e-6)
    pairs = zip(one.get_weights(), quiet.get_weights(), strict=True)
    moved = [np.max(np.abs(a - b) / (1e-6 + 1e-5 * np.abs(b))) for a, b in pairs]
    assert min(moved) > 10  # times what `assert_same` lets pass


@pytest.mark.slow
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize(
    ("count", "size", "present"),
    [(2, 7, 7), (4, 10, 10), (4, 12, 2), (4, 12, 0), (4, 3, 3), (4, 5, 1), (3, 2, 2)],
)
@pytest.mark.parametrize("method", ["dpsgd", "adafest", "microbatches"])
def test_uneven_and_empty_shards(method: str, count: int, size: int, present: int) -> None:
    one, _ = trained(1, METHODS[method], size=size, present=present)
    several, _ = trained(count, METHODS[method], size=size, present=present)
    assert_same(one, several)


DEFAULT_COLLECTIVES = """
    import sys

    import keras, numpy as np, tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    from tests.distribution.test_mirrored import METHODS, VOCABULARIES
    from tests.training_cases import click_model, clicks, marked_dataset, plan_for

    count = int(sys.argv[1])
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])
    plan = plan_for(12, steps=3, noise_multiplier=0.5, capacity=12)
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = click_model(VOCABULARIES)
        optimizer = METHODS["adafest"](model, plan)
        optimizer.use_noise_key(tf.constant([123, 456], tf.int64))
        model.compile(optimizer, loss="binary_crossentropy")
    model.fit(marked_dataset(plan, *clicks(12, VOCABULARIES), steps=3), verbose=0)
    print([float(np.abs(weight).sum()) for weight in model.get_weights()])
"""


@pytest.mark.slow
def test_with_tensorflows_own_collectives() -> None:
    one, two = (
        np.array(json.loads(run_python(DEFAULT_COLLECTIVES, str(count)).splitlines()[-1]))
        for count in (1, 2)
    )
    np.testing.assert_allclose(one, two, rtol=1e-5)


@pytest.mark.slow
def test_several_steps_in_one_execution() -> None:
    one, _ = trained(1, METHODS["adafest"], steps=4, noise_multiplier=0.5)
    x, y = clicks(12, VOCABULARIES)
    plan = plan_for(12, steps=4, noise_multiplier=0.5, capacity=12)
    with strategy_of(2).scope():
        keras.utils.set_random_seed(3)
        model = click_model(VOCABULARIES)
        optimizer = METHODS["adafest"](model, plan)
        optimizer.use_noise_key(tf.constant([123, 456], tf.int64))
        model.compile(optimizer, loss="binary_crossentropy", steps_per_execution=2)
    model.fit(marked_dataset(plan, x, y, steps=4), verbose=0)
    assert_same(one, model)


@pytest.mark.slow
@pytest.mark.parametrize("size", [12, 7])
def test_our_own_loop(size: int) -> None:
    """As `fit`, with the shares of several replicas of one process."""
    found = []
    for count in (1, 3):
        strategy = none_or_mirrored(count)
        plan = plan_for(size, steps=3, noise_multiplier=1e-6, capacity=size)
        with strategy.scope():
            keras.utils.set_random_seed(3)
            model = click_model(VOCABULARIES)
            model.compile(METHODS["adafest"](model, plan), "binary_crossentropy", metrics=["auc"])
        distribution.train(model, clicks(size, VOCABULARIES))
        found.append(model)
    assert_same(*found)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["adafest", "fest", "exponential"])
def test_what_replicas_exchange_does_not_grow_with_a_table(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same ids in tables of 40 and of 40,000 rows: the same bytes, to the last one."""
    sent: list[int] = []

    def counted(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def run(values: Any) -> Any:
            strategy = tf.distribute.get_strategy()
            for leaf in tf.nest.flatten(values):
                for own in strategy.experimental_local_results(leaf):
                    size = tf.size(own) * own.dtype.size
                    tf.py_function(lambda n: sent.append(int(n)), [size], [])
            return exchange(values)

        return run

    monkeypatch.setattr(replicas, "gathered", counted(replicas.gathered))
    monkeypatch.setattr(replicas, "summed", counted(replicas.summed))
    totals = []
    for rows in (40, 40_000):
        sent.clear()
        x, y = clicks(12, VOCABULARIES)
        plan = plan_for(12, noise_multiplier=1e-6, capacity=12)
        with strategy_of(2).scope():
            model = click_model((rows, rows))
            if method == "fest":
                tables = {w.path.split("/")[-2]: rows for w in model.weights[:2]}
                chosen = dp_sparse.SelectedRows.public(dict.fromkeys(tables, range(20)), tables)
                optimizer = dp_sparse.DPFESTOptimizer("sgd", plan, 0.5, rows=chosen)
            else:
                optimizer = METHODS[method](model, plan)
            model.compile(optimizer, "binary_crossentropy")
        model.fit(marked_dataset(optimizer.plan, x, y), verbose=0)
        totals.append(sum(sent))
    assert totals[0] == totals[1] > 1000


def test_masks_differ_between_replicas_and_parts() -> None:
    """Dropout's masks come from the key, the replica and the part: no two examples share one."""
    strategy, key = strategy_of(4), noise.NoiseKey()

    @tf.function
    def states() -> Any:
        def own() -> tf.Tensor:
            draw = replicas.merged(key.next_draw)
            return tf.stack([secret_seeds(draw, part)(0, "int64") for part in range(3)])

        return strategy.experimental_local_results(strategy.run(own))

    found = [tuple(state) for of_replica in states() for state in of_replica.numpy()]
    assert len(set(found)) == len(found) == 12


def poisson_plan(steps: int) -> Any:
    sampling = dp_sparse.PoissonSampling(num_examples=60, expected_batch_size=15, steps=steps)
    return dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-3), sampling).calibrate()


def under_two(plan: Any) -> keras.Model:
    with strategy_of(2).scope():
        model = click_model(VOCABULARIES)
        model.compile(METHODS["adafest"](model, plan), loss="binary_crossentropy", metrics=["auc"])
    return model


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpsgd", "adafest"])
def test_one_device_by_name_is_no_strategy(method: str) -> None:
    """The same key: the same weights to the last bit, noise included."""
    runs = [
        trained(1, METHODS[method], noise_multiplier=1.0, strategy=strategy)
        for strategy in (None, tf.distribute.OneDeviceStrategy("CPU:1"))
    ]
    for left, right in zip(*(model.get_weights() for model, _ in runs), strict=True):
        np.testing.assert_array_equal(left, right)
    assert "CPU:1" in runs[1][0].trainable_variables[0].value.device


@pytest.mark.slow
def test_the_samplers_own_batches_with_validation_and_a_report(tmp_path: Any) -> None:
    plan, data = poisson_plan(6), clicks(60, VOCABULARIES)
    model = under_two(plan)
    report = dp_sparse.PrivacyReport(tmp_path / "report.html")
    batches, held_out = plan.sampling.batches(data), clicks(60, VOCABULARIES)
    history = model.fit(
        batches,
        epochs=3,
        steps_per_epoch=2,
        validation_data=held_out,
        callbacks=[report],
        verbose=0,
    )
    assert len(history.history["val_auc"]) == 3
    assert int(model.optimizer.steps_spent.numpy()) == 6
    with pytest.raises(PrivacyError, match="no steps left: 6 of 6"):
        model.fit(plan.sampling.batches(data), verbose=0)


@pytest.mark.slow
def test_saved_and_loaded(tmp_path: Any) -> None:
    plan, data = poisson_plan(6), clicks(60, VOCABULARIES)
    model = under_two(plan)
    model.fit(plan.sampling.batches(data), steps_per_epoch=2, verbose=0)
    model.save(tmp_path / "model.keras")
    with strategy_of(2).scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    for left, right in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)
    loaded.fit(plan.sampling.batches(data), steps_per_epoch=4, verbose=0)
    assert int(loaded.optimizer.steps_spent.numpy()) == 6


@pytest.mark.slow
def test_one_batch_for_every_replica_is_refused() -> None:
    """Keras gives each replica the whole batch: every example would count twice."""
    plan = plan_for(12, steps=3, capacity=12)
    model = under_two(plan)
    batch = next(iter(marked_dataset(plan, *clicks(12, VOCABULARIES))))
    before = model.get_weights()
    with pytest.raises(PrivacyError, match="got 24,"):
        model.train_on_batch(*batch)
    step = tf.function(
        lambda data: model.distribute_strategy.run(model.train_step, args=(data,)), autograph=False
    )
    model.make_train_function()
    dp_sparse.preflight(model, batch)
    with pytest.raises(PrivacyError, match="got 24,"), dp_sparse.core.errors.translated():
        step(batch)
    for left, right in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)
    assert int(model.optimizer.iterations.numpy()) == 0
    assert int(model.optimizer.diagnostics.steps) == 0


def refused(match: str, make: Callable[[Any], Any], strategy: Any = None, **compile: Any) -> None:
    plan = plan_for(12)
    with (strategy or strategy_of(2)).scope():
        model = click_model(VOCABULARIES)
        with pytest.raises((PrivacyError, ValueError), match=match):
            model.compile(make(plan), loss="binary_crossentropy", **compile)


def test_compiling_outside_the_scope_refuses_the_same() -> None:
    plan = plan_for(12)
    with strategy_of(2).scope():
        model, optimizer = click_model(VOCABULARIES), dp_sparse.DPSGDOptimizer("sgd", plan, 1.0)
    with pytest.raises(ValueError, match="jit_compile=False with several replicas"):
        model.compile(optimizer, loss="binary_crossentropy", jit_compile=True)


def test_what_is_refused() -> None:
    def lazy(plan: Any) -> Any:
        return dp_sparse.LazyDPSGDOptimizer("sgd", plan, 1.0)

    refused("Expected no tf.distribute strategy with LazyDP", lazy)
    refused("Expected no tf.distribute strategy with LazyDP", lazy, strategy_of(1))
    refused(
        "Expected no tf.distribute strategy with ShuffledDPSGD",
        lambda plan: dp_sparse.ShuffledDPSGDOptimizer("sgd", plan, 1.0),
    )
    for option in ({"clipnorm": 1.0}, {"global_clipnorm": 1.0}, {"clipvalue": 1.0}):
        refused(
            f"without {next(iter(option))} on several replicas",
            lambda p, o=option: dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(**o), p, 1.0),
        )
    overwriting = {"use_ema": True, "ema_overwrite_frequency": 2}
    refused(
        "without ema_overwrite_frequency on several replicas",
        lambda p: dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(**overwriting), p, 1.0),
    )
    refused(
        "jit_compile=False with several replicas",
        lambda p: dp_sparse.DPSGDOptimizer("sgd", p, 1.0),
        jit_compile=True,
    )
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])
    refused("got CentralStorage", lambda p: dp_sparse.DPSGDOptimizer("sgd", p, 1.0), central)


@pytest.mark.slow
def test_importing_leaves_devices_to_be_configured() -> None:
    code = """
        import tensorflow as tf
        import dp_sparse, pipelines.criteo.train
        cpu, parts = tf.config.list_physical_devices("CPU")[0], 3
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * parts
        )
        print(len(tf.config.list_logical_devices("CPU")))
    """
    assert run_python(code).strip() == "3"


def test_parameter_servers_are_refused_saying_why() -> None:
    strategy = object.__new__(tf.distribute.ParameterServerStrategy)
    with pytest.raises(PrivacyError, match="workers updates on its own.*Use MirroredStrategy"):
        environment.check_strategy(strategy, None)


def test_parts_of_another_strategy_are_refused() -> None:
    plan = plan_for(12)
    outside = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(), plan, 1.0)
    wrapped = keras.optimizers.SGD()
    with strategy_of(2).scope():
        model = click_model(VOCABULARIES)
        inside = dp_sparse.DPSGDOptimizer(wrapped, plan, 1.0)
        for optimizer in (outside, inside):
            with pytest.raises(PrivacyError, match="make all three inside strategy.scope"):
                model.compile(optimizer, loss="binary_crossentropy")
        mirrored = dp_sparse.DPSGDOptimizer("sgd", plan, 1.0)
    plain = click_model(VOCABULARIES)
    with pytest.raises(PrivacyError, match="make all three inside strategy.scope"):
        plain.compile(mirrored, loss="binary_crossentropy")


def test_a_distributed_dataset_is_refused() -> None:
    plan = plan_for(12, capacity=12)
    model = under_two(plan)
    batches = marked_dataset(plan, *clicks(12, VOCABULARIES))
    with pytest.raises(PrivacyError, match="Expected the sampler's own batches"):
        model.fit(model.distribute_strategy.experimental_distribute_dataset(batches), verbose=0)


NOT_ALONE = (
    dp_sparse.DPSGDOptimizer,
    dp_sparse.LazyDPSGDOptimizer,
    dp_sparse.ShuffledDPSGDOptimizer,
)


@pytest.mark.parametrize("make", NOT_ALONE)
def test_a_step_under_another_strategy_is_refused(make: Any) -> None:
    """Each replica would draw of its own accord."""
    plan = plan_for(12, capacity=12)
    model = click_model(VOCABULARIES)
    model.compile(make("sgd", plan, 1.0), "binary_crossentropy")
    model.make_train_function()
    batch = next(iter(marked_dataset(plan, *clicks(12, VOCABULARIES))))
    with pytest.raises(PrivacyError, match="Expected a step under the strategy of the optimizer"):
        strategy_of(2).run(model.train_step, args=(batch,))


@pytest.mark.slow
def test_moving_averages_end_up_in_the_weights() -> None:
    plan = plan_for(12, steps=2, capacity=12)
    with strategy_of(2).scope():
        model = click_model(VOCABULARIES)
        averaging = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.9)
        model.compile(dp_sparse.DPSGDOptimizer(averaging, plan, 1.0), "binary_crossentropy")
    model.stop_training = True  # of an earlier run
    distribution.train(model, clicks(12, VOCABULARIES))
    averages = averaging._model_variables_moving_average
    assert int(model.optimizer.steps_spent.numpy()) == 2
    for variable, average in zip(averaging._trainable_variables, averages, strict=True):
        np.testing.assert_allclose(variable.numpy(), average.numpy(), atol=1e-6)


@pytest.mark.slow
def test_a_tied_table_and_dropout_train() -> None:
    tokens = np.random.default_rng(0).integers(0, 11, (8, 5))
    plan = plan_for(8, steps=2, noise_multiplier=0.1, capacity=8)
    with strategy_of(2).scope():
        ids = keras.Input((5,), dtype="int32")
        tied = keras.layers.ReversibleEmbedding(11, 4)
        hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(4, activation="tanh")(tied(ids)))
        model = keras.Model(ids, tied(hidden, reverse=True))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss=loss)
    before = model.get_weights()
    model.fit(marked_dataset(plan, tokens, tokens, steps=2), verbose=0)
    for left, right in zip(before, model.get_weights(), strict=True):
        assert not np.array_equal(left, right)

"""Training with an embedding layer, against `fit` with Keras' own tables, and what it refuses."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import distribution
from dp_sparse.core.errors import BadExampleError, PrivacyError, translated
from dp_sparse.distribution.embedding_layers import training_loop
from tests.distribution.embedding_layers import two_tables
from tests.distribution.embedding_layers.emulator import Strategy
from tests.training_cases import assert_deviation, plan_for


def parts(**arguments: Any) -> tuple[Any, distribution.PrivateTables, Any]:
    tables, layer = two_tables.tables_and_layer(**arguments)
    return two_tables.compiled_model(tables.private_optimizer), tables, layer


def values_of(model: keras.Model, layer: Any) -> list[np.ndarray]:
    tables = sorted(layer.embedding_tables.items(), key=lambda item: item[0].name)
    return [v.numpy() for v in (*model.trainable_variables, *(v for _, v in tables))]


class WithTables(keras.Model):
    """The same model over Keras' tables."""

    def __init__(self, top: keras.Model, initial: dict[str, np.ndarray]) -> None:
        super().__init__()
        self.top = top
        self.embeddings = [
            keras.layers.Embedding(
                len(v), two_tables.WIDTH, keras.initializers.Constant(v), name=name
            )
            for name, v in initial.items()
        ]

    def call(self, x: Any) -> Any:
        shared, bag = self.embeddings
        there = keras.ops.cast(x["words"] >= 0, "float32") * x["word_weights"]
        words = bag(keras.ops.maximum(x["words"], 0)) * there[..., None]
        inputs = {
            "left": shared(x["left"]),
            "right": shared(x["right"]),
            "words": keras.ops.sum(words, axis=1),
            "dense_features": x["dense_features"],
        }
        return self.top(inputs)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("wrapped", ["sgd", "adagrad"])
def test_as_fit_without_noise(wrapped: str) -> None:
    """Five steps; words of weight 0 claim their rows with Keras' tables, so there are none."""
    x, y = two_tables.data()
    x["words"] = np.where(x["word_weights"] > 0, x["words"], -1)
    x["words"][x["words"] < 0] = 5  # Keras' Embedding has no id that is none
    x["word_weights"] = np.maximum(x["word_weights"], 1)
    settings = {"steps": 5, "threshold": 0.9, "noise_multiplier": 1e-3}
    model, tables, layer = parts(wrapped=wrapped, **settings)
    ordered = {t.path: None for t in tables.tables}
    initial = {t.name: v.numpy() for t, v in layer.embedding_tables.items()}
    top = keras.models.clone_model(model)
    top.set_weights(model.get_weights())
    history = distribution.train_tables(model, tables, layer, (x, y), epochs=5)

    optimizer = two_tables.private_optimizer(wrapped, **settings)
    whole = WithTables(top, {name: initial[name] for name in ordered})
    whole.compile(optimizer, loss="binary_crossentropy")
    kept = whole.fit(
        optimizer.plan.sampling.batches((x, y)), epochs=5, steps_per_epoch=1, verbose=0
    )
    np.testing.assert_allclose(history.history["loss"], kept.history["loss"], rtol=1e-4)
    expected = {v.path: v.numpy() for v in whole.top.trainable_variables}
    for got, wanted in zip(model.trainable_variables, expected.values(), strict=True):
        np.testing.assert_allclose(got.numpy(), wanted, atol=1e-5)
    for table, got in layer.embedding_tables.items():
        embedding = next(e for e in whole.embeddings if e.name == table.name)
        np.testing.assert_allclose(got.numpy(), embedding.embeddings.numpy(), atol=1e-5)
        assert (got.numpy() != initial[table.name]).any()
    counts = [d.examples.numpy() for d in (o.diagnostics for o in (model.optimizer, optimizer))]
    assert counts[0] == counts[1] == 5 * two_tables.SIZE


@pytest.mark.slow
def test_noise_of_dense_variables() -> None:
    """Of one step under noise that drowns the gradients; rejects other deviations."""
    plan = plan_for(two_tables.SIZE, steps=1, noise_multiplier=100.0)
    optimizer = dp_sparse.DPAdaFESTOptimizer(keras.optimizers.SGD(1.0), plan, two_tables.CLIP)
    tables = two_tables.private_tables(optimizer)
    layer = two_tables.E.TPUEmbeddingForServing(tables.feature_config, None)
    model = two_tables.compiled_model(optimizer, hidden=1000)
    before = np.concatenate([v.numpy().ravel() for v in model.trainable_variables])
    distribution.train_tables(model, tables, layer, two_tables.data())
    after = np.concatenate([v.numpy().ravel() for v in model.trainable_variables])
    deviation = two_tables.CLIP * optimizer.gradient_noise_multiplier / two_tables.SIZE
    assert_deviation(after - before, deviation)


@pytest.mark.slow
def test_a_run_stops_where_a_callback_says_so() -> None:
    model, tables, layer = parts(steps=6)
    seen: list[Any] = []

    def end(batch: int, logs: Any) -> None:
        seen.append(batch)
        model.stop_training = batch == 1

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    distribution.train_tables(
        model, tables, layer, two_tables.data(), epochs=2, steps_per_epoch=3, callbacks=[callback]
    )
    assert seen == [0, 1] and int(model.optimizer.steps_spent) == 2


@pytest.mark.slow
def test_the_budget_ends_and_a_run_goes_on_where_it_stopped() -> None:
    model, tables, layer = parts(steps=4)
    source = two_tables.data()
    distribution.train_tables(model, tables, layer, source, steps_per_epoch=3)
    assert int(model.optimizer.steps_spent.numpy()) == 3
    with pytest.raises(ValueError, match="Expected at most 1 steps"):
        distribution.train_tables(model, tables, layer, source, steps_per_epoch=2)
    distribution.train_tables(model, tables, layer, source)
    assert int(model.optimizer.steps_spent.numpy()) == 4
    with pytest.raises(ValueError, match="Expected at most 0 steps"):
        distribution.train_tables(model, tables, layer, source)


@pytest.mark.slow
def test_a_batch_is_taken_once() -> None:
    model, tables, layer = parts()
    source = two_tables.data()
    batch = two_tables.prepared(tables, source)
    two_tables.take_step(model, tables, layer, source, batch)
    before = values_of(model, layer)
    with pytest.raises(PrivacyError, match="again or out of turn"), translated():
        two_tables.take_step(model, tables, layer, source, batch)
    for old, new in zip(before, values_of(model, layer), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.slow
def test_a_stream_of_examples() -> None:
    """Padding of the last batches, and order: batch t is for step t."""
    sampling = dp_sparse.StreamSampling(num_examples=two_tables.SIZE, batch_size=6, passes=1)
    budget = dp_sparse.PrivacyBudget(3.0, 1e-3)
    plan = dp_sparse.PrivacyPlan(budget, sampling).calibrate()
    optimizer = dp_sparse.DPAdaFESTOptimizer(keras.optimizers.SGD(0.1), plan, 1.0)
    tables = two_tables.private_tables(optimizer)
    layer = two_tables.E.TPUEmbeddingForServing(tables.feature_config, None)
    model = two_tables.compiled_model(optimizer)
    distribution.train_tables(model, tables, layer, two_tables.data(), steps_per_epoch=2)
    rows = tf.data.Dataset.from_tensor_slices(two_tables.data())
    with pytest.raises(PrivacyError, match="after 2 of 4 no pass is left"):
        distribution.train_tables(model, tables, layer, rows)
    distribution.train_tables(model, tables, layer, two_tables.data())
    assert int(optimizer.steps_spent.numpy()) == sampling.steps
    assert int(optimizer.diagnostics.examples) == two_tables.SIZE


@pytest.mark.slow
def test_bad_labels_leave_everything_as_it_was() -> None:
    model, tables, layer = parts()
    (x, y), before = two_tables.data(), values_of(model, layer)
    y[3] = 2.0
    with pytest.raises(BadExampleError, match=r"Expected labels in \[0, 1\].* got 2"):
        distribution.train_tables(model, tables, layer, (x, y))
    for old, new in zip(before, values_of(model, layer), strict=True):
        np.testing.assert_array_equal(old, new)
    assert int(model.optimizer.iterations) == int(model.optimizer.diagnostics.steps) == 0


def test_bad_ids_leave_everything_as_it_was() -> None:
    model, tables, layer = parts()
    (x, y), before = two_tables.data(), values_of(model, layer)
    x["right"][4] = 40
    with pytest.raises(BadExampleError, match=r"\[0, 40\) in feature 'right', got 40. Clip"):
        distribution.train_tables(model, tables, layer, (x, y))
    for old, new in zip(before, values_of(model, layer), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.slow
def test_an_example_that_is_not_finite_adds_nothing() -> None:
    model, tables, layer = parts(noise_multiplier=1e-3)
    x, y = two_tables.data()
    x["dense_features"][2] = np.nan
    distribution.train_tables(model, tables, layer, (x, y), steps_per_epoch=1)
    assert all(np.isfinite(v).all() for v in values_of(model, layer))
    assert int(model.optimizer.diagnostics.not_finite) == 1


class MixesExamples(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x - keras.ops.mean(x, axis=0, keepdims=True)


def model_of(tables: distribution.PrivateTables, values_of_inputs: Any) -> keras.Model:
    inputs = {name: keras.Input((two_tables.WIDTH,), name=name) for name in two_tables.FEATURES}
    inputs["dense_features"] = keras.Input((2,), name="dense_features")
    hidden = keras.layers.Concatenate()(values_of_inputs(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(tables.private_optimizer, loss="binary_crossentropy")
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: [MixesExamples()(x["left"]), x["words"]],
        lambda x: [x["left"], MixesExamples()(x["dense_features"])],
        lambda x: [x["left"], MixesExamples()(keras.ops.abs(x["left"] - x["words"]))],
    ],
)
def test_a_model_that_mixes_examples_is_refused(mixed: Any) -> None:
    """Differences of features, too, which equal activations would hide."""
    tables, layer = two_tables.tables_and_layer()
    model = model_of(tables, mixed)
    before = values_of(model, layer)
    with pytest.raises(PrivacyError, match="of one example depends on another"):
        distribution.train_tables(model, tables, layer, two_tables.data())
    for old, new in zip(before, values_of(model, layer), strict=True):
        np.testing.assert_array_equal(old, new)


class MixesLater(MixesExamples):
    """Mixes once a flag is set in Python, which another trace alone can see."""

    mixes = False

    def call(self, inputs: Any) -> Any:
        return super().call(inputs) if self.mixes else inputs


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """For each check of a batch, which of its examples are there."""
    seen: list[np.ndarray] = []
    check = training_loop.refuse_coupled

    def checking(isolation: Any, given: Any, present: np.ndarray, *rest: Any) -> None:
        seen.append(present)
        check(isolation, given, present, *rest)

    monkeypatch.setattr(training_loop, "refuse_coupled", checking)
    return seen


@pytest.mark.slow
def test_another_call_checks_what_it_traces_anew(checked: list[np.ndarray]) -> None:
    tables, layer = two_tables.tables_and_layer()
    mixing = MixesLater()
    model = model_of(tables, lambda x: [mixing(x["left"]), x["words"]])
    data = two_tables.data()
    distribution.train_tables(model, tables, layer, data, steps_per_epoch=2)
    assert len(checked) == 2
    distribution.train_tables(model, tables, layer, data, steps_per_epoch=1)
    assert len(checked) == 3
    mixing.mixes = True
    before = values_of(model, layer)
    with pytest.raises(PrivacyError, match="of one example depends on another"):
        distribution.train_tables(model, tables, layer, data, steps_per_epoch=1)
    for old, new in zip(before, values_of(model, layer), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.slow
def test_a_batch_without_examples_checks_nothing(checked: list[np.ndarray]) -> None:
    """Of about half an example each: padding is alike, whatever mixes it."""
    sampling = dp_sparse.PoissonSampling(two_tables.SIZE, 0.5, 30)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(3.0, 1e-3), sampling).calibrate()
    optimizer = dp_sparse.DPAdaFESTOptimizer(keras.optimizers.SGD(0.1), plan, 1.0)
    tables = two_tables.private_tables(optimizer)
    layer = two_tables.E.TPUEmbeddingForServing(tables.feature_config, None)
    distribution.train_tables(
        two_tables.compiled_model(optimizer), tables, layer, two_tables.data()
    )
    assert len(checked) == 3 and all(np.any(present > 0) for present in checked)
    assert int(optimizer.diagnostics.steps) == 30


def test_a_model_with_tables_of_its_own_is_refused() -> None:
    tables, layer = two_tables.tables_and_layer()
    ids = keras.Input((), dtype="int32", name="other")
    inputs = {name: keras.Input((two_tables.WIDTH,), name=name) for name in two_tables.FEATURES}
    rows = keras.layers.Embedding(7, 2, name="own")(ids)
    joined = keras.layers.Concatenate()([*inputs.values(), rows])
    outputs = keras.layers.Dense(1, activation="sigmoid")(joined)
    model = keras.Model({**inputs, "other": ids}, outputs)
    model.compile(tables.private_optimizer, loss="binary_crossentropy")
    x, y = two_tables.data()
    del x["dense_features"]
    x["other"] = np.zeros(two_tables.SIZE, "int32")
    with pytest.raises(PrivacyError, match=r"beside those of the layer, got \['own/embeddings'\]"):
        distribution.train_tables(model, tables, layer, (x, y))


def test_other_refusals() -> None:
    model, tables, layer = parts()
    with pytest.raises(PrivacyError, match="Expected dp_sparse.distribution.train_tables, got fit"):
        model.fit(tables.private_optimizer.plan.sampling.batches(two_tables.data()))
    other = two_tables.compiled_model(two_tables.private_optimizer())
    with pytest.raises(PrivacyError, match="compiled with the optimizer of its tables"):
        distribution.train_tables(other, tables, layer, two_tables.data())
    two_tables.private_tables(tables.private_optimizer)
    with pytest.raises(PrivacyError, match="Expected one PrivateTables of an optimizer"):
        distribution.train_tables(model, tables, layer, two_tables.data())
    model, tables, layer = parts()
    batches = tables.private_optimizer.plan.sampling.batches(two_tables.data())
    with pytest.raises(ValueError, match="Expected examples, got batches of a sampler"):
        distribution.train_tables(model, tables, layer, batches)
    stock = two_tables.compiled_model("sgd")
    with pytest.raises(ValueError, match="compiled with a private optimizer"):
        distribution.train_tables(stock, tables, layer, two_tables.data())
    with pytest.raises(ValueError, match="Expected epochs"):
        distribution.train_tables(model, tables, layer, two_tables.data(), epochs=0)
    with pytest.raises(ValueError, match="Expected tables to be PrivateTables, got TPUEmb"):
        distribution.train_tables(model, layer, tables, two_tables.data())
    (x, y) = two_tables.data()
    with pytest.raises(ValueError, match="'left' among the inputs, in a dictionary, got EagerT"):
        distribution.train_tables(model, tables, layer, (x["left"], y))
    model.compile(tables.private_optimizer, "binary_crossentropy", jit_compile=True)
    with pytest.raises(ValueError, match="Expected jit_compile=False, got True"):
        distribution.train_tables(model, tables, layer, two_tables.data())


def test_fit_under_a_tpu_strategy_is_refused() -> None:
    model, _, _ = parts()
    model._distribute_strategy = object.__new__(tf.distribute.TPUStrategy)
    with pytest.raises(PrivacyError, match="call dp_sparse.distribution.train_tables"):
        model.make_train_function()


@pytest.mark.slow
def test_dropout_masks_and_class_weights_and_callbacks() -> None:
    optimizer = two_tables.private_optimizer(steps=6)
    tables = two_tables.private_tables(optimizer)
    layer = two_tables.E.TPUEmbeddingForServing(tables.feature_config, None)
    model = two_tables.compiled_model(optimizer, dropout=0.5, metrics=["accuracy"])
    seen: list[Any] = []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs))
    history = distribution.train_tables(
        model,
        tables,
        layer,
        two_tables.data(),
        epochs=2,
        class_weight={0: 1.0, 1: 2.0},
        callbacks=[callback],
    )
    assert len(seen) == 2 and {"loss", "accuracy"} == set(history.history)


def test_settings_of_an_optimizer_stay() -> None:
    """Clipping, selection and noise are traced at different times, so they must not change."""
    optimizer = two_tables.private_optimizer()
    for name in ("clip_norm", "contribution_clip_norm", "noise_ratio", "threshold", "plan"):
        with pytest.raises(AttributeError):
            setattr(optimizer, name, 3.0)
    tables = two_tables.private_tables(optimizer)
    for name in ("grid", "examples", "tables", "private_optimizer", "layer_optimizer"):
        with pytest.raises(AttributeError, match="cannot change"):
            setattr(tables, name, getattr(tables, name))


def test_strategies_that_do_not_fit() -> None:
    model, tables, layer = parts()
    on_tpu = two_tables.private_tables(tables.private_optimizer, strategy=Strategy())
    serving = two_tables.E.TPUEmbeddingForServing(on_tpu.serving_config, None)
    with pytest.raises(ValueError, match="with the strategy of"):
        distribution.train_tables(model, on_tpu, serving, two_tables.data())
    one = tf.distribute.OneDeviceStrategy("CPU:0")
    with pytest.raises(PrivacyError, match="outside strategy.scope"), one.scope():
        distribution.train_tables(model, tables, layer, two_tables.data())
    model._distribute_strategy = one
    with pytest.raises(PrivacyError, match="Expected TPUStrategy or none, got OneDevice"):
        distribution.train_tables(model, tables, layer, two_tables.data())

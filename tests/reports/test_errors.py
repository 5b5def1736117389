"""What a user sees who makes a common mistake, or uses an uncommon part of Keras."""

import os
import secrets
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse.core import stderr_without
from tests.subprocesses import run_python
from tests.training_cases import without_preflight


def plan_of(
    examples: int = 64, batch: float = 16, steps: int = 4, sigma: float = 1.0
) -> dp_sparse.PrivacyPlan:
    return dp_sparse.PrivacyPlan(
        dp_sparse.PrivacyBudget(3.0, 1e-3),
        dp_sparse.PoissonSampling(examples, batch, steps),
        noise_multiplier=sigma,
        plan_id=secrets.token_hex(16),
    )


class WithASpareTable(keras.Model):
    """Has two tables, of which `call` looks one up."""

    def __init__(self) -> None:
        super().__init__()
        self.used = keras.layers.Embedding(20, 2, name="used")
        self.spare = keras.layers.Embedding(30, 2, name="spare")
        self.spare.build()
        self.head = keras.layers.Dense(1)

    def call(self, ids: Any) -> Any:
        return self.head(self.used(ids))


@pytest.mark.parametrize("most", [0, 2e7])
def test_advice_for_a_model_with_a_table_that_it_does_not_look_up(
    monkeypatch: pytest.MonkeyPatch, most: float
) -> None:
    monkeypatch.setattr("dp_sparse.reports.recommendation.MOST_DENSE_ENTRIES", most)
    model, x = WithASpareTable(), np.arange(8)
    advice = dp_sparse.recommend(model, plan_of(), x)
    expected = "The model looks up no row of spare, which can learn nothing"
    (said,) = [w for w in advice.warnings if "spare" in w]
    assert said.startswith(expected)
    model.compile(advice.optimizer(), "mse")
    assert any(w.startswith(expected) for w in dp_sparse.check_model(model, x).warnings)


def test_the_signal_of_a_run_is_one_number_in_the_table_of_plans_and_in_the_advice() -> None:
    table = dp_sparse.plan_table(100_000, 3.0, batch_sizes=[4096], epochs=[1])
    plan = plan_of(100_000, 4096, table.rows[0].steps, table.rows[0].noise_multiplier)
    model = keras.Sequential([keras.Input((), dtype="int32"), keras.layers.Embedding(50, 2)])
    advice = dp_sparse.recommend(model, plan)
    assert advice.signal_per_weight == pytest.approx(table.rows[0].signal_to_noise / 10)
    assert f"along one direction, {table.rows[0].signal_to_noise:,.0f}, over" in str(advice)


class Crossing(keras.Model):
    """Two columns to one score; XLA aborts the process, or does not know the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = keras.layers.HashedCrossing(20)
        self.table, self.head = keras.layers.Embedding(20, 2), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.head(self.table(self.cross((x["a"], x["b"]))))


class OfText(keras.Model):
    """Hashes text without a layer, so that only its inputs tell."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = keras.layers.Embedding(20, 2), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.head(self.table(tf.strings.to_hash_bucket_fast(x, 20)))


NUMBERS, TEXT = np.arange(64) % 7, np.array(["a", "b"] * 32, object)


@pytest.mark.parametrize(
    ("model", "x", "named"),
    [
        (Crossing, {"a": NUMBERS, "b": NUMBERS}, "hashed_crossing"),
        (OfText, TEXT, "inputs of text"),
    ],
)
def test_models_that_xla_does_not_support_train_without_it(
    model: type[keras.Model], x: Any, named: str
) -> None:
    trained, plan = model(), plan_of(steps=1)
    with warnings.catch_warnings(record=True) as said:
        trained.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), "mse", jit_compile=True)
        without_preflight(trained)
        trained.fit(plan.sampling.batches((x, np.ones(64, np.float32))), verbose=0)
    assert any(str(w.message).startswith(f"XLA does not support {named} of") for w in said)
    assert int(trained.optimizer.steps_spent) == 1 and not trained.optimizer.compiles


def click_model(optimizer: Any, loss: str = "mse") -> keras.Model:
    ids = keras.Input((), dtype="int32")
    values = keras.layers.Embedding(20, 2, name="table")(ids)
    model = keras.Model(ids, keras.layers.Dense(1, name="head")(values))
    if optimizer is not None:
        model.compile(optimizer, loss)
    return model


def private(plan: dp_sparse.PrivacyPlan) -> keras.optimizers.Optimizer:
    wrapped = keras.optimizers.Adam(name="wrapped")
    return dp_sparse.DPAdaFESTOptimizer(wrapped, plan, clip_norm=1.0, expected_false_rows=2.0)


@pytest.fixture(scope="module")
def trained() -> tuple[keras.Model, dp_sparse.PrivacyPlan]:
    """A model after one of its plan's four steps."""
    plan = plan_of()
    model = click_model(private(plan))
    without_preflight(model)
    batches = plan.sampling.batches((NUMBERS, np.ones(64, np.float32)))
    model.fit(batches, steps_per_epoch=1, verbose=0)
    return model, plan


def test_weights_go_into_a_model_that_was_only_built_and_compiled(
    trained: tuple[keras.Model, dp_sparse.PrivacyPlan], tmp_path: Path
) -> None:
    """As keras-tuner's get_best_models and a script that goes on do it."""
    model, plan = trained
    model.save_weights(tmp_path / "one.weights.h5")
    again = click_model(private(plan))
    again.load_weights(tmp_path / "one.weights.h5")
    assert int(again.optimizer.steps_spent) == 1
    for saved, loaded in zip(model.optimizer.slots, again.optimizer.slots, strict=True):
        np.testing.assert_array_equal(saved.numpy(), loaded.numpy())
    tree = model.get_state_tree(value_format="numpy_array")
    by_tree = click_model(private(plan))
    by_tree.set_state_tree(tree)
    assert int(by_tree.optimizer.steps_spent) == 1


def test_public_weights_go_into_a_private_model(tmp_path: Path) -> None:
    """Saved by a model without an optimizer: nothing is spent, and training goes on."""
    public = click_model(None)
    public.save_weights(tmp_path / "public.weights.h5")
    plan = plan_of()
    model = click_model(private(plan))
    without_preflight(model)
    batches = plan.sampling.batches((NUMBERS, np.ones(64, np.float32)))
    for spent in (0, 1):
        model.load_weights(tmp_path / "public.weights.h5")
        np.testing.assert_array_equal(model.get_weights()[0], public.get_weights()[0])
        assert int(model.optimizer.steps_spent) == spent
        model.fit(batches, steps_per_epoch=1, verbose=0)


def test_weights_of_another_optimizer_go_in_before_compile(tmp_path: Path) -> None:
    public = click_model("sgd")
    public.fit(NUMBERS, np.ones(64), verbose=0)
    public.save_weights(tmp_path / "public.weights.h5")
    model = click_model(private(plan_of()))
    with pytest.raises(dp_sparse.PrivacyError, match="^Expected .* call load_weights before") as e:
        model.load_weights(tmp_path / "public.weights.h5")
    assert len(str(e.value)) < 240
    model = click_model("sgd")
    model.load_weights(tmp_path / "public.weights.h5")
    model.compile(private(plan_of()), "mse")
    np.testing.assert_array_equal(model.get_weights()[0], public.get_weights()[0])


def test_legacy_files_are_refused_with_the_ones_to_use(
    trained: tuple[keras.Model, dp_sparse.PrivacyPlan], tmp_path: Path
) -> None:
    model, _ = trained
    with pytest.raises(ValueError, match=r"legacy HDF5 files lose the spent steps. Use model.save"):
        model.save(tmp_path / "model.h5")
    model.save(tmp_path / "weights_alone.h5", include_optimizer=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert int(loaded.optimizer.steps_spent) == 1


@pytest.mark.parametrize("on_epoch", [False, True])
def test_averages_of_the_weights_are_swapped_in(on_epoch: bool) -> None:
    """The average is kept by the wrapped optimizer, and validation sees it."""
    plan = plan_of()
    wrapped = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.9)
    model = click_model(dp_sparse.DPSGDOptimizer(wrapped, plan, clip_norm=1.0))
    without_preflight(model)
    seen: list[Any] = []
    look = keras.callbacks.LambdaCallback(
        on_test_batch_end=lambda batch, logs: seen.append(state(model))
    )
    batches = plan.sampling.batches((NUMBERS, np.ones(64, np.float32)))
    callbacks = [keras.callbacks.SwapEMAWeights(on_epoch), look]
    held_out = NUMBERS[:8].copy(), np.ones(8)
    shown = {"validation_data": held_out, "callbacks": callbacks, "verbose": 0}
    model.fit(batches, epochs=2, steps_per_epoch=2, **shown)
    averages = [v.numpy() for v in wrapped._model_variables_moving_average]
    for evaluated, average, weight in zip(seen[-1], averages, state(model), strict=True):
        np.testing.assert_allclose(evaluated, average, atol=1e-6)
        np.testing.assert_allclose(weight, average, atol=1e-6)  # as fit ends with use_ema


def test_averages_that_nobody_keeps_are_named() -> None:
    model = click_model(dp_sparse.DPSGDOptimizer("sgd", plan_of(), clip_norm=1.0))
    callback = keras.callbacks.SwapEMAWeights()
    with pytest.raises(ValueError, match="use_ema=True"):
        model.evaluate(NUMBERS, np.ones(64), callbacks=[callback], verbose=0)


def state(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.trainable_variables]


def of_keras_2(name: str) -> Any:
    """What `tf_keras` makes, as far as this package looks at it, without importing it."""
    return type(name, (), {"__module__": f"tf_keras.src.{name.lower()}"})()


def test_keras_2_is_named_by_all_that_takes_a_model_or_an_optimizer(tmp_path: Path) -> None:
    model, plan = of_keras_2("Sequential"), plan_of()
    for term in (
        lambda: dp_sparse.check_model(model),
        lambda: dp_sparse.recommend(model, plan),
        lambda: dp_sparse.export_model(model, tmp_path / "export"),
        lambda: dp_sparse.PrivateCheckpoint(tmp_path / "run").restore(model),
        lambda: dp_sparse.DPSGDOptimizer(of_keras_2("SGD"), plan, clip_norm=1.0),
        lambda: click_model(private(plan), of_keras_2("MeanSquaredError")),
    ):
        with pytest.raises(ValueError, match="of Keras 3, got .* of tf_keras, which is Keras 2"):
            term()


def test_keras_2_shows_what_it_could_not_interpret() -> None:
    """Its own error, of which `str(optimizer)` is all that tells the reason."""
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan_of(), clip_norm=1.0)
    assert (
        str(optimizer) == "<DPSGDOptimizer of dp_sparse, for models of Keras 3: use `import keras`>"
    )


def test_a_process_without_dp_sparse_is_told_how_to_load_a_private_model(
    trained: tuple[keras.Model, dp_sparse.PrivacyPlan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = trained
    model.save(tmp_path / "model.keras")
    known = keras.saving.get_custom_objects()
    monkeypatch.delitem(known, "dp_sparse>DPAdaFESTOptimizer")
    with pytest.raises(TypeError, match="Could not locate class") as e:
        keras.models.load_model(tmp_path / "model.keras")
    said = str(e.value)
    for fix in ("`import dp_sparse` before", "compile=False", "dp_sparse.export_model"):
        assert fix in said[:700], said[:700]
    plain = keras.models.load_model(tmp_path / "model.keras", compile=False)
    expected = model.predict(NUMBERS, verbose=0)
    np.testing.assert_array_equal(plain.predict(NUMBERS, verbose=0), expected)


def test_a_first_run_shows_nothing_that_looks_like_a_failure() -> None:
    """The self-check of assertions fails one on purpose, which TensorFlow logs from C++."""
    shown = run_python(
        """
        import os
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
        os.dup2(1, 2)
        import tensorflow as tf
        from dp_sparse.step import environment
        assert environment._assertions_hold()

        @tf.function
        def fails(x):
            with tf.control_dependencies([tf.debugging.Assert(x > 0, ["of a test"])]):
                return tf.identity(x)

        try:
            fails(tf.constant(0))
        except tf.errors.InvalidArgumentError:
            pass
        """
    )
    assert "assertion failed: [of a test]" in shown  # or nothing is logged here
    assert shown.count("assertion failed") == 1


def test_other_lines_on_the_console_stay(capfd: Any) -> None:
    with stderr_without("expected"):
        os.write(2, b"one that is expected\nanother one\n")
    assert capfd.readouterr().err == "another one\n"


def test_a_report_asks_the_accountant_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose answer takes as long as many steps, and is never below what was spent."""
    plan, asked = plan_of(steps=40), []

    def spent(self: Any, steps: int) -> dp_sparse.PrivacyBudget:
        asked.append(steps)
        return dp_sparse.PrivacyBudget(steps / 10, 1e-3)

    monkeypatch.setattr(dp_sparse.PrivacyPlan, "spent", spent)
    model = click_model(private(plan))
    without_preflight(model)
    report = dp_sparse.PrivacyReport(points=20)
    batches = plan.sampling.batches((NUMBERS, np.ones(64, np.float32)))
    model.fit(batches, epochs=3, steps_per_epoch=11, callbacks=[report], verbose=0)
    steps, epsilons = report.history.steps, report.history.epsilon
    assert steps == [*range(2, 33, 2), 33] and epsilons[-1] == 3.3 and len(set(asked)) <= 9
    assert all(s / 10 <= e <= s / 10 + 0.6 for s, e in zip(steps, epsilons, strict=True))


def test_validation_on_the_rows_of_training_is_no_validation() -> None:
    x, y = NUMBERS[:8], np.ones(8, np.float32)
    model = click_model(private(plan_of(examples=8, batch=8)))
    without_preflight(model)
    batches = model.optimizer.plan.sampling.batches((x, y))
    steer = keras.callbacks.ReduceLROnPlateau("val_loss")
    with pytest.raises(dp_sparse.PrivacyError, match="Hold rows out"):
        model.fit(batches, validation_data=(x, y), callbacks=[steer], verbose=0)
    assert int(model.optimizer.steps_spent) == 0
    accepted = dp_sparse.PrivacyReport(diagnostics="non_private")
    model.fit(batches, validation_data=(x, y), callbacks=[steer, accepted], verbose=0)

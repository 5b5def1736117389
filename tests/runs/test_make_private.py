"""One call around a compiled model: what it chooses, trains and refuses."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from dp_sparse.optimizers import with_other_training
from dp_sparse.runs.normalisation import without_batch_normalization
from tests.training_cases import plan_for

ROWS = 1_000


def data(rows: int = ROWS) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    x = {"user": rng.integers(0, 50, rows).astype(np.int32), "age": rng.random(rows, np.float32)}
    return x, (x["user"] % 2).astype(np.float32)[:, None]


def clicks(loss: Any = "binary_crossentropy") -> keras.Model:
    user = keras.Input((), dtype="int32", name="user")
    age = keras.Input((1,), name="age")
    rows = keras.layers.Embedding(50, 4)(user)
    logit = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Concatenate()([rows, age]))
    model = keras.Model({"user": user, "age": age}, logit, name="clicks")
    model.compile("adam", loss, metrics=["AUC"])
    return model


def columns(rows: int = ROWS) -> tuple[dict[str, np.ndarray], np.ndarray]:
    x, y = data(rows)
    return {**x, "age": x["age"][:, None]}, y


def test_it_learns_by_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = columns()
    model = clicks()
    private = dp_sparse.make_private(model, epsilon=8, examples=(x, y), epochs=20)
    told = capsys.readouterr().out.splitlines()
    assert 3 < len(told) <= 10
    assert told[0].startswith("clicks trains privately: epsilon=8, delta=0.001")
    assert "1,000 examples, 84 expected in a batch, 20 expected passes: 238 steps." in told[1]
    assert any(line.startswith("dp_sparse.DPSGDOptimizer(") for line in told)
    history = private.fit(x, y, validation_split=0.2, verbose=0).history
    assert private.plan.sampling.num_examples == 800 and len(history["val_AUC"]) == 20
    assert history["val_AUC"][-1] > 0.9
    assert private.model is model and private.evaluate(x, y, verbose=0)[1] > 0.9
    assert "-differential privacy protects one example after" in private.statement()
    assert private.statement(format="json")


def test_every_part_can_be_given() -> None:
    x, y = columns()
    private = dp_sparse.make_private(
        clicks(),
        epsilon=3,
        delta=1e-4,
        examples=(x, y, np.ones(ROWS, np.float32)),
        epochs=2,
        batch_size=100,
        optimizer=lambda plan: dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0),
        verbose=False,
    )
    assert isinstance(private.optimizer, dp_sparse.DPAdaFESTOptimizer)
    assert private.plan.budget.delta == 1e-4 and private.plan.sampling.steps == 20
    private.fit(epochs=1, batch_size=50, verbose=0)  # its own examples, before the first step
    assert private.plan.sampling.steps == 20 and private.plan.sampling.expected_batch_size == 50
    assert int(private.optimizer.steps_spent) == 20
    with pytest.raises(ValueError, match="with which training began"):
        private.fit(epochs=3, verbose=0)
    with pytest.raises(dp_sparse.PrivacyError, match="no steps left|all its steps|spent"):
        private.fit(verbose=0)


def test_loss_and_metrics_stay_and_logs_show_both(tmp_path: Path) -> None:
    x, y = columns()
    model = clicks(keras.losses.BinaryCrossentropy(label_smoothing=0.1))
    private = dp_sparse.make_private(model, epsilon=3, examples=(x, y), verbose=False)
    log = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    rng = np.random.default_rng(1)
    others = {"user": rng.integers(0, 50, 90).astype(np.int32), "age": rng.random((90, 1))}
    held_out = others, np.ones((90, 1), np.float32)
    private.fit(x, y, validation_data=held_out, callbacks=[log], verbose=0)
    assert "val_AUC" in (tmp_path / "log.csv").read_text()
    assert private.loss.label_smoothing == 0.1
    private.save(tmp_path / "model.keras")
    assert (tmp_path / "model.keras").exists()


def test_records_of_a_file(tmp_path: Path) -> None:
    written = dp_sparse.write_records(columns(), tmp_path / "rows.npy")
    private = dp_sparse.make_private(clicks(), epsilon=3, examples=written, verbose=False)
    private.fit(verbose=0)
    assert int(private.optimizer.steps_spent) == 12
    with pytest.raises(ValueError, match="with arrays, got"):
        dp_sparse.make_private(clicks(), epsilon=3, examples=written, verbose=False).fit(
            validation_split=0.5
        )


def normalised(statistics: bool) -> keras.Model:
    layers = [
        keras.Input((3,)),
        keras.layers.Dense(12),
        keras.layers.BatchNormalization(name="norm") if statistics else keras.layers.ReLU(),
        keras.layers.Dense(2),
    ]
    model = keras.Sequential(layers, name="normalised")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_batch_normalisation_is_replaced_if_asked() -> None:
    x = np.random.default_rng(0).random((64, 3), np.float32)
    y = np.arange(64) % 2
    model = normalised(statistics=True)
    model.get_layer("norm").gamma.assign(np.arange(12.0))
    with pytest.raises(
        dp_sparse.UnsupportedLayerError, match=r"(?s)norm.*mixes the examples.*fix=True"
    ):
        dp_sparse.make_private(model, epsilon=8, examples=(x, y), verbose=False)
    private = dp_sparse.make_private(model, epsilon=8, examples=(x, y), fix=True, verbose=False)
    assert "BatchNormalization became GroupNormalization(4)" in str(private)
    norm = private.get_layer("norm")
    assert isinstance(norm, keras.layers.GroupNormalization) and norm.groups == 4
    np.testing.assert_array_equal(norm.gamma, np.arange(12.0))
    np.testing.assert_array_equal(private.layers[0].kernel, model.layers[0].kernel)
    private.fit(x, y, verbose=0)
    same = normalised(statistics=False)
    assert (
        dp_sparse.make_private(same, epsilon=8, examples=(x, y), fix=True, verbose=False).model
        is same
    )


def test_batch_normalisation_of_a_functional_model_is_replaced() -> None:
    """Also where it got an argument that GroupNormalization does not have, and beside a branch."""
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(6, name="first")(inputs)
    branch = keras.layers.BatchNormalization(name="a")(hidden, training=True)
    other = keras.layers.BatchNormalization(name="b")(inputs=keras.layers.Dense(6)(hidden))
    outputs = keras.layers.Dense(1, name="last")(keras.layers.Add()([branch, other, hidden]))
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse")
    for name in "ab":
        model.get_layer(name).beta.assign(np.full(6, ord(name)))
    x, y = np.random.default_rng(0).random((64, 3), np.float32), np.ones(64)
    private = dp_sparse.make_private(model, epsilon=8, examples=(x, y), fix=True, verbose=False)
    for name in "ab":
        norm = private.get_layer(name)
        assert isinstance(norm, keras.layers.GroupNormalization) and norm.groups == 2
        np.testing.assert_array_equal(norm.beta, np.full(6, ord(name)))
    for layer in ("first", "last"):
        kernels = [made.get_layer(layer).kernel for made in (model, private)]
        np.testing.assert_array_equal(*kernels)
    private.fit(x, y, verbose=0)
    assert int(private.optimizer.steps_spent) == private.plan.sampling.steps


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": 3}, "compiled keras.Model, got model=3"),
        ({"epsilon": 0}, "epsilon"),
        ({"epochs": 0}, "epochs"),
        ({"batch_size": 2_000}, "batch"),
        ({"examples": [1, 2]}, r"write_records\(source, path\)"),
        ({"examples": (np.ones((4, 2)), np.ones(3))}, "one common length"),
    ],
)
def test_what_is_out_of_range_is_told(given: dict[str, Any], words: str) -> None:
    arguments = {"model": clicks(), "epsilon": 3, "examples": columns(), "verbose": False, **given}
    with pytest.raises(ValueError, match=words):
        dp_sparse.make_private(arguments.pop("model"), **arguments)


def test_a_model_without_a_loss_is_told() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="plain")
    for compiled in (False, True):
        if compiled:
            model.compile("adam")
        with pytest.raises(ValueError, match="Expected plain compiled with its loss"):
            dp_sparse.make_private(model, epsilon=3, examples=(np.ones((4, 2)), np.ones(4)))


def trained_before(private_too: bool) -> keras.Model:
    """With BatchNormalization, and trained: with a plan or without privacy."""
    x = np.random.default_rng(0).random((64, 3), np.float32)
    y = np.arange(64) % 2
    model = normalised(statistics=not private_too)
    if private_too:
        other = dp_sparse.make_private(model, epsilon=2, examples=(x, y), verbose=False)
        other.fit(verbose=0)
        widened = normalised(statistics=True)
        return keras.Sequential([keras.Input((3,)), model.layers[0], *widened.layers[1:]])
    model.fit(x, y, verbose=0)
    return model


@pytest.mark.parametrize("private_too", [False, True])
def test_what_trained_a_model_is_told_after_its_normalisation_is_replaced(
    private_too: bool,
) -> None:
    """The package copies the weights, so it tells what they hold."""
    model = trained_before(private_too)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.default_rng(0).random((64, 3), np.float32)
    examples = x, np.arange(64) % 2
    private = dp_sparse.make_private(model, epsilon=8, examples=examples, fix=True, verbose=False)
    assert private.model is not model
    wanted = "trained under another plan" if private_too else "also trained without privacy"
    assert wanted in private.statement().splitlines()[0]
    private.fit(verbose=0)
    assert wanted in private.statement().splitlines()[0]


def test_a_statement_is_that_of_the_plan_that_trained() -> None:
    """Another call on the same model compiles it anew; so does compile."""
    model, examples = clicks(), columns()
    first = dp_sparse.make_private(model, epsilon=0.5, examples=examples, verbose=False)
    second = dp_sparse.make_private(model, epsilon=8, examples=examples, verbose=False)
    for use in (first.fit, first.statement, lambda: first.fit(*columns(900))):
        with pytest.raises(dp_sparse.PrivacyError, match="it was compiled again"):
            use()
    second.fit(verbose=0)
    assert "the budget is epsilon=8." in second.statement()
    model.compile("adam", "mse")
    with pytest.raises(dp_sparse.PrivacyError, match="it was compiled again"):
        second.statement()


def test_what_fit_cannot_use_is_told_and_changes_nothing() -> None:
    x, y = columns()
    private = dp_sparse.make_private(clicks(), epsilon=3, examples=(x, y), verbose=False)
    for arguments, words in (
        ({"x": (x, y), "sample_weight": np.ones(ROWS)}, "sample_weight without y"),
        ({"y": y}, "y without x"),
        ({"x": x, "y": y, "validation_split": 0.9999}, "both sides of validation_split"),
        ({"x": x, "y": y, "batch_size": 5_000}, "batch"),
    ):
        with pytest.raises(ValueError, match=words):
            private.fit(**arguments)
    private.fit(x, y, verbose=0)
    assert private.plan.sampling.expected_batch_size == 84


def test_normalisation_that_cannot_be_replaced_is_told() -> None:
    examples = np.ones((8, 3), np.float32), np.ones(8)
    norm = keras.layers.BatchNormalization
    nested = keras.Sequential([keras.Input((3,)), keras.Sequential([norm()], name="inner")])
    unbuilt = keras.Sequential([norm(), keras.layers.Dense(1)])
    for model in (nested, unbuilt):
        model.compile("adam", "mse")
        with pytest.raises(ValueError, match=r"unbuilt or with one inside of another layer"):
            dp_sparse.make_private(model, epsilon=3, examples=examples, fix=True, verbose=False)


def test_frozen_normalisation_stays_frozen() -> None:
    model = normalised(statistics=True)
    model.get_layer("norm").trainable = False
    examples = np.random.default_rng(0).random((64, 3), np.float32), np.arange(64) % 2
    private = dp_sparse.make_private(model, epsilon=8, examples=examples, fix=True, verbose=False)
    assert not private.get_layer("norm").trainable and private.layers[0].trainable


def test_an_optimizer_of_another_kind_is_told() -> None:
    """Nothing is compiled then: train_on_batch would train without privacy."""
    model = clicks()
    stock = model.optimizer
    other = dp_sparse.make_private(clicks(), epsilon=1, examples=columns(), verbose=False).plan
    for make, words in (
        (lambda plan: keras.optimizers.Adam(), "got Adam without that plan"),
        (
            lambda plan: dp_sparse.DPSGDOptimizer("sgd", other, 1.0),
            "got DPSGDOptimizer without that plan",
        ),
        ("adam", "function of the plan, got optimizer='adam'"),
    ):
        with pytest.raises(ValueError, match=words):
            dp_sparse.make_private(model, epsilon=3, examples=columns(), optimizer=make)
    assert model.optimizer is stock


def test_models_whose_copy_would_be_another_are_told() -> None:
    class Own(keras.Model):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return keras.ops.mean(kwargs["y_pred"])

    inputs = keras.Input((3,))
    model = Own(inputs, keras.layers.BatchNormalization()(inputs))
    model.compile("adam")
    examples = np.ones((8, 3), np.float32), np.ones(8)
    with pytest.raises(ValueError, match=r"functional or Sequential model with fix=True, got Own"):
        dp_sparse.make_private(model, epsilon=3, examples=examples, fix=True, verbose=False)


def test_settings_of_compile_are_kept_and_a_new_plan_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    x, y = columns()
    model = clicks()
    model.compile("adam", "binary_crossentropy", steps_per_execution=4)
    private = dp_sparse.make_private(model, epsilon=3, examples=(x, y))
    assert model.steps_per_execution == 4 and "1,000 examples" in capsys.readouterr().out
    with pytest.raises(ValueError, match="validation_split or validation_data, got both"):
        private.fit(x, y, validation_split=0.1, validation_data=(x, y))
    private.fit(x, y, validation_split=0.1, verbose=0)
    assert "900 examples" in capsys.readouterr().out


def test_many_replaced_layers_leave_room_for_warnings() -> None:
    layers = [keras.layers.BatchNormalization(name=f"norm_{n}") for n in range(9)]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    examples = np.ones((50, 4), np.float32), np.ones(50, np.float32)
    private = dp_sparse.make_private(model, epsilon=1, examples=examples, fix=True, verbose=False)
    told = str(private).splitlines()
    assert "/norm_0, GroupNormalization(4) at" in told[3] and told[3].endswith(" and 7 more.")
    assert any(line.startswith("dp_sparse.DPSGDOptimizer") for line in told)
    assert sum(line.startswith("! ") for line in told) == len(private.advice.warnings) > 0


def test_another_plan_that_fails_leaves_the_first() -> None:
    x, y = columns()
    fails: list[bool] = []

    def make(plan: dp_sparse.PrivacyPlan) -> Any:
        return 3 if fails else dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0)

    private = dp_sparse.make_private(
        clicks(), epsilon=3, examples=(x, y), optimizer=make, verbose=False
    )
    fails.append(True)
    with pytest.raises(ValueError, match="got int without that plan"):
        private.fit(x, y, epochs=2)
    private.fit(x, y, verbose=0)
    assert int(private.optimizer.steps_spent) == private.plan.sampling.steps


def test_copied_weights_keep_what_trained_them() -> None:
    x = np.random.default_rng(0).random((8, 3), np.float32)
    model = normalised(statistics=True)
    model.fit(x, np.arange(8) % 2, verbose=0)
    made, _ = without_batch_normalization(model)
    for variable in made.variables:
        assert "also trained without privacy" in with_other_training("", [variable], [])


def test_an_optimizer_of_another_plan_has_no_statement() -> None:
    plan = plan_for(ROWS, noise_multiplier=1.0)
    private = dp_sparse.make_private(
        clicks(),
        epsilon=3,
        examples=columns(),
        optimizer=lambda plan: dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0),
        verbose=False,
    )
    private.model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), "mse")
    with pytest.raises(dp_sparse.PrivacyError, match="it was compiled again"):
        private.statement()

"""`export_model`: what leaves training, what stays behind, and that it predicts by itself."""

import json
import pathlib
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import PrivacyError
from dp_sparse.accounting import rounded_up
from dp_sparse.export import full, keras_folder, saved_model, weights
from tests.export import exported
from tests.subprocesses import run_python
from tests.training_cases import click_model

WITHOUT = """
    import pathlib, sys

    sys.modules["dp_sparse"] = None  # any import of it, or from it, raises
    import keras
    import numpy as np
    import tensorflow as tf

    for folder in map(pathlib.Path, sys.argv[1:]):
        x = np.load(folder / "x.npy")
        plain = keras.models.load_model(folder / "export" / "keras")
        assert not plain.compiled
        path = str(folder / "export" / "saved_model")
        layer = keras.layers.TFSMLayer(path, call_endpoint="serve")
        loaded = tf.saved_model.load(path)
        signature = loaded.signatures["serving_default"]
        (spec,) = signature.structured_input_signature[1].values()
        x = x.astype(spec.dtype.as_numpy_dtype)  # a Sequential without Input takes floats
        (served,) = signature(tf.constant(x)).values()
        found = plain.predict(x, verbose=0), layer(x), loaded.serve(x), served
        np.savez(folder / "found", *[np.asarray(tf.cast(each, tf.float32)) for each in found])
    assert not [name for name in sys.modules if name.startswith("dp_sparse.")]
"""


def predicts_without_the_package(tmp_path: pathlib.Path, steps: int, names: Iterable[str]) -> None:
    folders = []
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        model = exported.trained("dpsgd", exported.MODELS[name], steps)
        assert dp_sparse.export_model(model, folder / "export").steps == steps
        x, _ = exported.examples(model)
        np.save(folder / "x.npy", x)
        np.save(folder / "wanted.npy", np.asarray(model.predict(x, verbose=0), np.float32))
        folders.append(folder)
    run_python(WITHOUT, *map(str, folders), packages=tmp_path)
    for folder in folders:
        wanted, found = np.load(folder / "wanted.npy"), np.load(folder / "found.npz")
        assert len(found) == 4
        for values in found.values():
            np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-6, err_msg=str(folder))


def test_predicts_without_the_package(tmp_path: pathlib.Path) -> None:
    predicts_without_the_package(tmp_path, 1, ["clicks"])


@pytest.mark.slow
def test_every_model_predicts_without_the_package(tmp_path: pathlib.Path) -> None:
    predicts_without_the_package(tmp_path, 2, exported.MODELS)


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", exported.MODELS)
def test_holds_what_keras_saves_of_a_model_never_compiled(
    tmp_path: pathlib.Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same groups, datasets, dtypes and bytes, though written by parts."""
    monkeypatch.setattr(weights, "ENTRIES_AT_ONCE", 7)
    model = exported.trained("dpsgd", exported.MODELS[name], steps=0)
    export = dp_sparse.export_model(model, tmp_path / "export")
    plain = keras.models.load_model(tmp_path / "export" / "keras")
    keras.saving.save_model(plain, tmp_path / "plain" / "keras", zipped=False)
    found = exported.keras_weights(tmp_path / "export")
    assert found == exported.keras_weights(tmp_path / "plain")
    assert found.keys() == {weight.name for weight in export.weights}
    own = {v.path: v for v in model.variables if "seed" not in v.path}
    assert len(found) == len(own)
    by_bytes = sorted(np.asarray(v.value).tobytes() for v in own.values())
    assert by_bytes == sorted(content for _, _, content in found.values())
    saved = exported.saved_weights(tmp_path / "export")
    for weight in export.weights:
        assert saved[weight.key][2] == found[weight.name][2]
    assert saved.keys() == {weight.key for weight in export.weights}


class Counting(keras.layers.Layer):
    """Has a metric of its own, and saves it; predictions may use it."""

    def __init__(self, uses: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.seen, self.uses = keras.metrics.Mean(), uses

    def call(self, inputs: Any, training: bool = False) -> Any:
        used = self.uses and not training
        return inputs + keras.ops.cast(self.seen.total, "int32") if used else inputs

    def save_own_variables(self, store: Any) -> None:
        store["0"], store["1"] = self.seen.variables


def counting_model(counting: Counting) -> keras.Model:
    ids = keras.Input((2,), dtype="int32")
    rows = keras.layers.Embedding(11, 3)(counting(ids))
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))


def test_predictions_from_statistics_without_noise_are_refused(tmp_path: pathlib.Path) -> None:
    model = exported.compiled(counting_model(Counting(uses=True)))
    with pytest.raises(PrivacyError, match="a metric of training without noise"):
        dp_sparse.export_model(model, tmp_path / "export")
    assert not list(tmp_path.iterdir())


def test_statistics_without_noise_and_the_optimizer_stay_behind(tmp_path: pathlib.Path) -> None:
    counting = Counting()
    model = exported.compiled(counting_model(counting))
    exported.train(model)
    secret = np.float32(1234.5678)
    statistics = [*model.metrics_variables, *counting.seen.variables, *model.optimizer.variables]
    for variable in statistics:
        if variable.dtype == "float32":
            variable.assign(np.full(variable.shape, secret))
    dp_sparse.export_model(model, tmp_path / "export")
    files = [path for path in (tmp_path / "export").rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        assert secret.tobytes() not in path.read_bytes(), path
        if path.suffix in (".json", ".txt"):
            assert "dp_sparse" not in path.read_text() and "1234.5" not in path.read_text()
    names = exported.keras_weights(tmp_path / "export")
    zero = (), "<f4", np.float32(0).tobytes()
    assert [names[f"layers/counting/vars/{number}"] for number in "01"] == [zero, zero]


def test_the_statement_is_of_the_steps_so_far(tmp_path: pathlib.Path) -> None:
    model = exported.trained(steps=0)
    model.optimizer.count_spent(2)
    export = dp_sparse.export_model(model, tmp_path / "export")
    wanted = model.optimizer.plan.statement(2)
    assert export.statement == wanted and wanted != model.optimizer.plan.statement(3)
    assert (tmp_path / "export" / "statement.txt").read_text() == wanted + "\n"
    noted = dp_sparse.export_model(model, tmp_path / "noted", note="An example is a user.")
    assert noted.statement == f"An example is a user.\n{wanted}" and noted.digest != export.digest
    assert dp_sparse.check_export(tmp_path / "noted").statement == noted.statement


def test_the_digest_is_of_what_is_there(tmp_path: pathlib.Path) -> None:
    model = exported.trained(steps=0)
    first = dp_sparse.export_model(model, tmp_path / "first")
    again = dp_sparse.export_model(model, tmp_path / "again")
    assert first.digest == again.digest
    assert dp_sparse.check_export(tmp_path / "first") == first
    model.layers[-1].bias.assign([-0.0])  # from 0
    assert dp_sparse.export_model(model, tmp_path / "other").digest != first.digest


@pytest.mark.parametrize("name", ["saved_model.pb", "variables/variables.data-00000-of-00001"])
@pytest.mark.parametrize("change", ["changed", "removed", "added"])
def test_a_changed_saved_model_is_noticed(tmp_path: pathlib.Path, name: str, change: str) -> None:
    """Whether it is checked, or a delta is applied to it."""
    model = exported.trained(steps=0)
    dp_sparse.export_model(model, tmp_path / "export")
    dp_sparse.export_delta(model, tmp_path / "delta", tmp_path / "export")
    path = tmp_path / "export" / "saved_model" / name
    if change == "changed":
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif change == "removed":
        path.unlink()
    else:
        path = path.with_name("more")
        path.touch()
    message = f"whose saved_model/.*{path.name} is "
    with pytest.raises(ValueError, match=message):
        dp_sparse.check_export(tmp_path / "export")
    with pytest.raises(ValueError, match=message):
        dp_sparse.apply_deltas(tmp_path / "export", [tmp_path / "delta"], tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["statement.txt", "keras/config.json", "keras/model.weights.h5"])
def test_a_changed_file_is_noticed(tmp_path: pathlib.Path, name: str) -> None:
    dp_sparse.export_model(exported.trained(steps=0), tmp_path / "export")
    path = tmp_path / "export" / name
    content, values = path.read_bytes(), exported.keras_weights(tmp_path / "export")
    row = values["layers/embedding/vars/0"][2][:12]
    old = {"txt": b"differential", "json": b"sigmoid", "h5": row}[path.suffix[1:]]
    new = {"txt": b"DIFFERENTIAL", "json": b"softmax", "h5": row[::-1]}[path.suffix[1:]]
    assert old in content
    path.write_bytes(content.replace(old, new))
    with pytest.raises(ValueError, match="Expected the export that was written"):
        dp_sparse.check_export(tmp_path / "export")


def test_a_file_that_is_cut_is_noticed(tmp_path: pathlib.Path) -> None:
    dp_sparse.export_model(exported.trained(steps=0), tmp_path / "export")
    path = tmp_path / "export" / "keras" / "model.weights.h5"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="Expected an export in .*got files of another"):
        dp_sparse.check_export(tmp_path / "export")
    (tmp_path / "export" / "export.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match="Expected the folder of an Export"):
        dp_sparse.check_export(tmp_path / "export")


@pytest.mark.parametrize("as_model", [None, keras.models.clone_model])
def test_delayed_noise_is_added_first(tmp_path: pathlib.Path, as_model: Any) -> None:
    """Between two steps, where a row that was not looked up lacks it; a copy is made after that."""

    def copied(trained: keras.Model) -> keras.Model:
        made = as_model(trained)
        made.set_weights(trained.get_weights())
        return made

    model = exported.compiled(click_model(), "lazy")
    before = [np.array(variable) for variable in model.trainable_variables]
    x = np.zeros((8, 2), np.int32)
    batches = model.optimizer.plan.sampling.batches((x, np.ones(8, np.float32)))

    class Exporting(keras.callbacks.Callback):
        reads_weights = False  # as far as anybody can tell

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            made = as_model and copied
            dp_sparse.export_model(model, tmp_path / "export", as_model=made)

    model.fit(batches, steps_per_epoch=1, callbacks=[Exporting()], verbose=0)
    plain = keras.models.load_model(tmp_path / "export" / "keras")
    pairs = list(zip(before, plain.trainable_variables, strict=True))
    # Noisy sums lie on a grid, so that one in thousands is 0; a row without noise has three.
    assert sum((old == np.array(new)).sum() for old, new in pairs) < 3


class TestWholeOrNotAtAll:
    def test_an_error_leaves_nothing(
        self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "export"

        def full_disk(*_: Any) -> None:
            assert not path.exists()
            raise OSError("no space left on device")

        monkeypatch.setattr(saved_model, "write", full_disk)
        with pytest.raises(OSError, match="no space"):
            dp_sparse.export_model(exported.trained(steps=0), path)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("kind", ["file", "folder", "link"])
    def test_an_existing_path_is_refused(self, tmp_path: pathlib.Path, kind: str) -> None:
        path = tmp_path / "export"
        make = {"file": path.touch, "folder": path.mkdir, "link": lambda: path.symlink_to("no")}
        make[kind]()
        with pytest.raises(FileExistsError, match="Expected a path where nothing is yet"):
            dp_sparse.export_model(exported.compiled(click_model()), path)


class TestRefused:
    def test_a_model_without_privacy(self, tmp_path: pathlib.Path) -> None:
        model = click_model()
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="compiled with a private optimizer"):
            dp_sparse.export_model(model, tmp_path / "export")

    def test_a_model_without_weights(self, tmp_path: pathlib.Path) -> None:
        model = exported.compiled(exported.sequential(), "dpsgd")
        with pytest.raises(ValueError, match="Expected a built model"):
            dp_sparse.export_model(model, tmp_path / "export")

    def test_tables_of_an_embedding_layer(self, tmp_path: pathlib.Path) -> None:
        E = tf.tpu.experimental.embedding
        model = exported.compiled(click_model())
        user = E.FeatureConfig(E.TableConfig(10, 2, name="users"), name="user")
        dp_sparse.distribution.PrivateTables({"user": user}, model.optimizer)
        model.optimizer.outside_tables = (1,)
        with pytest.raises(ValueError, match="in an embedding layer of TPUs"):
            dp_sparse.export_model(model, tmp_path / "export")

    def test_a_path_elsewhere(self) -> None:
        with pytest.raises(ValueError, match="Expected a local path, got path='gs://b/x'"):
            dp_sparse.export_model(exported.compiled(click_model()), "gs://b/x")


def test_the_config_is_the_same_in_every_process() -> None:
    """Whatever addresses objects have that layers share."""
    ids = keras.Input((2,), dtype="int32")
    same = keras.initializers.RandomUniform(-0.1, 0.1)
    tables = [keras.layers.Embedding(7, 2, embeddings_initializer=same) for _ in range(2)]
    rows = keras.layers.Concatenate()([table(ids[:, k]) for k, table in enumerate(tables)])
    model = exported.compiled(keras.Model(ids, keras.layers.Dense(1)(rows)))
    text = keras_folder.layout(model).config
    shared = [part.split("}")[0] for part in text.split('"shared_object_id": ')[1:]]
    assert set(shared) == {str(number) for number in range(len(set(shared)))} and shared
    assert "compile_config" not in text and json.loads(text)["class_name"] == "Functional"


@pytest.mark.slow
def test_replicas_have_one_copy_of_each_weight(tmp_path: pathlib.Path) -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = exported.compiled(click_model(), "dpsgd")
    exported.train(model, 2)
    export = dp_sparse.export_model(model, tmp_path / "export")
    plain = keras.models.load_model(tmp_path / "export" / "keras")
    for ours, theirs in zip(plain.variables, model.variables, strict=True):
        np.testing.assert_array_equal(ours, theirs.numpy())
    saved = exported.saved_weights(tmp_path / "export")
    assert saved.keys() == {weight.key for weight in export.weights}
    assert full.check_export(tmp_path / "export") == export


def test_a_second_plan_does_not_hide_the_first(tmp_path: pathlib.Path) -> None:
    """The statement of an export, of a delta and of a report says what an earlier plan adds."""
    model = exported.trained("dpsgd", exported.MODELS["clicks"], 2)
    first = model.optimizer.plan
    whole = first.guaranteed(2)  # who chose the step to stop at may have looked at the run
    of_both = f"epsilon={rounded_up(whole.epsilon, 4)} and delta={rounded_up(whole.delta, 3)}"
    sentence = f"under another plan, for 2 of its 40 steps: {of_both}"
    assert sentence not in dp_sparse.export_model(model, tmp_path / "one").statement
    model.compile("sgd", loss="mse")  # in between, an optimizer without privacy
    exported.compiled(model, "dpsgd")
    later = dp_sparse.export_model(model, tmp_path / "two")
    assert later.statement.endswith(model.optimizer.plan.statement(0))
    assert later.statement.count(sentence) == 1
    report = dp_sparse.PrivacyReport(str(tmp_path / "report.html"))
    exported.train(model, callbacks=[report])
    assert "under another plan, for 2 of its 40 steps" in (tmp_path / "report.html").read_text()
    base = tmp_path / "one"
    assert sentence in dp_sparse.export_delta(model, tmp_path / "delta", base=base).statement


def test_training_without_privacy_is_said(tmp_path: pathlib.Path) -> None:
    model = exported.MODELS["clicks"]()
    model.compile("sgd", loss="mse")
    model.fit(*exported.examples(model), verbose=0)
    exported.compiled(model, "dpsgd")
    statement = dp_sparse.export_model(model, tmp_path / "one").statement
    assert statement.startswith("These weights were also trained without privacy.")


def test_training_of_what_an_export_adds_is_said(tmp_path: pathlib.Path) -> None:
    model = exported.trained("dpsgd", exported.MODELS["clicks"], 1)
    tower = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    tower.compile("sgd", loss="mse")
    tower.fit(np.ones((4, 1)), np.ones(4), verbose=0)

    def with_tower(own: keras.Model) -> keras.Model:
        return keras.Model(own.inputs, tower(own.outputs[0]))

    statement = dp_sparse.export_model(model, tmp_path / "one", as_model=with_tower).statement
    assert "also trained without privacy" in statement


def test_the_same_plan_is_counted_once(tmp_path: pathlib.Path) -> None:
    model = exported.trained("dpsgd", exported.MODELS["clicks"], 2)
    plan = model.optimizer.plan
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
    assert "also trained" not in dp_sparse.export_model(model, tmp_path / "one").statement

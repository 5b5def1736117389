"""Base and deltas together are the full export, bit for bit, and nothing else is accepted."""

import json
import pathlib
import shutil
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_sparse
from dp_sparse import PrivacyError
from dp_sparse.export import delta, manifest, weights
from tests.export import exported
from tests.training_cases import click_model


def days(folder: pathlib.Path, model: keras.Model, trained: Any, count: int = 2) -> list[Any]:
    """An export, then for each day `trained(model)`, its delta and its full export; the deltas."""
    dp_sparse.export_model(model, folder / "day_0")
    found = []
    for day in range(1, count + 1):
        trained(model)
        base = folder / f"day_{day - 1}"
        found.append(dp_sparse.export_delta(model, folder / f"delta_{day}", base=base))
        dp_sparse.export_model(model, folder / f"day_{day}")
    return found


def assert_the_full_export(folder: pathlib.Path, count: int = 2) -> None:
    deltas = [folder / f"delta_{day}" for day in range(1, count + 1)]
    made = dp_sparse.apply_deltas(folder / "day_0", deltas, folder / "made")
    assert exported.content(folder / "made") == exported.content(folder / f"day_{count}")
    assert exported.content(folder / "made") != exported.content(folder / "day_0")
    assert dp_sparse.check_export(folder / "made") == made


def edited(model: keras.Model) -> None:
    """As if training had changed a weight of each variable, to what is hard to copy."""
    odd = [np.nan, -0.0, np.inf, 1e-45]
    for number, variable in enumerate(model.trainable_variables):
        values = np.array(variable)
        values.reshape(-1)[number % values.size] = odd[number % 4]
        variable.assign(values)


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", exported.MODELS)
def test_every_model(tmp_path: pathlib.Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "ENTRIES_AT_ONCE", 7)
    model = exported.trained("dpsgd", exported.MODELS[name], steps=0)
    days(tmp_path, model, edited)
    assert_the_full_export(tmp_path)
    x, _ = exported.examples(model)
    loaded = keras.models.load_model(tmp_path / "made" / "keras")
    wanted = np.asarray(model.predict(x, verbose=0), np.float32)
    found = np.asarray(loaded.predict(x, verbose=0), np.float32)
    np.testing.assert_array_equal(found, wanted)
    served = keras.layers.TFSMLayer(str(tmp_path / "made" / "saved_model"), call_endpoint="serve")
    found = served(x.astype(model.inputs[0].dtype))
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ["adafest", "fest", "exponential", "adafest_plus", "dpsgd"])
def test_every_optimizer_that_trains(tmp_path: pathlib.Path, kind: str) -> None:
    """What it trains, and how many rows that are, by a comparison of two whole exports."""
    model = exported.trained(kind, steps=0)
    deltas = days(tmp_path, model, exported.train)
    assert_the_full_export(tmp_path)
    assert [each.steps for each in deltas] == [1, 2]
    for day, each in enumerate(deltas, start=1):
        old, new = (exported.keras_weights(tmp_path / f"day_{d}") for d in (day - 1, day))
        for weight in each.weights:
            if "embedding" not in weight.name or kind == "dpsgd":
                assert weight.rows is None
                continue
            shape, _, _ = new[weight.name]
            before, after = (
                np.frombuffer(of[weight.name][2], np.int32).reshape(shape) for of in (old, new)
            )
            assert weight.rows == (before != after).any(axis=1).sum() < shape[0]


def test_tables_are_compared_only_where_rows_are_chosen(tmp_path: pathlib.Path) -> None:
    """Rows that did not change are not there; a frozen table costs nothing."""
    model = exported.trained("adafest", exported.shared_table, steps=0)
    model.optimizer.build(model.trainable_variables)
    dp_sparse.export_model(model, tmp_path / "day_0")
    shared = model.get_layer("shared").embeddings
    shared.assign(np.where(np.arange(11)[:, None] % 4 == 1, 7.0, shared))
    made = dp_sparse.export_delta(model, tmp_path / "delta", base=tmp_path / "day_0")
    rows = {weight.shape: weight.rows for weight in made.weights}
    assert rows == {(11, 3): 3, (7, 2): 0, (8, 1): None, (1,): None}
    with h5py.File(tmp_path / "delta" / "rows.h5") as file:
        (name,) = (weight.name for weight in made.weights if weight.rows)
        assert list(file[name]["row_ids"]) == [1, 5, 9]
        np.testing.assert_array_equal(file[name]["values"], np.full((3, 3), 7.0))


def patched_by_reference(base: np.ndarray, row_ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    made = base.copy()
    for row, value in zip(row_ids, values, strict=True):
        made[row] = value
    return made


@given(
    rows=st.integers(1, 30),
    width=st.integers(0, 5),
    dtype=st.sampled_from(["float32", "float16", "int64", "uint8", "bool", "bfloat16"]),
    at_once=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None)
def test_differences_against_the_reference(
    rows: int, width: int, dtype: str, at_once: int, seed: int
) -> None:
    """Any shape, dtype and size of parts: what differs is written, and makes the new of the old."""
    rng = np.random.default_rng(seed)
    of = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
    shape = (rows, width) if width else (rows,)
    old = rng.integers(0, 2, shape).astype(of)
    new = np.where(rng.random(shape) < 0.1, np.array(1, of), old)
    with pytest.MonkeyPatch.context() as patch, h5py.File.in_memory() as file:
        patch.setattr(weights, "ENTRIES_AT_ONCE", at_once)
        before, after = (weights.of_array("a", each) for each in (old, new))
        dataset = weights.made_dataset(file, "a", before)
        weights.copied(before, dataset)
        made = file.create_group("delta")
        found = delta._difference(after, file, made, whole=False)
        row_ids, values = (np.array(made["a"][name]) for name in ("row_ids", "values"))
        changed = [row for row in range(rows) if old[row].tobytes() != new[row].tobytes()]
        assert list(row_ids) == changed and found.rows == len(changed)
        wanted = patched_by_reference(old, row_ids, values.view(of))
        assert wanted.tobytes() == new.tobytes()
        delta._patch_weight(dataset, made["a"])
        assert np.array(dataset).tobytes() == new.tobytes()
        assert weights.sha256(weights.of_dataset("a", dataset)) == found.sha256


class TestRefused:
    @pytest.fixture
    def two_days(self, tmp_path: pathlib.Path) -> pathlib.Path:
        model = exported.trained("adafest", steps=0)
        model.optimizer.build(model.trainable_variables)
        days(tmp_path, model, edited)
        return tmp_path

    def test_a_delta_of_another_base(self, two_days: pathlib.Path) -> None:
        base = json.loads((two_days / "day_1" / "export.json").read_text())["digest"]
        with pytest.raises(ValueError, match=rf"which is of {base}: apply deltas in their order"):
            dp_sparse.apply_deltas(two_days / "day_0", [two_days / "delta_2"], two_days / "made")
        deltas = [two_days / "delta_1"] * 2
        with pytest.raises(ValueError, match="Expected a delta of the export with digest"):
            dp_sparse.apply_deltas(two_days / "day_0", deltas, two_days / "made")
        with pytest.raises(ValueError, match="Expected one delta or more"):
            dp_sparse.apply_deltas(two_days / "day_0", [], two_days / "made")
        assert not (two_days / "made").exists()

    @pytest.mark.parametrize("part", ["base", "statement", "row", "digest"])
    def test_what_is_not_as_written(self, two_days: pathlib.Path, part: str) -> None:
        """A digest says so, whichever of them was changed, and nothing is left."""
        made = two_days / "delta_1"
        if part == "statement":
            (made / "statement.txt").write_text("(0, 0)-differential privacy\n")
        elif part == "digest":
            text = (made / "export.json").read_text()
            digest = json.loads(text)["digest"]
            (made / "export.json").write_text(text.replace(digest, digest[::-1]))
        else:
            name = "rows.h5" if part == "row" else "keras/model.weights.h5"
            path = two_days / ("delta_1" if part == "row" else "day_0") / name
            with h5py.File(path, "r+") as file:
                values = file["layers/embedding/vars/0"]
                row = (values["values"], 0) if part == "row" else (values, 3)
                row[0][row[1]] = row[0][row[1]] + 1
        with pytest.raises(ValueError, match="one of them is not what was written"):
            dp_sparse.apply_deltas(two_days / "day_0", [made], two_days / "made")
        assert not [each for each in two_days.iterdir() if "made" in each.name]

    @pytest.mark.parametrize("how", ["cut", "missing", "few_rows", "few_ids", "no_manifest"])
    def test_what_cannot_be_read(self, two_days: pathlib.Path, how: str) -> None:
        made = two_days / "delta_1"
        path = made / "rows.h5"
        if how == "cut":
            path.write_bytes(path.read_bytes()[:100])
        elif how == "missing":
            path.unlink()
        elif how == "no_manifest":
            (made / "export.json").unlink()
        else:
            with h5py.File(path, "r+") as file:
                name = "dense/vars/0/values" if how == "few_rows" else "embedding/vars/0/row_ids"
                file[f"layers/{name}"].resize(0, axis=0)
        match = "folder of an ExportDelta" if how == "no_manifest" else "a delta as written"
        with pytest.raises(ValueError, match=f"Expected .*{match}"):
            dp_sparse.apply_deltas(two_days / "day_0", [made], two_days / "made")

    def test_an_existing_path(self, two_days: pathlib.Path) -> None:
        with pytest.raises(FileExistsError):
            dp_sparse.apply_deltas(two_days / "day_0", [two_days / "delta_1"], two_days / "day_1")
        model = exported.trained("dpsgd", steps=0)
        shutil.rmtree(two_days / "day_0")
        dp_sparse.export_model(model, two_days / "day_0")
        with pytest.raises(FileExistsError):
            dp_sparse.export_delta(model, two_days / "delta_1", base=two_days / "day_0")

    def test_a_delta_is_no_base(self, two_days: pathlib.Path) -> None:
        with pytest.raises(ValueError, match="Expected the folder of an Export, got"):
            dp_sparse.apply_deltas(two_days / "delta_1", [two_days / "delta_2"], two_days / "made")

    def test_lazy_dp(self, tmp_path: pathlib.Path) -> None:
        model = exported.trained("lazy", steps=0)
        dp_sparse.export_model(model, tmp_path / "day_0")
        with pytest.raises(PrivacyError, match="got LazyDPSGDOptimizer, whose noise reaches every"):
            dp_sparse.export_delta(model, tmp_path / "delta", base=tmp_path / "day_0")
        assert not (tmp_path / "delta").exists()

    def test_another_architecture(self, tmp_path: pathlib.Path) -> None:
        dp_sparse.export_model(exported.trained(steps=0), tmp_path / "day_0")
        other = click_model(width=4)
        for variable in (other, click_model((11, 8))):
            model = exported.compiled(variable)
            with pytest.raises(ValueError, match="Expected a model of the architecture of"):
                dp_sparse.export_delta(model, tmp_path / "delta", base=tmp_path / "day_0")

    def test_lora(self, tmp_path: pathlib.Path) -> None:
        """Keras merges it when it saves; a SavedModel computes it."""
        model = click_model()
        model.layers[-1].enable_lora(1)
        exported.compiled(model, "dpsgd")
        export = dp_sparse.export_model(model, tmp_path / "day_0")
        assert len(export.others) == 3
        with pytest.raises(ValueError, match="LoRA is merged in one of them"):
            dp_sparse.export_delta(model, tmp_path / "delta", base=tmp_path / "day_0")
        loaded = keras.models.load_model(tmp_path / "day_0" / "keras")
        x, _ = exported.examples(model)
        wanted = model.predict(x, verbose=0)
        np.testing.assert_allclose(loaded.predict(x, verbose=0), wanted, rtol=1e-6)


def test_a_loaded_export_trains_on_the_next_day(tmp_path: pathlib.Path) -> None:
    """In another process, with another plan: from the Keras folder to a delta of it."""
    base = dp_sparse.export_model(exported.trained("dpsgd", steps=0), tmp_path / "day_0")
    model = exported.compiled(keras.models.load_model(base.path / "keras"), "adafest")
    days_of = dp_sparse.export_delta(model, tmp_path / "delta", base=base.path)
    assert days_of.base == base.digest and days_of.architecture == base.architecture
    assert manifest.read_delta(tmp_path / "delta") == days_of

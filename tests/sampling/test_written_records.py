"""Data as people have it, written as records and read by position."""

import gzip
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse.sampling import tables

ROWS = 1_000


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_ROWS", 300)
    monkeypatch.setattr(tables, "_BLOCK", 2**13)


def columns(rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "user": np.array([f"user {i}" for i in rng.integers(0, 50, rows)]),
        "age": rng.integers(0, 90, rows),
        "price": rng.normal(size=rows).astype(np.float32),
        "clicked": rng.integers(0, 2, rows),
        "weight": rng.uniform(0.5, 2.0, rows).astype(np.float32),
    }


def as_csv(path: Path, delimiter: str = ",") -> Path:
    made = columns()
    lines = [delimiter.join(made)]
    lines += [delimiter.join(map(str, row)) for row in zip(*made.values(), strict=True)]
    text = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def as_parquet(path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    made = pyarrow.table(columns())
    parquet.write_table(made.set_column(0, "user", made["user"].dictionary_encode()), path)
    return path


def as_tfrecord(path: Path) -> Path:
    made = columns()
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in zip(*made.values(), strict=True):
            features = {}
            for name, value in zip(made, row, strict=True):
                if isinstance(value, str):
                    own = tf.train.Feature(bytes_list=tf.train.BytesList(value=[value.encode()]))
                elif isinstance(value, np.floating):
                    own = tf.train.Feature(float_list=tf.train.FloatList(value=[value]))
                else:
                    own = tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
                features[name] = own
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
    return path


def features() -> dict[str, Any]:
    kinds = {"user": tf.string, "price": tf.float32, "weight": tf.float32}
    return {name: tf.io.FixedLenFeature([], kinds.get(name, tf.int64)) for name in columns()}


def as_frame(path: Path) -> Any:
    return pytest.importorskip("pandas").DataFrame(columns())


SOURCES: dict[str, Any] = {
    "rows.csv": as_csv,
    "rows.csv.gz": as_csv,
    "rows.tsv": lambda path: as_csv(path, "\t"),
    "rows.parquet": as_parquet,
    "rows.tfrecord": as_tfrecord,
    "a frame": as_frame,
    "columns": lambda path: columns(),
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_table_gives_the_same_records(name: str, tmp_path: Path) -> None:
    source = SOURCES[name](tmp_path / name.replace(" ", "_"))
    more = {"features": features()} if name.endswith(".tfrecord") else {}
    written = dp_sparse.write_records(
        source,
        tmp_path / "rows.npy",
        label="clicked",
        weight="weight",
        hashed={"user": 1_000},
        **more,
    )
    x, y, weights = written.gather(np.arange(ROWS))
    wanted = columns()
    hashing = keras.layers.Hashing(1_000)
    np.testing.assert_array_equal(x["user"], hashing(wanted["user"]))
    np.testing.assert_array_equal(x["age"], wanted["age"])
    np.testing.assert_allclose(x["price"], wanted["price"], rtol=1e-6)
    np.testing.assert_array_equal(y, wanted["clicked"])
    np.testing.assert_allclose(weights, wanted["weight"], rtol=1e-6)
    assert {n: v.dtype.name for n, v in x.items()} == {
        "user": "int32",
        "age": "int64",
        "price": "float32",
    }


def test_files_one_after_another_and_kept_text(tmp_path: Path) -> None:
    files = [as_csv(tmp_path / "a.csv"), as_csv(tmp_path / "b.csv.gz")]
    path = tmp_path / "rows.npy"
    written = dp_sparse.write_records(
        files, path, label=["clicked", "price"], leave_out=["weight"], text_bytes={"user": 7}
    )
    assert len(written) == 2 * ROWS
    x, y = dp_sparse.RecordFile(path, start=ROWS).gather(np.array([3]))
    assert x["user"].tolist() == [columns()["user"][3].encode()]
    assert sorted(x) == ["age", "user"] and sorted(y) == ["clicked", "price"]
    assert np.load(path, mmap_mode="r").shape == (2 * ROWS,)  # NumPy's own file


def test_a_dataset_of_examples_and_arrays(tmp_path: Path) -> None:
    x = {
        "ids": np.arange(12).reshape(6, 2),
        "text": np.array([b"a", b"bcd", b"", b"e", b"f", b"g"]),
    }
    y = np.arange(6, dtype=np.float32)[:, None]
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    for source in (dataset, (x, y)):
        written = dp_sparse.write_records(source, tmp_path / "rows.npy", text_bytes=3)
        found_x, found_y = written.gather(np.array([5, 1]))
        np.testing.assert_array_equal(found_x["ids"], x["ids"][[5, 1]])
        assert found_x["text"].tolist() == [b"g", b"bcd"]
        np.testing.assert_array_equal(found_y, y[[5, 1]])


def test_inputs_as_a_tuple(tmp_path: Path) -> None:
    source = (np.arange(3), np.ones((3, 2))), np.zeros(3)
    (first, second), y = dp_sparse.write_records(source, tmp_path / "r.npy").gather(np.array([2]))
    assert first.tolist() == [2] and second.shape == (1, 2) and y.tolist() == [0.0]


def test_a_private_run_reads_them(tmp_path: Path) -> None:
    written = dp_sparse.write_records(
        as_csv(tmp_path / "rows.csv"),
        tmp_path / "rows.npy",
        label="clicked",
        hashed={"user": 64},
        leave_out=["weight"],
        dtypes={"age": "float32"},
    )
    users, age, price = (
        keras.Input((), dtype="int32", name="user"),
        keras.Input((), name="age"),
        keras.Input((), name="price"),
    )
    rows = keras.layers.Embedding(64, 4)(users)
    numbers = keras.ops.stack([age, price], axis=1)
    logit = keras.layers.Dense(1)(keras.layers.Concatenate()([rows, numbers]))
    model = keras.Model({"user": users, "age": age, "price": price}, logit)
    sampling = dp_sparse.PoissonSampling(len(written), 100, steps=3)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(3.0, 1e-4), sampling).calibrate()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0), loss)
    model.fit(plan.sampling.batches(written), verbose=0)
    assert int(model.optimizer.steps_spent) == 3


def csv_of(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


MANY = ["1,2.5,a,0"] * 5_000
HEAD = "age,price,city,clicked"


@pytest.mark.parametrize(
    ("lines", "given", "words"),
    [
        ([HEAD, *MANY, "1,2.5,a"], {}, r"(?s)rows\.csv.*Row #5002: Expected 4 columns, got 3"),
        ([HEAD, *MANY, "x,2.5,a,0"], {}, r"(?s)column #0: Row #5002.*invalid value 'x'.*dtypes="),
        ([HEAD, *MANY, ",2.5,a,0"], {}, r"(?s)column 'age', got none in row 5000 of rows\.csv"),
        (
            [HEAD, *MANY, "1,2.5,abcde,0"],
            {"text_bytes": 4},
            r"4 bytes in 'city', got 5 in row 5000",
        ),
        ([HEAD], {}, "Expected rows to write, got none"),
        ([HEAD, *MANY], {"label": "buys"}, "Expected a column 'buys', got 'age', 'city'"),
        ([HEAD, *MANY], {"hashed": {"town": 9}}, r"got \['town'\] in hashed"),
        ([HEAD, *MANY], {"hashed": {"price": 9}}, "text or integers in 'price'"),
        ([HEAD, *MANY], {"hashed": {"city": 0}}, r"hashed\['city'\]"),
        ([HEAD, *MANY], {"label": None}, "Expected label= with a table"),
    ],
)
def test_a_wrong_row_is_told_and_nothing_is_left(
    lines: list[str], given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    target = tmp_path / "made" / "rows.npy"
    target.parent.mkdir()
    target.write_bytes(b"as before")
    arguments = {"label": "clicked", **given}
    with pytest.raises(ValueError, match=words) as found:
        dp_sparse.write_records(csv_of(tmp_path / "rows.csv", *lines), target, **arguments)
    assert "dp_sparse.write_records" in str(found.value) or "hashed[" in str(found.value)
    assert [path.read_bytes() for path in target.parent.iterdir()] == [b"as before"]


def test_missing_numbers_are_nan_where_they_may_be(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    source = csv_of(tmp_path / "rows.csv", HEAD, "1,,,0", ",2.5,a,1")
    written = dp_sparse.write_records(
        source, tmp_path / "r.npy", label="clicked", dtypes={"age": "float32", "price": "float32"}
    )
    x, _ = written.gather(np.arange(2))
    np.testing.assert_array_equal(x["age"], [1.0, np.nan])
    np.testing.assert_array_equal(x["price"], [np.nan, 2.5])
    assert x["city"].tolist() == [b"", b"a"]


def test_other_sources_are_told(tmp_path: Path) -> None:
    sampling = dp_sparse.StreamSampling(8, 4)
    batches = sampling.batches((np.arange(8), np.ones(8)))
    ragged = tf.data.Dataset.from_tensor_slices((tf.ragged.constant([[1], [2, 3]]), [0, 1]))
    x = np.arange(4)
    for source, given, error, words in [
        (batches, {}, dp_sparse.PrivacyError, "batches of a sampler"),
        (ragged, {}, ValueError, "fixed shapes"),
        (tf.data.Dataset.from_tensor_slices((x, x)).repeat(), {}, ValueError, "repeats"),
        (3, {}, ValueError, "DataFrame, a dictionary of columns"),
        (tmp_path / "rows.json", {"label": "y"}, FileNotFoundError, "No such file"),
        (csv_of(tmp_path / "rows.txt", "a,b"), {"label": "b"}, ValueError, "ends in .csv"),
        (as_tfrecord(tmp_path / "r.tfrecord"), {"label": "y"}, ValueError, "features="),
        ((x, x), {"label": "y"}, ValueError, "with a table of columns alone"),
        ({"a": x, "b": x[:3]}, {"label": "b"}, ValueError, "one length"),
        ({"a": x.astype("datetime64[D]"), "b": x}, {"label": "b"}, ValueError, "dates into"),
        (({"a": {"b": x}}, x), {}, ValueError, r"x\['a'\]"),
    ]:
        with pytest.raises(error, match=words) as found:
            dp_sparse.write_records(source, tmp_path / "rows.npy", **given)
        assert "dp_sparse.write_records" in str(found.value)
    assert not (tmp_path / "rows.npy").exists()


def test_a_file_of_something_else_is_told(tmp_path: Path) -> None:
    (tmp_path / "raw.bin").write_bytes(bytes(80))
    np.save(tmp_path / "plain.npy", np.zeros(4))
    for name, words in (("raw.bin", "a file of dp_sparse.write_records"), ("plain.npy", "x and y")):
        with pytest.raises(ValueError, match=words):
            dp_sparse.RecordFile(tmp_path / name)

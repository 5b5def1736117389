"""Data sources with random access: record files, arrays, datasets; what is refused, and why."""

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dp_sparse.core.errors import PrivacyError, translated
from dp_sparse.sampling.data_source import RecordFile, as_data_source, unpacked
from dp_sparse.sampling.poisson import PoissonSampling
from dp_sparse.sampling.stream import StreamSampling

N = 50
DTYPE = np.dtype([("id", "<i4"), ("values", "<f4", (3,)), ("label", "u1")])


def records(count: int = N) -> np.ndarray:
    found = np.zeros(count, DTYPE)
    found["id"] = np.arange(count)
    found["values"] = np.arange(3 * count).reshape(count, 3)
    found["label"] = np.arange(count) % 2
    return found


def unpack(found: np.ndarray) -> Any:
    return {"id": found["id"].astype(np.int64), "values": found["values"]}, found["label"]


def record_file(folder: Path, count: int = N, **range_of_records: int) -> RecordFile:
    path = folder / "records"
    records(count).tofile(path)
    return RecordFile(path, DTYPE, unpack, **range_of_records)


def arrays() -> Any:
    return unpack(records())


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays())


@pytest.fixture(params=["file", "arrays", "dataset", "mapped dataset", "prefetched dataset"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The same examples, each way."""
    return {
        "file": lambda: record_file(tmp_path),
        "arrays": arrays,
        "dataset": dataset,
        "mapped dataset": lambda: dataset().map(lambda x, y: (dict(x), y)),
        "prefetched dataset": lambda: dataset().prefetch(2),
    }[request.param]()


@pytest.mark.parametrize("indices", [[], [0], [49, 3, 3, 17], list(range(N))])
def test_gather(source: Any, indices: list[int]) -> None:
    found = as_data_source(source)
    assert len(found) == N
    x, y = found.gather(np.array(indices, np.int64))
    expected_x, expected_y = unpack(records()[indices])
    for key in ("id", "values"):
        np.testing.assert_array_equal(x[key], expected_x[key])
        assert x[key].dtype == expected_x[key].dtype and x[key].shape == expected_x[key].shape
    np.testing.assert_array_equal(y, expected_y)


def test_batches_of_every_source(source: Any) -> None:
    for x, y, weights in PoissonSampling(N, 12, 4).batches(source):
        count = int(weights["present"].numpy().sum())
        ids = x["id"].numpy()[:count]
        np.testing.assert_array_equal(x["values"].numpy()[:count, 0], 3 * ids)
        np.testing.assert_array_equal(y.numpy()[:count], ids % 2)
        np.testing.assert_array_equal(weights["sample_weight"], weights["present"])


def test_a_range_of_a_record_file(tmp_path: Path) -> None:
    found = record_file(tmp_path, start=10, stop=40)
    assert len(found) == 30
    x, _ = found.gather(np.array([0, 29]))
    np.testing.assert_array_equal(x["id"], [10, 39])


def test_a_record_file_stays_on_disk(tmp_path: Path) -> None:
    """A sparse file of 1 TB: opening it and reading its ends takes no memory to speak of."""
    path, count = tmp_path / "records", 2**40 // DTYPE.itemsize
    with path.open("wb") as file:
        file.truncate(count * DTYPE.itemsize)
    found = RecordFile(path, DTYPE, unpack)
    assert len(found) == count
    x, _ = found.gather(np.array([0, count - 1]))
    np.testing.assert_array_equal(x["id"], [0, 0])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x: x.reshape(-1), r"each of \d+ examples, got shape \(\d+,\) in x: "),
        (lambda x: np.repeat(x, 2, axis=0), r"got shape \(\d+, 3\) in x"),
        (lambda x: x[1:], r"got shape \(\d+, 3\) in x"),
    ],
)
def test_rows_that_unpack_adds_or_drops_are_refused(
    tmp_path: Path, change: Any, match: str
) -> None:
    path = tmp_path / "records"
    records().tofile(path)
    source = RecordFile(path, DTYPE, lambda found: (change(found["values"]), found["label"]))
    with pytest.raises(ValueError, match=match), translated():
        list(PoissonSampling(N, 40, 4).batches(source))


@pytest.mark.parametrize(
    "change", [lambda weights: weights[1:], lambda weights: np.repeat(weights, 2), lambda _: 1.0]
)
def test_weights_of_another_length_are_refused(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "records"
    records().tofile(path)
    source = RecordFile(
        path, DTYPE, lambda found: (found["values"], found["label"], change(found["label"]))
    )
    with pytest.raises(ValueError, match=r"got shape .* in sample_weight"), translated():
        list(PoissonSampling(N, 40, 4).batches(source))


def test_weights_may_be_none(tmp_path: Path) -> None:
    path = tmp_path / "records"
    records().tofile(path)
    source = RecordFile(path, DTYPE, lambda found: (found["values"], found["label"], None))
    for _, _, weights in PoissonSampling(N, 40, 4).batches(source):
        np.testing.assert_array_equal(weights["sample_weight"], weights["present"])


def test_an_empty_record_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="whole records of 17 bytes, got 0 bytes"):
        record_file(tmp_path, count=0)


def test_a_cut_record_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(records().tobytes()[:-1])
    with pytest.raises(
        ValueError, match=f"cut to hold whole records of 17 bytes, got {17 * N - 1}"
    ):
        RecordFile(path, DTYPE, unpack)


def test_a_missing_record_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        RecordFile(tmp_path / "nowhere", DTYPE, unpack)


@pytest.mark.parametrize(
    "source",
    [
        (np.zeros(5), np.zeros(4)),
        ({"a": np.zeros(5), "b": np.zeros((4, 2))}, np.zeros(5)),
        (np.zeros(5), np.zeros(5), np.zeros(6)),
        (np.zeros(5), 1.0),
    ],
)
def test_arrays_of_several_lengths_are_refused(source: Any) -> None:
    with pytest.raises(ValueError, match="Expected arrays of one common length, got shapes"):
        as_data_source(source)


@pytest.mark.parametrize(
    "ragged", [tf.ragged.constant([[1], [2, 3]]), tf.sparse.from_dense([[1, 0], [2, 3]])]
)
def test_examples_without_a_fixed_shape_are_refused(ragged: Any) -> None:
    arrays = {"ids": ragged}, np.zeros(2)
    rows = tf.data.Dataset.from_tensor_slices(arrays)
    name = type(ragged).__name__
    with pytest.raises(ValueError, match=f"Expected dense arrays, got {name}: .* to_tensor"):
        as_data_source(arrays)
    with pytest.raises(ValueError, match=f"Expected dense arrays, got {name}Spec"):
        as_data_source(rows)
    with pytest.raises(ValueError, match=f"Expected dense arrays, got {name}Spec"):
        StreamSampling(num_examples=2, batch_size=1).batches(rows)


@pytest.mark.parametrize("source", [[np.zeros(5), np.zeros(5)], None, 3, "file", np.zeros(5)])
def test_other_sources_are_refused(source: Any) -> None:
    with pytest.raises(ValueError, match=rf"Expected \(x, y\) .* got {type(source).__name__}"):
        as_data_source(source)


def generated() -> tf.data.Dataset:
    def generate() -> Any:
        yield from ((i, i % 2) for i in range(N))

    spec = tf.TensorSpec([], tf.int64)
    return tf.data.Dataset.from_generator(generate, output_signature=(spec, spec))


@pytest.mark.parametrize(
    "make",
    [
        generated,
        lambda: generated().apply(tf.data.experimental.assert_cardinality(N)),
        lambda: dataset().repeat(),
        lambda: dataset().filter(lambda x, y: True),
        lambda: (
            tf.data.Dataset.range(N)
            .interleave(lambda i: tf.data.Dataset.from_tensors((i, i)), cycle_length=2)
            .apply(tf.data.experimental.assert_cardinality(N))
        ),
    ],
    ids=["unknown size", "known size", "endless", "filtered", "interleaved"],
)
def test_a_dataset_without_random_access_is_refused(make: Any) -> None:
    """When the batches are asked for, with what to use instead: not deep in the first epoch."""
    with pytest.raises(ValueError, match="random access.*RecordFile"):
        PoissonSampling(N, 12, 4).batches(make())


@pytest.mark.parametrize("sampling", [PoissonSampling(N, 12, 4), StreamSampling(N, 12)])
@pytest.mark.parametrize("drop_remainder", [False, True])
def test_a_batched_dataset_is_refused(sampling: Any, drop_remainder: bool) -> None:
    with pytest.raises(ValueError, match="num_examples=50 examples, got 10: .* unbatch"):
        sampling.batches(dataset().batch(5, drop_remainder))


def test_batches_of_a_dataset_of_unknown_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"part of shape \(None,\): .* unbatch"):
        StreamSampling(N, 12).batches(generated().batch(5))
    batches = StreamSampling(N, 12).batches(generated().batch(5, drop_remainder=True))
    with pytest.raises(PrivacyError, match="but batch 0 holds 10.* unbatch"), translated():
        list(batches)


def test_examples_that_have_an_axis_of_their_own_look_like_no_batches() -> None:
    pairs = tf.data.Dataset.from_tensor_slices((np.zeros((10, 3)), np.zeros(10)))
    with pytest.raises(ValueError, match="got 10") as error:
        PoissonSampling(N, 12, 4).batches(pairs)
    assert "unbatch" not in str(error.value)


@pytest.mark.parametrize("x", [[3] * 50, {"ids": [3] * 50}, {"ids": (1.5,) * 50}, ["a"] * 50])
def test_lists_are_refused_in_a_few_words(x: Any) -> None:
    """Each number would be an input of its own, and the message would name all of them."""
    place = r"x\['ids'\]" if isinstance(x, dict) else "x"
    with pytest.raises(ValueError, match=f"of 50 values in {place}: pass np.asarray") as error:
        as_data_source((x, np.zeros(50)))
    assert len(str(error.value)) < 200


def test_shapes_of_many_arrays_are_told_in_a_few_words() -> None:
    x = {f"feature {i}": np.zeros(5) for i in range(1000)} | {"short": np.zeros(4)}
    with pytest.raises(ValueError, match="and 996 more") as error:
        as_data_source((x, np.zeros(5)))
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("missing", [None, float("nan"), 3])
def test_missing_text_is_told_by_its_place(missing: Any) -> None:
    """Before the first batch, not when the row is drawn."""
    words = np.array([["a", "b"], ["c", missing], ["d", "e"]], object)
    with pytest.raises(ValueError, match=rf"text in x\['words'\], got {missing} in row 1"):
        as_data_source(({"words": words}, np.zeros(3)))


def test_a_column_of_dates_is_told_by_its_name() -> None:
    x = {"user": np.arange(N), "day": np.zeros(N, "datetime64[ns]")}
    with pytest.raises(ValueError, match=r"in x\['day'\], got datetime64.*leave the column out"):
        PoissonSampling(N, 40, 4).batches((x, np.ones(N)))


def test_mappings_become_dicts() -> None:
    """Keras takes the values of an OrderedDict in its order, so that features would be swapped."""
    x = collections.OrderedDict([("b", np.arange(N)), ("a", np.zeros(N))])
    rows = tf.data.Dataset.from_tensor_slices((x, np.zeros(N)))
    for source in ((x, np.zeros(N)), rows):
        found = as_data_source(source).gather(np.arange(3))
        assert type(unpacked(found)[0]) is dict
        batch = next(iter(PoissonSampling(N, 50, 4, capacity=60).batches(source)))
        assert type(batch[0]) is dict and int(tf.reduce_max(batch[0]["b"])) > 0
    (batch,) = StreamSampling(N, N).batches(rows)
    assert type(batch[0]) is dict


def test_a_shuffled_dataset_holds_each_example_once() -> None:
    x, _ = as_data_source(dataset().shuffle(N)).gather(np.arange(N))
    assert sorted(x["id"].tolist()) == list(range(N))


@pytest.mark.parametrize("arity", [1, 4])
def test_examples_of_another_form_are_refused(arity: int) -> None:
    columns = (np.arange(N),) * arity
    for source in (columns, tf.data.Dataset.from_tensor_slices(columns)):
        with pytest.raises(ValueError, match=r"Expected examples \(x, y\) or"), translated():
            list(PoissonSampling(N, 12, 4).batches(source))


def test_unpacked() -> None:
    assert unpacked((1, 2)) == (1, 2, None)
    assert unpacked((1, 2, 3)) == (1, 2, 3)
    for example in ((1,), (1, 2, 3, 4), [1, 2], {"x": 1}):
        with pytest.raises(ValueError, match=r"Expected examples \(x, y\)"):
            unpacked(example)


def test_a_list_of_arrays_is_a_tuple_of_inputs() -> None:
    source = as_data_source(([np.arange(4), np.ones((4, 2))], np.zeros(4)))
    x, _ = source.gather(np.array([1, 3]))
    assert isinstance(x, tuple) and x[0].tolist() == [1, 3] and x[1].shape == (2, 2)


def test_a_data_frame_is_told_what_to_give() -> None:
    frame = type("DataFrame", (), {})()
    with pytest.raises(ValueError, match=r"Give \(dict\(frame\.drop\(columns=label"):
        as_data_source(frame)


class DataFrame:  # as much of pandas' as is read
    """Columns of equal length."""

    def __init__(self, **columns: np.ndarray) -> None:
        self._columns = columns
        self.dtypes = [column.dtype for column in columns.values()]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return np.stack(list(self._columns.values()), axis=1)


def test_a_data_frame_of_numbers_is_one_array_as_for_keras() -> None:
    frame = DataFrame(user=np.arange(4), price=np.array([0.5, 1.5, 2.5, 3.5]))
    x, _ = as_data_source((frame, np.zeros(4))).gather(np.array([1, 3]))
    assert x.tolist() == [[1, 1.5], [3, 3.5]]


def test_a_data_frame_of_text_and_numbers_is_told_to_be_a_dict() -> None:
    frame = DataFrame(user=np.arange(2), city=np.array(["a", "b"], object))
    message = r"one type in x, got a DataFrame with columns of int64, object, .* dict\(frame\)"
    with pytest.raises(ValueError, match=message):
        as_data_source((frame, np.zeros(2)))

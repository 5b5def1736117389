"""Weights by parts: read, hashed, compared and written without a second copy of a table in memory.

A weight comes from a variable of a model or from a dataset of a file, and is read in ranges of
rows, its first axis. A part has at most 2²⁰ entries, whatever the size of the table.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import h5py
import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

ENTRIES_AT_ONCE = 2**20
Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Values:
    """A weight that is read by parts.

    Attributes:
        name: Of its dataset in Keras' file of weights.
        shape: Of all of it.
        dtype: As Keras names it.
        read: From a range of rows to their values, `[stop − start, ...]`; a scalar is one row.
        variable: The variable that it is the value of, if it is one's.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], Array]
    variable: keras.Variable | None = None

    @property
    def size(self) -> int:
        """Bytes of all of it."""
        return math.prod(self.shape) * int(tf.as_dtype(self.dtype).size)

    @property
    def rows(self) -> int:
        """The length of the first axis."""
        return self.shape[0] if self.shape else 1

    def parts(self) -> Iterator[tuple[int, int, Array]]:
        """Ranges of rows, together all of them, and their values."""
        size = rows_at_once(self.shape)
        for start in range(0, self.rows, size):
            stop = min(start + size, self.rows)
            yield start, stop, self.read(start, stop)


def rows_at_once(shape: Sequence[int]) -> int:
    """How many rows one part has."""
    return max(1, ENTRIES_AT_ONCE // max(1, math.prod(shape[1:])))


def of_variable(name: str, variable: keras.Variable, strategy: tf.distribute.Strategy) -> Values:
    """Reads rows of a variable, of replicas the first one's; all of it is never copied."""
    own = strategy.experimental_local_results(variable.value)[0]

    def read(start: int, stop: int) -> Array:
        if not own.shape.rank:
            return np.asarray(own.read_value())[np.newaxis]
        rows: Array = own.sparse_read(tf.range(start, stop)).numpy()
        return rows

    dtype = keras.backend.standardize_dtype(variable.dtype)
    return Values(name, tuple(variable.shape), dtype, read, variable)


def of_array(name: str, value: Any) -> Values:
    """Reads what is in memory."""
    array = keras.ops.convert_to_numpy(value)
    rows = array if array.ndim else array[np.newaxis]
    dtype = keras.backend.standardize_dtype(array.dtype)
    return Values(name, array.shape, dtype, lambda start, stop: rows[start:stop])


def of_dataset(name: str, dataset: h5py.Dataset) -> Values:
    """Reads a dataset of a file that is open."""
    dtype = dataset.attrs.get("dtype", dataset.dtype.name)

    def read(start: int, stop: int) -> Array:
        if not dataset.shape:
            return np.asarray(dataset[()])[np.newaxis]
        rows: Array = dataset[start:stop]
        return rows

    return Values(name, dataset.shape, dtype, read)


def made_dataset(
    group: h5py.Group, name: str, values: Values, rows: int | None = None
) -> h5py.Dataset:
    """An empty dataset for these values, or for so many rows of their kind and more to come.

    HDF5 has no bfloat16, whose two bytes Keras writes as they are, with a remark.
    """
    bfloat16 = values.dtype == "bfloat16"
    dtype = "V2" if bfloat16 else values.dtype
    shape = values.shape if rows is None else (rows, *values.shape[1:])
    most = None if rows is None else (None, *values.shape[1:])
    dataset = group.create_dataset(name, shape, dtype, maxshape=most)
    if bfloat16:
        dataset.attrs["dtype"] = "bfloat16"
    return dataset


def write_rows(dataset: h5py.Dataset, start: int, rows: Array) -> None:
    """Writes rows from `start` on; a scalar is one row."""
    plain = rows.view(dataset.dtype) if rows.dtype != dataset.dtype else rows
    if dataset.shape:
        dataset[start : start + len(rows)] = plain
    else:
        dataset[()] = plain[0]


def append_rows(dataset: h5py.Dataset, rows: Array) -> None:
    """Writes rows behind those that are there."""
    start = len(dataset)
    dataset.resize(start + len(rows), axis=0)
    write_rows(dataset, start, rows)


def copied(values: Values, dataset: h5py.Dataset) -> str:
    """Writes all of it; returns the SHA-256 of its bytes, row by row."""
    digest = hashlib.sha256()
    for start, _, rows in values.parts():
        write_rows(dataset, start, rows)
        digest.update(bytes_of(rows).data)
    return digest.hexdigest()


def sha256(values: Values) -> str:
    """The SHA-256 of its bytes, row by row."""
    digest = hashlib.sha256()
    for _, _, rows in values.parts():
        digest.update(bytes_of(rows).data)
    return digest.hexdigest()


def bytes_of(rows: Array) -> npt.NDArray[np.uint8]:
    """The bytes of each row, uint8 `[rows, bytes]`: −0 is not 0, and NaN is itself."""
    width = rows.dtype.itemsize * math.prod(rows.shape[1:])
    return np.frombuffer(rows.tobytes(), np.uint8).reshape(len(rows), width)

"""Random access to examples in a memory-mapped record file, arrays or a `tf.data.Dataset`.

A data source has `len(source)` and `source.gather(indices)`. Gathering B examples costs O(B)
whatever the number of examples, and a memory-mapped file keeps only the pages in memory that were
read.

`chunks_of` reads each example once from any kind of source, in the memory of one chunk.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from dp_sparse.core import PrivacyError, validate
from dp_sparse.sampling import input_guard
from dp_sparse.sampling.batch import is_sampled

Example = tuple[Any, ...]  # (x, y) or (x, y, sample_weight), each a nest of arrays [n, ...]


_SHOWN = 6  # arrays whose shapes a message tells
_RAGGED = tf.RaggedTensor | tf.SparseTensor | tf.RaggedTensorSpec | tf.SparseTensorSpec
_CHUNK = 2**14  # examples read at once from a data source with random access


class DataSource(Protocol):
    """A data source: examples that are read by their index.

    One with `in_order = True` reads forwards alone, for a stream: then `gather` is not asked for
    the same examples twice, and what it gives is not compared.
    """

    def __len__(self) -> int: ...

    def gather(self, indices: np.ndarray) -> Example:
        """The examples at `indices` (int64 `[n]`), stacked along a leading dimension of n."""
        ...


class RecordFile:
    """Fixed-width records in a memory-mapped file.

    Args:
        path: The file: one of `write_records`, or with a dtype any whose size is a multiple of the
            record's width.
        dtype: NumPy structured dtype of one record, without padding; by default what the file says.
        unpack: Turns an array of n records into `(x, y)` or `(x, y, sample_weight)`, nests of
            arrays `[n, ...]`; by default by the names that `write_records` gives.
        start: First record to use.
        stop: The record after the last one to use; by default the end of the file.

    Raises:
        ValueError: When the file is empty, does not hold whole records, or is none of
            `write_records` and no dtype is given.

    Examples:
        >>> import dp_sparse, numpy as np, tempfile
        >>> dtype = np.dtype([("user", "<i4"), ("clicked", "<f4")])
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = f"{folder.name}/clicks.bin"
        >>> np.array([(3, 1.0), (7, 0.0)], dtype).tofile(path)
        >>> clicks = dp_sparse.RecordFile(path, dtype, lambda r: (r["user"], r["clicked"]))
        >>> len(clicks)  # `sampling.batches(clicks)` reads it
        2
        >>> x, y = clicks.gather(np.array([1]))
        >>> x.tolist(), y.tolist()
        ([7], [0.0])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        dtype: np.dtype | None = None,
        unpack: Callable[[np.ndarray], Example] | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        self._unpack = unpack or unpacked_by_names
        if dtype is None:
            self._records = _self_described(path)[start:stop]
            return
        size = os.path.getsize(path)
        if size == 0 or size % dtype.itemsize:
            raise ValueError(
                f"Expected {path} to hold whole records of {dtype.itemsize} bytes, got {size} "
                f"bytes: "
                "prepare the file again."
            )
        self._records = np.memmap(path, dtype=dtype, mode="r")[start:stop]

    def __len__(self) -> int:
        return len(self._records)

    def gather(self, indices: np.ndarray) -> Example:
        """The examples at `indices` (int64 `[n]`)."""
        return self._unpack(np.asarray(self._records[indices]))


def unpacked_by_names(records: np.ndarray) -> Example:
    """`(x, y)` or `(x, y, sample_weight)` of records with the fields of `write_records`."""
    found: list[Any] = []
    for part in ("x", "y", "weight"):
        names = [name for name in records.dtype.names or () if name.partition("/")[0] == part]
        leaves = {name.partition("/")[2]: records[name] for name in names}
        if names == [part]:
            found.append(records[part])
        elif list(leaves) == [str(place) for place in range(len(leaves))]:
            found.append(tuple(leaves.values()))
        else:
            found.append(leaves)
    return tuple(found[:2] if isinstance(found[2], tuple) and not found[2] else found)


def _self_described(path: str | os.PathLike[str]) -> np.ndarray:
    try:
        records = np.lib.format.open_memmap(path, mode="r", max_header_size=2**24)
    except ValueError as error:
        raise ValueError(
            f"Expected a file of dp_sparse.write_records, got {os.fspath(path)} ({error}).\n"
            "Write it by that call, or say what its records are: RecordFile(path, dtype, unpack)."
        ) from error
    if not {"x", "y"} <= {name.partition("/")[0] for name in records.dtype.names or ()}:
        raise ValueError(
            f"Expected records with fields x and y in {os.fspath(path)}, got {records.dtype}.\n"
            "Write it by dp_sparse.write_records, or pass dtype and unpack."
        )
    return records


class _Arrays:
    def __init__(self, arrays: Example) -> None:
        names = ("x", "y", "sample_weight")
        arrays = plain(arrays)
        _refuse_mixed_frames(dict(zip(names, arrays, strict=False)))
        parts = zip(names, arrays, strict=False)
        named = [pair for name, part in parts for pair in _named_leaves(part, name)]
        _refuse_dates(named)
        _refuse_missing_text(named)
        lengths = {len(leaf) if leaf.ndim else None for _, leaf in named}
        if len(lengths) != 1 or None in lengths:
            shapes = [f"{name}: {leaf.shape}" for name, leaf in named]
            more = f" and {len(shapes) - _SHOWN} more" if len(shapes) > _SHOWN else ""
            raise ValueError(
                "Expected arrays of one common length, got shapes "
                f"{', '.join(shapes[:_SHOWN])}{more}."
            )
        self.examples = tf.nest.map_structure(lambda leaf: _without_str(np.asarray(leaf)), arrays)
        self._length = len(named[0][1])

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: np.ndarray) -> Example:
        return tf.nest.map_structure(lambda leaf: leaf[indices], self.examples)


class _IndexedDataset:
    """Elements of a dataset by TensorFlow's random access: about 20 µs an element."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._length = int(dataset.cardinality())
        if self._length < 0:
            endless = self._length == tf.data.INFINITE_CARDINALITY
            size = "that repeats without end" if endless else "of unknown size"
            raise ValueError(
                f"Expected a dataset with random access and a known size, got one {size}: "
                f"{dataset}. {'Leave repeat() out, or use' if endless else 'Use'} arrays, "
                "dp_sparse.RecordFile, or StreamSampling."
            )
        input_guard.check_source(dataset)  # random numbers would crash in `at`
        self.examples, spec = dataset, dataset.element_spec

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def gather(indices: tf.Tensor) -> Any:
            return tf.map_fn(
                lambda index: tf.data.experimental.at(dataset, index),
                indices,
                fn_output_signature=spec,
            )

        self._gather = gather
        try:
            self.gather(np.zeros(min(1, self._length), np.int64))
        except tf.errors.OpError as error:
            raise ValueError(
                f"Expected a dataset with random access, got {dataset}, which has none "
                f"({error.message.splitlines()[0]}). "
                "Use arrays, dp_sparse.RecordFile, or StreamSampling."
            ) from None

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: np.ndarray) -> Example:
        return tf.nest.map_structure(lambda leaf: leaf.numpy(), self._gather(indices))


def plain(nest: Any) -> Any:
    """The same with dicts for other mappings, of which Keras takes the order and not the names.

    Tuples stand for lists of arrays, which TensorFlow would stack.
    """
    if isinstance(nest, Mapping):
        return {name: plain(value) for name, value in nest.items()}
    if type(nest) is tuple or (type(nest) is list and not _of_values(nest)):
        return tuple(map(plain, nest))
    return nest


def _of_values(nest: list[Any] | tuple[Any, ...]) -> bool:
    """Whether it is a list of numbers or words."""
    return bool(nest) and not isinstance(nest[0], Mapping | list | tuple) and not np.ndim(nest[0])


def _named_leaves(nest: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """Each array with its place, such as `x['user']`.

    Raises:
        ValueError: A list of numbers or words, of which each would be an input of its own.
    """
    if isinstance(nest, dict):
        for key, value in nest.items():
            yield from _named_leaves(value, f"{name}[{key!r}]")
    elif isinstance(nest, list | tuple):
        if _of_values(nest):
            raise ValueError(
                f"Expected arrays, got a {type(nest).__name__} of {len(nest)} values in {name}: "
                "pass np.asarray(...) of it."
            )
        for index, value in enumerate(nest):
            yield from _named_leaves(value, f"{name}[{index}]")
    else:
        yield name, np.asarray(nest)


def _is_frame(value: Any) -> bool:
    """Whether it is a table of pandas or the like, of which Keras makes one array."""
    return type(value).__name__ == "DataFrame"


def _refuse_mixed_frames(parts: Mapping[str, Any]) -> None:
    """Raises ValueError for a table of text and numbers, which has no array of one dtype."""
    for name, part in parts.items():
        if _is_frame(part) and len({dtype.kind in "biuf" for dtype in part.dtypes}) == 2:
            kinds = ", ".join(dict.fromkeys(map(str, part.dtypes)))
            raise ValueError(
                f"Expected columns of one type in {name}, got a DataFrame with columns of {kinds}, "
                "of which Keras would make one array: pass dict(frame) for named inputs."
            )


def _refuse_dates(named: list[tuple[str, np.ndarray]]) -> None:
    """Raises ValueError for columns of a dtype that TensorFlow does not have."""
    for name, leaf in named:
        if leaf.dtype.kind not in "biufcOSTU":
            raise ValueError(
                f"Expected numbers or text in {name}, got {leaf.dtype}: make numbers of it, or "
                "leave the column out."
            )


def _refuse_missing_text(named: list[tuple[str, np.ndarray]]) -> None:
    """Raises ValueError for columns of Python objects with something that is no text."""
    for name, leaf in named:
        if leaf.dtype == object:
            for index, value in enumerate(leaf.flat):
                if not isinstance(value, str | bytes):
                    row = index // max(leaf[0].size if leaf.ndim > 1 else 1, 1)
                    raise ValueError(
                        f"Expected text in {name}, got {value!r} in row {row}: give a missing text "
                        "a value such as '', and numbers a numeric dtype by astype(...), or leave "
                        "the column out."
                    )


def _without_str(leaf: np.ndarray) -> np.ndarray:
    """Text as TensorFlow holds it: bytes, or any text as Python objects."""
    if leaf.dtype.kind == "U":
        return np.char.encode(leaf, "utf-8").astype(object)
    return leaf.astype(object) if leaf.dtype.kind == "T" else leaf  # NumPy's StringDType


def text_tensors(nest: Any, name: str) -> Any:
    """The same with tensors for arrays of text, of which Keras takes few kinds; dicts for mappings.

    Args:
        nest: Arrays, or whatever else Keras takes, which stays as it is.
        name: What an error calls it.

    Raises:
        ValueError: Python objects that are no text among them.
    """

    def of(leaf: Any) -> Any:
        if tf.is_tensor(leaf) or not hasattr(leaf, "__array__"):
            return leaf
        values = np.asarray(leaf)
        if values.dtype.kind not in "OSTU":
            return leaf
        _refuse_missing_text([(name, values)])
        return tf.convert_to_tensor(_without_str(values), tf.string)

    return tf.nest.map_structure(of, plain(nest))


def as_data_source(source: Any) -> DataSource:
    """The data source for what a user gave.

    That is arrays `(x, y[, sample_weight])`, a dataset of single examples with random access, or a
    data source.
    """
    if isinstance(source, tf.data.Dataset):
        if is_sampled(source.element_spec):
            raise ValueError(
                "Expected examples, got batches of a sampler: pass what sampling.batches(...) was "
                "given."
            )
        refuse_ragged(source.element_spec)
        return _IndexedDataset(source)
    if isinstance(source, tuple):
        refuse_ragged(source)
        return _Arrays(source)
    if hasattr(source, "gather") and hasattr(source, "__len__"):
        return source
    raise ValueError(
        "Expected (x, y) or (x, y, sample_weight) arrays, a dp_sparse.RecordFile, or a "
        f"tf.data.Dataset with random access, got {type(source).__name__}: "
        "dp_sparse.write_records(source, path) makes a RecordFile of files, frames and datasets."
        + (" Give (dict(frame.drop(columns=label)), frame[label])." if _is_frame(source) else "")
    )


def refuse_ragged(example: Any) -> None:
    """Raises ValueError for examples, or their specs, of no fixed shape."""
    for leaf in tf.nest.flatten(example):
        if isinstance(leaf, _RAGGED):
            raise ValueError(
                f"Expected dense arrays, got {type(leaf).__name__}: examples have one shape. Pad "
                "them, for example with to_tensor(default_value=...)."
            )


def refuse_other_lengths(parts: Mapping[str, Any], count: int) -> None:
    """Raises ValueError unless every leaf has a row for each of the `count` examples.

    What is longer would be cut, so that the examples behind a removed one got others' rows.
    """
    given = {name: part for name, part in parts.items() if part is not None}
    for name, leaf in itertools.chain(*(_named_leaves(part, name) for name, part in given.items())):
        if not leaf.ndim or len(leaf) != count:
            raise ValueError(
                f"Expected one row for each of {count} examples, got shape {leaf.shape} in {name}: "
                "let unpack, or the source's gather, keep the leading dimension."
            )


def batch_hint(source: Any) -> str:
    """What to do about a dataset whose elements look like batches; nothing for other sources."""
    if not isinstance(source, tf.data.Dataset):
        return ""
    shapes = [leaf.shape for leaf in tf.nest.flatten(source.element_spec)]
    leads = {shape[0] if shape.rank else 1 for shape in shapes}
    if len(leads) > 1 or leads == {1}:
        return ""
    return " Its elements look like batches: leave batch() out, or take them apart by unbatch()."


def unpacked(example: Example) -> tuple[Any, Any, Any]:
    """`(x, y, sample_weight)`, the last None if the data source has none."""
    if not isinstance(example, tuple) or len(example) not in (2, 3):
        raise ValueError(
            "Expected examples (x, y) or (x, y, sample_weight), got "
            f"{len(example) if isinstance(example, tuple) else type(example).__name__}."
        )
    x, y, *rest = plain(example)
    return x, y, rest[0] if rest else None


def chunks_of(examples: Any) -> Iterator[Any]:
    """Batches of numpy arrays, in the order of the examples."""
    sources = _sources(examples)
    if sources is None:
        stream = isinstance(examples, tf.data.Dataset)
        yield from examples.as_numpy_iterator() if stream else examples
        return
    for source in sources:
        for start in range(0, len(source), _CHUNK):
            yield source.gather(np.arange(start, min(start + _CHUNK, len(source))))


def has_length(examples: Any) -> bool:
    """Whether the number of examples is known before they are read."""
    return _sources(examples) is not None


def checked_number(examples: Any, num_examples: int | None) -> int | None:
    """How many examples to expect; None if that is not known.

    Raises:
        ValueError: `examples` repeats, is no collection of batches, or has another length.
    """
    if num_examples is not None:
        num_examples = validate.positive_integer("num_examples", num_examples)
    sources = _sources(examples)
    if sources is not None:
        length = sum(len(source) for source in sources)
        if num_examples not in (None, length):
            raise ValueError(
                f"Expected num_examples={length}, the length of examples, got "
                f"num_examples={num_examples}."
            )
        return length
    if isinstance(examples, Mapping | str) or not isinstance(examples, Iterable):
        raise ValueError(
            "Expected a dp_sparse.RecordFile or a list of them, arrays (x, y), a tf.data.Dataset "
            f"of batches or another iterable of batches, got {type(examples).__name__}."
        )
    endless = tf.data.INFINITE_CARDINALITY
    if isinstance(examples, tf.data.Dataset) and examples.cardinality() == endless:
        raise ValueError("Expected a finite dataset, got one that repeats: leave repeat() out.")
    return num_examples


def _sources(examples: Any) -> list[DataSource] | None:
    """The data sources with random access in `examples`; None if it is a stream."""
    if isinstance(examples, tuple):
        return [as_data_source(examples)]
    found = examples if isinstance(examples, list) and examples else [examples]
    return found if all(hasattr(source, "gather") for source in found) else None


def parts_of(batch: Any) -> tuple[Mapping[str, Any], Any, Any]:
    """`(x, y, sample_weight)` of a batch, None for what it does not have.

    Raises:
        ValueError: x does not map names to ids.
        PrivacyError: A sampler made the batch.
    """
    parts = batch if isinstance(batch, tuple) else (batch,)
    x, y, weights = (*parts, None, None)[:3]
    if isinstance(weights, Mapping) and "marker" in weights:
        raise PrivacyError(
            "Expected each example once, got batches of a sampler, which may hold an example "
            "several times: pass the dataset that the sampler was given."
        )
    if len(parts) > 3 or not isinstance(x, Mapping):
        raise ValueError(
            "Expected batches x, (x, y) or (x, y, sample_weight) whose x maps names to arrays, "
            f"got {type(x).__name__} in a batch of {len(parts)}."
        )
    return x, y, weights


def has_weight(weights: Any) -> np.ndarray | None:
    """bool `[batch]`: whether some weight of an example is not 0; None if that holds for all."""
    if weights is None:
        return None
    leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(weights)]
    weighty = [np.any(leaf.reshape(len(leaf), -1) != 0, axis=1) for leaf in leaves]
    present = np.logical_or.reduce(weighty)
    return None if present.all() else present

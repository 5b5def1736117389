"""Records of fixed width, written from the data as people have it, and read by position.

The file is that of `numpy.save`: `numpy.load(path, mmap_mode="r")` opens it, too. Its fields are
`x` or `x/NAME`, `y` or `y/NAME`, and `weight`.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from dp_sparse.core import PrivacyError, validate, whole_file
from dp_sparse.sampling.batch import is_sampled
from dp_sparse.sampling.data_source import RecordFile, chunks_of
from dp_sparse.sampling.tables import (
    CALL,
    Piece,
    is_frame,
    paths_of,
    pieces_of_columns,
    pieces_of_file,
    pieces_of_frame,
)

_ROWS = 2**14  # of a dataset that are taken at once
_PARTS = ("x", "y", "weight")
Names = str | Sequence[str] | None


def write_records(
    source: Any,
    path: str | os.PathLike[str],
    *,
    label: Names = None,
    weight: str | None = None,
    leave_out: Sequence[str] = (),
    hashed: Mapping[str, int] | None = None,
    text_bytes: int | Mapping[str, int] = 64,
    dtypes: Mapping[str, str] | None = None,
    features: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> RecordFile:
    """Writes examples as records of fixed width, which every sampler reads by position.

    A table becomes x by the names of its columns, and y. Integers are stored as int64, other
    numbers as float32, text as bytes; hashed columns are int32.

    Args:
        source: A CSV, TSV (or .gz of them), Parquet or TFRecord file, or a list of such files; a
            data frame; a dictionary of columns; a `tf.data.Dataset` of single examples `(x, y)` or
            `(x, y, sample_weight)`; arrays of these; or anything with `gather`.
        path: The file to write. What was there stays if anything fails.
        label: Of a table: the column that is y, or several by their names.
        weight: Of a table: the column of sample weights.
        leave_out: Of a table: columns that are not stored.
        hashed: Of columns of text or integers, how many buckets they are hashed to, as
            `keras.layers.Hashing` of as many bins does.
        text_bytes: The most bytes of text that is not hashed; for all columns, or by their names.
        dtypes: Of columns of CSV whose first rows tell something else, such as `"float32"` or
            `"text"`.
        features: Of a TFRecord file, as `tf.io.parse_example` takes it, of fixed lengths.
        progress: Whether to show rows a second.

    Returns:
        The records, as `RecordFile(path)` opens them.

    Raises:
        ValueError: Another kind of source, no rows, a row with columns too few, a value that is not
            of its column's kind, missing integers, text that is too long; or no pyarrow, which CSV
            and Parquet need. Each names the place.
        PrivacyError: The source holds batches of a sampler.
        OSError: A file cannot be read, or the disk is full.

    Examples:
        >>> import dp_sparse, numpy as np, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> columns = {"user": np.array(["a", "b"]), "age": [31, 40], "clicked": [1.0, 0.0]}
        >>> path = f"{folder.name}/clicks.npy"
        >>> clicks = dp_sparse.write_records(columns, path, label="clicked", hashed={"user": 100})
        >>> len(clicks)
        2
        >>> x, y = dp_sparse.RecordFile(path).gather(np.array([1]))
        >>> sorted(x), x["age"].tolist(), y.tolist()
        (['age', 'user'], [40], [0.0])

    ### Formal Guarantees
    What is stored of a row follows from that row alone, and rows keep their order. The number of
    rows, the columns and the buckets are public.
    """
    made = _Records(dict(hashed or {}), text_bytes)
    pieces = _examples(source, label, weight, leave_out, dtypes or {}, features)
    with (
        whole_file(path) as file,
        tqdm(unit="row", unit_scale=True, desc=os.fspath(path), disable=not progress) as bar,
    ):
        for example in pieces:
            made.write(file, example)
            bar.update(made.rows - bar.n)
        made.end(file)
    return RecordFile(path)


def _examples(
    source: Any,
    label: Names,
    weight: str | None,
    leave_out: Sequence[str],
    dtypes: Mapping[str, str],
    features: Mapping[str, Any] | None,
) -> Iterator[tuple[Any, ...]]:
    """`(x, y)` or `(x, y, weights)` in pieces."""
    tables = _pieces(source, dtypes, features)
    if tables is not None:
        if label is None:
            raise ValueError(
                f"Expected label= with a table, the column that is y, got none ({CALL})."
            )
        return (_parted(piece, label, weight, leave_out) for piece in tables)
    given = {"label": label, "weight": weight, "leave_out": leave_out, "dtypes": dtypes}
    of_tables = [name for name, value in given.items() if value]
    if of_tables:
        raise ValueError(
            f"Expected {of_tables[0]}= with a table of columns alone, got it with "
            f"{type(source).__name__}, which has x and y ({CALL})."
        )
    if isinstance(source, tf.data.Dataset):
        return _of_dataset(source)
    if isinstance(source, tuple) or hasattr(source, "gather"):
        return iter(chunks_of(source))
    raise ValueError(
        f"Expected {CALL} of a CSV, Parquet or TFRecord file, a DataFrame, a dictionary of "
        f"columns, a tf.data.Dataset of examples or arrays (x, y), got {type(source).__name__}."
    )


def _pieces(
    source: Any, dtypes: Mapping[str, str], features: Mapping[str, Any] | None
) -> Iterable[Piece] | None:
    """The pieces of a table; None if the source has x and y."""
    files = paths_of(source)
    if files is not None:
        missing = [path for path in files if not path.exists()]
        if missing:
            raise FileNotFoundError(f"No such file: {missing[0]} ({CALL}).")
        return (piece for path in files for piece in pieces_of_file(path, dtypes, features))
    if is_frame(source):
        return pieces_of_frame(source)
    if isinstance(source, Mapping):
        return pieces_of_columns({str(name): np.asarray(v) for name, v in source.items()})
    return None


def _parted(
    piece: Piece, label: Names, weight: str | None, leave_out: Sequence[str]
) -> tuple[Any, ...]:
    labels = [label] if isinstance(label, str) else list(label or ())
    asked = [*labels, *([weight] if weight else []), *leave_out]
    unknown = [name for name in asked if name not in piece]
    if unknown:
        raise ValueError(
            f"Expected a column {unknown[0]!r}, got {', '.join(map(repr, sorted(piece)))} ({CALL})."
        )
    x = {name: values for name, values in piece.items() if name not in asked}
    if not x:
        raise ValueError(f"Expected a column for x, got {sorted(piece)} and none left ({CALL}).")
    y = piece[label] if isinstance(label, str) else {name: piece[name] for name in labels}
    return (x, y, piece[weight]) if weight else (x, y)


def _of_dataset(dataset: tf.data.Dataset) -> Iterator[tuple[Any, ...]]:
    spec = dataset.element_spec
    if is_sampled(spec):
        raise PrivacyError(
            f"Expected examples, got batches of a sampler ({CALL}): pass the dataset that the "
            "sampler was given."
        )
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(f"Expected a dataset that ends, got one that repeats ({CALL}).")
    for leaf in tf.nest.flatten(spec):
        if not isinstance(leaf, tf.TensorSpec) or leaf.shape.num_elements() is None:
            raise ValueError(
                f"Expected examples of fixed shapes, got {leaf} in the dataset ({CALL}).\nPad each "
                "to one length, and unbatch batches."
            )
    return iter(dataset.batch(_ROWS).as_numpy_iterator())


class _Records:
    """What is written, by the fields of the first piece.

    Attributes:
        rows: How many so far.
    """

    def __init__(self, hashed: dict[str, int], text_bytes: int | Mapping[str, int]) -> None:
        self._hashed = {
            name: validate.positive_integer(f"hashed[{name!r}]", buckets)
            for name, buckets in hashed.items()
        }
        self._text_bytes = text_bytes
        self._dtype: np.dtype[Any] | None = None
        self.rows = 0

    def write(self, file: IO[bytes], example: tuple[Any, ...]) -> None:
        """Adds the rows of a piece."""
        fields = {
            name: self._stored(name.partition("/")[2] or name, values)
            for part, nest in zip(_PARTS, example, strict=False)
            for name, values in _named(part, nest)
        }
        lengths = {len(values) for values in fields.values()}
        if len(lengths) != 1:
            found = {name: len(values) for name, values in fields.items()}
            raise ValueError(f"Expected columns of one length, got {found} ({CALL}).")
        dtype = np.dtype([(name, v.dtype, v.shape[1:]) for name, v in fields.items()])
        if self._dtype is None:
            self._dtype = dtype
            self._refuse_unknown(fields)
            file.write(_header(dtype, 0))
        if dtype != self._dtype:
            raise ValueError(
                f"Expected fields {_told(self._dtype)} from row {self.rows} on, got {_told(dtype)} "
                f"({CALL}).\nGive all files the same columns, and CSV dtypes=."
            )
        records = np.empty(lengths.pop(), dtype)
        for name, values in fields.items():
            records[name] = values
        file.write(records.tobytes())
        self.rows += len(records)

    def _refuse_unknown(self, fields: Mapping[str, np.ndarray]) -> None:
        given = {*self._hashed}
        if isinstance(self._text_bytes, Mapping):
            given |= {*self._text_bytes}
        names = {name.partition("/")[2] or name for name in fields}
        if given - names:
            raise ValueError(
                f"Expected columns among {sorted(names)}, got {sorted(given - names)} in hashed or "
                f"text_bytes ({CALL})."
            )

    def end(self, file: IO[bytes]) -> None:
        """Says in the header how many rows there are."""
        if self._dtype is None or not self.rows:
            raise ValueError(f"Expected rows to write, got none ({CALL}).")
        file.seek(0)
        file.write(_header(self._dtype, self.rows))
        file.seek(0, os.SEEK_END)

    def _stored(self, name: str, values: Any) -> np.ndarray:
        values = np.asarray(values)
        if values.dtype.kind in "UO":
            values = _as_bytes(name, values, self.rows)
        if name in self._hashed:
            return self._buckets(name, values)
        if values.dtype.kind == "S":
            return self._kept(name, values)
        if values.dtype.kind in "iub":
            return values.astype(np.int64)
        if values.dtype.kind == "f":
            return values.astype(np.float32)
        raise ValueError(
            f"Expected numbers or text in {name!r}, got {values.dtype} ({CALL}): turn dates into "
            "numbers."
        )

    def _buckets(self, name: str, values: np.ndarray) -> np.ndarray:
        if values.dtype.kind not in "iubS":
            raise ValueError(
                f"Expected text or integers in {name!r}, which is hashed, got {values.dtype} "
                f"({CALL})."
            )
        distinct, places = np.unique(values, return_inverse=True)
        text = distinct if distinct.dtype.kind == "S" else tf.strings.as_string(distinct)
        found = tf.strings.to_hash_bucket_fast(text, self._hashed[name]).numpy()
        return found.astype(np.int32)[places].reshape(values.shape)

    def _kept(self, name: str, values: np.ndarray) -> np.ndarray:
        given = self._text_bytes
        most = given.get(name, 64) if isinstance(given, Mapping) else given
        if values.dtype.itemsize > most:
            lengths = np.char.str_len(values).reshape(len(values), -1).max(axis=1)
            if lengths.max(initial=0) > most:
                row = int(np.argmax(lengths > most))
                raise ValueError(
                    f"Expected text of at most {most} bytes in {name!r}, got {lengths[row]} in row "
                    f"{self.rows + row} ({CALL}; rows count from 0).\nPass text_bytes={{{name!r}: "
                    f"{lengths[row]}}} or more, or hashed={{{name!r}: BUCKETS}}."
                )
        return values.astype(f"S{most}")


def _named(part: str, nest: Any) -> Iterator[tuple[str, Any]]:
    """Leaves by the names of their fields."""
    if isinstance(nest, Mapping):
        leaves = {str(name): leaf for name, leaf in nest.items()}
    elif isinstance(nest, list | tuple):
        leaves = {str(place): leaf for place, leaf in enumerate(nest)}
    else:
        yield part, nest
        return
    for name, leaf in leaves.items():
        if isinstance(leaf, Mapping):
            raise ValueError(
                f"Expected {part} to be an array, or a dictionary, list or tuple of arrays, got "
                f"{type(leaf).__name__} in {part}[{name!r}] ({CALL})."
            )
        yield f"{part}/{name}", leaf


def _as_bytes(name: str, values: np.ndarray, begin: int) -> np.ndarray:
    flat = values.reshape(-1)
    wrong = [place for place, each in enumerate(flat) if not isinstance(each, str | bytes)]
    if wrong:
        raise ValueError(
            f"Expected text in each row of {name!r}, got {flat[wrong[0]]!r} in row "
            f"{begin + wrong[0] * len(values) // max(len(flat), 1)} ({CALL}; rows count from 0).\n"
            "Give it a value such as ''."
        )
    made = [each.encode() if isinstance(each, str) else each for each in flat]
    return np.array(made, dtype=bytes).reshape(values.shape)


def _told(dtype: np.dtype[Any]) -> str:
    return ", ".join(f"{name}: {dtype[name]}" for name in dtype.names or ())


def _header(dtype: np.dtype[Any], rows: int) -> bytes:
    """NumPy's own, version 3, as long for any number of rows."""
    described = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (rows,),
    }
    text = repr(described).encode() + b" " * (20 - len(str(rows)))
    text += b" " * (-(len(text) + 13) % 64) + b"\n"
    return b"\x93NUMPY\x03\x00" + len(text).to_bytes(4, "little") + text

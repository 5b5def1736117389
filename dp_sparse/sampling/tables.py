"""Tables of named columns in pieces: CSV, Parquet and TFRecord files, and data frames.

Each piece maps names to arrays of equal length: integers int64, other numbers float32, text bytes.
pyarrow reads CSV and Parquet, and is needed for those alone.
"""

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

CALL = "dp_sparse.write_records"
Piece = dict[str, np.ndarray]
_ROWS = 2**16  # of a piece
_BLOCK = 2**24  # bytes of a CSV file that are parsed at once
_CSV, _PARQUET, _TFRECORD = (".csv", ".tsv"), (".parquet",), (".tfrecord", ".tfrecords")
_TEXT = ("string", "large_string", "string_view", "binary", "large_binary")
_SHOWN = 200  # characters of another library's error


def is_frame(source: Any) -> bool:
    """Whether it is a data frame."""
    return hasattr(source, "columns") and hasattr(source, "iloc")


def paths_of(source: Any) -> list[Path] | None:
    """The files that a source names; None if it is something else."""
    if isinstance(source, str | os.PathLike):
        return [Path(source)]
    if (
        isinstance(source, Sequence)
        and source
        and all(isinstance(each, str | os.PathLike) for each in source)
    ):
        return [Path(each) for each in source]
    return None


def pieces_of_file(
    path: Path, dtypes: Mapping[str, str], features: Mapping[str, Any] | None
) -> Iterator[Piece]:
    """The pieces of one file, by its name's ending.

    Args:
        path: The file; CSV and TSV also as .gz.
        dtypes: Of columns that the first block of a CSV file would tell wrongly.
        features: What a TFRecord holds, as `tf.io.parse_example` takes it.

    Raises:
        ValueError: Another ending, a row or a value that is not of its column, no pyarrow.
        OSError: It cannot be read.
    """
    kind = (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()
    if kind in _CSV:
        return _of_csv(path, "\t" if kind == ".tsv" else ",", dtypes)
    if kind in _PARQUET:
        return _of_parquet(path)
    if kind in _TFRECORD:
        return _of_tfrecord(path, features)
    endings = ", ".join((*_CSV, *_PARQUET, *_TFRECORD))
    raise ValueError(
        f"Expected {CALL} of a file that ends in {endings}, CSV also in .gz, got {path.name}.\n"
        "Rename it, or pass a DataFrame or a tf.data.Dataset of examples."
    )


def pieces_of_frame(frame: Any) -> Iterator[Piece]:
    """The pieces of a data frame."""
    for begin in range(0, len(frame), _ROWS):
        part = frame.iloc[begin : begin + _ROWS]
        yield {
            str(name): _plain(str(name), _without_missing_text(part[name].to_numpy()), begin)
            for name in part.columns
        }


def pieces_of_columns(columns: Piece) -> Iterator[Piece]:
    """The pieces of arrays by name."""
    lengths = {name: np.shape(values)[:1] for name, values in columns.items()}
    if len({*lengths.values()}) != 1 or () in lengths.values():
        raise ValueError(f"Expected columns of one length, got shapes {lengths} ({CALL}).")
    for begin in range(0, next(iter(lengths.values()))[0], _ROWS):
        yield {name: values[begin : begin + _ROWS] for name, values in columns.items()}


def _without_missing_text(values: np.ndarray) -> np.ndarray:
    """An object column as text, in which what is missing is empty; other columns as they are."""
    if values.dtype != object and values.dtype.kind not in "US":
        return values
    missing = np.array([value is None or value != value for value in values], bool)
    values = np.where(missing, "", values)
    return np.char.encode(values.astype(str), "utf-8")


def _arrow(module: str) -> Any:
    try:
        return importlib.import_module(f"pyarrow.{module}")
    except ImportError as error:
        raise ValueError(
            f"Expected pyarrow for {CALL} of CSV and Parquet, got none: pip install "
            "'pyarrow>=23,<26'."
        ) from error


def _of_csv(path: Path, delimiter: str, dtypes: Mapping[str, str]) -> Iterator[Piece]:
    csv = _arrow("csv")
    known = {name: str(np.dtype(kind)) for name, kind in dtypes.items() if kind != "text"}
    known |= {name: "string" for name, kind in dtypes.items() if kind == "text"}
    options = {
        "parse_options": csv.ParseOptions(delimiter=delimiter),
        "convert_options": csv.ConvertOptions(column_types=known, strings_can_be_null=False),
    }

    def blocks(threads: bool) -> Iterator[Any]:
        read = csv.ReadOptions(block_size=_BLOCK, use_threads=threads)
        with csv.open_csv(path, read_options=read, **options) as reader:
            yield from reader

    rows = 0
    try:
        for block in blocks(True):
            yield _of_arrow(block, rows, path)
            rows += block.num_rows
    except _arrow("lib").ArrowInvalid as error:
        raise ValueError(_of_wrong_row(path, blocks, error)) from error


def _of_wrong_row(path: Path, blocks: Any, error: Exception) -> str:
    """Reads again by one thread, whose errors know the row."""
    told = str(error)
    try:
        for _ in blocks(False):
            pass
    except _arrow("lib").ArrowInvalid as again:
        told = str(again)
    return (
        f"Expected rows of one kind in {path.name}, got {told[:_SHOWN]!r} ({CALL}; the first line "
        "is row 1).\nMend the row, or say what the column holds: dtypes={'NAME': 'float32'}, or "
        "'text'."
    )


def _of_parquet(path: Path) -> Iterator[Piece]:
    parquet, rows = _arrow("parquet"), 0
    try:
        with parquet.ParquetFile(path) as file:
            for block in file.iter_batches(_ROWS):
                yield _of_arrow(block, rows, path)
                rows += block.num_rows
    except _arrow("lib").ArrowInvalid as error:
        raise ValueError(
            f"Expected a Parquet file, got {path.name}: {str(error)[:_SHOWN]} ({CALL}).\nWrite it "
            "again."
        ) from error


def _of_arrow(block: Any, begin: int, path: Path) -> Piece:
    lib, compute = _arrow("lib"), _arrow("compute")
    found: Piece = {}
    for name, column in zip(block.schema.names, block.columns, strict=True):
        if isinstance(column, lib.DictionaryArray):
            column = column.dictionary_decode()
        kind = str(column.type)
        if kind in _TEXT:
            found[name] = _text(compute, column)
            continue
        if column.null_count and kind.startswith(("int", "uint", "bool")):
            row = begin + int(np.flatnonzero(np.asarray(column.is_null()))[0])
            raise ValueError(_missing(name, row, path.name))
        found[name] = _plain(name, column.to_numpy(zero_copy_only=False), begin)
    return found


def _text(compute: Any, column: Any) -> np.ndarray:
    """Bytes `[rows]`, by the distinct values of the piece: few of them are converted."""
    coded = compute.dictionary_encode(compute.fill_null(column.cast("binary"), b""))
    distinct = np.array(coded.dictionary.to_pylist() or [b""], dtype=bytes)
    return distinct[coded.indices.to_numpy(zero_copy_only=False)]


def _plain(name: str, values: np.ndarray, begin: int) -> np.ndarray:
    """Integers as int64, other numbers as float32, text as it is."""
    if values.dtype.kind in "iub":
        return values.astype(np.int64)
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    if values.dtype.kind == "S":
        return values
    raise ValueError(
        f"Expected numbers or text in column {name!r}, got {values.dtype} from row {begin} on "
        f"({CALL}).\nTurn dates into numbers, and lists into a column each."
    )


def _missing(name: str, row: int, where: str) -> str:
    return (
        f"Expected a number in each row of column {name!r}, got none in row {row} of {where} "
        f"({CALL}; rows count from 0).\nFill it, or pass dtypes={{{name!r}: 'float32'}}, in which "
        "it is NaN."
    )


def _of_tfrecord(path: Path, features: Mapping[str, Any] | None) -> Iterator[Piece]:
    if not features:
        raise ValueError(
            f"Expected features= with the TFRecord file {path.name}, as tf.io.parse_example takes "
            f"it, got none ({CALL}).\nFor example features={{'user': tf.io.FixedLenFeature([], "
            "tf.int64)}."
        )
    packed = "GZIP" if path.suffix == ".gz" else None
    batches = tf.data.TFRecordDataset(str(path), packed).batch(_ROWS)
    try:
        for batch in batches.map(lambda raw: tf.io.parse_example(raw, dict(features))):
            yield {name: _of_tensor(name, value) for name, value in batch.items()}
    except (tf.errors.InvalidArgumentError, tf.errors.DataLossError) as error:
        raise ValueError(
            f"Expected examples of these features in {path.name}, got {error.message[:_SHOWN]!r} "
            f"({CALL}).\nMend features=, or write the file again."
        ) from error


def _of_tensor(name: str, value: Any) -> np.ndarray:
    if not isinstance(value, tf.Tensor):
        raise ValueError(
            f"Expected features of fixed length, got {type(value).__name__} for {name!r} ({CALL}): "
            "use tf.io.FixedLenFeature."
        )
    values = value.numpy()
    return values.astype(bytes) if values.dtype == object else values

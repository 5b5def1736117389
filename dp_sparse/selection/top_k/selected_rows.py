"""The rows that were selected before training: which rows of which table, and what they cost.

They are saved as one `.npz` file: the sorted rows of each table, and a JSON header with the tables'
sizes, the noise source and its cost. Counts, noisy or not, are neither kept nor saved. O(rows
selected).
"""

import dataclasses
import hashlib
import json
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np

from dp_sparse.accounting import Release, event_config
from dp_sparse.core import damage_told, read_arrays, validate, whole_file, write_arrays
from dp_sparse.selection.top_k.counting import TopKTable, as_tables
from dp_sparse.selection.top_k.noise_sources import NoiseSource, PublicRows

_FORMAT = "dp-sparse-rows-1"


@dataclasses.dataclass(frozen=True, eq=False)
class SelectedRows:
    """The embedding rows that training may update, and what their selection costs.

    Attributes:
        row_ids: int64 `[rows]` of each table by name, sorted, unique and read-only.
        num_rows: Rows of each table; read-only, too.
        source: The noise source of the selection.
        lookups: p, the most lookups of one example in the tables of which some rows are selected
            and some are not; only these were counted. 0 for public rows.

    Raises:
        ValueError: Rows and tables have different names, a row is outside its table, repeated or
            out of order, or a private selection has lookups=0.

    Examples:
        >>> import dp_sparse, tempfile
        >>> rows = dp_sparse.SelectedRows.public({"users": [7, 3]}, {"users": 10})
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = f"{folder.name}/rows.npz"
        >>> rows.save(path)
        >>> dict(dp_sparse.SelectedRows.load(path, {"users": 10}).row_ids)
        {'users': array([3, 7])}

    ### Formal Guarantees
    Those of `release.event`, for the selection. Rows that several models train were selected once,
    and their release belongs into the plan of each model. Other rows need a release of their own,
    even if they came from the same noise source at the same cost.
    """

    row_ids: Mapping[str, np.ndarray]
    num_rows: Mapping[str, int]
    source: NoiseSource
    lookups: int = 0

    def __post_init__(self) -> None:
        _check_same_tables("rows", self.row_ids, self.num_rows)
        row_ids = {n: _checked_rows(n, self.row_ids[n], self.num_rows[n]) for n in self.num_rows}
        object.__setattr__(self, "row_ids", types.MappingProxyType(row_ids))
        object.__setattr__(self, "num_rows", types.MappingProxyType(dict(self.num_rows)))
        if self.selected and not isinstance(self.source, PublicRows):
            validate.positive_integer("lookups", self.lookups)

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies: what it was made of."""
        return type(self), (dict(self.row_ids), dict(self.num_rows), self.source, self.lookups)

    @classmethod
    def public(
        cls, row_ids: Mapping[str, Any], tables: Mapping[str, int | TopKTable]
    ) -> "SelectedRows":
        """Rows from a public list, in any order: at no cost.

        Args:
            row_ids: Integers `[rows]` of each table by name.
            tables: Each table by name, or its number of rows.

        Raises:
            ValueError: As the class.
        """
        ordered = {name: np.unique(np.asarray(rows)) for name, rows in row_ids.items()}
        return cls(ordered, _sizes(tables), PublicRows())

    @property
    def selected(self) -> int:
        """How many rows were selected in the tables that had to be counted."""
        sizes = {name: len(rows) for name, rows in self.row_ids.items()}
        return sum(size for name, size in sizes.items() if size < self.num_rows[name])

    @property
    def event(self) -> dp_accounting.DpEvent:
        """What the selection cost."""
        if not self.selected:
            return dp_accounting.NoOpDpEvent()
        return self.source.event(self.lookups, self.selected)

    @property
    def costs(self) -> bool:
        """Whether private data was read, so that a plan must have the release."""
        return not isinstance(self.event, dp_accounting.NoOpDpEvent)

    @property
    def release(self) -> Release:
        """The release for `PrivacyPlan(releases=(..., ))`."""
        tables = f"top {self.selected} rows of {len(self.num_rows)} tables"
        noise = self.source.description(self.lookups) if self.selected else "nothing counted"
        return Release(f"{tables} ({noise}; selection {self.fingerprint})", self.event)

    @property
    def fingerprint(self) -> str:
        """The name of this selection: 12 hexadecimal digits of a SHA-256 of all that it is."""
        found = hashlib.sha256(json.dumps(self._header(), sort_keys=True).encode())
        for name in sorted(self.row_ids):
            found.update(self.row_ids[name].tobytes())
        return found.hexdigest()[:12]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one file, whole or not at all, in place of what was there."""
        rows = {f"rows_{i}": each for i, each in enumerate(self.row_ids.values())}
        with whole_file(path) as file:
            write_arrays(file, _FORMAT, self._header(), rows)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        tables: Mapping[str, int | TopKTable] | None = None,
    ) -> "SelectedRows":
        """The rows that `save` wrote.

        Args:
            path: The file.
            tables: The model's tables by name, or their numbers of rows; the file must be for them.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is of another kind, damaged, or for other tables.
        """
        config = _read(Path(path))
        if tables is not None:
            _check_model(path, config["num_rows"], _sizes(tables))
        return cls.from_config(config)

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description from which `from_config` makes equal rows."""
        row_ids = {name: rows.tolist() for name, rows in self.row_ids.items()}
        return {**self._header(), "row_ids": row_ids}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "SelectedRows":
        """The rows that `get_config` described.

        Raises:
            ValueError: Their cost is not that of their noise source, or as the class.
        """
        source = NoiseSource.from_config(config["source"])
        row_ids = {name: np.asarray(r, np.int64) for name, r in config["row_ids"].items()}
        found = cls(row_ids, config["num_rows"], source, config["lookups"])
        if event_config(found.event) != config["event"]:
            raise ValueError(
                f"Expected the cost of {source}, {event_config(found.event)}, got "
                f"{config['event']}: restore the file; selecting again spends again."
            )
        return found

    def _header(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "num_rows": dict(self.num_rows),
            "source": self.source.get_config(),
            "lookups": self.lookups,
            "event": event_config(self.event),
        }


def _read(path: Path) -> dict[str, Any]:
    """The config that a file holds, its rows as arrays."""
    told = (
        f"Expected {path} to be rows that SelectedRows.save wrote, in format {_FORMAT}, got "
        "another or a damaged file ({}): restore the file; selecting again spends again."
    )
    with damage_told(told):
        header, arrays = read_arrays(path, _FORMAT)
        rows = {name: arrays[f"rows_{i}"] for i, name in enumerate(header["num_rows"])}
        return {**header, "row_ids": rows}


def _sizes(tables: Mapping[str, int | TopKTable]) -> dict[str, int]:
    return {name: table.num_rows for name, table in as_tables(tables).items()}


def _check_model(
    path: str | os.PathLike[str], saved: Mapping[str, int], wanted: Mapping[str, int]
) -> None:
    """Refuses rows that were selected for other tables."""
    _check_same_tables(str(path), saved, wanted)
    for name, num_rows in wanted.items():
        if saved[name] != num_rows:
            raise ValueError(
                f"Expected {path} to be for a table {name!r} of {num_rows} rows, got one of "
                f"{saved[name]} rows: the file belongs to another model."
            )


def _check_same_tables(what: str, got: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
    if set(got) != set(tables):
        raise ValueError(
            f"Expected {what} for the tables {sorted(tables)}, got {sorted(got)}: name every table "
            "of the model and no other."
        )


def _checked_rows(name: str, row_ids: Any, num_rows: int) -> np.ndarray:
    """int64 `[rows]`, read-only."""
    rows = np.asarray(row_ids)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise ValueError(
            f"Expected integer rows [rows] of table {name!r}, got {rows.dtype} of shape "
            f"{rows.shape}."
        )
    rows = rows.astype(np.int64)
    outside = rows[(rows < 0) | (rows >= num_rows)]
    if outside.size:
        raise ValueError(f"Expected rows of table {name!r} in [0, {num_rows}), got {outside[0]}.")
    if np.any(np.diff(rows) <= 0):
        raise ValueError(f"Expected sorted, distinct rows of table {name!r}: use np.unique.")
    rows.flags.writeable = False
    return rows

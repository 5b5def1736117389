"""What is in the folder of an export or of a delta, said in a JSON file beside it, with its digest.

The digest of an export is a SHA-256 over its architecture, its statement, its steps, and the bytes
of each weight. It does not depend on how files lay them out, nor on when they were written: an
export that deltas made has that of the full one.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST, STATEMENT = "export.json", "statement.txt"
KERAS, SAVED_MODEL, ROWS = "keras", "saved_model", "rows.h5"
_FORMAT = 2


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight of an export.

    Attributes:
        name: Of its dataset in Keras' file of weights.
        shape: Its shape.
        dtype: Its dtype, as Keras names it.
        sha256: Of its bytes, row by row.
        key: In the SavedModel's checkpoint; None where that has no such weight.
        rows: In a delta, how many of its rows are there; None: all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sha256: str
    key: str | None = None
    rows: int | None = None


@dataclasses.dataclass(frozen=True)
class Export:
    """A model that has left training, in a folder.

    Attributes:
        path: The folder. `path/keras` is for `keras.models.load_model`, `path/saved_model` for
            `tf.saved_model.load` and `keras.layers.TFSMLayer(…, call_endpoint="serve")`.
        digest: A SHA-256, hexadecimal, of its architecture, statement, steps and weights.
        steps: Steps of the plan that the weights are of.
        statement: The plan's statement for these steps.
        architecture: A SHA-256 of the model's configuration and assets.
        weights: All weights.
        others: The SavedModel's variables that Keras' file does not have; deltas need none.
        served: The SavedModel's files, each with a SHA-256: (path, hexadecimal).

    Examples:
        >>> import dp_sparse, keras, tempfile
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
        >>> folder = tempfile.TemporaryDirectory()
        >>> export = dp_sparse.export_model(model, f"{folder.name}/export")
        >>> [weight.name for weight in export.weights]
        ['layers/dense/vars/0', 'layers/dense/vars/1']
    """

    path: Path
    digest: str
    steps: int
    statement: str
    architecture: str
    weights: tuple[Weight, ...]
    others: tuple[str, ...] = ()
    served: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class ExportDelta:
    """What training changed between two exports, in a folder.

    Attributes:
        path: The folder.
        base: The digest of the export that it changes.
        digest: The digest of the export that it makes.
        steps: As in `Export`, of what it makes.
        statement: Likewise.
        architecture: Likewise.
        weights: What it makes of all weights, with the number of their rows that it has.

    Examples:
        >>> import dp_sparse, keras, tempfile
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
        >>> folder = tempfile.TemporaryDirectory()
        >>> export = dp_sparse.export_model(model, f"{folder.name}/export")
        >>> delta = dp_sparse.export_delta(model, f"{folder.name}/delta", base=export.path)
        >>> delta.base == export.digest == delta.digest  # nothing was trained
        True
    """

    path: Path
    base: str
    digest: str
    steps: int
    statement: str
    architecture: str
    weights: tuple[Weight, ...]


def digest(architecture: str, statement: str, steps: int, weights: tuple[Weight, ...]) -> str:
    """The digest of the export that these make."""
    of_weights = [[w.name, w.dtype, list(w.shape), w.sha256] for w in weights]
    content = json.dumps([_FORMAT, architecture, statement, steps, of_weights])
    return hashlib.sha256(content.encode()).hexdigest()


def write(what: Export | ExportDelta, folder: Path) -> None:
    """Writes the manifest and the statement."""
    fields = dataclasses.asdict(what)
    (folder / STATEMENT).write_text(fields.pop("statement") + "\n")
    del fields["path"]
    (folder / MANIFEST).write_text(json.dumps({"format": _FORMAT, **fields}, indent=1) + "\n")


def read_export(path: Path) -> Export:
    """What an export's manifest says; its weights are not read.

    Raises:
        ValueError: There is no export in `path`, or its manifest cannot be read.
    """
    fields = _read(path, Export)
    others, served = tuple(fields["others"]), tuple(map(tuple, fields["served"]))
    return Export(path=path, **(fields | {"others": others, "served": served}))


def read_delta(path: Path) -> ExportDelta:
    """What a delta's manifest says; its weights are not read.

    Raises:
        ValueError: There is no delta in `path`, or its manifest cannot be read.
    """
    return ExportDelta(path=path, **_read(path, ExportDelta))


def _read(path: Path, kind: type[Export] | type[ExportDelta]) -> dict[str, Any]:
    wanted = {field.name for field in dataclasses.fields(kind)}
    try:
        fields = json.loads((path / MANIFEST).read_text())
        statement = (path / STATEMENT).read_text().removesuffix("\n")
        if fields.pop("format") != _FORMAT or fields.keys() | {"path", "statement"} != wanted:
            raise ValueError("it is of another kind or version")
        made = tuple(_weight(each) for each in fields["weights"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"Expected the folder of an {kind.__name__}, got {path}: {error}."
        ) from None
    return fields | {"statement": statement, "weights": made}


def _weight(fields: Mapping[str, Any]) -> Weight:
    return Weight(**{**fields, "shape": tuple(fields["shape"])})

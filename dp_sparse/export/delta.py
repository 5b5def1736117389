"""`export_delta`: from day to day, only the rows of tables that training changed.

The rows are found by comparing the model with the last export, part by part: both are released, so
which rows differ is, too. Dense variables, which every step changes, are taken whole.

`apply_deltas`: an export and the deltas since, made into the next full export.

No model is built and no code of the model is needed: weights are exchanged in the files.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import h5py
import keras
import numpy as np

from dp_sparse.accounting import DisjointPlans
from dp_sparse.core import PrivacyError, whole_folder
from dp_sparse.export import full, keras_folder, manifest, saved_model, weights
from dp_sparse.export.full import StrPath, require_served
from dp_sparse.export.manifest import Export, ExportDelta, Weight
from dp_sparse.export.weights import Values
from dp_sparse.optimizers import PrivateOptimizer


def export_delta(
    model: keras.Model, path: StrPath, base: StrPath, *, plans: DisjointPlans | None = None
) -> ExportDelta:
    """Writes what training changed since an export, for `apply_deltas`.

    It has the rows of tables that changed, by id, the dense variables whole, and the statement. It
    costs one pass over all weights and the memory of a part of them.

    Args:
        model: As in `export_model`, of the same architecture as the base, layers' names included.
        path: A local folder that is not there yet. It appears when it is complete.
        base: The folder of the export that the delta will be applied to.
        plans: As in `export_model`.

    Returns:
        What was written. `DPSGDOptimizer` changes every row, so its deltas have whole tables.

    Raises:
        FileExistsError: `path` is there.
        ValueError: As `export_model`, or `base` is no export, or one of another architecture, or
            one whose weights Keras' file does not have as they are, as with LoRA.
        PrivacyError: The model trains with LazyDP, or another thread trained it meanwhile.

    Examples:
        >>> import dp_sparse, keras, numpy as np, tempfile
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> layers = [keras.Input((), dtype="int32"), keras.layers.Embedding(10, 2, name="ids")]
        >>> model = keras.Sequential([*layers, keras.layers.Dense(1)])
        >>> rows = dp_sparse.SelectedRows.public({"ids": [3, 7]}, {"ids": 10})
        >>> optimizer = dp_sparse.DPFESTOptimizer("sgd", plan, clip_norm=1.0, rows=rows)
        >>> model.compile(optimizer, loss="mse")
        >>> folder = tempfile.TemporaryDirectory()
        >>> day_1, day_2 = f"{folder.name}/day_1", f"{folder.name}/day_2"
        >>> export = dp_sparse.export_model(model, day_1)
        >>> history = model.fit(plan.sampling.batches((np.arange(8), np.ones(8))), verbose=0)
        >>> delta = dp_sparse.export_delta(model, f"{folder.name}/delta", base=day_1)
        >>> [(weight.shape, weight.rows) for weight in delta.weights]  # None: whole
        [((10, 2), 2), ((2, 1), None), ((1,), None)]
        >>> export = dp_sparse.apply_deltas(day_1, [f"{folder.name}/delta"], day_2)
        >>> export.digest == delta.digest
        True

    ### Formal Guarantees
    As `export_model`. Which rows differ from the base follows from two sets of weights that are
    both published.
    """
    optimizer, last = full.checked(model, path, plans), manifest.read_export(Path(base))
    if optimizer.delays_noise:
        raise PrivacyError(
            f"Expected an optimizer that changes chosen rows, got {type(optimizer).__name__}, "
            "whose noise reaches every row: its delta would be the whole table. Use export_model."
        )
    require_mapped(last)
    with whole_folder(path) as folder:
        check = optimizer.watch_steps(f"the delta {path} was written")
        steps, statement, _ = full.released(model, optimizer, plans)
        layout = keras_folder.layout(model)
        of = _architecture_of(model, layout, last)
        source = last.path / manifest.KERAS / keras_folder.WEIGHTS
        with h5py.File(source) as old, h5py.File(folder / manifest.ROWS, "w") as new:
            found = tuple(
                _difference(values, old, new, whole=_changes_whole(values, optimizer))
                for values in layout.weights
            )
        check()
        digest = manifest.digest(of, statement, steps, found)
        delta = ExportDelta(Path(path), last.digest, digest, steps, statement, of, found)
        manifest.write(delta, folder)
    return delta


def require_mapped(export: Export) -> None:
    """Raises ValueError unless each weight of the SavedModel is one of Keras' file."""
    if export.others:
        raise ValueError(
            f"Expected an export whose SavedModel has the weights of its Keras file, got "
            f"{export.path}, where {export.others[0]} has no like (LoRA is merged in one of them): "
            "write full exports of such a model."
        )


def _architecture_of(model: keras.Model, layout: keras_folder.Layout, last: Export) -> str:
    """The architecture's SHA-256, if it is that of the last export."""
    with tempfile.TemporaryDirectory() as name:
        keras_folder.describe(model, layout, Path(name))
        found = keras_folder.architecture(Path(name))
    own = [(each.name, each.shape, each.dtype) for each in layout.weights]
    if found != last.architecture or own != [(w.name, w.shape, w.dtype) for w in last.weights]:
        raise ValueError(
            f"Expected a model of the architecture of {last.path}, got {model.name} with other "
            "layers, settings or names of layers: build it as that one was, or from its Keras "
            "folder, or write a full export."
        )
    return found


def _changes_whole(values: Values, optimizer: PrivateOptimizer) -> bool:
    """Whether training changes every row of a weight."""
    tables = [] if optimizer.selects_rows else optimizer.tables
    return any(values.variable is each for each in (*optimizer.dense_variables, *tables))


def _difference(values: Values, old: h5py.File, new: h5py.File, *, whole: bool) -> Weight:
    """Writes what differs, or all, to `new`; describes the weight."""
    group, digest = new.create_group(values.name), hashlib.sha256()
    rows_of_old = weights.of_dataset(values.name, old[values.name])
    kept = weights.made_dataset(group, "values", values, rows=0)
    row_ids = None if whole else group.create_dataset("row_ids", (0,), "int64", maxshape=(None,))
    for start, stop, rows in values.parts():
        content = weights.bytes_of(rows)
        digest.update(content.data)
        if row_ids is not None:
            differs = (content != weights.bytes_of(rows_of_old.read(start, stop))).any(axis=1)
            changed = np.flatnonzero(differs)
            weights.append_rows(row_ids, start + changed)
            rows = rows[changed]
        weights.append_rows(kept, rows)
    count = None if row_ids is None else len(row_ids)
    return Weight(values.name, values.shape, values.dtype, digest.hexdigest(), None, count)


def apply_deltas(base: StrPath, deltas: Sequence[StrPath], path: StrPath) -> Export:
    """Writes the full export that deltas make of a base, bit for bit the one of their model.

    It costs one pass over all weights for each delta and three more, and the memory of a part.

    Args:
        base: The folder of an export.
        deltas: Folders of deltas, one or more: the first of `base`, each other of what the one
            before it makes.
        path: A local folder that is not there yet. It appears when it is complete.

    Returns:
        What was written, with the statement and the digest of the last delta.

    Raises:
        FileExistsError: `path` is there.
        ValueError: No delta, one of another base, or a folder that is not what was written.

    Examples:
        >>> import dp_sparse, keras, numpy as np, tempfile
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
        >>> folder = tempfile.TemporaryDirectory()
        >>> day_1, day_2, delta = (f"{folder.name}/{name}" for name in ("day_1", "day_2", "delta"))
        >>> export = dp_sparse.export_model(model, day_1)
        >>> batches = plan.sampling.batches((np.ones((8, 1)), np.ones(8)))
        >>> history = model.fit(batches, verbose=0)
        >>> made = dp_sparse.export_delta(model, delta, base=day_1)
        >>> dp_sparse.apply_deltas(day_1, [delta], day_2).steps
        2
    """
    export, chain = manifest.read_export(Path(base)), _chain(base, deltas)
    require_mapped(export)
    last = chain[-1]
    with whole_folder(path) as folder:
        shutil.copytree(export.path / manifest.KERAS, folder / manifest.KERAS)
        with h5py.File(folder / manifest.KERAS / keras_folder.WEIGHTS, "r+") as file:
            for delta in chain:
                _patch(file, delta)
            values = [weights.of_dataset(w.name, file[w.name]) for w in export.weights]
            pairs = list(zip(export.weights, values, strict=True))
            found = tuple(
                Weight(w.name, v.shape, v.dtype, weights.sha256(v), w.key) for w, v in pairs
            )
            of = keras_folder.architecture(folder / manifest.KERAS)
            digest = manifest.digest(of, last.statement, last.steps, found)
            _require(digest, last, export)
            keyed = [(w.key, v) for w, v in pairs if w.key is not None]
            source = export.path / manifest.SAVED_MODEL
            require_served(export, saved_model.files(source))
            saved_model.with_weights(source, keyed, folder / manifest.SAVED_MODEL)
        served = saved_model.files(folder / manifest.SAVED_MODEL)
        made = Export(Path(path), digest, last.steps, last.statement, of, found, served=served)
        manifest.write(made, folder)
    return made


def _chain(base: StrPath, deltas: Sequence[StrPath]) -> list[ExportDelta]:
    """The deltas, if each changes what is there when its turn comes."""
    if not deltas:
        raise ValueError("Expected one delta or more, got none.")
    found, at, digest = [], Path(base), manifest.read_export(Path(base)).digest
    for name in deltas:
        delta = manifest.read_delta(Path(name))
        if delta.base != digest:
            raise ValueError(
                f"Expected a delta of the export with digest {digest}, which {at} makes, got "
                f"{name}, which is of {delta.base}: apply deltas in their order, to their base."
            )
        found.append(delta)
        at, digest = Path(name), delta.digest
    return found


def _patch(file: h5py.File, delta: ExportDelta) -> None:
    """Writes a delta's rows over those of the file."""
    try:
        with h5py.File(delta.path / manifest.ROWS) as rows:
            for weight in delta.weights:
                _patch_weight(file[weight.name], rows[weight.name])
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"Expected a delta as written, got {delta.path}: {error}.") from None


def _patch_weight(dataset: h5py.Dataset, new: h5py.Group) -> None:
    old = weights.of_dataset("", dataset)
    if "row_ids" not in new:
        if len(new["values"]) != old.rows:
            raise ValueError(f"{len(new['values'])} of {old.rows} rows")
        for start, stop, _ in old.parts():
            weights.write_rows(dataset, start, new["values"][start:stop])
        return
    row_ids = new["row_ids"][:]
    if len(new["values"]) != len(row_ids):
        raise ValueError(f"{len(new['values'])} rows of {len(row_ids)}")
    for start, stop, rows in old.parts():
        first, end = np.searchsorted(row_ids, [start, stop])
        if first < end:
            changed = rows.copy()
            changed[row_ids[first:end] - start] = new["values"][first:end]
            weights.write_rows(dataset, start, changed)


def _require(digest: str, last: ExportDelta, base: Export) -> None:
    if digest != last.digest:
        raise ValueError(
            f"Expected the export with digest {last.digest} from {base.path} and its deltas, got "
            f"{digest}: one of them is not what was written. Fetch them again."
        )

"""`export_delta`: from day to day, only the rows of tables that training changed.

The rows are found by comparing the model with the last export, part by part: both are released, so
which rows differ is, too. Dense variables, which every step changes, are taken whole.
"""

import hashlib
import tempfile
from pathlib import Path

import h5py
import keras
import numpy as np

from dp_sparse.accounting import DisjointPlans
from dp_sparse.core import PrivacyError, whole_folder
from dp_sparse.export import full, keras_folder, manifest, weights
from dp_sparse.export.full import StrPath
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

"""`apply_deltas`: an export and the deltas since, made into the next full export.

No model is built and no code of the model is needed: weights are exchanged in the files.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from dp_sparse.core import whole_folder
from dp_sparse.export import keras_folder, manifest, saved_model, weights
from dp_sparse.export.delta import require_mapped
from dp_sparse.export.full import StrPath, require_served
from dp_sparse.export.manifest import Export, ExportDelta, Weight


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

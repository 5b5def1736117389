"""A SavedModel of a model's forward pass, with each weight once, and others put into it by parts.

TensorFlow writes a variable to its checkpoint without a copy of it. Keras' own `model.export` keeps
each weight twice, as its own variable and as TensorFlow's. A checkpoint may hold a tensor as slices
(`SaveV2`), and several are merged without reading them (`MergeV2Checkpoints`): so the weights of
another day are written beside the graph of the first.
"""

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras.src.export import export_utils

from dp_sparse.core import PrivacyError
from dp_sparse.export.keras_folder import statistics
from dp_sparse.export.weights import Values

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"  # of every checkpoint of `tf.train.Checkpoint`
_BYTES_AT_ONCE = 2**25
_VARIABLES = "variables/variables"


def write(model: keras.Model, variables: Sequence[keras.Variable], folder: Path) -> list[str]:
    """Writes it, with the endpoint `serve`.

    Args:
        model: Built.
        variables: Those whose keys are wanted; no other that the forward pass needs is left out.
        folder: Does not exist.

    Returns:
        The key of each of `variables` in the SavedModel's checkpoint, and after them the paths of
        variables that are there besides.

    Raises:
        PrivacyError: The forward pass reads a metric of training.
    """
    specs = keras.tree.map_structure(
        export_utils.make_tf_tensor_spec, export_utils.get_input_signature(model)
    )
    serve = tf.function(lambda *inputs: model(*inputs), input_signature=specs, autograph=False)
    first = model.distribute_strategy.experimental_local_results  # of replicas
    served, own = tf.Module(), [first(variable.value)[0] for variable in variables]
    known = {id(variable) for variable in own}
    others = [v for v in serve.get_concrete_function().variables if id(v) not in known]
    counted = {id(first(variable.value)[0]) for variable in statistics(model)}
    for variable in others:
        if id(variable) in counted:
            raise PrivacyError(
                f"Expected a model that predicts from its weights, got {model.name}, which reads "
                f"{variable.name}, a metric of training without noise: leave it out of call."
            )
    served.weights, served.others, served.serve = own, others, serve
    served.resources = list(_resources(model))
    tf.saved_model.save(served, str(folder), signatures={"serve": serve, "serving_default": serve})
    keys = [f"weights/{number}/.ATTRIBUTES/VARIABLE_VALUE" for number in range(len(own))]
    return [*keys, *(variable.name for variable in others)]


def files(folder: Path) -> tuple[tuple[str, str], ...]:
    """The paths of its files, and a SHA-256 of each."""
    found = []
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found.append((path.relative_to(folder).as_posix(), digest))
    return tuple(found)


def with_weights(base: Path, values: Iterable[tuple[str, Values]], folder: Path) -> None:
    """Writes the SavedModel in `base` with other weights.

    Args:
        base: Its folder.
        values: For every key of its checkpoint, the new weight.
        folder: Does not exist. It has no fingerprint, which would be that of `base`.
    """
    left_out = shutil.ignore_patterns("variables", "fingerprint.pb")
    shutil.copytree(base, folder, ignore=left_out)
    (folder / "variables").mkdir()
    graph = tf.train.load_checkpoint(str(base / _VARIABLES)).get_tensor(_GRAPH)
    slices = [(_GRAPH, "", tf.constant(graph))]
    prefixes: list[str] = []
    for batch in _batches(slices, values):
        names, places, tensors = zip(*batch, strict=True)
        prefixes.append(str(folder / "variables" / f"part-{len(prefixes)}"))
        tf.raw_ops.SaveV2(
            prefix=prefixes[-1], tensor_names=names, shape_and_slices=places, tensors=tensors
        )
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=prefixes,
        destination_prefix=str(folder / _VARIABLES),
        delete_old_dirs=False,
    )


Slice = tuple[str, str, tf.Tensor]  # a tensor's key, its place in the tensor, its values


def _batches(first: list[Slice], values: Iterable[tuple[str, Values]]) -> Iterator[list[Slice]]:
    """Slices, a bounded number of bytes at a time."""
    batch, size = list(first), 0
    for key, weight in values:
        for start, stop, rows in weight.parts():
            typed = rows.view(tf.as_dtype(weight.dtype).as_numpy_dtype)
            batch.append((key, _place(weight, start, stop), tf.constant(_shaped(typed, weight))))
            size += typed.nbytes
            if size >= _BYTES_AT_ONCE:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _shaped(rows: Any, weight: Values) -> Any:
    return rows if weight.shape else rows[0]


def _place(weight: Values, start: int, stop: int) -> str:
    """Which part of a tensor a slice is, as `SaveV2` reads it; nothing for all of it."""
    if stop - start == weight.rows:
        return ""
    shape = " ".join(map(str, weight.shape))
    inner = [f"0,{size}" for size in weight.shape[1:]]
    return f"{shape} {':'.join([f'{start},{stop - start}', *inner])}"


def _resources(model: keras.Model) -> Iterator[Any]:
    """Lookup tables of preprocessing layers, and modules with such tables; no variables."""
    kinds = (tf.saved_model.experimental.TrackableResource, tf.Module)
    for layer in model._flatten_layers():
        yield from (value for value in vars(layer).values() if isinstance(value, kinds))

"""A model as Keras saves it in a folder, without what belongs to its training.

`keras.models.load_model` reads it: `config.json`, `metadata.json`, `model.weights.h5`, `assets`.
Keras' own writer holds a table several times in memory, and adds the optimizer and the metrics of
training, which have no noise; this one asks Keras which weights to write under which names, and
writes them by parts.
"""

import dataclasses
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
from keras.src.saving import saving_lib

from dp_sparse.clipping import metric_variables
from dp_sparse.core import require_room
from dp_sparse.export import weights
from dp_sparse.export.weights import Values

CONFIG, METADATA, WEIGHTS, ASSETS = "config.json", "metadata.json", "model.weights.h5", "assets"


@dataclasses.dataclass(frozen=True)
class Layout:
    """What Keras would write of a model that was never compiled.

    Attributes:
        weights: In the order of the file.
        groups: Each group of the file, and the name of the layer that it belongs to.
        config: The text of `config.json`.
        metadata: The text of `metadata.json`.
    """

    weights: list[Values]
    groups: dict[str, str | None]
    config: str
    metadata: str


def layout(model: keras.Model) -> Layout:
    """Asks Keras; reads no weights."""
    store = _Names(model)
    saving_lib._save_state(model, store, None, "", _of_compile(model))
    store.close()
    config, metadata = saving_lib._serialize_model_as_json(model)
    return Layout(store.found, store.groups, plain_config(config), metadata)


def describe(model: keras.Model, of: Layout, folder: Path) -> None:
    """Writes all but the weights."""
    (folder / CONFIG).write_text(of.config)
    (folder / METADATA).write_text(of.metadata)
    assets = saving_lib.DiskIOStore(str((folder / ASSETS).absolute()), mode="w")
    saving_lib._save_state(model, None, assets, "", _of_compile(model))
    assets.close()


def write(model: keras.Model, of: Layout, folder: Path) -> dict[str, str]:
    """Writes the folder; returns the SHA-256 of each weight, by name."""
    folder.mkdir()
    describe(model, of, folder)
    require_room(folder, [v.size for v in of.weights])
    with h5py.File(folder / WEIGHTS, "w") as file:
        for name, layer in of.groups.items():
            file.create_group(name).attrs.update({} if layer is None else {"name": layer})
        return {
            v.name: weights.copied(v, weights.made_dataset(file, v.name, v)) for v in of.weights
        }


def plain_config(text: str) -> str:
    """A config without what `compile` was given, and the same in every process.

    Keras names objects that several layers share by their addresses; here they are counted. Dtype
    policies are values, which layers of a loaded model no longer share.
    """
    numbers: dict[int, int] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        if not isinstance(value, dict):
            return value
        kept = {key: plain(each) for key, each in value.items() if key != "compile_config"}
        if kept.get("class_name") == "DTypePolicy":
            kept.pop("shared_object_id", None)
        if "shared_object_id" in kept:
            kept["shared_object_id"] = numbers.setdefault(kept["shared_object_id"], len(numbers))
        return kept

    return json.dumps(plain(json.loads(text)))


def architecture(folder: Path) -> str:
    """The SHA-256 of a folder's config and assets, without the shapes that layers were built for.

    Those name the batch with which the model was built.
    """

    def essential(value: Any) -> Any:
        if isinstance(value, list):
            return [essential(each) for each in value]
        if not isinstance(value, dict):
            return value
        built = "build_config", "build_input_shape"
        return {key: essential(each) for key, each in value.items() if key not in built}

    config = essential(json.loads((folder / CONFIG).read_text()))
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in sorted((folder / ASSETS).rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(folder)).encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def statistics(model: keras.Model) -> list[keras.Variable]:
    """What training counted without noise: metrics of models, and those that layers have."""
    of_layers = [m for layer in model._flatten_layers() for m in layer._metrics]
    own = [variable for metric in of_layers for variable in metric.variables]
    return [*own, *(v for each in _models(model) for v in metric_variables(each))]


class _Names(saving_lib.H5IOStore):  # which Keras' walk over a model asks for
    """Collects what a model's layers save, and writes nothing."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__(io.BytesIO(), mode="w")
        self._strategy = model.distribute_strategy
        self._unnoised = {id(variable) for variable in statistics(model)}
        self.found: list[Values] = []
        self.groups: dict[str, str | None] = {}

    def make(self, path: str, metadata: dict[str, str] | None = None) -> "_Names":
        """Goes to the entry of an object of the model."""
        self._group = f"{path}/vars" if path else "vars"
        if metadata:
            self.groups[self._group] = metadata["name"]
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        """Notes a weight of that object."""
        name = f"{self._group}/{key}"
        self.groups.setdefault(self._group, None)
        if id(value) in self._unnoised:  # of a layer that saves its metric: as after a reset
            self.found.append(weights.of_array(name, np.zeros(value.shape, value.dtype)))
        elif isinstance(value, keras.Variable):
            self.found.append(weights.of_variable(name, value, self._strategy))
        else:
            self.found.append(weights.of_array(name, value))


def _models(model: keras.Model) -> list[keras.Model]:
    """It, and the models inside of it."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.Model)]


def _of_compile(model: keras.Model) -> set[int]:
    """The ids of what `compile` gave models, for Keras to pass over."""
    names = "optimizer", "_loss_tracker", "_compile_metrics", "_compile_loss"
    given = [getattr(each, name, None) for each in _models(model) for name in names]
    return {id(each) for each in given if each is not None}

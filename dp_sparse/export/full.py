"""`export_model`: a model leaves training as plain Keras and TensorFlow read it."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import h5py
import keras

from dp_sparse.accounting import DisjointPlans, RestsOnRelease
from dp_sparse.core import PrivacyError, whole_folder
from dp_sparse.export import keras_folder, manifest, saved_model, weights
from dp_sparse.export.manifest import Export, Weight
from dp_sparse.optimizers import (
    PrivateOptimizer,
    calibrations_of,
    private_optimizer_of,
    with_other_training,
)

StrPath = str | os.PathLike[str]
AsModel = Callable[[keras.Model], keras.Model]


def export_model(
    model: keras.Model,
    path: StrPath,
    *,
    plans: DisjointPlans | None = None,
    as_model: AsModel | None = None,
    note: str = "",
) -> Export:
    """Writes a model so that it predicts without `dp_sparse`, with the statement of its privacy.

    The folder has the model as Keras saves it (`keras`), a SavedModel (`saved_model`, endpoint
    `serve`), `statement.txt`, and `export.json` with the digest. The optimizer, the private step
    and the metrics of training stay behind. Tables are written by parts: it costs one pass over all
    weights, twice their size on the disk, and some 100 MB of memory.

    Args:
        model: Built, compiled with a private optimizer.
        path: A local folder that is not there yet. It appears when it is complete.
        plans: Of a model that trained on several parts of the data: the plans of all parts so far,
            the optimizer's own among them. The statement is then that of all of them.
        as_model: Makes what is written of the trained model, whose weights are final by then: a
            `Calibration`, or the same model with LoRA merged or a tokenizer in front of it.
        note: Sentences in front of the statement, such as who an example is, and what of the data
            counts as public.

    Returns:
        What was written.

    Raises:
        FileExistsError: `path` is there.
        ValueError: A path that is not local, a model without a private optimizer or not built, one
            with its tables in an embedding layer of TPUs, or `plans` without the optimizer's own.
        PrivacyError: The model's predictions use a metric of training, which has no noise, no plan
            pays for frequencies that it was made with, or another thread trained it meanwhile.

    Examples:
        >>> import dp_sparse, keras, numpy as np, tempfile
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> layers = [keras.Input((), dtype="int32"), keras.layers.Embedding(10, 2)]
        >>> model = keras.Sequential([*layers, keras.layers.Dense(1)])
        >>> model.compile(dp_sparse.DPAdaFESTOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
        >>> history = model.fit(plan.sampling.batches((np.arange(8), np.ones(8))), verbose=0)
        >>> folder = tempfile.TemporaryDirectory()
        >>> export = dp_sparse.export_model(model, f"{folder.name}/day_1")
        >>> export.steps
        2
        >>> plain = keras.models.load_model(f"{folder.name}/day_1/keras")  # needs no dp_sparse
        >>> plain.predict(np.arange(3), verbose=0).shape
        (3, 1)

    ### Formal Guarantees
    What is written follows from weights that the plan's steps have released, from the plan and from
    the model's configuration: `statement.txt` holds for it. It is that of the optimizer's plan, or
    of `plans`, and names what else trained the weights in this process: other plans, and optimizers
    of Keras without privacy; weights that were loaded bring a statement of their own, which adds to
    it. Noise that an optimizer delays is added first. An export publishes the steps so far, so a
    `PrivateCheckpoint` that restored the model saves a checkpoint of them before: a run that is
    killed does not draw them again. `as_model` may use the model's weights and what is public, and
    nothing of the data.
    """
    return written(model, checked(model, path, plans), path, plans, as_model, note)


def checked(
    model: keras.Model, path: StrPath, plans: DisjointPlans | None = None
) -> PrivateOptimizer:
    """The model's optimizer.

    Raises:
        ValueError: As `export_model`.
    """
    optimizer = private_optimizer_of(
        model, "an export has its plan's statement, so use model.save or model.export without one"
    )
    if not model.built:
        raise ValueError(
            f"Expected a built model, got {model.name}: call it on a batch of inputs first."
        )
    if optimizer.outside_tables:
        raise ValueError(
            f"Expected tables in layers of {model.name}, got {len(optimizer.outside_tables)} in an "
            "embedding layer of TPUs, which no Keras file holds: copy them to the host with "
            "dp_sparse.distribution.serving_layer, and save that and the model by themselves."
        )
    if "://" in str(path):
        raise ValueError(f"Expected a local path, got path={str(path)!r}: copy the folder after.")
    if plans is not None and _own(optimizer, plans) is None:
        raise ValueError(
            f"Expected the plan of the model's optimizer among plans, got those of "
            f"{[*plans.plans]}, none of which it is: pass the plans of all parts that trained the "
            "model."
        )
    return optimizer


def _own(optimizer: PrivateOptimizer, plans: DisjointPlans) -> str | None:
    """The name of the part on which the optimizer trains."""
    own = optimizer.plan.run_id
    return next((name for name, plan in plans.plans.items() if plan.run_id == own), None)


def released(
    model: keras.Model,
    optimizer: PrivateOptimizer,
    plans: DisjointPlans | None,
    as_model: AsModel | None = None,
) -> tuple[int, str, keras.Model]:
    """What is exported, of weights that `optimizer.settled` keeps at what the plan has released.

    Returns the steps, their statement, and the model to export.

    Parts other than the optimizer's own count with all their steps.
    """
    optimizer.before_publishing()
    exported = model if as_model is None else as_model(model)
    counting = [optimizer.plan] if plans is None else [*plans.plans.values()]
    releases = [release for plan in counting for release in plan.releases]
    for layer in (*model._flatten_layers(), *exported._flatten_layers()):
        if isinstance(layer, RestsOnRelease):
            fix = "export it with a plan that has it in releases"
            layer.require_paid(releases, fix)
    steps = optimizer.plan.sampling.steps - optimizer.steps_left
    if plans is None:
        statement = optimizer.plan.statement(steps)
    else:
        taken = {name: plan.sampling.steps for name, plan in plans.plans.items()}
        own = _own(optimizer, plans)
        statement = plans.statement(taken if own is None else {**taken, own: steps})
    counted = [plan.run_id for plan in counting]
    variables = [*model.variables, *exported.variables]
    lines = _of_calibrations(variables, counted)
    statement = with_other_training(statement, variables, counted)
    return steps, "\n".join([*lines, statement]), exported


def _of_calibrations(variables: Sequence[keras.Variable], counted: list[str]) -> list[str]:
    """What calibrated predictions cost apart from the counted plans.

    Raises:
        PrivacyError: They rest on a histogram that no counted plan pays for.
    """
    found = calibrations_of(variables)
    if any(made.paid_by is not None and made.paid_by not in counted for made in found):
        raise PrivacyError(
            "The calibration was made from a histogram that another plan pays for, so this "
            "export's statement would leave it out.\nCalibrate the model under its own plan."
        )
    return [made.statement for made in found if made.statement]


def written(
    model: keras.Model,
    optimizer: PrivateOptimizer,
    path: StrPath,
    plans: DisjointPlans | None,
    as_model: AsModel | None = None,
    note: str = "",
) -> Export:
    """Writes the export, unless a step of another thread began meanwhile (PrivacyError)."""
    with whole_folder(path) as folder, optimizer.settled():
        check = optimizer.watch_steps(f"the export {path} was written")
        steps, statement, model = released(model, optimizer, plans, as_model)
        statement = f"{note}\n{statement}" if note else statement
        layout = keras_folder.layout(model)
        digests = keras_folder.write(model, layout, folder / manifest.KERAS)
        variables = {v.name: v.variable for v in layout.weights if v.variable is not None}
        keys = saved_model.write(model, [*variables.values()], folder / manifest.SAVED_MODEL)
        check()
        key_of = dict(zip(variables, keys, strict=False))
        found = tuple(
            Weight(v.name, v.shape, v.dtype, digests[v.name], key_of.get(v.name))
            for v in layout.weights
        )
        of = keras_folder.architecture(folder / manifest.KERAS)
        digest = manifest.digest(of, statement, steps, found)
        others = tuple(keys[len(variables) :])
        served = saved_model.files(folder / manifest.SAVED_MODEL)
        export = Export(Path(path), digest, steps, statement, of, found, others, served)
        manifest.write(export, folder)
    return export


def check_export(path: StrPath) -> Export:
    """Reads an export, and whether it is what was written.

    It costs one pass over all files.

    Args:
        path: Its folder.

    Raises:
        ValueError: There is no export in it, or what is in it does not have its digest.

    Examples:
        >>> import dp_sparse
        >>> dp_sparse.check_export("nothing")
        Traceback (most recent call last):
        ...
        ValueError: Expected the folder of an Export, got nothing: ...
    """
    folder = Path(path)
    export = manifest.read_export(folder)
    found = recomputed(folder, export)
    if found != export.digest:
        raise ValueError(
            f"Expected the export that was written, with digest {export.digest}, got {path}, "
            f"whose content has {found}: write or fetch it again."
        )
    require_served(export, saved_model.files(folder / manifest.SAVED_MODEL))
    return export


def require_served(export: Export, found: Iterable[tuple[str, str]]) -> None:
    """Raises ValueError unless these are files of the SavedModel as they were written.

    Args:
        export: What was written.
        found: All files that are there.
    """
    wanted, there = dict(export.served), dict(found)
    for name in sorted(wanted.keys() | there.keys()):
        if wanted.get(name) != there.get(name):
            how = "missing" if name not in there else "not what was written"
            raise ValueError(
                f"Expected the export that was written, got {export.path}, whose "
                f"{manifest.SAVED_MODEL}/{name} is {how}: write or fetch it again."
            )


def recomputed(folder: Path, export: Export) -> str:
    """The digest of what is in the folder, with an export's steps and statement."""
    try:
        with h5py.File(folder / manifest.KERAS / keras_folder.WEIGHTS) as file:
            found = []
            for weight in export.weights:
                values = weights.of_dataset(weight.name, file[weight.name])
                own = Weight(weight.name, values.shape, values.dtype, weights.sha256(values))
                found.append(own)
        of = keras_folder.architecture(folder / manifest.KERAS)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"Expected an export in {folder}, got files of another: {error}") from None
    return manifest.digest(of, export.statement, export.steps, tuple(found))

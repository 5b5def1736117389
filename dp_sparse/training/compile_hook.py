"""The `compile` hook that gives a model the private train step.

Importing `dp_sparse` wraps the `compile` method that `keras.Model` inherits. Compiling a model with
a private optimizer gives it the private step; compiling it with another optimizer gives it Keras'
own step again.

An optimizer's state is restored completely, with the steps that it spent, or not at all.

Keras assigns the values whose paths it finds and ignores the others. So the state of an optimizer
that has another name, or is not built yet, would restore weights and lose the spent steps. An
optimizer that was compiled and has not trained is built first.
"""

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import h5py
import keras
import tensorflow as tf

from dp_sparse import clipping
from dp_sparse.core import NoStepsLeftError, PrivacyError, translated, validate
from dp_sparse.optimizers import PrivateOptimizer, record
from dp_sparse.sampling import batch_of, check_batches, is_sampled
from dp_sparse.step import (
    Preflight,
    all_built,
    build_for,
    build_metrics,
    build_optimizer,
    checkpointed_steps,
    environment,
    flush_hooks,
    private_train_step,
    refuse_known_noise,
    refuse_other_strategy,
    replaced_methods,
)
from dp_sparse.training import fit_arguments, plan_steps
from dp_sparse.training.plan_steps import FitSteps

_UNFIT = "the spent steps would be lost", "spent steps under another plan"


def guard_restoring(model: keras.Model, optimizer: PrivateOptimizer) -> None:
    """Makes `set_state_tree` and `load_weights` refuse a state that does not fit the optimizer."""
    model.set_state_tree = _restoring_tree(model, optimizer)
    model.load_weights = _loading(model, optimizer)


def _restoring_tree(model: keras.Model, optimizer: PrivateOptimizer) -> Callable[..., None]:
    stock = model.set_state_tree

    @functools.wraps(stock)
    def set_state_tree(state_tree: Mapping[str, Any]) -> None:
        if "optimizer_variables" in state_tree:
            _build_to_restore(model, optimizer)
            _check_paths(set(_paths(state_tree["optimizer_variables"])), optimizer)
        stock(state_tree)

    return set_state_tree


def _loading(model: keras.Model, optimizer: PrivateOptimizer) -> Callable[..., None]:
    """Keras' own, which wraps what an optimizer refuses in sentences of its own.

    A file without the state of an optimizer, as of public weights, leaves the optimizer as it is.
    """
    stock = model.load_weights

    @functools.wraps(stock)
    def load_weights(filepath: Any, *args: Any, **kwargs: Any) -> None:
        _build_to_restore(model, optimizer)
        if _has_weights_alone(str(filepath)):
            kwargs["objects_to_skip"] = [*kwargs.get("objects_to_skip", ()), optimizer]
        try:
            stock(filepath, *args, **kwargs)
        except ValueError as error:
            own = [part for part in str(error).split("\n\n") if any(u in part for u in _UNFIT)]
            if not own:
                raise
            raise PrivacyError(own[0]) from None

    return load_weights


def _has_weights_alone(path: str) -> bool:
    """Whether a local file of weights has no variables of an optimizer."""
    if not path.endswith(".weights.h5") or not os.path.exists(path):
        return False
    with h5py.File(path) as file:
        found: list[str] = []
        file.visit(found.append)
    return not any(name.startswith("optimizer/vars/") for name in found)


def _build_to_restore(model: keras.Model, optimizer: PrivateOptimizer) -> None:
    """Creates the optimizer's variables, if the model has its own."""
    if not optimizer.built and model.built and all_built(model):
        with model.distribute_strategy.scope():
            build_optimizer(model, optimizer)


def _check_paths(given: set[str], optimizer: PrivateOptimizer) -> None:
    own = {variable.path for variable in optimizer.variables}
    wrong = sorted(given ^ own)
    if wrong:
        raise PrivacyError(
            f"Expected the state of all {len(own)} variables of {optimizer.name}, got another set, "
            f"which differs in {wrong[:3]}: the spent steps would be lost. Compile the model as "
            "the saved one was, with the same name= of the optimizer and of the one inside."
        )


def _paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{path}/")
        else:
            yield path


_HELD_OUT = {"test_step": "model.evaluate(x, y)", "predict_step": "model.predict(x)"}
_EXAMPLES = ("evaluate", "predict")
_PUBLISHERS = ("save", "save_weights", "export")
_REPLACED = (
    "fit",
    "train_step",
    "make_train_function",
    "_maybe_symbolic_build",
    "set_state_tree",
    "load_weights",
    *_HELD_OUT,
    *_EXAMPLES,
    *_PUBLISHERS,
    "get_weights",
)


def install_compile_hook() -> None:
    """Wraps the `compile` that `keras.Model` inherits, once."""
    owner = next(cls for cls in keras.Model.__mro__ if "compile" in vars(cls))
    original = owner.compile
    if hasattr(original, "_dp_sparse_original"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(self, *args, **kwargs)
        _restore_stock_step(self)
        optimizer, before = arguments.arguments.get("optimizer"), getattr(self, "optimizer", None)
        if getattr(before, "built", False):
            record(before)  # also if it was built before this package was imported
        if isinstance(optimizer, PrivateOptimizer):
            _prepare(self, optimizer, arguments.arguments)
        original(*arguments.args, **arguments.kwargs)
        if isinstance(optimizer, PrivateOptimizer):
            self._compile_config.config["jit_compile"] = optimizer.compiles  # for a saved model
            _install_private_step(self, optimizer)
            guard_restoring(self, optimizer)

    compile._dp_sparse_original = original  # type: ignore[attr-defined]
    owner.compile = compile


def _restore_stock_step(model: keras.Model) -> None:
    flush_hooks.remove(model)
    clipping.take_by_place(model)
    for name in _REPLACED:
        if name in vars(model):
            delattr(model, name)


def _prepare(model: keras.Model, optimizer: PrivateOptimizer, arguments: dict[str, Any]) -> None:
    """Refuses what would bypass the private step, and turns off what would change its gradients."""
    replaced = replaced_methods(model, arguments.get("loss"))
    if replaced:
        raise PrivacyError("\n".join(replaced))
    for name in ("loss", "metrics", "weighted_metrics"):
        for given in tf.nest.flatten(arguments.get(name)):
            validate.of_keras_3(name, given)
    refuse_known_noise(model, optimizer)
    environment.check_strategy(model._distribute_strategy, optimizer)
    optimizer.compiles = _compiles(optimizer, arguments)
    _leave_out_xla_where_it_cannot_be(model, optimizer, getattr(model, "inputs", None))
    environment.check(optimizer.compiles)
    arguments["jit_compile"] = False
    arguments["auto_scale_loss"] = False
    optimizer.bind(model, functools.partial(clipping.embedding_tables, model))


def _compiles(optimizer: PrivateOptimizer, arguments: dict[str, Any]) -> bool:
    """Whether XLA shall compile the step."""
    wanted = arguments.get("jit_compile", "auto")
    if wanted not in ("auto", None, True, False):
        raise ValueError(f"Expected jit_compile to be True or False, got {wanted!r}.")
    if wanted in ("auto", None, False):
        return False
    if optimizer.microbatch_size is not None or arguments.get("run_eagerly"):
        wrong = "run_eagerly=True" if arguments.get("run_eagerly") else "microbatch_size"
        raise ValueError(f"Expected jit_compile=False with {wrong}, got jit_compile=True.")
    if optimizer._distribution_strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "Expected jit_compile=False with several replicas, got jit_compile=True: their common "
            "operations cannot be part of one kernel. Leave it out."
        )
    return True


def _leave_out_xla_where_it_cannot_be(
    model: keras.Model, optimizer: PrivateOptimizer, inputs: Any
) -> None:
    """Warns and trains in graph mode, as stock Keras does, before anything is traced.

    Args:
        model: Whose layers may say that XLA does not support them.
        optimizer: Of the model.
        inputs: Anything nested with dtypes, as far as it is known; XLA has no text.
    """
    if not optimizer.compiles:
        return
    wrong = [
        layer.path or layer.name for layer in model._flatten_layers() if not layer.supports_jit
    ]
    if any(
        getattr(leaf, "dtype", None) in ("string", tf.string) for leaf in tf.nest.flatten(inputs)
    ):
        wrong.append("inputs of text")
    if wrong:
        warnings.warn(
            f"XLA does not support {', '.join(wrong)} of model {model.name!r}: training "
            "without XLA (jit_compile=False).",
            stacklevel=5,
        )
        optimizer.compiles = False


def _install_private_step(model: keras.Model, optimizer: PrivateOptimizer) -> None:
    clipping.register_statistics(model, optimizer)
    clipping.take_by_name(model)
    preflight = Preflight(model, optimizer)
    model.train_step = _train_step(model, optimizer, preflight)
    for name, instead in _HELD_OUT.items():
        setattr(model, name, _refusing_batches(getattr(model, name), instead))
    for name in _PUBLISHERS:
        setattr(model, name, _covered_first(optimizer, getattr(model, name)))
    model.save = _refusing_legacy_files(model.save)
    model.fit = plan_steps.around_fit()(fit_arguments.checked_fit(model.fit))
    for name in _EXAMPLES:
        taking = fit_arguments.taking_text(name, getattr(model, name))
        setattr(model, name, _saved_first(optimizer, taking))
    model.get_weights = _saved_first(optimizer, model.get_weights)
    steps = plan_steps.of_fit(model)
    model.make_train_function = _making_train_function(model, optimizer, steps, preflight)
    model._maybe_symbolic_build = _building_for_batches(model, optimizer, steps)
    if optimizer.delays_noise:
        flush_hooks.install(model, optimizer)


def _train_step(
    model: keras.Model, optimizer: PrivateOptimizer, preflight: Preflight
) -> Callable[[Any], Any]:
    """The private step; called eagerly it looks at its batch first, and is traced all the same.

    The graph guard needs a graph, also with run_eagerly=True.
    """

    def traced(data: Any) -> Any:
        checkpointed_steps.refuse_without_checkpoint(optimizer)
        if is_sampled(data):
            preflight.require(data)
        return private_train_step(model, optimizer, data)

    in_graph = tf.function(traced, autograph=False, reduce_retracing=True)

    def step(data: Any) -> Any:
        if not tf.executing_eagerly():
            return traced(data)
        refuse_other_strategy(optimizer)  # whose replicas would cut the batch otherwise
        preflight.look_at(data)
        return in_graph(data)

    step.preflight = preflight  # type: ignore[attr-defined]
    return step


def _refusing_batches(step: Callable[[Any], Any], instead: str) -> Callable[[Any], Any]:
    """A step of Keras that is not for a sampler's batches, whose padding would count."""

    @functools.wraps(step)
    def run(data: Any) -> Any:
        if is_sampled(data):
            raise ValueError(
                "Expected held-out examples, got batches of a sampler, which are padded and of "
                f"random sizes: call {instead} with the examples themselves."
            )
        return step(data)

    return run


def _covered_first(optimizer: PrivateOptimizer, write: Callable[..., Any]) -> Callable[..., Any]:
    """A method that writes weights, once a checkpoint holds them if the run has any.

    It raises PrivacyError if a step was taken meanwhile.
    """

    @functools.wraps(write)
    def run(*args: Any, **kwargs: Any) -> Any:
        check = optimizer.watch_steps(f"{write.__name__} wrote the model")
        optimizer.before_publishing()
        result = write(*args, **kwargs)
        check()
        return result

    return run


def _saved_first(optimizer: PrivateOptimizer, show: Callable[..., Any]) -> Callable[..., Any]:
    """A method that shows weights, once a checkpoint holds them if the run has any."""

    @functools.wraps(show)
    def run(*args: Any, **kwargs: Any) -> Any:
        optimizer.before_publishing()
        return show(*args, **kwargs)

    return run


def _refusing_legacy_files(save: Callable[..., Any]) -> Callable[..., Any]:
    """Keras' `save`, whose .h5 files do not restore a private optimizer."""
    signature = inspect.signature(save)

    @functools.wraps(save)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        kept = given.get("kwargs", {}).get("include_optimizer", True)
        if kept and str(given["filepath"]).endswith((".h5", ".hdf5")):
            raise ValueError(
                f"Expected a path that ends in .keras, got {str(given['filepath'])!r}: legacy HDF5 "
                "files lose the spent steps. Use model.save('....keras'), or "
                "model.save_weights('....weights.h5')."
            )
        return save(*args, **kwargs)

    return run


def _making_train_function(
    model: keras.Model, optimizer: PrivateOptimizer, steps: FitSteps, preflight: Preflight
) -> Callable[..., Any]:
    """Keras' own function, with variables made before it and errors of the step translated."""
    stock = model.make_train_function
    traced: list[int] = []  # the variables that the train function was made for

    def make_train_function(force: bool = False) -> Any:
        environment.check_fit_strategy(model)
        steps.forget()
        variables = [id(variable) for variable in model.trainable_variables]
        if model.train_function is not None and traced and variables != traced:
            raise PrivacyError(
                f"The trainable variables of {model.name} changed after its first fit (a layer was "
                "frozen, added, or given LoRA), which training would ignore. Compile the model "
                "again, with a new optimizer and a new plan for the steps to come: epsilon and "
                "delta of both plans add up."
            )
        if model.built:
            with model.distribute_strategy.scope():
                build_optimizer(model, optimizer)  # before callbacks restore its state
        stock(force)
        if not hasattr(model.train_function, "_dp_sparse_translated"):
            preflight.restart()
            model.train_function = _translating(model, model.train_function, steps, preflight)
        traced[:] = variables if model.built else []
        return model.train_function

    return make_train_function


def _building_for_batches(
    model: keras.Model, optimizer: PrivateOptimizer, steps: FitSteps
) -> Callable[..., None]:
    """Keras' own function for other data, and the package's for batches of a sampler.

    To learn the shapes, Keras would take a batch of the sampler, and on several replicas also
    average over them. It also treats a model as built if one of its layers has no weights yet, and
    leaves others to their first batch, which is too late for what callbacks restore.
    """
    stock = model._maybe_symbolic_build

    def maybe_symbolic_build(iterator: Any = None, data_batch: Any = None) -> None:
        clipping.take_by_name(model)  # also functional models that were made since `compile`
        spec = data_batch
        if iterator is not None:
            dataset = iterator.data_adapter.get_tf_dataset()
            spec = dataset.element_spec
            environment.check_shared_out(model, dataset)
            if is_sampled(spec):
                check_batches(dataset)
                steps.prepare(iterator)
        if is_sampled(spec):
            _leave_out_xla_where_it_cannot_be(model, optimizer, spec[:2])
        if is_sampled(spec) and (model._distribute_strategy is not None or not all_built(model)):
            build_for(model, optimizer, batch_of(spec).examples)
            return
        stock(iterator=iterator, data_batch=data_batch)
        if is_sampled(spec) and model.built:
            build_metrics(model, *spec[:2])

    return maybe_symbolic_build


def _translating(model: keras.Model, function: Any, steps: FitSteps, preflight: Preflight) -> Any:
    eager = model.run_eagerly  # as the function is; a model may change it later

    @functools.wraps(function)
    def run(iterator: Any) -> Any:
        try:
            environment.check(model.optimizer.compiles)
            with translated():
                if not eager:  # otherwise the step looks at its batch itself
                    iterator = preflight.ahead(iterator, model.steps_per_execution)
                return function(iterator)
        except NoStepsLeftError as error:
            return steps.end(error)
        except Exception:
            model.train_function = None  # the next fit must not use an unfinished graph
            raise

    run._dp_sparse_translated = True  # type: ignore[attr-defined]
    return run

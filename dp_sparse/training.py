"""The private train step, and the `compile` hook that installs it.

Importing `dp_sparse` wraps the `compile` found on `keras.Model`'s MRO. Compiling with a private
optimizer gives that model the private step; compiling with any other gives the stock step back. One
step: one recorded forward pass, one backward pass to the pre-activations, then selection, clipping
and noise from the records (DP-AdaFEST, Algorithm 1).
"""

import functools
import inspect
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import (
    ambient,
    batch_sums,
    clipping,
    flushing,
    isolation,
    microbatches,
    noise,
    passes,
    replicas,
    restoring,
    strategies,
)
from dp_sparse.errors import PrivacyError, translated
from dp_sparse.optimizers import PrivateOptimizer
from dp_sparse.sampling.marker import is_sampled

_REPLACED = ("train_step", "make_train_function", "_maybe_symbolic_build", "set_state_tree")


def install_compile_hook() -> None:
    """Wraps `compile` where `keras.Model` finds it, once."""
    owner = next(cls for cls in keras.Model.__mro__ if "compile" in vars(cls))
    original = owner.compile
    if hasattr(original, "_dp_sparse_original"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(self, *args, **kwargs)
        _restore_stock_step(self)
        optimizer = arguments.arguments.get("optimizer")
        if isinstance(optimizer, PrivateOptimizer):
            _prepare(self, optimizer, arguments.arguments)
        original(*arguments.args, **arguments.kwargs)
        if isinstance(optimizer, PrivateOptimizer):
            self._compile_config.config["jit_compile"] = optimizer.compiles  # for a saved model
            _install_private_step(self, optimizer)
            restoring.guard(self, optimizer)

    compile._dp_sparse_original = original  # type: ignore[attr-defined]
    owner.compile = compile


def _restore_stock_step(model: keras.Model) -> None:
    flushing.remove(model)
    for name in _REPLACED:
        if name in vars(model):
            delattr(model, name)


def _prepare(model: keras.Model, optimizer: PrivateOptimizer, arguments: dict[str, Any]) -> None:
    """Refuses what would bypass the private step, and turns off what would change its gradients."""
    for name in ("train_step", "compute_loss", "_compute_loss"):
        owner = next(cls for cls in type(model).__mro__ if name in vars(cls))
        if not owner.__module__.startswith("keras."):
            raise PrivacyError(
                f"{type(model).__name__} has a {name} of its own, which the private step would "
                f"not run: remove it and pass "
                "loss= and metrics= to compile."
            )
    strategies.check(model._distribute_strategy, optimizer)
    optimizer.compiles = _compiles(optimizer, arguments)
    ambient.check(optimizer.compiles)
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
            "Expected jit_compile=False with several replicas, got jit_compile=True: what they do "
            "together cannot be part of one kernel. Leave it out."
        )
    return True


def _install_private_step(model: keras.Model, optimizer: PrivateOptimizer) -> None:
    clipping.register_unnoised(model, optimizer.diagnostics)
    stock_make = model.make_train_function
    traced: list[int] = []  # the variables that the train function was made for

    def make_train_function(force: bool = False) -> Any:
        strategies.check_fit(model)
        variables = [id(variable) for variable in model.trainable_variables]
        if model.train_function is not None and traced and variables != traced:
            raise PrivacyError(
                f"The trainable variables of {model.name} changed after its first fit (a layer was "
                "frozen, added, or given LoRA), and training would not see it. Compile it again, "
                "with a new optimizer and a new plan for the steps to come."
            )
        if model.built:
            with model.distribute_strategy.scope():
                _build_optimizer(model, optimizer)  # before callbacks restore its state
        stock_make(force)
        if not hasattr(model.train_function, "_dp_sparse_translated"):
            model.train_function = _translating(model, model.train_function)
        traced[:] = variables if model.built else []
        return model.train_function

    stock_build = model._maybe_symbolic_build

    def maybe_symbolic_build(iterator: Any = None, data_batch: Any = None) -> None:
        """Keras would take a batch of the sampler, and mean over shares, to learn its shapes.

        It also takes a model for built that has a layer without its weights.
        """
        spec = data_batch
        if iterator is not None:
            dataset = iterator.data_adapter.get_tf_dataset()
            spec = dataset.element_spec
            strategies.check_shared_out(model, dataset)
        partly_built = model.built and not _all_built(model)
        if is_sampled(spec) and (model._distribute_strategy is not None or partly_built):
            build_for(model, optimizer, spec)
        else:
            stock_build(iterator=iterator, data_batch=data_batch)

    model._maybe_symbolic_build = maybe_symbolic_build
    step = functools.partial(private_train_step, model, optimizer)
    in_graph = tf.function(step, autograph=False, reduce_retracing=True)
    # A graph shows all that a step does; under run_eagerly=True it is traced on its own.
    model.train_step = lambda data: (in_graph if tf.executing_eagerly() else step)(data)
    model.make_train_function = make_train_function
    if optimizer.delays_noise:
        flushing.install(model, optimizer)


def _translating(model: keras.Model, function: Any) -> Any:
    @functools.wraps(function)
    def run(iterator: Any) -> Any:
        try:
            ambient.check(model.optimizer.compiles)
            with translated():
                return function(iterator)
        except Exception:
            model.train_function = None  # a half-made graph must not serve the next fit
            raise

    run._dp_sparse_translated = True  # type: ignore[attr-defined]
    return run


def private_train_step(
    model: keras.Model, optimizer: PrivateOptimizer, data: Any
) -> dict[str, Any]:
    """One step of private training on one batch of the plan's sampler.

    Args:
        model: A model compiled with `optimizer`.
        optimizer: The private optimizer.
        data: `(x, y, weights)` as `plan.sampling.batches` makes it.

    Returns:
        Training loss and metrics over the real examples: not private.

    Raises:
        PrivacyError: A batch that the plan's sampler did not make, used before, or after the last
            step.
        BadExampleError: An id or a label out of range.
        UnsupportedLayerError: A layer whose per-example gradients cannot be had.
    """
    _refuse(optimizer, data)
    x, y, weights = data if optimizer.compiles else _trimmed(data)
    if not optimizer.built:
        build_for(model, optimizer, (x, y, weights))
    draw, spent = optimizer.begin_step(weights["marker"])
    with tf.control_dependencies([spent]):
        x = tf.nest.map_structure(tf.identity, x)
    # Traced first: a layer that initialises itself from its first batch is then seen to mix.
    checked = _checked_examples(optimizer, (x, y, weights))
    observer = passes.observed(model, optimizer, checked, draw)
    size = optimizer.microbatch_size
    if optimizer.compiles:
        found, logs = batch_sums.in_one_kernel(model, optimizer, (x, y, weights), draw)
    elif size is None:
        found, logs = batch_sums.at_once(model, optimizer, (x, y, weights), draw)
    else:
        found, logs = microbatches.by_parts(model, optimizer, (x, y, weights), draw, size)
    with tf.control_dependencies(batch_sums.tensors(found)):  # whose pass then leaves the memory
        progress, present = optimizer.diagnostics.isolation, checked[2]["present"]
        progress.traced()
        checks = isolation.checks(observer, checked, present, progress, found.not_zero)
    found = batch_sums.over_replicas(batch_sums.after(checks, found))
    with tf.control_dependencies([found.counts]):  # counts of steps, too, wait for every check
        with clipping.update_from([*found.sums.tensors(), *draw.tensors()]):
            optimizer.apply_private(found.sums, draw)
        replicas.merged(functools.partial(_finish, optimizer, found, draw))
    return logs


def _refuse(optimizer: PrivateOptimizer, data: Any) -> None:
    """Raises PrivacyError for data that is no batch of a sampler, or where it cannot be a step."""
    if not is_sampled(data):
        raise PrivacyError(
            "Expected a batch made by this plan's sampler, got one without its marker: train with "
            "model.fit(plan.sampling.batches(dataset)). Batches made any other way void the "
            "plan's accounting."
        )
    if tf.distribute.get_strategy() is not optimizer._distribution_strategy:
        raise PrivacyError(
            f"Expected a step under the strategy of the optimizer, "
            f"{type(optimizer._distribution_strategy).__name__}, got "
            f"{type(tf.distribute.get_strategy()).__name__}: build and compile the model inside "
            "strategy.scope()."
        )
    if optimizer.compiles and data[2]["present"].shape[0] is None:
        raise PrivacyError(
            "Expected batches of a fixed size with jit_compile=True, got some of unknown size: "
            "pass the sampler's own batches, without batch or unbatch."
        )


def _finish(optimizer: PrivateOptimizer, found: batch_sums.BatchSums, draw: noise.Draw) -> None:
    optimizer.end_step(found.statistic, draw)
    _count(optimizer, found)


def _checked_examples(optimizer: PrivateOptimizer, batch: Any) -> Any:
    """What isolation is checked on; of a large batch a micro-batch, so that memory stays fixed."""
    x, y, weights = batch
    batch = x, y, {**weights, "marker": weights["present"]}  # that of the batch fits no part
    if optimizer.microbatch_size is not None:
        batch = tf.nest.map_structure(lambda leaf: leaf[: optimizer.microbatch_size], batch)
    return batch


def _count(optimizer: PrivateOptimizer, found: batch_sums.BatchSums) -> None:
    """Adds to the running totals that reports read."""
    totals = optimizer.diagnostics
    totals.add(found.counts)
    if optimizer.tables and optimizer.selects_rows:  # else which rows were looked up would be told
        of_table = {id(table): rows for table, rows in found.sums.tables}
        rows = [tf.size(of_table[id(table)].indices, tf.int64) for table in optimizer.tables]
        totals.rows.assign_add(tf.stack(rows))


def build_for(model: keras.Model, optimizer: PrivateOptimizer, batch: Any) -> None:
    """Creates all variables for batches `(x, y, weights)` like this one, or of this signature.

    On every replica, and before anything is recorded.
    """
    x, y, _ = batch
    with tf.init_scope(), model.distribute_strategy.scope():
        if not _all_built(model):
            model._symbolic_build(data_batch=(x, y, None))  # weights may lack the losses' axes
        if not _all_built(model):  # as a layer that is an activation, which needs a real call
            specs = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), x)
            given = {"training": False} if model._call_has_training_arg else {}
            called = functools.partial(model, **given)
            tf.function(called, autograph=False).get_concrete_function(specs)
        _build_optimizer(model, optimizer)


def _all_built(model: keras.Model) -> bool:
    return all(layer.built for layer in model._flatten_layers())


def _build_optimizer(model: keras.Model, optimizer: PrivateOptimizer) -> None:
    if not model.trainable_variables:
        raise ValueError(
            f"Expected a model with something to train, got {model.name} without trainable "
            "variables."
        )
    for variable in model.trainable_variables:
        if variable.dtype != "float32":
            raise ValueError(
                f"Expected variables in float32, got {variable.path} in {variable.dtype}: use "
                'dtype="float32", or a mixed policy, which keeps variables in float32.'
            )
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    if optimizer.delays_noise:
        flushing.guard_layers(model, optimizer)


def _trimmed(data: Any) -> Any:
    """The batch without the padding after its last real example, but of two examples at least.

    Padding is there for a fixed shape between the sampler and the step; nothing in the graph needs
    it.
    """
    x, y, weights = data
    present = weights["present"]
    capacity = tf.shape(present)[0]
    last = tf.reduce_max(tf.where(present > 0, tf.range(1, capacity + 1), 0))
    size = tf.minimum(tf.maximum(last, 2), capacity)
    marker = weights["marker"]
    x, y, weights = tf.nest.map_structure(
        lambda leaf: leaf[:size], (x, y, dict(weights, marker=present))
    )
    return x, y, dict(weights, marker=marker)

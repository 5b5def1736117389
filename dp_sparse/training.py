"""The private train step, and the `compile` hook that installs it.

Importing `dp_sparse` wraps the `compile` found on `keras.Model`'s MRO. Compiling with a private
optimizer gives that model the private step; compiling with any other gives the stock step back. One
step: one recorded forward pass, one backward pass to the pre-activations, then selection, clipping
and noise from the records (DP-AdaFEST, Algorithm 1).
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping, isolation, noise
from dp_sparse.clipping.uses import Rows, Use
from dp_sparse.errors import PrivacyError, translated
from dp_sparse.losses import per_example_losses
from dp_sparse.optimizers import PrivateOptimizer, PrivateSums, RowChoice
from dp_sparse.sampling.marker import is_sampled
from dp_sparse.selection.contribution import TableLookups

_REPLACED = ("train_step", "make_train_function")
_Used = list[tuple[keras.Variable, Use]]


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
            _install_private_step(self, optimizer)

    compile._dp_sparse_original = original  # type: ignore[attr-defined]
    owner.compile = compile


def _restore_stock_step(model: keras.Model) -> None:
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
    if model._distribute_strategy is not None:
        raise PrivacyError(
            f"Expected a model without tf.distribute, got "
            f"{type(model._distribute_strategy).__name__}: each replica would "
            "draw noise and spend steps of its own. Build the model outside strategy.scope()."
        )
    if arguments.get("jit_compile", "auto") not in ("auto", False, None):
        raise ValueError(
            "Expected jit_compile=False with a private optimizer, got jit_compile=True: rows "
            "change by step."
        )
    tf.config.experimental.enable_tensor_float_32_execution(False)  # norms need float32's own bits
    noise.self_check()
    clipping.self_check()
    arguments["jit_compile"] = False
    arguments["auto_scale_loss"] = False
    optimizer.bind(model, functools.partial(clipping.embedding_tables, model))


def _install_private_step(model: keras.Model, optimizer: PrivateOptimizer) -> None:
    stock_make = model.make_train_function

    def make_train_function(force: bool = False) -> Any:
        if tf.distribute.has_strategy():
            raise PrivacyError("Expected fit outside strategy.scope(): train on one device.")
        if model.built and not optimizer.built:
            optimizer.build(model.trainable_variables)  # before callbacks restore its state
        stock_make(force)
        if not hasattr(model.train_function, "_dp_sparse_translated"):
            model.train_function = _translating(model, model.train_function)
        return model.train_function

    model.train_step = functools.partial(private_train_step, model, optimizer)
    model.make_train_function = make_train_function


def _translating(model: keras.Model, function: Any) -> Any:
    @functools.wraps(function)
    def run(iterator: Any) -> Any:
        try:
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
    if not is_sampled(data):
        raise PrivacyError(
            "Expected a batch made by this plan's sampler, got one without its marker: train with "
            "model.fit(plan.sampling.batches(dataset)). Batches made any other way void the "
            "plan's accounting."
        )
    capacity = optimizer.plan.sampling.batch_capacity
    x, y, weights = _trimmed(data)
    if not optimizer.built:
        _build(model, optimizer, (x, y, weights["sample_weight"]))
    draw, spent = optimizer.begin_step(weights["marker"])
    checks = isolation.checks(
        _losses_of(model, weights, capacity),
        (x, y),
        weights["present"],
        optimizer.diagnostics.isolation_checks,
    )
    with tf.control_dependencies([spent, *checks]):
        x = tf.nest.map_structure(tf.identity, x)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        recording = clipping.record(model, x, tape, capacity)
        losses = _losses(model, y, recording.outputs, weights)
        total = tf.reduce_sum(losses)
    uses = recording.uses(tape.gradient(total, recording.targets))
    recording.commit()
    uses += _unused_tables(optimizer, uses, tf.shape(losses)[0])
    real = weights["present"] * _any_weight(weights["sample_weight"])
    uses, choices = _restricted(uses, optimizer, real, draw)
    num_slots = {key: tf.size(choice.row_ids) for key, choice in choices.items()}
    sums = clipping.clip(uses, num_slots, optimizer.clip_norm, losses, real)
    optimizer.apply_private(_private_sums(model, sums, choices), draw)
    _count(
        optimizer,
        sums,
        real,
        [choices[id(table)] for table in optimizer.tables if id(table) in choices],
    )
    with tf.control_dependencies([losses]):  # its labels are checked; Keras' own are not
        y = tf.nest.map_structure(tf.identity, y)
    return _metrics(model, x, y, recording.outputs, weights)


def _build(model: keras.Model, optimizer: PrivateOptimizer, batch: Any) -> None:
    """Creates the variables of the model and the optimizer before anything is recorded."""
    with tf.init_scope():
        if not all(layer.built for layer in model._flatten_layers()):
            model._symbolic_build(data_batch=batch)
        if not model.trainable_variables:
            raise ValueError(
                f"Expected a model with something to train, got {model.name} without trainable "
                f"variables."
            )
        optimizer.build(model.trainable_variables)


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


def _losses(model: keras.Model, y: Any, y_pred: Any, weights: dict[str, Any]) -> tf.Tensor:
    """Per-example losses, 0 for padding."""
    present = weights["present"]
    sample_weight = tf.nest.map_structure(
        lambda w: w * _column(present, w), weights["sample_weight"]
    )
    return per_example_losses(model, y, y_pred, sample_weight)


def _column(present: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    return tf.reshape(present, [-1] + [1] * (weights.shape.rank - 1))


def _any_weight(sample_weight: Any) -> tf.Tensor:
    """1 for examples with some weight above 0, float32 `[batch]`: weight 0 means padding."""
    used = [
        tf.reduce_any(tf.reshape(weight > 0, [tf.shape(weight)[0], -1]), axis=1)
        for weight in tf.nest.flatten(sample_weight)
    ]
    return tf.cast(functools.reduce(tf.logical_or, used), tf.float32)


def _unused_tables(optimizer: PrivateOptimizer, uses: _Used, batch: tf.Tensor) -> _Used:
    """Tables that this batch never looked up: they get false rows, or dense noise, all the same."""
    used = {id(variable) for variable, _ in uses}
    ids = tf.zeros([batch, 0], tf.int64)
    return [
        (table, Rows(ids, tf.cast(ids, tf.bool), tf.zeros([batch, 0, table.shape[1]])))
        for table in optimizer.tables
        if id(table) not in used
    ]


def _restricted(
    uses: _Used, optimizer: PrivateOptimizer, real: tf.Tensor, draw: Any
) -> tuple[_Used, dict[int, RowChoice]]:
    """Lookups restricted to the optimizer's rows, over all tables at once, before any clipping."""
    tables = [(variable, use) for variable, use in uses if isinstance(use, Rows)]
    lookups = [
        TableLookups(variable.shape[0], use.row_ids, use.valid & (real > 0)[:, tf.newaxis])
        for variable, use in tables
    ]
    choices = optimizer.choose_rows(lookups, draw)
    chosen = {id(variable): choice for (variable, _), choice in zip(tables, choices, strict=True)}
    restricted: _Used = [
        (variable, use.restricted(chosen[id(variable)].slots) if isinstance(use, Rows) else use)
        for variable, use in uses
    ]
    return restricted, chosen


def _private_sums(
    model: keras.Model, sums: clipping.ClippedSums, choices: dict[int, RowChoice]
) -> PrivateSums:
    """The clipped sums, with zeros for variables that this batch's records did not reach.

    They are noised all the same.
    """
    reached = {id(variable): total for variable, total in sums.dense}
    tables = [
        (
            table,
            tf.IndexedSlices(
                rows, choices[id(table)].row_ids, tf.constant(list(table.shape), tf.int64)
            ),
        )
        for table, rows in sums.tables
    ]
    dense = [
        (variable, reached.get(id(variable), tf.zeros(variable.shape)))
        for variable in model.trainable_variables
        if id(variable) not in choices
    ]
    return PrivateSums(dense, tables)


def _losses_of(model: keras.Model, weights: dict[str, Any], capacity: int) -> isolation.LossesOf:
    """The recorded forward pass with all weights 1, as the isolation checks call it."""
    everyone = tf.nest.map_structure(tf.ones_like, dict(weights))

    def losses_of(x: Any, y: Any, tape: tf.GradientTape) -> tuple[tf.Tensor, list[tf.Tensor]]:
        recording = clipping.record(model, x, tape, capacity)
        return _losses(model, y, recording.outputs, everyone), recording.targets

    return losses_of


def _count(
    optimizer: PrivateOptimizer,
    sums: clipping.ClippedSums,
    real: tf.Tensor,
    choices: Sequence[RowChoice],
) -> None:
    """Adds to the running totals that reports read."""
    counts = optimizer.diagnostics
    examples = real > 0
    clipped = examples & sums.finite & (sums.squared_norms > optimizer.clip_norm**2)
    counts.examples.assign_add(tf.math.count_nonzero(examples))
    counts.clipped.assign_add(tf.math.count_nonzero(clipped))
    counts.not_finite.assign_add(tf.math.count_nonzero(examples & ~sums.finite))
    if choices and optimizer.selects_rows:  # else which rows a batch looked up would be counted
        rows = tf.stack([tf.size(choice.row_ids, tf.int64) for choice in choices])
        counts.rows.assign_add(rows)


def _metrics(
    model: keras.Model, x: Any, y: Any, y_pred: Any, weights: dict[str, Any]
) -> dict[str, Any]:
    """Keras' loss and metrics over the real examples of the batch."""
    present = weights["present"] > 0

    def real(values: Any) -> Any:
        return tf.nest.map_structure(lambda value: tf.boolean_mask(value, present), values)

    y, y_pred = real(y), real(y_pred)
    sample_weight = _by_output(real(weights["sample_weight"]), y_pred)
    loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    model._loss_tracker.update_state(loss, sample_weight=tf.math.count_nonzero(present))
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _by_output(sample_weight: Any, y_pred: Any) -> Any:
    """Weights `[batch]` with the axes of each output's losses.

    Keras' own reduction does not add them.
    """
    if tf.nest.is_nested(sample_weight) or sample_weight.shape.rank != 1:
        return sample_weight
    return tf.nest.map_structure(
        lambda output: tf.reshape(sample_weight, [-1] + [1] * (output.shape.rank - 2)), y_pred
    )

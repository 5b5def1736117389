"""The private train step, and the `compile` hook that installs it.

Importing `dp_sparse` wraps the `compile` found on `keras.Model`'s MRO. Compiling with a private optimizer gives that model the
private step; compiling with any other gives the stock step back. One step: one recorded forward pass, one backward pass to the
pre-activations, then selection, clipping and noise from the records (DP-AdaFEST, Algorithm 1).
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping
from dp_sparse.clipping.uses import Rows, Use
from dp_sparse.errors import BadExampleError, PrivacyError, require, translated
from dp_sparse.losses import per_example_losses
from dp_sparse.optimizers import PrivateOptimizer, PrivateSums, RowChoice
from dp_sparse.sampling.marker import is_sampled
from dp_sparse.selection.contribution import TableLookups

_REPLACED = ("train_step", "make_train_function", "_symbolic_build")
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
                f"{type(model).__name__} has a {name} of its own, which the private step would not run: remove it and pass "
                "loss= and metrics= to compile."
            )
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise PrivacyError(
            f"Expected one replica, got {model.distribute_strategy.num_replicas_in_sync}: each would draw noise and spend "
            "steps of its own. Train on one device."
        )
    if arguments.get("jit_compile", "auto") not in ("auto", False, None):
        raise ValueError("Expected jit_compile=False with a private optimizer, got jit_compile=True: rows change by step.")
    arguments["jit_compile"] = False
    arguments["auto_scale_loss"] = False
    optimizer.bind(model, functools.partial(clipping.embedding_tables, model))


def _install_private_step(model: keras.Model, optimizer: PrivateOptimizer) -> None:
    stock_make, stock_build = model.make_train_function, model._symbolic_build

    def make_train_function(force: bool = False) -> Any:
        stock_make(force)
        if not hasattr(model.train_function, "_dp_sparse_translated"):
            model.train_function = _translating(model.train_function)
        return model.train_function

    def symbolic_build(iterator: Any = None, data_batch: Any = None) -> None:
        if data_batch is None and iterator is not None:
            data_batch = _first_batch(iterator)
        if is_sampled(data_batch):
            data_batch = (*data_batch[:2], data_batch[2]["sample_weight"])
        stock_build(iterator, data_batch)

    model.train_step = functools.partial(private_train_step, model, optimizer)
    model.make_train_function = make_train_function
    model._symbolic_build = symbolic_build


def _translating(function: Any) -> Any:
    @functools.wraps(function)
    def run(iterator: Any) -> Any:
        with translated():
            return function(iterator)

    run._dp_sparse_translated = True  # type: ignore[attr-defined]
    return run


def _first_batch(iterator: Any) -> Any:
    for _, _, data in iterator:
        return data[0] if isinstance(data, list | tuple) else next(data)
    return None


def private_train_step(model: keras.Model, optimizer: PrivateOptimizer, data: Any) -> dict[str, Any]:
    """One step of private training on one batch of the plan's sampler.

    Args:
        model: A model compiled with `optimizer`.
        optimizer: The private optimizer.
        data: `(x, y, weights)` as `plan.sampling.batches` makes it.

    Returns:
        Training loss and metrics over the real examples: not private.

    Raises:
        PrivacyError: A batch that the plan's sampler did not make, used before, or after the last step.
        BadExampleError: An id or a label out of range.
        UnsupportedLayerError: A layer whose per-example gradients cannot be had.
    """
    if not is_sampled(data):
        raise PrivacyError(
            "Expected a batch made by this plan's sampler, got one without its marker: train with "
            "model.fit(plan.sampling.batches(dataset)). Batches made any other way void the plan's accounting."
        )
    x, y, weights = data
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    draw, spent = optimizer.begin_step(weights["marker"])
    checks = [*spent, *_isolation_checks(model, optimizer, data)]
    with tf.control_dependencies(checks):
        x = tf.nest.map_structure(tf.identity, x)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        recording = clipping.record(model, x, tape)
        losses = _losses(model, y, recording.outputs, weights)
        total = tf.reduce_sum(losses)
    uses = recording.uses(tape.gradient(total, recording.targets))
    recording.commit()
    real = weights["present"] * _any_weight(weights["sample_weight"])
    uses, choices = _restricted(uses, optimizer, real, draw)
    num_slots = {table: tf.size(choice.row_ids) for table, choice in choices.items()}
    sums = clipping.clip(uses, num_slots, optimizer.clip_norm, losses, real)
    optimizer.apply_private(_private_sums(model, sums, choices), draw)
    _count(optimizer, sums, real, [choices[id(table)] for table in optimizer.tables if id(table) in choices])
    return _metrics(model, x, y, recording.outputs, weights)


def _losses(model: keras.Model, y: Any, y_pred: Any, weights: dict[str, Any]) -> tf.Tensor:
    """Per-example losses, 0 for padding."""
    present = weights["present"]
    sample_weight = tf.nest.map_structure(lambda w: w * _column(present, w), weights["sample_weight"])
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


def _restricted(
    uses: _Used, optimizer: PrivateOptimizer, real: tf.Tensor, draw: Any
) -> tuple[_Used, dict[int, RowChoice]]:
    """Lookups restricted to the rows that the optimizer chooses, over all tables at once, before any clipping."""
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
    """The clipped sums, with zeros for variables that this batch's records did not reach: they are noised all the same."""
    reached = {id(variable): total for variable, total in sums.dense}
    tables = [
        (table, tf.IndexedSlices(rows, choices[id(table)].row_ids, tf.constant(list(table.shape), tf.int64)))
        for table, rows in sums.tables
    ]
    dense = [
        (variable, reached.get(id(variable), tf.zeros(variable.shape)))
        for variable in model.trainable_variables
        if id(variable) not in choices
    ]
    return PrivateSums(dense, tables)


def _isolation_checks(model: keras.Model, optimizer: PrivateOptimizer, data: Any) -> list[Any]:
    """On the first step, fails unless ∂loss[0]/∂z[1:] is exactly 0 for every recorded z."""

    def coupled() -> tf.Tensor:
        x, y, weights = data
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            recording = clipping.record(model, x, tape)
            present = dict(weights, present=tf.ones_like(weights["present"]))
            first = _losses(model, y, recording.outputs, dict(present, sample_weight=_ones(weights)))[0]
        cotangents = tape.gradient(first, recording.targets, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        leaks = [tf.reduce_any(tf.not_equal(tf.convert_to_tensor(c)[1:], 0)) for c in cotangents]
        return tf.reduce_any(tf.stack(leaks))

    first_step = tf.equal(optimizer.steps_in_process(), 1)
    leaked = tf.cond(first_step, coupled, lambda: tf.constant(False))
    message = (
        "The loss of one example depends on another example of its batch, so clipping each example would not bound its "
        "influence. Remove what mixes examples (batch statistics, contrastive or in-batch losses)."
    )
    return [check for check in [require(~leaked, PrivacyError, message)] if check is not None]


def _ones(weights: dict[str, Any]) -> Any:
    return tf.nest.map_structure(tf.ones_like, weights["sample_weight"])


def _count(
    optimizer: PrivateOptimizer, sums: clipping.ClippedSums, real: tf.Tensor, choices: Sequence[RowChoice]
) -> None:
    """Adds to the running totals that reports read."""
    counts = optimizer.diagnostics
    examples = real > 0
    clipped = examples & sums.finite & (sums.squared_norms > optimizer.clip_norm**2)
    counts.examples.assign_add(tf.math.count_nonzero(examples))
    counts.clipped.assign_add(tf.math.count_nonzero(clipped))
    counts.not_finite.assign_add(tf.math.count_nonzero(examples & ~sums.finite))
    if choices:
        rows = tf.stack([tf.size(choice.row_ids, tf.int64) for choice in choices])
        counts.rows.assign_add(rows)


def _metrics(model: keras.Model, x: Any, y: Any, y_pred: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Keras' loss and metrics over the real examples of the batch."""
    present = weights["present"] > 0

    def real(values: Any) -> Any:
        return tf.nest.map_structure(lambda value: tf.boolean_mask(value, present), values)

    y, y_pred, sample_weight = real(y), real(y_pred), real(weights["sample_weight"])
    loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    model._loss_tracker.update_state(loss, sample_weight=tf.math.count_nonzero(present))
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

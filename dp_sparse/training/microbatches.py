"""A logical batch of any size in fixed memory, part by part.

The rows of the whole batch are chosen first, from its ids alone; then each part is clipped with
that choice and added up. Noise comes later and once, so micro-batches change neither the guarantee
nor, but for rounding and dropout masks, the numbers.
"""

from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping, noise
from dp_sparse.clipping import Rows, exact
from dp_sparse.core import PrivacyError, require
from dp_sparse.optimizers import PrivateOptimizer, PrivateSums
from dp_sparse.selection import RowChoice
from dp_sparse.training import forward_backward, metrics
from dp_sparse.training.batch_gradient import (
    BatchSums,
    Choices,
    choose_rows,
    clipped_sums,
)
from dp_sparse.training.forward_backward import Pass

_State = dict[str, Any]  # what the loop carries from part to part


def by_parts(
    model: keras.Model, optimizer: PrivateOptimizer, batch: Any, draw: noise.Draw, size: int
) -> tuple[BatchSums, dict[str, Any]]:
    """Sums over the batch `(x, y, weights)` in parts of `size`, and Keras' logs.

    The first pass is there for its ids: of the rest of it, nothing is used and so nothing computed.
    """
    whole = forward_backward.unchecked(model, optimizer, batch, draw)
    _build_metrics(model, batch, whole)
    choices = choose_rows(optimizer, whole.uses, _examples_with_ids(whole, batch), draw)
    tables = [variable for variable, use in whole.uses if isinstance(use, Rows)]
    dense = [v for v in model.trainable_variables if id(v) not in choices]
    found_at = {id(variable): use.row_ids for variable, use in whole.uses if isinstance(use, Rows)}
    lookups = [(found_at[id(table)], choices[id(table)].slots) for table in tables]

    def add_part(begin: tf.Tensor, state: _State) -> tuple[tf.Tensor, _State]:
        own, own_lookups = _part((batch, lookups), begin, size)
        run = forward_backward.run(model, optimizer, own, draw, 1 + begin // size)
        # Ids that do not lead with the batch cannot be compared, which the losses wait to know.
        with tf.control_dependencies([run.losses]):
            checks = _same_rows(run, tables, own_lookups)
        with tf.control_dependencies(checks):
            own_slots = [tf.identity(slots) for _, slots in own_lookups]
        real = forward_backward.checked_examples(run, own)
        found = clipped_sums(model, optimizer, run, _with_slots(choices, tables, own_slots), real)
        metrics.update(model, own, run.outputs, run.losses, run.output_losses)
        return begin + size, _added(state, found, (dense, tables))

    state, shapes = _start(dense, tables, choices, clipping.count_tensors(whole.uses, whole.losses))
    examples = tf.shape(batch[2]["present"])[0]
    _, state = tf.while_loop(
        lambda begin, _: begin < examples,
        add_part,
        (tf.constant(0), state),
        (tf.TensorShape([]), shapes),
        parallel_iterations=1,
    )
    sums = _sums(state, dense, tables, choices)
    found = BatchSums(sums, state["counts"], state["statistic"], state["not_zero"])
    return found, model.get_metrics_result()


def _examples_with_ids(whole: Pass, batch: Any) -> tf.Tensor:
    """The real examples, once the ids were found to lead with the batch; parts check the rest."""
    ids = [(v.path, use.row_ids) for v, use in whole.uses if isinstance(use, Rows)]
    with tf.control_dependencies(clipping.require_batch_leads(ids, batch[2]["present"])):
        return tf.identity(forward_backward.real_examples(batch))


def _part(structure: Any, begin: tf.Tensor, size: int) -> Any:
    """The examples from `begin` on, `size` at most; the marker belongs to the batch and stays."""
    (x, y, weights), lookups = structure
    cut, marker = (x, y, {**weights, "marker": weights["present"]}, lookups), weights["marker"]
    x, y, weights, lookups = tf.nest.map_structure(lambda leaf: leaf[begin : begin + size], cut)
    return (x, y, {**weights, "marker": marker}), lookups


def _same_rows(run: Pass, tables: list[keras.Variable], lookups: Any) -> list[tf.Operation]:
    """Fails if a part looks up other rows than the first pass did: norms would not fit the sums."""
    own = {id(variable): use.row_ids for variable, use in run.uses if isinstance(use, Rows)}
    message = (
        "The rows that an example looks up changed between two passes over it: ids that depend on "
        "random layers cannot be trained with microbatch_size. Leave it out."
    )
    checks = [
        require(tf.reduce_all(tf.equal(own[id(table)], row_ids)), PrivacyError, message)
        for table, (row_ids, _) in zip(tables, lookups, strict=True)
    ]
    return [check for check in checks if check is not None]


def _with_slots(choices: Choices, tables: list[keras.Variable], slots: list[tf.Tensor]) -> Choices:
    return {
        id(table): RowChoice(choices[id(table)].row_ids, own)
        for table, own in zip(tables, slots, strict=True)
    }


def _start(
    dense: list[keras.Variable],
    tables: list[keras.Variable],
    choices: Choices,
    tensors: int,
) -> tuple[_State, _State]:
    """Zeros of every sum, and the shapes that they keep."""
    counts = [tf.size(choices[id(table)].row_ids) for table in tables]
    state = {
        "dense": [tf.zeros(variable.shape, tf.float64) for variable in dense],
        "rows": [
            tf.zeros([n, table.shape[1]], tf.float64)
            for n, table in zip(counts, tables, strict=True)
        ],
        "counts": tf.zeros([3], tf.int64),
        "statistic": tf.zeros([], tf.float64),
        "not_zero": tf.zeros([tensors], tf.bool),
    }
    shapes = {
        **tf.nest.map_structure(lambda value: value.shape, state),
        "rows": [tf.TensorShape([None, table.shape[1]]) for table in tables],
    }
    return state, shapes


def _added(state: _State, found: BatchSums, names: tuple[Any, Any]) -> _State:
    dense, tables = names
    of_dense = {id(variable): total for variable, total in found.sums.dense}
    of_rows = {id(table): rows.values for table, rows in found.sums.tables}
    return {
        "dense": _sum(state["dense"], [of_dense[id(v)] for v in dense]),
        "rows": _sum(state["rows"], [of_rows[id(table)] for table in tables]),
        "counts": state["counts"] + found.counts,
        "statistic": state["statistic"] + found.statistic,
        "not_zero": state["not_zero"] | found.not_zero,
    }


def _sum(totals: list[tf.Tensor], parts: list[tf.Tensor]) -> list[tf.Tensor]:
    return [total + exact(part) for total, part in zip(totals, parts, strict=True)]


def _sums(
    state: _State, dense: list[keras.Variable], tables: list[keras.Variable], choices: Choices
) -> PrivateSums:
    slices = [
        tf.IndexedSlices(rows, choices[id(t)].row_ids, tf.constant(list(t.shape), tf.int64))
        for rows, t in zip(state["rows"], tables, strict=True)
    ]
    return PrivateSums(
        list(zip(dense, state["dense"], strict=True)), list(zip(tables, slices, strict=True))
    )


def _build_metrics(model: keras.Model, batch: Any, whole: Pass) -> None:
    """Creates what Keras would create at its first update, which cannot be inside a loop."""
    metrics = model._compile_metrics
    if metrics is not None and not metrics.built:
        metrics.build(batch[1], whole.outputs)

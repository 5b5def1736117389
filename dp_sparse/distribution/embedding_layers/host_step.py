"""What is done to a batch on the host: its rows are chosen, their noise drawn, both laid out.

A choice rests on ids alone, so it is made in the input pipeline, ahead of the step. With a window
it rests on batches that the pipeline prepared before, whose steps come first.

### Formal Guarantees
Selection and noise are those of DP-AdaFEST, from a secret key that is new for every pass; a choice
belongs to one batch, whose marker goes with it, and is released by the step that takes that batch.
A pipeline has a window of its own: one that its end cuts short is dropped, with the survivors that
no step has used.
Noise of rows, of deviation C·σ2, is drawn in float64 and rounded to the `grid` of the gradients
that the layer adds to it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dp_sparse import noise
from dp_sparse.core import BadExampleError, PrivacyError, grouped, require
from dp_sparse.distribution.embedding_layers.private_tables import Feature, PrivateTables, Table
from dp_sparse.optimizers import SelectionWindow
from dp_sparse.sampling import Batch, batch_of, real_examples
from dp_sparse.selection import StepRows, TableLookups

_SENT = ("features", "id_weights", "keep", "first", "noise", "filled")


@dataclasses.dataclass(frozen=True)
class Ids:
    """A feature's ids in a batch.

    Attributes:
        row_ids: int64 `[examples, lookups]`, 0 where there is none.
        weights: float32 `[examples, lookups]`, 0 where there is none.
    """

    row_ids: tf.Tensor
    weights: tf.Tensor


class HostStep:
    """Maps a sampler's batch to what the device step takes; for `tf.data.Dataset.map`.

    Args:
        tables: The tables.
        steps: Of the run, before this one's first.
        window: Of the optimizer's `new_window`.
    """

    def __init__(
        self, tables: PrivateTables, steps: int = 0, window: SelectionWindow | None = None
    ) -> None:
        self._tables, self._steps, self._window = tables, steps, window
        self._optimizer = tables.private_optimizer
        self._key = noise.NoiseKey(self._optimizer.plan.sampling.not_private_seed, steps)

    def __call__(self, x: Any, y: Any, weights: dict[str, Any]) -> dict[str, Any]:
        """A dictionary of what `device_step.sums_of` reads, and the `marker`.

        Leaves are `[examples, ...]`, but noise, its ids and `filled` `[capacity, ...]`, and a bag's
        backward ids `[examples · lookups, None]`. `keep`, of each feature, float32
        `[examples, lookups]`, is what a lookup adds of the activation's gradient to its row's, 0
        for rows that were not chosen. `first`, int32 `[examples, lookups]`, of each table in which
        an example looks up more than once, in the order of its features: which lookup was the first
        of the same row.
        `filled`, int32, is 1 where there is a chosen row. `window`, int64 `[examples, 4]`, has
        `SelectionWindow.last_ended` in each line.

        Raises:
            ValueError: Inputs that do not fit the features.
            BadExampleError: When it runs, an id or a weight out of its range.
            PrivacyError: When it runs, more rows than there is room for, once in 10^13 steps.
        """
        examples, marker = self._padded(batch_of((x, y, weights)))
        x, real = examples.x, real_examples(examples)
        ids = {feature.name: read_ids(feature, x, table) for table, feature in self._pairs()}
        lookups = [self._lookups(table, ids, real) for table in self._tables.tables]
        draw, window = self._key.next_draw(), self._window
        ended = tf.zeros([4], tf.int64) if window is None else window.last_ended()
        chosen = self._optimizer.rows_ahead(
            lookups,
            draw,
            window,
            self._steps + draw.number,
            [table.capacity for table in self._tables.tables],
        )
        parts = [
            self._of_lookups(*each, ids)
            for each in zip(self._tables.tables, lookups, chosen, strict=True)
        ]
        sent = _joined([*parts, *self._of_noise(chosen, draw)])
        others = examples._replace(x=other_inputs(x, self._tables))
        state = tf.tile(ended[tf.newaxis], [self._tables.examples, 1])
        return {**sent, "examples": others, "marker": marker, "window": state}

    def to_look_up(self, x: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The layer's features and weights for ids `[examples, ...]`, with no row chosen."""
        tables, real = self._tables.tables, tf.ones([self._tables.examples])
        ids = {feature.name: read_ids(feature, x, table) for table, feature in self._pairs()}
        lookups = [self._lookups(table, ids, real) for table in tables]
        nothing = tf.zeros([0], tf.int64)
        no_rows = [StepRows(nothing, tf.fill(tf.shape(own.row_ids), -1)) for own in lookups]
        parts = [
            self._of_lookups(*each, ids) for each in zip(tables, lookups, no_rows, strict=True)
        ]
        sent = _joined([*parts, *self._of_noise(no_rows, self._key.next_draw())])
        return sent["features"], sent["id_weights"]

    def _pairs(self) -> list[tuple[Table, Feature]]:
        return [(table, feature) for table in self._tables.tables for feature in table.features]

    def _padded(self, batch: Batch) -> Batch:
        missing = self._tables.examples - self._optimizer.plan.sampling.batch_capacity
        return tf.nest.map_structure(
            lambda leaf: tf.pad(leaf, [[0, missing]] + [[0, 0]] * (leaf.shape.rank - 1)), batch
        )

    def _lookups(self, table: Table, ids: dict[str, Ids], real: tf.Tensor) -> TableLookups:
        row_ids = tf.concat([ids[feature.name].row_ids for feature in table.features], 1)
        used = tf.concat([ids[feature.name].weights > 0 for feature in table.features], 1)
        return TableLookups(table.num_rows, row_ids, used & (real > 0)[:, tf.newaxis])

    def _of_lookups(
        self, table: Table, lookups: TableLookups, rows: StepRows, ids: dict[str, Ids]
    ) -> dict[str, dict[str, Any]]:
        kept = tf.cast(lookups.valid & (rows.places >= 0), tf.float32)
        widths = [feature.most_ids for feature in table.features]
        sent: dict[str, dict[str, Any]] = {key: {} for key in ("features", "id_weights", "keep")}
        for feature, own in zip(table.features, tf.split(kept, widths, 1), strict=True):
            found = ids[feature.name]
            if not feature.bag:
                sent["features"][feature.name] = tf.cast(found.row_ids[:, 0], tf.int32)
                sent["keep"][feature.name] = own
                continue
            sent["keep"][feature.name] = _gains(feature.combiner, found.weights) * own
            row_ids = tf.cast(found.row_ids, tf.int32)
            sent["features"][feature.name] = _ragged(row_ids, found.weights > 0)
            places = tf.reshape(row_ids, [-1, 1]), tf.reshape(own, [-1, 1]) > 0
            sent["features"][feature.backward] = _ragged(*places)
            if feature.weights is not None:
                sent["id_weights"][feature.name] = _ragged(found.weights, found.weights > 0)
        if sum(widths) > 1:
            sent["first"] = {table.path: _first_of_example(lookups.row_ids, lookups.valid)}
        return sent

    def _of_noise(
        self, chosen: Sequence[StepRows], draw: noise.Draw
    ) -> list[dict[str, dict[str, Any]]]:
        """The chosen rows as ids, and the noise of each; places without an id have none."""
        grid, pairs = self._tables.grid, list(zip(self._tables.tables, chosen, strict=True))
        sizes = [tf.size(rows.row_ids) * table.width for table, rows in pairs]
        noisy = grid.noise(noise.normal(draw, noise.Purpose.ROWS, tf.add_n(sizes)))
        parts = tf.split(noisy, tf.stack(sizes), num=len(sizes))
        return [
            self._spread(table, rows.row_ids, tf.reshape(own, [-1, table.width]))
            for (table, rows), own in zip(pairs, parts, strict=True)
        ]

    def _spread(
        self, table: Table, row_ids: tf.Tensor, noise_of: tf.Tensor
    ) -> dict[str, dict[str, Any]]:
        """Shares rows out over the replicas and their cores, each of which has its own places."""
        count, shards = tf.size(row_ids), self._tables.shards
        room = require(
            count <= table.capacity,
            PrivacyError,
            f"More rows of {table.path} survived than the {table.capacity} that there is room for, "
            "which noise alone does once in 10^13 steps. Nothing was released; go on from the last "
            "checkpoint.",
        )
        with tf.control_dependencies([room]):
            index = tf.range(count)
        of_replica, replicas = shards // self._tables.replicas, self._tables.replicas
        shard = index % replicas * of_replica + index // replicas % of_replica
        place = shard * (table.capacity // shards) + index // shards
        filled = tf.scatter_nd(place[:, tf.newaxis], tf.ones_like(place), [table.capacity])
        ordered = tf.gather(tf.cast(row_ids, tf.int32), tf.argsort(place))
        ids = tf.RaggedTensor.from_row_lengths(ordered, filled, validate=False)
        shape = [table.capacity, table.width]
        values = tf.scatter_nd(place[:, tf.newaxis], noise_of, shape)
        return {
            "features": {table.noise: ids},
            "noise": {table.path: values},
            "filled": {table.path: filled},
        }


def _joined(parts: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    return {key: {n: v for part in parts for n, v in part.get(key, {}).items()} for key in _SENT}


def other_inputs(x: dict[str, tf.Tensor], tables: PrivateTables) -> dict[str, tf.Tensor]:
    """What of the inputs goes to the model as it is."""
    taken = {name for f in tables.features for name in (f.name, f.weights)}
    return {name: value for name, value in x.items() if name not in taken}


def read_ids(feature: Feature, x: Any, table: Table) -> Ids:
    """A feature's ids and weights among the inputs.

    Raises:
        ValueError: It is not there, or of another shape or type.
        BadExampleError: When the step runs, an id or a weight out of its range.
    """
    given = tf.convert_to_tensor(_input(feature.name, x))
    if not given.dtype.is_integer:
        raise ValueError(
            f"Expected integer ids of {feature.name!r}, got {given.dtype.name}: number its values "
            "from 0 on, or hash them, beforehand."
        )
    given = tf.cast(given, tf.int64)
    if not feature.bag and given.shape.rank == 1:
        given = given[:, tf.newaxis]
    if given.shape[1:] != [feature.most_ids]:
        shape = f"[batch, {feature.most_ids}]" if feature.bag else "[batch] or [batch, 1]"
        raise ValueError(
            f"Expected ids of {feature.name!r} of shape {shape}, got {given.shape}: name features "
            "with several ids in bags=, with the most ids that an example has."
        )
    lowest = -1 if feature.bag else 0
    accepted = f"ids in [0, {table.num_rows}){', or -1 for none,' if feature.bag else ''}"
    weights = tf.cast(given >= 0, tf.float32)
    checks = [
        _in_range(accepted, feature, given, (given >= lowest) & (given < table.num_rows)),
    ]
    if feature.weights is not None:
        own = tf.convert_to_tensor(_input(feature.weights, x))
        if not (own.dtype.is_floating or own.dtype.is_integer):
            raise ValueError(
                f"Expected numbers as weights of {feature.name!r}, got {own.dtype.name}."
            )
        own = tf.cast(own, tf.float32)
        if own.shape[1:] != given.shape[1:]:
            raise ValueError(
                f"Expected weights of {feature.name!r} of the shape of its ids, {given.shape}, got "
                f"{own.shape}."
            )
        checks.append(_in_range("weights 0 or in [1e-15, 1e15]", feature, own, _is_weight(own)))
        weights *= own
    with tf.control_dependencies(checks):
        return Ids(tf.maximum(given, 0), tf.identity(weights))


def _input(name: str, x: Any) -> tf.Tensor:
    if not isinstance(x, dict) or name not in x:
        got = sorted(x) if isinstance(x, dict) else type(x).__name__
        raise ValueError(f"Expected {name!r} among the inputs, in a dictionary, got {got}.")
    return x[name]


def _in_range(accepted: str, feature: Feature, values: tf.Tensor, good: tf.Tensor) -> tf.Operation:
    flat = tf.concat([tf.reshape(values, [-1]), tf.zeros([1], values.dtype)], 0)
    bad = tf.concat([tf.reshape(~good, [-1]), [True]], 0)
    worst = flat[tf.argmax(tf.cast(bad, tf.int32))]
    message = f"Expected {accepted} in feature {feature.name!r}, got {{}}. Clip them, or hash ids."
    return require(tf.reduce_all(good), BadExampleError, message, worst)


def _is_weight(values: tf.Tensor) -> tf.Tensor:
    """Whether a layer's float32 can square them and divide by sums of them."""
    return tf.equal(values, 0) | ((values >= 1e-15) & (values <= 1e15))


def _ragged(values: tf.Tensor, used: tf.Tensor) -> tf.RaggedTensor:
    lengths = tf.reduce_sum(tf.cast(used, tf.int32), axis=1)
    flat = tf.boolean_mask(values, used)
    return tf.RaggedTensor.from_row_lengths(flat, lengths, validate=False)


def _gains(combiner: str, weights: tf.Tensor) -> tf.Tensor:
    """What the row of each id gets of the gradient of its bag, float32 `[examples, lookups]`."""
    exact = tf.cast(weights, tf.float64)
    if combiner == "mean":
        exact = tf.math.divide_no_nan(exact, tf.reduce_sum(exact, 1, keepdims=True))
    elif combiner == "sqrtn":
        norms = tf.sqrt(tf.reduce_sum(exact * exact, 1, keepdims=True))
        exact = tf.math.divide_no_nan(exact, norms)
    return tf.cast(exact, tf.float32)


def _first_of_example(row_ids: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
    """For each valid lookup the place of the example's first one of the same row; int32.

    Of others, their own place.
    """
    examples, lookups = row_ids.shape
    nowhere = tf.reduce_max(row_ids) + 1 + tf.range(lookups, dtype=tf.int64)
    row_ids = tf.where(valid, row_ids, nowhere)
    example = tf.repeat(tf.range(examples, dtype=tf.int64), lookups)
    num_rows = tf.reduce_max(row_ids) + 1
    groups = grouped(example * num_rows + tf.reshape(row_ids, [-1]), -1)
    at = tf.range(examples * lookups)
    first = tf.math.unsorted_segment_min(at, groups.places, tf.size(groups.values))
    return tf.reshape(tf.gather(first, groups.places) % lookups, [examples, lookups])

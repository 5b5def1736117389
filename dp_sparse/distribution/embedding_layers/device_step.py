"""The step on the device: look rows up, run the model, clip, hand the layer its gradients."""

import dataclasses
import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse import clipping, noise
from dp_sparse.clipping import Rows, Terms, exact
from dp_sparse.core import PrivacyError, UnsupportedLayerError, replicas, xla
from dp_sparse.distribution.embedding_layers.layer_adapters import TableLayer
from dp_sparse.distribution.embedding_layers.private_tables import PrivateTables, Table
from dp_sparse.guards import Isolation
from dp_sparse.sampling import Examples, real_examples
from dp_sparse.step import has_own_loss, led_by_batch, losses_with_padding, refuse_nan

PreparedBatch = dict[str, Any]

# Random layers take their seeds from 0 on; this is the first number beyond them.
_ROUNDING = 2**14


def sums_of(
    model: keras.Model,
    tables: PrivateTables,
    layer: TableLayer,
    batch: PreparedBatch,
    draw: noise.Draw,
) -> tuple[dict[str, Any], list[xla.Postponed]]:
    """One replica's clipped sums over the dense variables; the tables are updated on the way.

    Whatever check fails is found afterwards, by the caller; the tables got gradients of 0 then.

    Returns:
        Over all replicas `counts`, int32 `[3]` as `Amounts.counts`, and `rows`, int32, chosen in
        each table; this replica's `dense` sums, float32 or float64, `losses`, `output_losses` and
        `outputs`; and the checks.
    """
    with xla.postponing() as checks:
        batch = {**batch, "examples": refuse_nan(model, batch["examples"])}
        lookup = layer.look_up(batch["features"], batch["id_weights"])
        activations = {f.name: lookup.activations[f.name] for f in tables.features}
        run = _backward(model, tables, batch, activations, _seeds(draw))
        optimizer, real = tables.private_optimizer, real_examples(batch["examples"])
        clip_norm, style = tables.grid.clip_norm_before_rounding, optimizer.clipping
        found = clipping.scaled(run.terms, clip_norm, run.losses, real, style)
        sums = found.dense_sums()
    good = tf.reduce_all([check.condition for check in checks]) if checks else tf.constant(True)
    lookup.push(_output_gradients(tables, batch, run.cotangents, found, good, draw))
    everyone: dict[str, Any] = {"counts": found.counts(real, tf.int32)}
    everyone["rows"] = tf.stack([tf.reduce_sum(batch["filled"][t.path]) for t in tables.tables])
    everyone = replicas.merged(replicas.summed, everyone)
    dense = [sums.get(id(v), tf.zeros(v.shape)) for v in model.trainable_variables]
    own = {
        "dense": dense,
        "losses": run.losses,
        "output_losses": run.output_losses,
        "outputs": run.recording.outputs,
    }
    return {**everyone, **own}, checks


def isolation_of(model: keras.Model, tables: PrivateTables) -> Isolation:
    """The checks of the model's pass over what `made_up` gives."""

    def recorded(given: Any, seeds: clipping.Seeds) -> tuple[Terms, tf.Tensor, bool]:
        own, activations = given
        found = _backward(model, tables, own, activations, seeds)
        return found.terms, found.losses, found.recording.seeds_drawn > 0

    return Isolation(model, recorded, _of_data, own_size=True)


def made_up(tables: PrivateTables, batch: PreparedBatch) -> Any:
    """What a batch of one replica gives the pass, with random activations.

    The layer looks up each id on its own, so only the model can couple examples; random activations
    show that as well as true ones.
    """
    random = np.random.default_rng(0)
    examples = tables.examples // tables.replicas
    activations = {
        feature.name: random.normal(size=(examples, table.width)).astype(np.float32)
        for table in tables.tables
        for feature in table.features
    }
    return {name: batch[name] for name in ("examples", "keep", "first")}, activations


def _of_data(given: Any) -> Any:
    """Whether each leaf of what the pass takes holds inputs or labels, bool."""
    own, activations = given
    no = {name: tf.nest.map_structure(lambda _: False, own[name]) for name in ("keep", "first")}
    yes = tf.nest.map_structure(lambda _: True, activations)
    return {"examples": own["examples"].of_data(), **no}, yes


@dataclasses.dataclass(frozen=True)
class _Backward:
    """A forward and a backward pass of the model, from activations that were looked up.

    Attributes:
        recording: The forward pass.
        losses: float32 `[batch]`.
        output_losses: The same for each output whose loss Keras tracks by itself.
        cotangents: Of the activations, by feature.
        uses: Of the model's variables, and of the tables.
    """

    recording: clipping.Recording
    losses: tf.Tensor
    output_losses: list[tf.Tensor]
    cotangents: dict[str, tf.Tensor]
    terms: Terms


def _backward(
    model: keras.Model,
    tables: PrivateTables,
    batch: PreparedBatch,
    activations: dict[str, tf.Tensor],
    seeds: clipping.Seeds,
) -> _Backward:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(activations)
        recording, losses, of_outputs = _forward(model, tables, batch, activations, tape, seeds)
        total = tf.reduce_sum(losses)
    targets = recording.targets
    with clipping.guarded():
        gradients = tape.gradient(total, [*targets, *activations.values()])
        terms = recording.terms(gradients[: len(targets)])
    cotangents = {
        name: tf.zeros_like(activations[name]) if own is None else tf.cast(own, tf.float32)
        for name, own in zip(activations, gradients[len(targets) :], strict=True)
    }
    terms += [(table, _rows(table, batch, cotangents)) for table in tables.tables]
    losses = led_by_batch(terms, losses, batch["examples"].present)
    return _Backward(recording, losses, of_outputs, cotangents, terms)


def _forward(
    model: keras.Model,
    tables: PrivateTables,
    batch: PreparedBatch,
    activations: dict[str, tf.Tensor],
    tape: tf.GradientTape,
    seeds: clipping.Seeds,
) -> tuple[clipping.Recording, tf.Tensor, list[tf.Tensor]]:
    examples: Examples = batch["examples"]
    if has_own_loss(model):
        raise PrivacyError(
            f"{type(model).__name__} has a compute_loss of its own, which train_tables does not "
            "run: pass loss= to compile, or train with fit, which runs it."
        )
    x = {**examples.x, **activations}
    recording = clipping.record(model, x, tape, tables.examples, seeds)
    if recording.seeds_drawn > _ROUNDING:
        raise UnsupportedLayerError(
            f"Expected at most {_ROUNDING} random layers, got {recording.seeds_drawn}: the secret "
            "seeds of others would be used twice. Leave some out."
        )
    losses, of_outputs = losses_with_padding(model, examples, recording.outputs)
    return recording, losses, of_outputs


def _rows(table: Table, batch: PreparedBatch, cotangents: dict[str, tf.Tensor]) -> Rows:
    """The table's lookups as far as they were chosen, with the gradient of each one's row.

    Rows go by the place of their first lookup in the example: only which are equal matters.
    """
    keep = [batch["keep"][feature.name] for feature in table.features]
    gradients = [
        own[..., tf.newaxis] * cotangents[feature.name][:, tf.newaxis]
        for own, feature in zip(keep, table.features, strict=True)
    ]
    chosen = tf.concat(keep, 1) > 0
    first = batch["first"].get(table.path, tf.zeros(tf.shape(chosen), tf.int32))
    return Rows(tf.cast(first, tf.int64), chosen, tf.concat(gradients, 1))


def _output_gradients(
    tables: PrivateTables,
    batch: PreparedBatch,
    cotangents: dict[str, tf.Tensor],
    found: clipping.Scaled,
    good: tf.Tensor,
    draw: noise.Draw,
) -> dict[str, tf.Tensor]:
    """Of each of the layer's features: the clipped mean's share, or the noise; 0 unless `good`.

    All of them are points of the grid.
    """
    divisor = tables.private_optimizer.plan.sampling.expected_batch_size
    of_table = {id(variable): (term, factor) for variable, term, factor in found.terms}
    sent = {}
    for number, table in enumerate(tables.tables):
        term, factor = of_table[id(table)]
        assert isinstance(term, Rows)
        shares = term.cotangents * (factor / divisor)[:, tf.newaxis, tf.newaxis]
        if table.path in batch["first"]:
            shares = _once_a_row(shares, batch["first"][table.path])
        shares = tables.grid.rounded(shares, _seeds(draw)(_ROUNDING + number, "int32"))
        widths = [feature.most_ids for feature in table.features]
        for feature, own in zip(table.features, tf.split(shares, widths, 1), strict=True):
            if feature.bag:
                sent[feature.name] = tf.zeros_like(cotangents[feature.name])
                sent[feature.backward] = tf.reshape(own, [-1, table.width])
            else:
                sent[feature.name] = own[:, 0]
        sent[table.noise] = batch["noise"][table.path]
    return {name: tf.where(good, gradient, 0.0) for name, gradient in sent.items()}


def _once_a_row(shares: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
    """`[examples, lookups, width]` with an example's whole gradient of a row at its first lookup.

    Else terms that cancel in the example's gradient would enter a layer's sums one by one, and
    could be larger than C.
    """
    examples, lookups = first.shape
    places = first + tf.range(examples)[:, tf.newaxis] * lookups
    flat = tf.reshape(exact(shares), [examples * lookups, -1])
    sums = tf.math.unsorted_segment_sum(flat, tf.reshape(places, [-1]), examples * lookups)
    return tf.reshape(tf.cast(sums, tf.float32), shares.shape)


def _seeds(draw: noise.Draw) -> clipping.Seeds:
    context = tf.distribute.get_replica_context()
    return functools.partial(noise.seed_state, draw, context.replica_id_in_sync_group)

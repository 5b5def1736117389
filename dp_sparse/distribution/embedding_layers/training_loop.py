"""Training with an embedding layer: the host prepares a batch, the device trains on it.

Before the first step it checks the setup, creates the variables and distributes the data.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse import clipping, noise
from dp_sparse.clipping import exact
from dp_sparse.core import PrivacyError, key_bytes, replicas, xla
from dp_sparse.distribution import epochs as epochs_of
from dp_sparse.distribution.embedding_layers import device_step
from dp_sparse.distribution.embedding_layers.host_step import HostStep, other_inputs
from dp_sparse.distribution.embedding_layers.layer_adapters import TableLayer, layer_of
from dp_sparse.distribution.embedding_layers.private_tables import PrivateTables, check_optimizer
from dp_sparse.sampling import Augment, augmented, batch_of
from dp_sparse.step import Schedule, build_for, metrics, refuse_coupled

_Batch = device_step.PreparedBatch
_DRAW = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


def check_setup(model: keras.Model, tables: PrivateTables) -> None:
    """Raises PrivacyError or ValueError for what cannot be trained with these tables."""
    if not isinstance(tables, PrivateTables):
        raise ValueError(f"Expected tables to be PrivateTables, got {type(tables).__name__}.")
    if epochs_of.checked_optimizer(model) is not tables.private_optimizer:
        raise PrivacyError(
            f"Expected {model.name} compiled with the optimizer of its tables, got another: pass "
            "the same to PrivateTables and to compile."
        )
    check_optimizer(tables.private_optimizer)
    if tf.distribute.has_strategy():
        raise PrivacyError("Expected train_tables outside strategy.scope(), got it inside.")
    strategy = model._distribute_strategy
    if strategy is not None and not isinstance(strategy, tf.distribute.TPUStrategy):
        raise PrivacyError(
            f"Expected TPUStrategy or none, got {type(strategy).__name__}: elsewhere use "
            "keras.layers.Embedding, and fit."
        )
    count = 1 if strategy is None else strategy.num_replicas_in_sync
    if (count, strategy is not None) != (tables.replicas, tables.on_tpu):
        raise ValueError(
            f"Expected PrivateTables(strategy=...) with the strategy of {model.name}, got another."
        )
    if tables.private_optimizer.compiles:
        raise ValueError("Expected jit_compile=False, got True: a TPU compiles by itself.")
    last = tables.private_optimizer.outside_tables
    if [id(table) for table in last] != [id(table) for table in tables.tables]:
        raise PrivacyError(
            "Expected one PrivateTables of an optimizer, got an earlier one: make an optimizer and "
            "a plan for each."
        )


def build_all(model: keras.Model, tables: PrivateTables, layer: TableLayer, spec: Any) -> None:
    """Creates all variables, those of the layer too, before anything is traced."""
    examples, _ = batch_of(spec)
    x, size = examples.x, tables.examples
    nothing = tf.nest.map_structure(lambda of: tf.zeros([size, *of.shape[1:]], of.dtype), x)
    layer.build(*HostStep(tables).to_look_up(nothing))
    widths = {feature.name: table.width for table in tables.tables for feature in table.features}
    rows = tables.private_optimizer.plan.sampling.batch_capacity
    inputs = {name: tf.TensorSpec([rows, width]) for name, width in widths.items()}
    inputs = {**other_inputs(x, tables), **inputs}
    build_for(model, tables.private_optimizer, examples._replace(x=inputs))
    if tables.private_optimizer.tables:
        own = [table.path for table in tables.private_optimizer.tables]
        raise PrivacyError(
            f"Expected a model without embedding tables beside those of the layer, got {own}: rows "
            "are chosen over all tables at once. Make them tables of the layer."
        )


def distributed_batches(model: keras.Model, dataset: tf.data.Dataset) -> Any:
    """The prepared batches, divided over the replicas of the model's strategy."""
    strategy = model._distribute_strategy
    if strategy is None:
        return dataset
    options = tf.distribute.InputOptions(experimental_fetch_to_device=False)
    return strategy.experimental_distribute_dataset(dataset, options)


def train_tables(
    model: keras.Model,
    tables: PrivateTables,
    layer: Any,
    source: Any,
    *,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    class_weight: dict[int, float] | None = None,
    augment: Augment | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    verbose: int = 0,
) -> keras.callbacks.History:
    """Trains a model together with the tables of an embedding layer.

    Args:
        model: Compiled with `tables.private_optimizer`, under the same strategy as the layer. Its
            inputs are a dictionary: of each feature its activations `[batch, width]`, and whatever
            else is in the source's inputs.
        tables: What the layer was made with.
        layer: An embedding layer made with `tables.feature_config`: `TPUEmbeddingForServing`,
            `TPUEmbedding` or `TPUEmbeddingV2` of `tf.tpu.experimental.embedding`, `TPUEmbedding`
            of tensorflow_recommenders or `DistributedEmbedding` of keras-rs.
        source: What `plan.sampling.batches` takes; its inputs are a dictionary with the ids of each
            feature.
        epochs: Into which the steps are divided, for metrics and callbacks. With a window of the
            optimizer, one call for all of them is best: its maps are lost at its end, and a call
            whose steps end no window warns.
        steps_per_epoch: By default as `fit` has it: what is left of the plan, divided by `epochs`;
            if the plan was made in epochs and has more of them left, those of one.
        class_weight: As `PoissonSampling.batches` takes it.
        augment: As `PoissonSampling.batches` takes it.
        callbacks: As in Keras; they see the model, not the layer, whose tables need a
            `tf.train.Checkpoint` of their own.
        verbose: As in Keras.

    Returns:
        The history of loss and metrics, not private; on a TPU of the loss alone.

    Raises:
        ValueError: More steps than the plan has left, inputs that do not fit the features, or a
            layer of another kind.
        PrivacyError: A model without that optimizer, with tables of its own, under a strategy of
            several devices that are no TPU, or with a loss that mixes examples.
        BadExampleError: An id, weight or label out of its range.

    Examples:
        >>> import dp_sparse, keras, numpy as np, tensorflow as tf
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan, clip_norm=1.0)
        >>> E = tf.tpu.experimental.embedding
        >>> user = E.FeatureConfig(E.TableConfig(10, 2, name="users"), name="user")
        >>> tables = dp_sparse.distribution.PrivateTables({"user": user}, optimizer)
        >>> layer = E.TPUEmbeddingForServing(tables.feature_config, None)  # off TPU
        >>> user_input = keras.Input((2,), name="user")
        >>> model = keras.Model({"user": user_input}, keras.layers.Dense(1)(user_input))
        >>> model.compile(optimizer, loss="mse")
        >>> source = {"user": np.arange(8)}, np.ones(8)
        >>> history = dp_sparse.distribution.train_tables(model, tables, layer, source)
        >>> int(optimizer.steps_spent)
        2

    ### Formal Guarantees
    Those of DP-AdaFEST (`DPAdaFESTOptimizer`), with one Gaussian mechanism of the plan's σ a step.
    Dense variables get their noise as everywhere, in float64 and rounded. What the layer applies is
    the clipped sum of the chosen rows plus their noise over the expected batch size, on a grid
    where float32 adds exactly (`tables.grid`), once a step: the model sees activations that no
    backward pass leads through, and the gradient of the lookup is taken once. A failed check leaves
    tables and variables as they were.
    """
    check_setup(model, tables)
    own = layer_of(layer, tables)
    steps = _Steps(model, tables, own)

    def begin(first_step: int) -> tuple[epochs_of.Step, epochs_of.Logs]:
        sampling = tables.private_optimizer.plan.sampling
        share = epochs_of.whole_batch(sampling, first_step)
        batches = sampling.batches_of(
            source, share, first_step=first_step, class_weight=class_weight
        )
        fresh = key_bytes(sampling.not_private_seed, "augmentation", first_step)
        batches = augmented(batches, augment, fresh)
        build_all(model, tables, own, batches.element_spec)
        most_rows = [table.capacity for table in tables.tables]
        window = tables.private_optimizer.new_window(most_rows)
        prepared = batches.map(HostStep(tables, first_step, window)).prefetch(2)
        iterator = iter(distributed_batches(model, prepared))
        return lambda: steps.take(next(iterator)), steps.logs

    return epochs_of.run(model, source, begin, epochs, steps_per_epoch, callbacks, verbose)


class _Steps:
    """The steps of one run, each of them two calls: spend it, and train."""

    def __init__(self, model: keras.Model, tables: PrivateTables, layer: TableLayer) -> None:
        self._model, self._tables, self._layer = model, tables, layer
        self._optimizer = tables.private_optimizer
        self._strategy = model._distribute_strategy or tf.distribute.get_strategy()
        self._losses: list[tf.Tensor] = []
        self._begin = tf.function(self._spend, autograph=False)
        self._train = tf.function(self._train_on, autograph=False)
        self._schedule, self._isolation = Schedule(), device_step.isolation_of(model, tables)

    def take(self, batch: _Batch) -> None:
        """Trains on one batch."""
        self._check_isolation(batch)
        draw = self._begin(batch["marker"])
        self._losses.append(self._train(batch, draw))
        if self._optimizer.window > 1:
            self._follow_window(batch)

    def _follow_window(self, batch: _Batch) -> None:
        """Notes the survivors of a window that ended before this batch: its step released them."""
        of = self._strategy.experimental_local_results
        ended = of(batch["window"])[0][0].numpy().tolist()
        if ended[0] > self._optimizer.windows_ended:
            noised = (of(batch["features"][table.noise]) for table in self._tables.tables)
            parts = [np.concatenate([part.flat_values for part in own]) for own in noised]
            self._optimizer.follow_window(ended, [np.sort(part) for part in parts])

    def _check_isolation(self, batch: _Batch) -> None:
        """Before the step, which updates the layer's tables on its way."""
        if self._schedule.due():
            parts = [self._of_replica(batch, number) for number in range(self._tables.replicas)]
            there = [np.any(part["examples"].present > 0) for part in parts]
            for replica in np.flatnonzero(there):
                part = parts[replica]
                given, present = device_step.made_up(self._tables, part), part["examples"].present
                whole, seed = self._schedule.turns_whole, self._schedule.batches
                refuse_coupled(self._isolation, given, present, seed, whole, int(replica))
            if any(there):
                self._schedule.passed()
        self._schedule.batches += 1

    def _of_replica(self, batch: _Batch, number: int) -> _Batch:
        local = self._strategy.experimental_local_results
        return tf.nest.map_structure(lambda leaf: local(leaf)[number].numpy(), batch)

    def logs(self) -> dict[str, float]:
        """Loss and metrics since the last call."""
        totals, self._losses = np.sum([loss.numpy() for loss in self._losses], axis=0), []
        if self._tables.on_tpu:
            return {"loss": float(totals[0] / max(totals[1], 1))}
        return {name: float(value) for name, value in self._model.get_metrics_result().items()}

    def _spend(self, marker: Any) -> _DRAW:
        markers = tf.concat(self._strategy.experimental_local_results(marker), 0)
        capacity = self._optimizer.plan.sampling.batch_capacity
        draw, spent = self._optimizer.begin_step(markers[:capacity])
        with tf.control_dependencies([spent]):
            return tf.identity(draw.key), tf.identity(draw.number), tf.identity(draw.offset)

    def _train_on(self, batch: _Batch, draw: _DRAW) -> tf.Tensor:
        made: list[xla.Postponed] = []

        def of_replica(batch: _Batch, draw: _DRAW) -> tuple[Any, Any]:
            key = noise.Draw(*draw)
            found, made[:] = device_step.sums_of(self._model, self._tables, self._layer, batch, key)
            return found, [(check.condition, check.values) for check in made]

        found, outcomes = self._strategy.run(of_replica, args=(batch, draw))
        dense = [self._summed(total) for total in found["dense"]]
        with tf.control_dependencies(self._checks(made, outcomes)):  # counts of steps wait, too
            if not self._tables.on_tpu:  # before the update: regularisers count at the same weights
                kept = found["outputs"], found["losses"], found["output_losses"]
                metrics.update(self._model, batch["examples"], *kept)
            self._release_and_update(dense, draw)
            totals = self._optimizer.diagnostics
            totals.add(self._own(found["counts"]))
            totals.rows.assign_add(tf.cast(self._own(found["rows"]), tf.int64))
        losses = self._strategy.experimental_local_results(found["losses"])
        total = tf.add_n([tf.reduce_sum(of_replica) for of_replica in losses])
        return tf.stack([total, tf.cast(self._own(found["counts"])[0], tf.float32)])

    def _release_and_update(self, dense: list[tf.Tensor], draw: _DRAW) -> None:
        """Adds noise to the sums of the dense variables, and updates these on every replica."""
        amounts = clipping.zero_sums([], [], []).amounts._replace(dense=dense)
        sums = clipping.ClippedSums(self._model.trainable_variables, [], [], amounts)
        noisy = self._optimizer.release(sums, noise.Draw(*draw))
        with clipping.update_from(noisy.tensors()):
            self._optimizer.measure(noisy)
            variables, means = zip(*self._optimizer.update_tables(noisy), strict=True)
            keras_optimizer = self._optimizer.optimizer
            self._strategy.run(
                lambda means: keras_optimizer.apply(replicas.parts(means), variables), (means,)
            )

    def _summed(self, value: Any) -> tf.Tensor:
        """Over all replicas, on the host, in float64."""
        return tf.add_n([exact(own) for own in self._strategy.experimental_local_results(value)])

    def _own(self, value: Any) -> tf.Tensor:
        """What all replicas have alike."""
        return self._strategy.experimental_local_results(value)[0]

    def _checks(self, made: list[xla.Postponed], outcomes: Any) -> list[tf.Operation]:
        of = self._strategy.experimental_local_results
        required = []
        for check, (condition, values) in zip(made, outcomes, strict=True):
            by_replica: Callable[[Any], Any] = lambda index: tuple(of(v)[index] for v in values)  # noqa: B023, E731
            required += [check.check(c, by_replica(i)) for i, c in enumerate(of(condition))]
        return required

"""LazyDP: exact DP-SGD with plain SGD, whose noise reaches a row when the row is read.

Source: Lim et al., "LazyDP", ASPLOS 2024; [38] of Ghazi et al., NeurIPS 2023. The weights that a
step reads, and those that leave the optimizer, have the distribution of DP-SGD's; a step costs what
its lookups cost, whatever the size of the tables.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.accounting import PrivacyPlan
from dp_sparse.clipping import BeforeLookup, ClippedSums, ClippingStyle, tables_read_whole
from dp_sparse.optimizers.base import PrivateOptimizer, checked_optimizer
from dp_sparse.optimizers.lazy_noise import DelayedNoise
from dp_sparse.optimizers.release import NoisyMeans, noisy_dense
from dp_sparse.optimizers.sparse_base import refuse_whole_table
from dp_sparse.selection import StepChoice, TableLookups, looked_up_rows


@keras.saving.register_keras_serializable(package="dp_sparse")
class LazyDPSGDOptimizer(PrivateOptimizer):
    """DP-SGD around Keras' plain SGD, with a step whose cost does not grow with the tables.

    Rows get their noise when they are read. `fit` adds what is due at the end of every epoch and of
    itself, also after an error, and `train_on_batch` after every call; `evaluate`, `predict`, what
    they do on one batch, `save`, `save_weights`, `export`, `get_weights` and `get_state_tree`
    add it first. `flush` does so at any time. That costs one pass over the tables, O(table
    entries), and the first step after it another that only reads; any other step of `fit` costs
    O(lookups · width), and a row 8 bytes of memory more. There are no micro-batches.

    Args:
        optimizer: Exactly a Keras SGD, without momentum; a learning-rate schedule is fine.
        plan: As `PrivateOptimizer`.
        clip_norm: As `PrivateOptimizer`.
        clipping: As `PrivateOptimizer`.
        name: As in Keras.

    Raises:
        ValueError: Another optimizer, or one with an option that couples steps or touches a table's
            every row; when training begins, a table with a regularizer or a constraint, one that
            is not float32, or a tied output layer.
        PrivacyError: At run time, a step whose noise float32 cannot hold beside the weights.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> ids, table = keras.Input((), dtype="int32"), keras.layers.Embedding(10, 2)
        >>> model = keras.Sequential([ids, table, keras.layers.Dense(1)])
        >>> optimizer = dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(0.1), plan, clip_norm=1.0)
        >>> model.compile(optimizer, loss="mse")
        >>> history = model.fit(plan.sampling.batches((np.arange(8), np.ones(8))), verbose=0)
        >>> int(optimizer.steps_spent)  # and every row has its noise, since `fit` has ended
        2

    ### Formal Guarantees
    That of `DPSGDOptimizer`, for weights after `flush`. Between steps a table in memory lacks noise
    on rows that were not looked up, which tells which ones were, so it must not be read in any way
    but those above: callbacks that act after every batch are refused.
    """

    selects_rows = False
    delays_noise = True
    replicable = False  # each replica would add noise to rows of its own

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        plan: PrivacyPlan,
        clip_norm: float,
        *,
        clipping: ClippingStyle | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            _checked_sgd(checked_optimizer(optimizer)),
            plan,
            clip_norm,
            clipping=clipping,
            name=name,
        )
        self._delayed = DelayedNoise([])

    def build(self, variables: list[keras.Variable]) -> None:
        """Builds the wrapped optimizer over the dense variables; no row lacks noise yet."""
        if self.built:
            return
        self._split_variables(variables)
        _refuse_tied(self._model() if self._model is not None else None)
        for table in self.tables:
            refuse_whole_table(table)
            _refuse_coarse(table)
        self.optimizer.build(self.dense_variables)
        self._delayed = DelayedNoise(self.tables)
        super().build(variables)

    def before_lookup(self, draw: noise.Draw) -> BeforeLookup:
        """Adds the noise that is due to the rows that are about to be read."""
        lookups = iter(range(noise.Purpose.DELAYED, 2**24))

        def settle(table: keras.Variable, row_ids: tf.Tensor) -> None:
            unique = tf.unique(tf.reshape(row_ids, [-1]))[0]
            with self._delayed.lock.writing([unique]):
                self._delayed.settle(table, unique, draw, next(lookups))

        return settle

    def rows_of_step(self, lookups: Sequence[TableLookups], draw: noise.Draw) -> StepChoice:
        """The rows that the batch looked up; all others get their noise later, as these do."""
        del draw
        return StepChoice([looked_up_rows(table) for table in lookups])

    def _noisy_means(self, sums: ClippedSums, draw: noise.Draw) -> NoisyMeans:
        """Noise on every dense parameter and on the rows that were read.

        Sums of rows stay float64, and undivided: `DelayedNoise.on_grid` rounds the weights.
        """
        deviation = tf.cast(self.current_clip_norm * self.noise_multiplier, tf.float64)
        batch_size = self.plan.sampling.expected_batch_size
        dense = list(zip(sums.dense, sums.amounts.dense, strict=True))
        rows = _noisy_sums(sums.slices, deviation, draw)
        return NoisyMeans(
            noisy_dense(dense, deviation, batch_size, draw),
            list(zip(sums.tables, rows, strict=True)),
        )

    def update_tables(self, noisy: NoisyMeans) -> list[tuple[keras.Variable, tf.Tensor]]:
        """`w − η·(noisy sum)/B` on the rows that were read; all others are due their noise."""
        norm = tf.cast(self.current_clip_norm, tf.float64)
        rate = tf.cast(self.optimizer.learning_rate, tf.float64)
        scale = rate / self.plan.sampling.expected_batch_size
        deviation, most = scale * norm * self.noise_multiplier, scale * norm
        with self._delayed.lock.writing(noisy.tensors()):
            room = self._delayed.room(
                deviation, most * self.plan.sampling.batch_capacity, self._account.noise_key
            )
            with tf.control_dependencies([room]):
                before = [table.value.sparse_read(rows.indices) for table, rows in noisy.tables]
            with tf.control_dependencies([room, self._delayed.refuse_vanishing(deviation)]):
                for (table, rows), weights in zip(noisy.tables, before, strict=True):
                    after = tf.cast(weights, tf.float64) - scale * rows.values
                    released = self._delayed.on_grid(after, deviation)
                    table.value.scatter_update(tf.IndexedSlices(released, rows.indices))
                given = [(table, rows.indices) for table, rows in noisy.tables]
                self._delayed.delay(deviation, given)
                waiting = [(variable, tf.identity(mean)) for variable, mean in noisy.dense]
        return super().update_tables(noisy._replace(dense=waiting))

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description; never a key."""
        config = super().get_config()
        del config["microbatch_size"]
        return config

    def flush(self) -> None:
        """Adds the noise that rows lack: the tables are then as DP-SGD's. O(table entries).

        In another thread than `fit` it waits until a step has written; read them in `settled`.
        """
        with self.settled():
            pass

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Tables as DP-SGD's while the code inside runs; steps of other threads wait to write."""
        with self._delayed.lock.reading():
            self._delayed.settle_all(self._account.noise_key)
            yield


def _noisy_sums(
    slices: Sequence[tf.IndexedSlices], deviation: tf.Tensor, draw: noise.Draw
) -> list[tf.IndexedSlices]:
    """Each table's sum plus N(0, deviation²), float64; one stream for all tables."""
    if not slices:
        return []
    sizes = [tf.size(rows.values) for rows in slices]
    normals = tf.split(noise.normal(draw, noise.Purpose.ROWS, tf.add_n(sizes)), sizes)
    return [
        tf.IndexedSlices(
            rows.values + deviation * tf.reshape(own, tf.shape(rows.values)), rows.indices
        )
        for rows, own in zip(slices, normals, strict=True)
    ]


def _refuse_tied(model: keras.Model | None) -> None:
    tied = [] if model is None else tables_read_whole(model)
    if tied:
        raise ValueError(
            f"Expected tables that are read by rows alone, got the tied output layer {tied[0]}, "
            "which reads its table whole: all noise would be due at every step. Untie it "
            "(tie_weights=False), or use DPSGDOptimizer."
        )


def _refuse_coarse(table: keras.Variable) -> None:
    if table.dtype != "float32":
        raise ValueError(
            f"Expected embedding table {table.path} in float32, got {table.dtype}: roundings would "
            "tell which rows were looked up. Use a mixed_ dtype policy, or DPSGDOptimizer."
        )


def _checked_sgd(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.SGD:
    options = "momentum", "weight_decay", "clipnorm", "global_clipnorm", "clipvalue", "use_ema"
    used = [name for name in options if getattr(optimizer, name, None)]
    if type(optimizer) is not keras.optimizers.SGD or used:
        raise ValueError(
            f"Expected keras.optimizers.SGD without {', '.join(options)}, got "
            f"{type(optimizer).__name__}{f' with {used[0]}' if used else ''}: noise can be delayed "
            "only where a step adds it to the weights and to nothing else. Use DPSGDOptimizer."
        )
    return optimizer

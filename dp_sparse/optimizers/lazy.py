"""LazyDP: exact DP-SGD with plain SGD, whose noise reaches a row when the row is read.

Source: Lim et al., "LazyDP", ASPLOS 2024; [38] of Ghazi et al., NeurIPS 2023. The weights that a
step reads, and those that leave the optimizer, have the distribution of DP-SGD's; a step costs what
its lookups cost, whatever the size of the tables.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.accounting import PrivacyPlan
from dp_sparse.clipping import BeforeLookup, ClippingStyle, tables_read_whole
from dp_sparse.optimizers.arguments import checked_optimizer
from dp_sparse.optimizers.base import PrivateOptimizer
from dp_sparse.optimizers.lazy_noise import DelayedNoise
from dp_sparse.optimizers.sparse_base import refuse_whole_table
from dp_sparse.optimizers.sums import PrivateSums
from dp_sparse.selection import RowChoice, TableLookups, looked_up_rows


@keras.saving.register_keras_serializable(package="dp_sparse")
class LazyDPSGDOptimizer(PrivateOptimizer):
    """DP-SGD around Keras' plain SGD, with a step whose cost does not grow with the tables.

    Noise is owed to rows until they are read. `fit` settles it at the end of every epoch and of
    itself, also after an error, and `train_on_batch` after every call; `evaluate`, `predict`, what
    they do on one batch, `save`, `save_weights`, `export`, `get_weights` and `get_state_tree`
    settle it first. `flush` does so at any time. Settling costs one pass over the tables, O(table
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
        >>> model = keras.Sequential([keras.layers.Embedding(10, 2), keras.layers.Dense(1)])
        >>> optimizer = dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(0.1), plan, clip_norm=1.0)
        >>> model.compile(optimizer, loss="mse")
        >>> history = model.fit(plan.sampling.batches((np.arange(8), np.ones(8))), verbose=0)
        >>> int(optimizer.steps_spent)  # and every row has its noise, since `fit` has ended
        2

    ### Formal Guarantees
    That of `DPSGDOptimizer`, for weights after `flush`. Between steps a table in memory lacks noise
    on rows that were not looked up, which tells which ones were, so it must not be read by any road
    but those above: callbacks that act after every batch are refused.
    """

    selects_rows = False
    delays_noise = True
    replicable = False  # each replica would settle rows of its own

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
        """Builds the wrapped optimizer over the dense variables, and what rows are owed."""
        if self.built:
            return
        self._split_variables(variables)
        _refuse_tied(self._model() if self._model is not None else None)
        for table in self.tables:
            refuse_whole_table(table)
            _refuse_coarse(table)
        tables = {id(table) for table in self.tables}
        self.optimizer.build([v for v in variables if id(v) not in tables])
        self._delayed = DelayedNoise(self.tables)
        super().build(variables)

    def before_lookup(self, draw: noise.Draw) -> BeforeLookup:
        """Settles what the rows that are about to be read are owed."""
        lookups = iter(range(noise.Purpose.DELAYED, 2**24))

        def settle(table: keras.Variable, row_ids: tf.Tensor) -> None:
            unique = tf.unique(tf.reshape(row_ids, [-1]))[0]
            self._delayed.settle(table, unique, draw, next(lookups))

        return settle

    def choose_rows(self, lookups: Sequence[TableLookups], draw: noise.Draw) -> list[RowChoice]:
        """The rows that the batch looked up; all others get their noise later, as these do."""
        del draw
        return [looked_up_rows(table) for table in lookups]

    def release(
        self, sums: PrivateSums, draw: noise.Draw
    ) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Noise on every dense parameter and on the rows that were read; owed to all others."""
        deviation = tf.cast(self.current_clip_norm * self.noise_multiplier, tf.float64)
        rate = tf.cast(self.optimizer.learning_rate, tf.float64)
        scale = rate / self.plan.sampling.expected_batch_size
        owed = scale * deviation
        most = scale * tf.cast(self.current_clip_norm, tf.float64)
        room = self._delayed.room(owed, most * self.plan.sampling.batch_capacity, self._noise_key)
        with tf.control_dependencies([room]):
            updated = self._updated_rows(sums.tables, scale, deviation, draw)
        noisy = self._noisy_dense(sums, deviation, draw)
        with tf.control_dependencies([room, self._delayed.refuse_vanishing(owed)]):
            for table, after, row_ids in updated:
                rows = tf.IndexedSlices(tf.cast(after, tf.float32), row_ids)
                table.value.scatter_update(rows)
            self._delayed.owe(owed, [(table, row_ids) for table, _, row_ids in updated])
            return [(variable, tf.identity(gradient)) for variable, gradient in noisy]

    def _updated_rows(
        self,
        tables: list[tuple[keras.Variable, tf.IndexedSlices]],
        scale: tf.Tensor,
        deviation: tf.Tensor,
        draw: noise.Draw,
    ) -> list[tuple[keras.Variable, tf.Tensor, tf.Tensor]]:
        """`w − η·(sum + N(0, (σC)²))/B`, float64, with its rows; one stream for all tables."""
        if not tables:
            return []
        sizes = [tf.size(rows.values) for _, rows in tables]
        normals = tf.split(noise.normal(draw, noise.Purpose.ROWS, tf.add_n(sizes)), sizes)
        updated = []
        for (table, rows), own in zip(tables, normals, strict=True):
            noisy = rows.values + deviation * tf.reshape(own, tf.shape(rows.values))
            before = tf.cast(table.value.sparse_read(rows.indices), tf.float64)
            updated.append((table, before - scale * noisy, rows.indices))
        return updated

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description; never a key."""
        config = super().get_config()
        del config["microbatch_size"]
        return config

    def flush(self) -> None:
        """Settles what all rows are owed; after it the tables are as DP-SGD's. O(table entries)."""
        self._delayed.settle_all(self._noise_key)


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

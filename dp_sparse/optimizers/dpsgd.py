"""DP-SGD: noise on every parameter, tables included.

The baseline; its step costs what its tables weigh.

One step: clip each example's gradient to C, sum, add N(0, (C·σ)²) to every entry, divide by the
expected batch size (Ghazi et al., NeurIPS 2023, equation 1, where the realised one is printed).
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.clipping import ClippedSums
from dp_sparse.optimizers.base import PrivateOptimizer
from dp_sparse.optimizers.release import NoisyMeans, noisy_dense
from dp_sparse.selection import StepChoice, TableLookups, looked_up_rows


@keras.saving.register_keras_serializable(package="dp_sparse")
class DPSGDOptimizer(PrivateOptimizer):
    """DP-SGD around any Keras optimizer.

    Args: as `PrivateOptimizer`.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> ids, table = keras.Input((), dtype="int32"), keras.layers.Embedding(10, 2)
        >>> model = keras.Sequential([ids, table, keras.layers.Dense(1)])
        >>> optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.Adam(), plan, clip_norm=1.0)
        >>> model.compile(optimizer, loss="mse")
        >>> history = model.fit(plan.sampling.batches((np.arange(8), np.ones(8))), verbose=0)
        >>> int(optimizer.steps_spent)
        2

    ### Formal Guarantees
    One step is the Gaussian mechanism of noise multiplier `plan.noise_multiplier` on the clipped
    sum, of sensitivity `clip_norm`, on one batch of the plan's sampler. With `QuantileClipping` the
    count of unclipped examples is part of that mechanism.
    """

    selects_rows = False

    def build(self, variables: list[keras.Variable]) -> None:
        """Builds the wrapped optimizer over all variables: tables are dense here."""
        if self.built:
            return
        self._split_variables(variables)
        self.optimizer.build(variables)
        super().build(variables)

    def rows_of_step(self, lookups: Sequence[TableLookups], draw: noise.Draw) -> StepChoice:
        """The rows that the batch looked up; every row of the table is noised later."""
        del draw
        return StepChoice([looked_up_rows(table) for table in lookups])

    def _noisy_means(self, sums: ClippedSums, draw: noise.Draw) -> NoisyMeans:
        """Noise on every entry of every variable."""
        dense = list(zip(sums.dense, sums.amounts.dense, strict=True))
        for table, rows in zip(sums.tables, sums.slices, strict=True):
            num_rows = tf.constant(table.shape[0], rows.indices.dtype)
            whole = tf.math.unsorted_segment_sum(rows.values, rows.indices, num_rows)
            dense.append((table, tf.ensure_shape(whole, table.shape)))
        deviation = self.current_clip_norm * self.noise_multiplier
        batch_size = self.plan.sampling.expected_batch_size
        return NoisyMeans(noisy_dense(dense, deviation, batch_size, draw), [])

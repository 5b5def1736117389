"""DP-SGD: noise on every parameter, tables included.

The baseline; its step costs what its tables weigh.

One step: clip each example's gradient to C, sum, add N(0, (C·σ)²) to every entry, divide by the
expected batch size (Ghazi et al., NeurIPS 2023, equation 1, where the realised one is printed).
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.optimizers.base import PrivateOptimizer
from dp_sparse.optimizers.sums import PrivateSums
from dp_sparse.selection import RowChoice, TableLookups, looked_up_rows


@keras.saving.register_keras_serializable(package="dp_sparse")
class DPSGDOptimizer(PrivateOptimizer):
    """DP-SGD around any Keras optimizer.

    Args: as `PrivateOptimizer`.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> model = keras.Sequential([keras.layers.Embedding(10, 2), keras.layers.Dense(1)])
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

    def choose_rows(self, lookups: Sequence[TableLookups], draw: noise.Draw) -> list[RowChoice]:
        """The rows that the batch looked up; every row of the table is noised later."""
        del draw
        return [looked_up_rows(table) for table in lookups]

    def release(
        self, sums: PrivateSums, draw: noise.Draw
    ) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Noise on every entry of every variable."""
        tables = [(table, tf.convert_to_tensor(rows)) for table, rows in sums.tables]
        sums = PrivateSums(dense=[*sums.dense, *tables], tables=[])
        return self._noisy_dense(sums, self.current_clip_norm * self.noise_multiplier, draw)

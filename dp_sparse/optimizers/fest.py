"""DP-FEST: noise on embedding rows selected once, before training.

Source: Ghazi et al., NeurIPS 2023, section 3.1 and B.1. Rows are selected by `select_top_k`, or
public; every step noises all of them and no other. Its cost grows with the number of selected rows,
not with the tables.
"""

from collections.abc import Sequence
from typing import Unpack

import keras

from dp_sparse import noise
from dp_sparse.accounting import PrivacyPlan
from dp_sparse.optimizers.base import TableOptions
from dp_sparse.optimizers.sparse_base import SparseOptimizer, checked_rows
from dp_sparse.selection import SelectedRows, StepChoice, StepRows, TableLookups, restricted


@keras.saving.register_keras_serializable(package="dp_sparse")
class DPFESTOptimizer(SparseOptimizer):
    """Sparse private training on rows selected before, around Keras' SGD, Adagrad, Adam or Ftrl.

    Args:
        optimizer: Updates the dense variables, and the tables through its row-wise twin.
        plan: A calibrated plan, whose releases pay for `rows`.
        clip_norm: C > 0, for each example's whole gradient on dense variables and selected rows.
        rows: The rows to train; all others keep their initial values.
        options: `table_optimizer`, `microbatch_size`, `clipping` and `name`, as `TableOptions`.

    Raises:
        ValueError: A number out of its range, or an optimizer that would touch every row of a
            table; when training begins, rows for other tables than the model's.
        PrivacyError: The plan does not pay for `rows`.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> table = keras.layers.Embedding(10, 2, name="users")
        >>> model = keras.Sequential([keras.Input((), dtype="int32"), table, keras.layers.Dense(1)])
        >>> rows = dp_sparse.SelectedRows.public({"users": [1, 4]}, {"users": 10})
        >>> optimizer = dp_sparse.DPFESTOptimizer("sgd", plan, clip_norm=1.0, rows=rows)
        >>> model.compile(optimizer, loss="mse")
        >>> before = table.embeddings.numpy()
        >>> history = model.fit(plan.sampling.batches((np.arange(8), np.ones(8))), verbose=0)
        >>> np.flatnonzero(np.any(table.embeddings.numpy() != before, axis=1))
        array([1, 4])

    ### Formal Guarantees
    Lookups of other rows are zeroed before clipping, so a step is the Gaussian mechanism of noise
    multiplier `plan.noise_multiplier` on a clipped sum of sensitivity C. Which rows are trained is
    released, at the price that the plan composes with training.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        plan: PrivacyPlan,
        clip_norm: float,
        rows: SelectedRows,
        **options: Unpack[TableOptions],
    ) -> None:
        super().__init__(optimizer, plan, clip_norm, rows, **options)
        checked_rows(rows, self.plan)  # here None is refused, too

    def rows_of_step(self, lookups: Sequence[TableLookups], draw: noise.Draw) -> StepChoice:
        """All selected rows, at every step."""
        del draw
        pairs = zip(lookups, self._selected, strict=True)
        return StepChoice([StepRows(own, restricted(table, own).places) for table, own in pairs])

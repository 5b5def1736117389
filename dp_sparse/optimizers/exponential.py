"""Exponential selection: in each step the k rows with the largest noisy gradient norms.

The baseline [57] of Ghazi et al., NeurIPS 2023 (section 4). A step pays for k selections where
DP-AdaFEST pays for one noisy map: with `noise_ratio=1` half of its budget goes there.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import keras

from dp_sparse import noise
from dp_sparse.accounting import ExponentialSelection, PrivacyPlan
from dp_sparse.core import validate
from dp_sparse.optimizers.base import TableOptions
from dp_sparse.optimizers.sparse_base import SparseOptimizer
from dp_sparse.selection import (
    StepChoice,
    StepRows,
    TableLookups,
    restricted,
    row_scores,
    select_top_rows,
    selected_by_table,
)


@keras.saving.register_keras_serializable(package="dp_sparse")
class ExponentialSelectionOptimizer(SparseOptimizer):
    """Private training on k rows a step, chosen by exponential mechanisms.

    It needs all gradients of a batch before rows are chosen, so there are no micro-batches. A step
    costs O(lookups · width + k), whatever the size of the tables.

    Args:
        optimizer: Updates the dense variables, and the tables through its row-wise twin.
        plan: A calibrated plan whose `mechanism` is an `ExponentialSelection`, which says how many
            rows a step gets and at which price.
        clip_norm: C2 > 0, for each example's whole gradient, dense and sparse together.
        row_clip_norm: C3 > 0, to which the largest of an example's row norms is clipped before
            they are added to scores; by default `clip_norm`.
        options: `table_optimizer`, `clipping` and `name`, as `TableOptions`.

    Raises:
        ValueError: A number out of its range, a plan with another mechanism, or an optimizer that
            would touch every row of a table; when training begins, tables of fewer rows than k.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(
        ...     dp_sparse.PrivacyBudget(1.0, 1e-3), sampling, dp_sparse.ExponentialSelection(3)
        ... ).calibrate()
        >>> ids, table = keras.Input((), dtype="int32"), keras.layers.Embedding(10, 2)
        >>> model = keras.Sequential([ids, table, keras.layers.Dense(1)])
        >>> optimizer = dp_sparse.ExponentialSelectionOptimizer("sgd", plan, clip_norm=1.0)
        >>> model.compile(optimizer, loss="mse")
        >>> history = model.fit(plan.sampling.batches((np.arange(8), np.ones(8))), verbose=0)
        >>> optimizer.diagnostics.rows.numpy()  # of the table in both steps
        array([6])

    ### Formal Guarantees
    One step releases the k selected rows, by k exponential mechanisms of ε0 each, and, given them,
    a Gaussian mechanism of noise multiplier σ on the clipped sum: `ExponentialSelection` is their
    composition on one batch.
    """

    mechanism = ExponentialSelection
    reads_cotangents = True

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        plan: PrivacyPlan,
        clip_norm: float,
        row_clip_norm: float | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        if options.get("microbatch_size") is not None:
            raise ValueError(
                f"Expected no microbatch_size, got {options['microbatch_size']!r}: rows are chosen "
                "by all gradients of a batch. Leave it out."
            )
        super().__init__(optimizer, plan, clip_norm, **options)
        if row_clip_norm is None:
            row_clip_norm = clip_norm
        self.row_clip_norm = validate.clip_norm("row_clip_norm", row_clip_norm)

    def build(self, variables: list[keras.Variable]) -> None:
        """As the others; the tables must have the rows that the plan pays for."""
        super().build(variables)
        assert isinstance(self.plan.mechanism, ExponentialSelection)
        wanted, rows = self.plan.mechanism.rows_per_step, sum(t.shape[0] for t in self.tables)
        if self.tables and wanted > rows:
            raise ValueError(
                f"Expected rows_per_step <= {rows}, all rows of the model's tables, got "
                f"rows_per_step={wanted}: the plan would pay for rows that are not there."
            )

    def rows_of_step(self, lookups: Sequence[TableLookups], draw: noise.Draw) -> StepChoice:
        """k rows over all tables at once."""
        if not lookups:
            return StepChoice([])
        mechanism, sigma = self.plan.mechanism, self.plan.noise_multiplier
        assert isinstance(mechanism, ExponentialSelection) and sigma is not None
        scores = row_scores(lookups, self.row_clip_norm)
        scale = self.row_clip_norm / mechanism.epsilon_per_row(sigma)
        rows = select_top_rows(scores, mechanism.rows_per_step, scale, draw)
        chosen = zip(lookups, selected_by_table(rows, scores.offsets), strict=True)
        return StepChoice([StepRows(own, restricted(table, own).places) for table, own in chosen])

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description; never a key."""
        config = {**super().get_config(), "row_clip_norm": self.row_clip_norm}
        del config["rows"], config["microbatch_size"]
        return config

"""DP-AdaFEST: noise only on the embedding rows whose noisy contribution reaches a threshold.

This is Algorithm 1 of Ghazi et al., NeurIPS 2023. A step releases the contribution map with noise
σ1·C1 (then thresholded) and the clipped sum with noise σ2·C2 on the survivors and on every dense
parameter. With r = σ1/σ2: σ1 = σ√(1 + r²), σ2 = σ√(1 + 1/r²). Its cost is flat in the size of the
tables.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any, Unpack

import keras
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.accounting import (
    FALSE_ROWS,
    NOISE_RATIO,
    PrivacyPlan,
    default_threshold,
    split_noise,
    survival_probability,
)
from dp_sparse.core import validate
from dp_sparse.optimizers.base import PrivateOptimizer, TableOptions
from dp_sparse.optimizers.sparse_base import SparseOptimizer
from dp_sparse.selection import (
    Restricted,
    SelectedRows,
    StepRows,
    TableLookups,
    contribution_map,
    most_skips,
    restricted,
    select_rows,
    step_rows_by_table,
)


@keras.saving.register_keras_serializable(package="dp_sparse")
class DPAdaFESTOptimizer(SparseOptimizer):
    """Sparse private training of embedding models, around Keras' SGD, Adagrad, Adam or Ftrl.

    Args:
        optimizer: Updates the dense variables, and the tables through its row-wise twin.
        plan: A calibrated plan; its noise multiplier σ is split here.
        clip_norm: C2 > 0, for each example's whole gradient, dense and sparse together.
        contribution_clip_norm: C1 > 0. Above √(lookups of an example) it only adds noise, and a
            warning says so.
        noise_ratio: r = σ1/σ2 > 0; 1/(1 + r²) of σ⁻² chooses rows, by default a fifth.
        threshold: τ, in units of the contribution map: an example with p distinct rows adds
            min(1, C1/√p) to each of its rows. By default such that `expected_false_rows` rows
            survive on noise alone.
        expected_false_rows: λ > 0, for the default threshold; by default 10, and at most half of
            all rows.
        rows: DP-AdaFEST+: rows selected beforehand, which alone can survive; the plan must pay for
            them. By default all rows.
        options: `table_optimizer`, `microbatch_size`, `clipping` and `name`, as `TableOptions`.

    Raises:
        ValueError: A number out of its range, a threshold together with
            `expected_false_rows`, or an optimizer that would touch every row of a table; when
            training begins, rows for other tables than the model's.
        PrivacyError: The plan does not pay for `rows`.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> ids, table = keras.Input((), dtype="int32"), keras.layers.Embedding(10, 2)
        >>> model = keras.Sequential([ids, table, keras.layers.Dense(1)])
        >>> optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan, clip_norm=1.0, threshold=40.0)
        >>> model.compile(optimizer, loss="mse")
        >>> history = model.fit(plan.sampling.batches((np.arange(8), np.ones(8))), verbose=0)
        >>> (noised,) = optimizer.diagnostics.rows.numpy()  # rows of the table, in both steps
        >>> bool(noised < 2 * 10)
        True

    ### Formal Guarantees
    One step is a post-processing of two Gaussian releases on one batch, of noise multipliers σ1
    (map, sensitivity C1) and σ2 (clipped sum given the survivors, sensitivity C2), together exactly
    one Gaussian mechanism of σ = (σ1⁻² + σ2⁻²)^(−1/2). The rows that were updated are public; which
    of them the batch looked up is not released.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        plan: PrivacyPlan,
        clip_norm: float,
        contribution_clip_norm: float = 1.0,
        noise_ratio: float = NOISE_RATIO,
        threshold: float | None = None,
        expected_false_rows: float | None = None,
        rows: SelectedRows | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        super().__init__(optimizer, plan, clip_norm, rows, **options)
        self._contribution_clip_norm = validate.clip_norm(
            "contribution_clip_norm", contribution_clip_norm
        )
        self._noise_ratio = validate.positive("noise_ratio", noise_ratio)
        fixed = None if threshold is None else validate.finite("threshold", threshold)
        self._fixed_threshold = fixed
        wanted = FALSE_ROWS if expected_false_rows is None else expected_false_rows
        self._expected_false_rows = validate.positive("expected_false_rows", wanted)
        if threshold is not None and expected_false_rows is not None:
            raise ValueError(
                f"Expected threshold or expected_false_rows, got threshold={threshold!r} and "
                f"expected_false_rows={expected_false_rows!r}: leave one out."
            )

    # Settings are for good: selection, clipping and noise may be traced at different times.

    @property
    def contribution_clip_norm(self) -> float:
        """C1."""
        return self._contribution_clip_norm

    @property
    def noise_ratio(self) -> float:
        """r = σ1/σ2."""
        return self._noise_ratio

    @property
    def threshold(self) -> float | None:
        """τ, if it was given."""
        return self._fixed_threshold

    @property
    def expected_false_rows(self) -> float:
        """λ, of the default threshold."""
        return self._expected_false_rows

    @property
    def contribution_noise_multiplier(self) -> float:
        """σ1 = σ√(1 + r²)."""
        return split_noise(self.noise_multiplier, self.noise_ratio)[0]

    @property
    def gradient_noise_multiplier(self) -> float:
        """σ2 = σ√(1 + 1/r²)."""
        return split_noise(self.noise_multiplier, self.noise_ratio)[1]

    def rows_of_step(self, lookups: Sequence[TableLookups], draw: noise.Draw) -> list[StepRows]:
        """The survivors of the noisy, thresholded contribution map, over all tables at once."""
        if self.rows is None:
            return self._survivors(lookups, draw)
        among = [restricted(*each) for each in zip(lookups, self._selected, strict=True)]
        nonempty = [table for table in among if table.selected.shape[0]]
        survivors = iter(self._survivors([table.lookups for table in nonempty], draw))
        return [
            _unrestricted(next(survivors), table) if table.selected.shape[0] else _nothing(table)
            for table in among
        ]

    def _survivors(self, lookups: Sequence[TableLookups], draw: noise.Draw) -> list[StepRows]:
        if not lookups:
            return []
        self._warn_if_loose(lookups)
        contributions = contribution_map(lookups, self.contribution_clip_norm)
        threshold, deviation = self._threshold(contributions.num_rows)
        survivors = select_rows(contributions, threshold, deviation, draw)
        return step_rows_by_table(contributions, survivors)

    def _threshold(self, num_rows: int) -> tuple[float, float]:
        """τ over this many rows, and the deviation of the map's noise, s = σ1·C1."""
        deviation = self.contribution_noise_multiplier * self.contribution_clip_norm
        if self.threshold is not None:
            return self.threshold, deviation
        return default_threshold(self.expected_false_rows, num_rows, deviation), deviation

    @property
    def false_rows_per_step(self) -> list[float]:
        """Rows of each table that survive a step on noise alone, expected, if none is looked up."""
        if self.rows is None:
            sizes = [int(table.shape[0]) for table in self.noised_tables]
        else:
            sizes = [int(selected.shape[0]) for selected in self._selected]
        if not sum(sizes):
            return [0.0] * len(sizes)
        rate = survival_probability(*self._threshold(sum(sizes)))
        return [rate * size for size in sizes]

    def most_false_rows(self, num_rows: int) -> int:
        """More rows than that survive on noise alone in one step of 10^13."""
        return most_skips(num_rows, survival_probability(*self._threshold(num_rows)))

    def _warn_if_loose(self, lookups: Sequence[TableLookups]) -> None:
        widths = [table.row_ids.shape[1] for table in lookups]
        if None in widths or self.contribution_clip_norm <= math.sqrt(sum(widths)):
            return
        warnings.warn(
            f"contribution_clip_norm={self.contribution_clip_norm:g} can never bind: an example "
            f"has {sum(widths)} lookups, "
            f"so its map's norm is at most {math.sqrt(sum(widths)):.4g}. A larger value only adds "
            f"noise.",
            stacklevel=2,
        )

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description; never a key."""
        return {
            **super().get_config(),
            "contribution_clip_norm": self.contribution_clip_norm,
            "noise_ratio": self.noise_ratio,
            "threshold": self.threshold,
            "expected_false_rows": self.expected_false_rows if self.threshold is None else None,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> PrivateOptimizer:
        """As Keras calls it; a threshold was once saved with false rows, which it did not use."""
        if config["threshold"] is not None:
            config = {**config, "expected_false_rows": None}
        return super().from_config(config, custom_objects)


def _unrestricted(rows: StepRows, table: Restricted) -> StepRows:
    """Rows of a step among the selected ones, as rows among all."""
    places = tf.where(table.places >= 0, rows.places, -1)
    selected = tf.concat([table.selected, [table.num_rows]], 0)  # a filler stays a filler
    return StepRows(tf.gather(selected, rows.row_ids), places)


def _nothing(table: Restricted) -> StepRows:
    return StepRows(table.selected, table.places)

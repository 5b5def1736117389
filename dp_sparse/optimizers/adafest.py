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
import numpy as np
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.accounting import (
    FALSE_ROWS,
    NOISE_RATIO,
    PrivacyPlan,
    checked_window,
    default_threshold,
    split_noise,
    survival_probability,
)
from dp_sparse.core import validate, xla
from dp_sparse.optimizers.base import PrivateOptimizer, TableOptions
from dp_sparse.optimizers.keras_wrapper import WrappingOptimizer
from dp_sparse.optimizers.sparse_base import SparseOptimizer, checked_rows, rows_of_tables
from dp_sparse.optimizers.window import Selection, SelectionWindow
from dp_sparse.selection import (
    ContributionMap,
    Restricted,
    SelectedRows,
    StepChoice,
    StepRows,
    TableLookups,
    contribution_map,
    most_skips,
    restricted,
    select_rows,
    step_rows_by_table,
    unit_of,
)

_SURVIVORS, _SIZES = "survivors", "sizes_of_survivors"  # in a saved optimizer, beside its variables


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
        window: W ≥ 1, the most steps of which maps are added up before rows are chosen for the
            steps that follow (docs/windowed_selection.md). With 1 each step chooses its own rows,
            as in Algorithm 1.
        first_rows: With a window, the rows that train before the first window has ended, as far as
            `rows` has them; the plan must pay for them. By default none, and none of tables that
            it leaves out.
        options: `table_optimizer`, `microbatch_size`, `clipping` and `name`, as `TableOptions`.

    Raises:
        ValueError: A number out of its range, a window longer than the run or than its noise
            reaches, a threshold together with `expected_false_rows`, or an optimizer that would
            touch every row of a table; when training begins, rows for other tables than the
            model's.
        PrivacyError: The plan does not pay for `rows` or `first_rows`.

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
    of them the batch looked up is not released. With a window what is released is a post-processing
    of the same releases.
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
        window: int = 1,
        first_rows: SelectedRows | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        super().__init__(optimizer, plan, clip_norm, rows, **options)
        if first_rows is not None:
            checked_rows(first_rows, self.plan, "first_rows")
        self._first_rows = first_rows
        self._contribution_clip_norm = validate.clip_norm(
            "contribution_clip_norm", contribution_clip_norm
        )
        self._noise_ratio = validate.positive("noise_ratio", noise_ratio)
        sampling, delta = self.plan.sampling, self.plan.budget.delta
        window = checked_window(window, sampling, self.noise_multiplier, self.noise_ratio, delta)
        self._window = None if window == 1 else SelectionWindow(window)
        if self._window is None and first_rows is not None:
            raise ValueError(
                "Expected first_rows with a window, got window=1, whose steps choose their own "
                "rows: set window, or leave out first_rows."
            )
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
    def first_rows(self) -> SelectedRows | None:
        """The rows that train before the first window has ended; None if none do."""
        return self._first_rows

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

    @property
    def window(self) -> int:
        """W; 1 where each step chooses its own rows."""
        return 1 if self._window is None else self._window.longest

    def build(self, variables: list[keras.Variable]) -> None:
        """As all sparse optimizers; a window begins with `first_rows`."""
        if self.built:
            return
        super().build(variables)
        if self._window is None or not self.noised_tables:
            return
        self._begin_first()

    def _begin_first(self) -> None:
        """Begins window 0."""
        if self.first_rows is None:
            self._begin([np.zeros(0, np.int64)] * len(self.noised_tables), 0)
        else:
            first = rows_of_tables(self.first_rows, self.noised_tables, of_all=False)
            self._begin([rows.numpy() for rows in first], 0)

    def rows_of_step(self, lookups: Sequence[TableLookups], draw: noise.Draw) -> StepChoice:
        """The survivors of the noisy, thresholded contribution map, over all tables at once.

        With a window, those of the window before.
        """
        if self.rows is None:
            return self._survivors(lookups, draw, self._window)
        among = [restricted(*each) for each in zip(lookups, self._selected, strict=True)]
        nonempty = [table for table in among if table.selected.shape[0]]
        choice = self._survivors([table.lookups for table in nonempty], draw, self._window)
        survivors = iter(choice.rows)
        rows = [
            _unrestricted(next(survivors), table) if table.selected.shape[0] else _nothing(table)
            for table in among
        ]
        return StepChoice(rows, choice.to_remember)

    def rows_ahead(
        self,
        lookups: Sequence[TableLookups],
        draw: noise.Draw,
        window: SelectionWindow | None,
        step: tf.Tensor,
        most_rows: Sequence[int],
    ) -> list[StepRows]:
        """As `rows_of_step`, where batches are prepared in their order ahead of their steps.

        Args:
            lookups: Of each table.
            draw: The streams of the batch.
            window: Of these batches alone, to which the map is added at once; from `new_window`.
            step: The number of the batch's step in the run, an int64 scalar.
            most_rows: The most rows of each table that a window's steps can have; of more, those
                that stay are drawn at random.
        """
        choice = self._survivors(lookups, draw, window)
        if window is not None:
            self._add_to(window, choice.to_remember, draw, step, tuple(most_rows))
        return choice.rows

    def new_window(self, most_rows: Sequence[int]) -> SelectionWindow | None:
        """A window of its own, with the survivors of this one; None for a window of one step.

        Args:
            most_rows: As in `rows_ahead`.
        """
        if self._window is None:
            return None
        window, offsets = SelectionWindow(self.window), self._own_offsets
        survivors = zip(self._window.survivors(offsets), most_rows, strict=True)
        window.start([_drawn(*own) for own in survivors], offsets, self.windows_ended)
        return window

    @property
    def windows_ended(self) -> int:
        """How many windows have ended, in earlier processes, too."""
        return 0 if self._window is None else self._window.windows_ended

    def follow_window(self, ended: Sequence[int], survivors: list[np.ndarray]) -> None:
        """Takes over what a window of `new_window` has released.

        Args:
            ended: `SelectionWindow.last_ended`.
            survivors: Of each table, sorted.
        """
        assert self._window is not None
        self._window.follow(ended, survivors, self._own_offsets)

    def _survivors(
        self, lookups: Sequence[TableLookups], draw: noise.Draw, window: SelectionWindow | None
    ) -> StepChoice:
        if not lookups:
            return StepChoice([])
        self._warn_if_loose(lookups)
        contributions = contribution_map(lookups, self.contribution_clip_norm, self._most_shares)
        if window is not None:
            rows = self._rows_of_window(window, lookups, contributions)
            return StepChoice(rows, (contributions.row_ids, contributions.units))
        threshold, deviation = self._threshold(contributions.num_rows)
        survivors = select_rows(contributions, threshold, deviation, draw)
        return StepChoice(step_rows_by_table(contributions, survivors))

    def _rows_of_window(
        self,
        window: SelectionWindow,
        lookups: Sequence[TableLookups],
        contributions: ContributionMap,
    ) -> list[StepRows]:
        if xla.static_shapes():
            pairs = zip(lookups, window.padded_survivors(self._own_offsets), strict=True)
            return [StepRows(rows, restricted(table, rows).places) for table, rows in pairs]
        return step_rows_by_table(contributions, window.survivors_in(contributions))

    def remember(self, of_step: tuple[tf.Tensor, ...], draw: noise.Draw, step: tf.Tensor) -> None:
        """Adds the step's map to that of the window, which may end with it."""
        if self._window is None or not of_step:
            return
        self._add_to(self._window, of_step, draw, step)

    def state_of_choice(self) -> tf.Tensor:
        """A hash of the windows ended and of the survivors; 0 without a window."""
        return super().state_of_choice() if self._window is None else self._window.fingerprint()

    def _add_to(
        self,
        window: SelectionWindow,
        of_step: tuple[tf.Tensor, ...],
        draw: noise.Draw,
        step: tf.Tensor,
        most_rows: tuple[int, ...] | None = None,
    ) -> None:
        offsets = self._own_offsets
        row_ids, units = of_step
        if self.compiles:  # the map was filled up
            there = row_ids < offsets[-1]
            row_ids, units = tf.boolean_mask(row_ids, there), tf.boolean_mask(units, there)
        unit = unit_of(self.contribution_clip_norm, self._most_shares)
        by = Selection(offsets, unit, *self._threshold(int(offsets[-1])), most_rows)
        window.add(row_ids, units, step // self.plan.sampling.steps_per_round, draw, by)

    @property
    def _most_shares(self) -> int:
        """The most shares that are added up for a row."""
        return self.window * self.plan.sampling.batch_capacity

    @property
    def _own_sizes(self) -> list[int]:
        """Rows of each table that can survive, of tables that have some."""
        if self.rows is None:
            return [int(table.shape[0]) for table in self.noised_tables]
        return [size for selected in self._selected if (size := int(selected.shape[0]))]

    @property
    def _own_offsets(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self._own_sizes, dtype=np.int64)])

    @property
    def survivors(self) -> list[np.ndarray] | None:
        """With a window, the rows of each table that train until it ends, int64; else None.

        They are released, also before they are used: a checkpoint is written first.
        """
        self.before_publishing()
        return self._survivors_now()

    def __dir__(self) -> list[str]:
        """Without what writes a checkpoint: Keras reads all that is here when it saves a model."""
        return [name for name in super().__dir__() if name not in ("survivors", "windows")]

    def _survivors_now(self) -> list[np.ndarray] | None:
        if self._window is None:
            return None
        own = self._window.survivors(self._own_offsets)
        if self.rows is None:
            return own
        parts, nothing = iter(own), np.zeros(0, np.int64)
        return [
            selected.numpy()[next(parts)] if selected.shape[0] else nothing
            for selected in self._selected
        ]

    def _begin(self, survivors: Sequence[np.ndarray], ended: int) -> None:
        """Begins a window with these rows of each table, as far as they can survive."""
        assert self._window is not None
        sizes = [int(table.shape[0]) for table in self.noised_tables]
        own = [rows[rows < size] for rows, size in zip(survivors, sizes, strict=True)]
        if self.rows is not None:
            among = zip([each.numpy() for each in self._selected], own, strict=True)
            own = [np.flatnonzero(np.isin(rows, kept)) for rows, kept in among if len(rows)]
        self._window.start(own, self._own_offsets, ended)

    def take_slots(self, previous: WrappingOptimizer) -> None:
        """As all optimizers, and the survivors of its last window, if both have windows."""
        super().take_slots(previous)
        if isinstance(previous, DPAdaFESTOptimizer) and previous._window is not None:
            paths = [table.path for table in previous.noised_tables]
            kept = dict(zip(paths, previous._survivors_now() or (), strict=False))
            if self._window is not None and previous.windows_ended:  # else none has survived
                nothing = np.zeros(0, np.int64)
                rows = [kept.get(table.path, nothing) for table in self.noised_tables]
                self._begin(rows, previous._window.windows_ended)

    @property
    def windows(self) -> np.ndarray | None:
        """For each window that has ended: steps, survivors, survivors that trained during it.

        Released, after a checkpoint was written. int64 `[windows, 3]`, the last 4,096 of this
        process; None without a window.
        """
        self.before_publishing()
        return None if self._window is None else self._window.history

    @property
    def non_private_variables(self) -> list[tf.Variable]:
        """As all optimizers, and the sum of the window."""
        own = [] if self._window is None else self._window.non_private_variables()
        return [*super().non_private_variables, *own]

    def save_own_variables(self, store: Any) -> None:
        """As all optimizers, and the survivors of the last window; never the sum of this one."""
        super().save_own_variables(store)
        rows = self._survivors_now() if self.built else None
        if self._window is not None and rows is not None:
            store[_SURVIVORS] = np.concatenate([np.zeros(0, np.int64), *rows])
            store[_SIZES] = np.array([self._window.windows_ended, *map(len, rows)])

    def load_own_variables(self, store: Any) -> None:
        """As all optimizers; a new window begins, with the survivors that were saved."""
        super().load_own_variables(store)
        if self._window is None or _SIZES not in list(store.keys()):
            return
        ended, *sizes = np.asarray(store[_SIZES]).tolist()
        rows = np.split(np.asarray(store[_SURVIVORS]), np.cumsum(sizes)[:-1])
        if not ended:  # the rows of a plan that may not be this one's
            self._begin_first()
        elif len(rows) == len(self.noised_tables):
            self._begin(rows, ended)

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
            sizes = self._own_sizes
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
            "window": self.window,
            "first_rows": None if self.first_rows is None else self.first_rows.get_config(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> PrivateOptimizer:
        """As Keras calls it; a threshold was once saved with false rows, which it did not use."""
        if config["threshold"] is not None:
            config = {**config, "expected_false_rows": None}
        config = {"window": 1, **config}
        if config.get("first_rows") is not None:
            config["first_rows"] = SelectedRows.from_config(config["first_rows"])
        return super().from_config(config, custom_objects)


def _drawn(rows: np.ndarray, most: int) -> np.ndarray:
    """These sorted rows, or as many of them at random."""
    if len(rows) <= most:
        return rows
    return np.sort(np.random.default_rng().choice(rows, most, replace=False))


def _unrestricted(rows: StepRows, table: Restricted) -> StepRows:
    """Rows of a step among the selected ones, as rows among all."""
    places = tf.where(table.places >= 0, rows.places, -1)
    selected = tf.concat([table.selected, [table.num_rows]], 0)  # a filler stays a filler
    return StepRows(tf.gather(selected, rows.row_ids), places)


def _nothing(table: Restricted) -> StepRows:
    return StepRows(table.selected, table.places)

"""What all sparse optimizers share: noise and updates on the rows of a step, and on no other."""

from collections.abc import Sequence
from typing import Any, Unpack

import keras
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.accounting import PrivacyPlan
from dp_sparse.clipping import ClippedSums
from dp_sparse.core import PrivacyError
from dp_sparse.optimizers.base import Options, PrivateOptimizer, checked_optimizer
from dp_sparse.optimizers.release import NoisyMeans, noisy_dense, noisy_rows
from dp_sparse.optimizers.row_updates import RowWise, gathered_by
from dp_sparse.selection import SelectedRows, among_selected


def checked_rows(rows: Any, plan: PrivacyPlan, name: str = "rows") -> SelectedRows:
    """`rows`, if the plan pays for them.

    Raises:
        ValueError: The argument of this name is no `SelectedRows`.
        PrivacyError: They were selected privately, and their own release is none of the plan's.
    """
    if not isinstance(rows, SelectedRows):
        raise ValueError(
            f"Expected {name} from dp_sparse.select_top_k or dp_sparse.SelectedRows, got "
            f"{type(rows).__name__}."
        )
    if rows.costs and rows.release not in plan.releases:
        raise PrivacyError(
            f"The plan does not pay for {name} ({rows.release.name}): make it with "
            f"PrivacyPlan(..., releases=({name}.release,)).calibrate()."
        )
    return rows


def rows_of_tables(
    rows: SelectedRows, tables: Sequence[Any], of_all: bool = True
) -> list[tf.Tensor]:
    """The selected rows of each table of the model, int64 `[k]`, as constants outside of any graph.

    A table goes by the name of its layer, one of an embedding layer by its own. Unless `of_all`,
    tables that the selection leaves out have none.

    Raises:
        ValueError: The selection has other tables, or tables of other sizes, than the model.
    """
    sizes = {_name(table): table.shape[0] for table in tables}
    wanted = sizes if of_all else {n: size for n, size in sizes.items() if n in rows.num_rows}
    if len(sizes) != len(tables) or wanted != dict(rows.num_rows):
        raise ValueError(
            f"Expected rows for the model's embedding tables {sizes}, got rows for "
            f"{dict(rows.num_rows)}: select them with tables=, by the names of the Embedding "
            "layers."
        )
    with tf.init_scope():
        return [tf.constant(rows.row_ids.get(_name(table), []), tf.int64) for table in tables]


def _constant_rates(
    optimizer: keras.optimizers.Optimizer, table_optimizer: keras.optimizers.Optimizer | None
) -> tuple[float, float] | None:
    """Their learning rates, or None if there is no ratio of them to keep."""
    if table_optimizer is None or not all(map(_is_constant, (optimizer, table_optimizer))):
        return None
    dense, tables = (float(o.learning_rate.numpy()) for o in (optimizer, table_optimizer))
    return (dense, tables) if dense > 0 else None


def _is_constant(optimizer: keras.optimizers.Optimizer) -> bool:
    return isinstance(optimizer._learning_rate, keras.Variable)


def _name(table: Any) -> str:
    return table.path.split("/")[-2] if isinstance(table, keras.Variable) else str(table.path)


class SparseOptimizer(PrivateOptimizer):
    """Noise and updates on the rows that `rows_of_step` gives, and on every dense parameter.

    Args:
        optimizer: Updates the dense variables, and the tables through its row-wise twin.
        plan: As `PrivateOptimizer`.
        clip_norm: As `PrivateOptimizer`.
        rows: Rows selected beforehand, which alone may be chosen; None for all rows.
        table_optimizer: As `TableOptions`.
        options: Those of `PrivateOptimizer`; with `microbatch_size`, rows are chosen once, over the
            whole batch.

    Raises:
        ValueError: An optimizer that would touch every row of a table; when training begins, rows
            for other tables than the model's.
        PrivacyError: The plan does not pay for `rows`.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        plan: PrivacyPlan,
        clip_norm: float,
        rows: SelectedRows | None = None,
        table_optimizer: keras.optimizers.Optimizer | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(optimizer, plan, clip_norm, **options)
        if table_optimizer is not None:
            table_optimizer = checked_optimizer(table_optimizer)
        self.table_optimizer = table_optimizer
        self._rates = _constant_rates(self.optimizer, table_optimizer)
        self._row_wise = RowWise(table_optimizer or self.optimizer)
        self._rows = None if rows is None else checked_rows(rows, self.plan)
        self._selected: list[tf.Tensor] = []

    @property
    def rows(self) -> SelectedRows | None:
        """Rows selected beforehand, for which the plan pays; None for all rows."""
        return self._rows

    @property
    def learning_rate(self) -> Any:
        """The wrapped optimizer's. What sets it multiplies that of `table_optimizer`, too."""
        return self.optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        if self.table_optimizer is not None:
            self.table_optimizer.learning_rate = self._table_rate(value)
        self.optimizer.learning_rate = value

    def _table_rate(self, value: Any) -> Any:
        """The tables' learning rate that keeps its ratio to that of the dense variables."""
        schedule = isinstance(value, keras.optimizers.schedules.LearningRateSchedule)
        if self._rates is None or schedule:
            raise ValueError(
                "Expected constant learning rates above 0 of the optimizer and of its "
                f"table_optimizer, whose ratio stays, got learning_rate={value!r} for others: give "
                "each its schedule when it is made, or leave out table_optimizer."
            )
        dense, tables = self._rates
        return value * (tables / dense)

    @property
    def variables(self) -> list[keras.Variable]:
        """Its own slots and count, then those of the optimizers it wraps."""
        tables = self.table_optimizer.variables if self.table_optimizer is not None else []
        return [*super().variables, *tables]

    @property
    def slots(self) -> list[keras.Variable]:
        """As `PrivateOptimizer`, and those of the tables."""
        tables = [] if self.table_optimizer is None else gathered_by(self.table_optimizer)
        return [*super().slots, *self._row_wise.slots, *tables]

    def build(self, variables: list[keras.Variable]) -> None:
        """Builds the wrapped optimizer over the dense variables, and the tables' row-wise slots."""
        if self.built:
            return
        self._split_variables(variables)
        for table in self.tables:
            refuse_whole_table(table)
        self.optimizer.build(self.dense_variables)
        self._row_wise.build(self.tables, self._add_slot)
        super().build(variables)
        if self.rows is not None:
            self._selected = rows_of_tables(self.rows, self.tables)

    def public_rows(self, number: int, row_ids: tf.Tensor) -> tf.Tensor:
        """Of rows selected beforehand, those that were."""
        if self.rows is None:
            return row_ids
        return among_selected(row_ids, self._selected[number], self.tables[number].shape[0])

    def _noisy_means(self, sums: ClippedSums, draw: noise.Draw) -> NoisyMeans:
        """Noise on the chosen rows and on every dense parameter, and on nothing else."""
        deviation = self.current_clip_norm * self.gradient_noise_multiplier
        batch_size = self.plan.sampling.expected_batch_size
        dense = list(zip(sums.dense, sums.amounts.dense, strict=True))
        rows = noisy_rows(sums.slices, deviation, batch_size, draw)
        return NoisyMeans(
            noisy_dense(dense, deviation, batch_size, draw),
            list(zip(sums.tables, rows, strict=True)),
        )

    def update_tables(self, noisy: NoisyMeans) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Updates the chosen rows of the tables, and of their slots, in place."""
        step = self.iterations + 1
        for table, gradient in noisy.tables:
            self._row_wise.apply(table, gradient, step)
        if self.table_optimizer is not None:
            self.table_optimizer.iterations.assign_add(1)
        return super().update_tables(noisy)

    def _add_slot(self, table: keras.Variable, name: str, value: float) -> keras.Variable:
        initializer = keras.initializers.Constant(value)
        return self.add_variable_from_reference(table, name=name, initializer=initializer)

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description; never a key."""
        table_optimizer = self.table_optimizer
        if table_optimizer is not None:
            table_optimizer = keras.saving.serialize_keras_object(table_optimizer)
        rows = None if self.rows is None else self.rows.get_config()
        return {**super().get_config(), "table_optimizer": table_optimizer, "rows": rows}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> PrivateOptimizer:
        """The optimizer that `get_config` described, with a fresh noise key."""
        if config.get("rows") is not None:
            config = dict(config, rows=SelectedRows.from_config(config["rows"]))
        return super().from_config(config, custom_objects)


def refuse_whole_table(table: keras.Variable) -> None:
    """Raises ValueError for a table with a regularizer or a constraint."""
    for name in ("regularizer", "constraint"):
        if getattr(table, name) is not None:
            raise ValueError(
                f"Expected embedding table {table.path} without a {name}, got "
                f"{getattr(table, name)}: it would touch "
                "every row at every step. Remove it."
            )

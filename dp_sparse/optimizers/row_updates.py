"""Row-wise updates of embedding tables: gather the rows, update them, scatter them back, in place.

Stock Keras Adagrad, Adam and momentum touch every row of a table; these touch the rows of a sparse
gradient alone, so a step costs O(rows · width) whatever the size of the table. Row ids must be
unique. A row that is not in the gradient keeps its weights and slots as they are (for Adam: the
lazy variant).

Slots, which updates have gathered, can be passed on to the optimizer of another plan.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from dp_sparse.core import replicas

AddSlot = Callable[[keras.Variable, str, float], keras.Variable]
_WHOLE_TABLE = ("weight_decay", "clipnorm", "global_clipnorm", "clipvalue", "use_ema")


def sgd_rows(table: tf.Variable, gradient: tf.IndexedSlices, learning_rate: tf.Tensor) -> None:
    """`w -= lr · g` on the gradient's rows."""
    table.scatter_sub(tf.IndexedSlices(learning_rate * gradient.values, gradient.indices))


def adagrad_rows(
    table: tf.Variable,
    accumulator: tf.Variable,
    gradient: tf.IndexedSlices,
    learning_rate: tf.Tensor,
    epsilon: float,
) -> None:
    """`a += g²; w -= lr · g / √(a + ε)` on the gradient's rows."""
    rows, values = gradient.indices, gradient.values
    total = accumulator.sparse_read(rows) + tf.square(values)
    accumulator.scatter_update(tf.IndexedSlices(total, rows))
    step = learning_rate * values * tf.math.rsqrt(total + epsilon)
    table.scatter_sub(tf.IndexedSlices(step, rows))


def adam_rows(
    table: tf.Variable,
    first_moment: tf.Variable,
    second_moment: tf.Variable,
    gradient: tf.IndexedSlices,
    learning_rate: tf.Tensor,
    step: tf.Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
) -> None:
    """Adam on the gradient's rows; the bias correction counts all steps, as lazy Adam does.

    Args:
        table: `[rows, width]`.
        first_moment: Running mean of g, of the table's shape.
        second_moment: Running mean of g², of the table's shape.
        gradient: Unique rows.
        learning_rate: Scalar.
        step: The step's number, from 1 on.
        beta_1: Decay of the first moment.
        beta_2: Decay of the second moment.
        epsilon: Added to the root of the second moment.
    """
    rows, values = gradient.indices, gradient.values
    step = tf.cast(step, tf.float32)
    mean = beta_1 * first_moment.sparse_read(rows) + (1 - beta_1) * values
    square = beta_2 * second_moment.sparse_read(rows) + (1 - beta_2) * tf.square(values)
    first_moment.scatter_update(tf.IndexedSlices(mean, rows))
    second_moment.scatter_update(tf.IndexedSlices(square, rows))
    rate = learning_rate * tf.sqrt(1 - tf.pow(beta_2, step)) / (1 - tf.pow(beta_1, step))
    table.scatter_sub(tf.IndexedSlices(rate * mean / (tf.sqrt(square) + epsilon), rows))


class FtrlSettings(NamedTuple):
    """Constants of FTRL-Proximal, by Keras' names.

    Attributes:
        power: `learning_rate_power`, at most 0.
        l1: `l1_regularization_strength`.
        l2: `l2_regularization_strength`.
        shrinkage: `l2_shrinkage_regularization_strength`.
        beta: As there.
    """

    power: float
    l1: float
    l2: float
    shrinkage: float
    beta: float


def ftrl_rows(
    table: tf.Variable,
    accumulator: tf.Variable,
    linear: tf.Variable,
    gradient: tf.IndexedSlices,
    learning_rate: tf.Tensor,
    settings: FtrlSettings,
) -> None:
    """FTRL-Proximal on the gradient's rows (McMahan et al., KDD 2013, Algorithm 1), as Keras does.

    What a row holds follows from its slots: weights that it began with are not kept.
    """
    rows, values = gradient.indices, gradient.values
    weights, before = table.sparse_read(rows), accumulator.sparse_read(rows)
    total = before + tf.square(values)
    grown, rate = -settings.power, learning_rate
    sigma = (tf.pow(total, grown) - tf.pow(before, grown)) / rate
    moved = values + 2 * settings.shrinkage * weights - sigma * weights
    own = linear.sparse_read(rows) + moved
    quadratic = tf.pow(total, grown) / rate + 2 * settings.l2 + settings.beta / rate
    accumulator.scatter_update(tf.IndexedSlices(total, rows))
    linear.scatter_update(tf.IndexedSlices(own, rows))
    found = (tf.clip_by_value(own, -settings.l1, settings.l1) - own) / quadratic
    table.scatter_update(tf.IndexedSlices(found, rows))


class RowWise:
    """Updates tables at the rows of a gradient, as `optimizer` would.

    Args:
        optimizer: Exactly a Keras SGD without momentum, Adagrad, Ftrl, or Adam without amsgrad.
            Its learning rate and its constants are used; its own `apply` is not.

    Raises:
        ValueError: Any other optimizer, or one with an option that touches a table's every row.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        _refuse(optimizer)
        self._optimizer = optimizer
        self._slots: dict[int, list[keras.Variable]] = {}

    def build(self, tables: list[keras.Variable], add_slot: AddSlot) -> None:
        """Creates the slots of each table; nothing of a table's size is allocated later."""
        for table in tables:
            self._slots[id(table)] = [add_slot(table, n, value) for n, value in self._slot_names()]

    @property
    def slots(self) -> list[keras.Variable]:
        """Those of all tables, in their order."""
        return [slot for slots in self._slots.values() for slot in slots]

    def apply(self, table: keras.Variable, gradient: tf.IndexedSlices, step: tf.Tensor) -> None:
        """One update; `step` counts from 1 on."""
        rate = tf.convert_to_tensor(self._optimizer.learning_rate, tf.float32)
        variables = [table.value, *(slot.value for slot in self._slots[id(table)])]
        replicas.update(variables, functools.partial(self._update_rows, gradient, rate, step))

    def _update_rows(
        self,
        gradient: tf.IndexedSlices,
        rate: tf.Tensor,
        step: tf.Tensor,
        weights: tf.Variable,
        *slots: tf.Variable,
    ) -> None:
        optimizer = self._optimizer
        if isinstance(optimizer, keras.optimizers.SGD):
            sgd_rows(weights, gradient, rate)
        elif isinstance(optimizer, keras.optimizers.Adagrad):
            adagrad_rows(weights, slots[0], gradient, rate, optimizer.epsilon)
        elif isinstance(optimizer, keras.optimizers.Ftrl):
            ftrl_rows(weights, slots[0], slots[1], gradient, rate, _settings(optimizer))
        else:
            betas = optimizer.beta_1, optimizer.beta_2
            adam_rows(weights, slots[0], slots[1], gradient, rate, step, *betas, optimizer.epsilon)

    def _slot_names(self) -> list[tuple[str, float]]:
        if isinstance(self._optimizer, keras.optimizers.SGD):
            return []
        if isinstance(self._optimizer, keras.optimizers.Adagrad):
            return [("accumulator", self._optimizer.initial_accumulator_value)]
        if isinstance(self._optimizer, keras.optimizers.Ftrl):
            return [("accumulator", self._optimizer.initial_accumulator_value), ("linear", 0.0)]
        return [("momentum", 0.0), ("velocity", 0.0)]


def _settings(optimizer: keras.optimizers.Ftrl) -> FtrlSettings:
    return FtrlSettings(
        optimizer.learning_rate_power,
        optimizer.l1_regularization_strength,
        optimizer.l2_regularization_strength,
        optimizer.l2_shrinkage_regularization_strength,
        optimizer.beta,
    )


def _refuse(optimizer: keras.optimizers.Optimizer) -> None:
    fix = "Give tables one of their own: table_optimizer=keras.optimizers.Adagrad(...)."
    if type(optimizer) not in (
        keras.optimizers.SGD,
        keras.optimizers.Adagrad,
        keras.optimizers.Adam,
        keras.optimizers.Ftrl,
    ):
        raise ValueError(
            "Expected SGD, Adagrad, Adam or Ftrl for embedding tables, got "
            f"{type(optimizer).__name__}, whose update would touch every row. {fix}"
        )
    if getattr(optimizer, "momentum", 0) or getattr(optimizer, "amsgrad", False):
        raise ValueError(
            f"Expected no momentum and no amsgrad on embedding tables, got "
            f"{optimizer.get_config()}. {fix}"
        )
    used = [name for name in _WHOLE_TABLE if getattr(optimizer, name)]
    if used:
        raise ValueError(
            f"Expected an optimizer for embedding tables without {used[0]}, got {used[0]}="
            f"{getattr(optimizer, used[0])}: it would touch every row. {fix}"
        )


def gathered_by(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The slots of a Keras optimizer and its count of updates; not its learning rate."""
    rate = optimizer._learning_rate
    return [variable for variable in optimizer.variables if variable is not rate]


def check_successor(optimizer: Any, previous: Any) -> None:
    """Raises ValueError unless `previous` trained the model of `optimizer` under another plan."""
    if type(previous) is not type(optimizer):
        raise ValueError(
            f"Expected the {type(optimizer).__name__} of an earlier part of the data, got "
            f"{type(previous).__name__}: train all parts with one kind of optimizer."
        )
    if previous.plan.run_id == optimizer.plan.run_id:
        raise ValueError(
            "Expected an optimizer of another plan, got one of the same: to go on with a plan, use "
            "PrivateCheckpoint or a saved model."
        )
    models = [None if o._model is None else o._model() for o in (optimizer, previous)]
    if models[0] is None or models[0] is not models[1] or not previous.built:
        raise ValueError(
            "Expected an optimizer that trained the model with which this one is compiled: compile "
            "the model with this one first, and pass the one before it, which has taken steps."
        )


def same_slots(
    own: Sequence[keras.Variable], previous: Sequence[keras.Variable]
) -> Iterator[tuple[keras.Variable, keras.Variable]]:
    """Pairs of slots that serve the same purpose.

    Raises:
        ValueError: They are not those of the same model under optimizers with the same settings.
    """
    described = [[(v.name, tuple(v.shape), v.dtype) for v in slots] for slots in (own, previous)]
    if described[0] != described[1]:
        pairs = zip([*described[0], None], [*described[1], None], strict=False)
        wanted, got = next(pair for pair in pairs if pair[0] != pair[1])
        raise ValueError(
            f"Expected the slots of an optimizer like this one on the same model, got {got} where "
            f"this one has {wanted}: wrap the same Keras optimizer, and train the same model."
        )
    return zip(own, previous, strict=True)

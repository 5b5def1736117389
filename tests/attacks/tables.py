"""Attacks on training with embedding layers of TPUs, by `distribution.train_tables`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from dp_sparse import distribution
from dp_sparse.distribution.embedding_layers import layer_adapters, training_loop
from tests.attacks import steering
from tests.attacks.entries import MEASURED, MIXES, REFUSED, Entry
from tests.attacks.measuring import (
    Problem,
    Released,
    attacking,
    contributions_kept,
    hidden_state,
    private_optimizer,
    sensitivity,
    too_late,
    zeroed,
)
from tests.attacks.mixing_batch import FORWARD
from tests.attacks.mixing_gradients import CHANGES, with_gradient
from tests.attacks.mixing_losses import LOSSES
from tests.attacks.reaching import (
    KEPT,
    NOT_NOISED,
    Keeping,
    KeepingLast,
    KeptRegularizer,
    by,
    counts,
    loss_where_known,
    where_known,
)
from tests.attacks.state import VariableLoss, Writes, kept, tf_variable
from tests.attacks.towers import layer as as_layer
from tests.attacks.ways import WAYS, Way, stream_plan
from tests.distribution.embedding_layers import two_tables
from tests.distribution.embedding_layers.emulator import SparseCore

CLIP = 0.1
_APART = tuple(way for way in WAYS if way != "graph")
_INITIAL = {
    name: np.random.default_rng(5).normal(size=(rows, two_tables.WIDTH)).astype(np.float32)
    for name, rows in two_tables.ROWS.items()
}
Made = tuple[Any, Callable[[], list[Any]]]  # a layer, and its tables


def serving(tables: distribution.PrivateTables) -> Made:
    layer = two_tables.E.TPUEmbeddingForServing(tables.feature_config, None)
    return layer, lambda: [v for _, v in sorted(layer.embedding_tables.items(), key=_name)]


def sparse_core(tables: distribution.PrivateTables) -> Made:
    engine = SparseCore(tables.feature_config, _INITIAL)
    return layer_adapters.SparseCoreLayer(engine), lambda: [*engine.tables.values()]


@contextlib.contextmanager
def engines_accepted() -> Iterator[None]:
    """`train_tables` takes the stand-ins for engines of TPUs, which no public layer has here."""
    original = training_loop.layer_of
    accepting = lambda given, *rest: (  # noqa: E731
        given if isinstance(given, layer_adapters.TableLayer) else original(given, *rest)
    )
    with mock.patch.object(training_loop, "layer_of", accepting):
        yield


def _name(item: Any) -> str:
    return str(item[0].name)


def top(part: Any = None) -> keras.Model:
    """The model over the activations, with an attack on them."""
    inputs = {name: keras.Input((two_tables.WIDTH,), name=name) for name in two_tables.FEATURES}
    inputs["dense_features"] = keras.Input((2,), name="dense_features")
    values = keras.layers.Concatenate()([*inputs.values()])
    values = values if part is None else part(values)
    hidden = keras.layers.Dense(5, activation="tanh")(values)
    return keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))


def measured(
    part: Any = None,
    *,
    loss: Any = "binary_crossentropy",
    metric: Any = None,
    make: Callable[[distribution.PrivateTables], Made] = serving,
    state: Callable[[], list[Any]] = list,
    table_rate: Callable[[], Any] | None = None,
) -> Callable[[Way], float]:
    """The sensitivity of a step of `train_tables`, examples taking turns as padding."""

    def attack(way: Way) -> float:
        with attacking():
            trainee = Trainee(part, loss, metric, make, state, table_rate)
        with attacking(trainee.model, kept=trainee.table_values):
            whole = trainee.on(None)
        with too_late():
            return sensitivity(whole, [trainee.on(7)])

    return attack


class Trainee:
    """A model with tables, on a stream whose passes are one batch; set back after each step."""

    def __init__(
        self,
        part: Any,
        loss: Any,
        metric: Any,
        make: Any,
        state: Callable[[], list[Any]],
        table_rate: Callable[[], Any] | None,
    ) -> None:
        keras.utils.set_random_seed(7)
        self.plan = stream_plan(two_tables.SIZE, two_tables.SIZE, 100)
        self.state = state
        fields = {} if table_rate is None else {"table_optimizer": by(table_rate)()}
        problem = Problem(lambda: None, two_tables.data, clip_norm=CLIP, optimizer=fields)
        self.optimizer = private_optimizer(problem, self.plan)
        self.tables = two_tables.private_tables(self.optimizer)
        self.layer, self._values = make(self.tables)
        self.model = top(part)
        steering.trains(self.model)
        self.model.compile(
            self.optimizer,
            loss=loss() if isinstance(loss, type) else loss,
            metrics=None if metric is None else [metric()],
        )
        self.seen: dict[int, float] = {}

    def on(self, index: int | None) -> Released:
        self.optimizer.use_noise_key(tf.constant([123, 456], tf.int64))  # for equal rounding
        kept = [np.array(v) for v in self.model.variables]
        self._build()
        own_before, before = self.table_values(), self._trained()
        self.seen.clear()
        with contributions_kept(self.seen), engines_accepted():
            source = self._source(index)
            distribution.train_tables(
                self.model, self.tables, self.layer, source, steps_per_epoch=1
            )
        moved = (before - self._trained()) * two_tables.SIZE
        state = hidden_state(self.model, self.state())
        for variable, value in zip(
            [*self.model.variables, *self._values()], [*kept, *own_before], strict=True
        ):
            variable.assign(value)
        return Released(moved, state, dict(self.seen))

    def _build(self) -> None:
        """A layer for serving has no tables before it looked something up."""
        if not isinstance(self.layer, layer_adapters.TableLayer):
            distribution.model_inputs(self.tables, self.layer, two_tables.data()[0])

    def table_values(self) -> list[np.ndarray]:
        return [np.array(v) for v in self._values()]

    def _trained(self) -> np.ndarray:
        variables = [*self.model.trainable_variables, *self._values()]
        return np.concatenate([np.array(v, np.float64).ravel() for v in variables])

    def _source(self, index: int | None) -> tf.data.Dataset:
        x, y = two_tables.data()
        data = x, y[:, None], np.ones(two_tables.SIZE, np.float32)
        return tf.data.Dataset.from_tensor_slices(data if index is None else zeroed(data, index))


def folded(values: Any) -> Any:
    """Features of an example go through a layer as examples of their own."""
    width = values.shape[-1]
    outputs = keras.layers.Dense(2)(keras.ops.reshape(values, (-1, 1)))
    return keras.ops.concatenate([values, keras.ops.reshape(outputs, (-1, 2 * width))], axis=1)


def writes(values: Any) -> Any:
    return Writes(tf_variable, lambda place, total: place.assign_add(total))(values)


def kept_by(name: str) -> Callable[[Any], Any]:
    """A layer whose regulariser reads what was kept under a name."""
    return lambda values: keras.layers.Dense(3, kernel_regularizer=KeptRegularizer(name))(values)


def keeps_last(values: Any) -> Any:
    return kept_by("layer")(KeepingLast()(values))


def of_part(part: Any) -> Callable[[Any], Any]:
    return lambda values: as_layer(part)(values)


ENTRIES = [
    Entry(f"tables: {name}", attack, expected, apart=_APART)
    for name, attack, expected in [
        ("honest: a layer for serving", measured(), MEASURED),
        ("honest: sparse cores", measured(make=sparse_core), MEASURED),
        ("a batch mean", measured(of_part(FORWARD["mean"])), MIXES),
        ("a stopped batch mean", measured(of_part(FORWARD["stopped mean"])), MIXES),
        ("the size of the batch", measured(of_part(FORWARD["size of the batch"])), MIXES),
        ("features folded into the batch", measured(folded), MIXES),
        (
            "a gradient clipped by the norm over the batch",
            measured(of_part(with_gradient(CHANGES["clipped by the norm over the batch"]))),
            MIXES,
        ),
        ("a contrastive loss", measured(loss=LOSSES["contrastive"]), MIXES),
        (
            "a layer that mixes where the batch's size is known",
            measured(of_part(where_known)),
            MIXES,
        ),
        (
            "a loss that mixes where the batch's size is known",
            measured(loss=loss_where_known),
            MIXES,
        ),
        (
            "a metric's tensor in a regulariser",
            measured(kept_by("metric"), metric=Keeping),
            NOT_NOISED,
        ),
        ("a layer's tensor in a regulariser", measured(keeps_last), NOT_NOISED),
        (
            "a layer's tensor in the schedule of the tables",
            measured(KeepingLast(), table_rate=lambda: 1 + abs(KEPT.get("layer", 0.0))),
            NOT_NOISED,
        ),
        (
            "the training loss in the schedule of the tables",
            measured(table_rate=lambda: 1 + steering.training_loss()),
            NOT_NOISED,
        ),
        (
            "counts of examples in the schedule of the tables",
            measured(table_rate=counts),
            NOT_NOISED,
        ),
        ("a loss that keeps a mean", measured(loss=VariableLoss, state=kept), REFUSED),
        ("a layer that writes", measured(writes, state=kept), REFUSED),
    ]
]

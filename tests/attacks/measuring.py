"""Sensitivity: how much more or less one example makes a step release, read from the weights."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from dp_sparse.optimizers import adafest

TOLERANCE = 1e-3
SIGMA = 1e-6  # noise is off; what is computed from σ must not be
EVERY_LOOKUP = 1e-3  # a threshold that each lookup reaches, and noise of 1e-6 never does
_COUNTERS = ("iteration", "steps_spent", "steps_seal", "own_order")

Loss = Callable[[Any, Any], Any] | keras.losses.Loss | type[keras.losses.Loss] | str | None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is trained, and on which neighbours.

    Attributes:
        model: Makes the model.
        data: Makes `(x, y)` or `(x, y, weights)`, each leaf `[examples, ...]`.
        loss: As `compile` takes it, or a class of which each model gets a loss of its own.
        removed: Which examples are removed, in turn; -1 is the last one.
        clip_norm: C.
        optimizer: Further arguments of the private optimizer.
        compiled: Further arguments of `compile`.
        sigma: The plan's σ.
        state: What the attack keeps outside of the model: arrays that must not depend on an
            example.
    """

    model: Callable[[], keras.Model]
    data: Callable[[], Any]
    loss: Loss = "mse"
    removed: Sequence[int] = (0,)
    clip_norm: float = 0.1
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    compiled: dict[str, Any] = dataclasses.field(default_factory=dict)
    sigma: float = SIGMA
    state: Callable[[keras.Model], Sequence[Any]] = lambda model: ()


@dataclasses.dataclass
class Released:
    """What one step on one of the neighbours gave away.

    Attributes:
        sums: S/C over all trainable variables, flat, float64.
        state: Everything else that a step may not move by what it saw.
        contributions: V/C1 by number of row, the contribution map over all tables.
    """

    sums: np.ndarray
    state: dict[str, np.ndarray]
    contributions: dict[int, float]

    def distance(self, other: "Released") -> float:
        """The sensitivity that this pair of neighbours shows: of the sums, the map, the state."""
        if not all(np.isfinite(each.sums).all() for each in (self, other)):
            return np.inf
        rows = {*self.contributions, *other.contributions}
        maps = [[each.contributions.get(row, 0.0) for row in rows] for each in (self, other)]
        of_map = float(np.linalg.norm(np.subtract(*maps)))
        of_sums = float(np.linalg.norm(self.sums - other.sums))
        return max(of_sums, of_map) if same(self.state, other.state) else np.inf


class Refusal(Exception):
    """An attack ended in an error.

    Attributes:
        error: What was raised.
        late: Whether something had moved before.
    """

    def __init__(self, error: Exception, late: bool) -> None:
        super().__init__(f"{type(error).__name__}: {error} ({'late' if late else 'in time'})")
        self.error = error
        self.late = late


def sensitivity(whole: Released, others: Sequence[Released]) -> float:
    """The largest that the neighbours of `whole` show."""
    return max(whole.distance(other) for other in others)


@contextlib.contextmanager
def attacking(*models: Any, kept: Callable[[], Sequence[Any]] = lambda: ()) -> Iterator[None]:
    """Turns an error into a `Refusal`, late if a variable of a model, or what is kept, moved."""
    before = [*map(weights_of, models), numbered(kept())]
    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        after = [*map(weights_of, models), numbered(kept())]
        raise Refusal(error, late=not all(map(same, before, after))) from error


@contextlib.contextmanager
def too_late() -> Iterator[None]:
    """Turns an error into a `Refusal` that comes after an update."""
    try:
        yield
    except Exception as error:
        raise Refusal(error, late=True) from error


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    """Whether two states are equal, bit for bit."""
    return left.keys() == right.keys() and all(
        np.array_equal(left[key], right[key], equal_nan=left[key].dtype.kind == "f") for key in left
    )


def numbered(values: Sequence[Any]) -> dict[str, np.ndarray]:
    """What an attack keeps outside of the model, as a state."""
    return {f"attack {i}": np.array(value) for i, value in enumerate(values)}


def weights_of(holder: Any) -> dict[str, np.ndarray]:
    """Copies of the variables of a model or a layer, by number and path."""
    named = enumerate(holder.variables)
    return {f"{i} {v.path}": np.array(v) for i, v in named if not _is_random(v.path)}


def hidden_state(model: keras.Model, more: Sequence[Any]) -> dict[str, np.ndarray]:
    """What no step may move: variables that are not trained, of the model and of its optimizer."""
    trained = {id(v) for v in model.trainable_variables}
    rest = [v for v in (*model.variables, *model.optimizer.variables) if id(v) not in trained]
    state = {f"{i} {v.path}": np.array(v) for i, v in enumerate(rest) if not _is_counter(v)}
    return state | numbered(more)


def _is_counter(variable: keras.Variable) -> bool:
    return variable.path.split("/")[-1] in _COUNTERS or _is_random(variable.path)


def _is_random(path: str) -> bool:
    return path.endswith("seed_generator_state")


@contextlib.contextmanager
def contributions_kept(seen: dict[int, float]) -> Iterator[None]:
    """While a step is traced: each run of it puts its contribution map, in units of C1, there."""
    original = adafest.contribution_map

    def spied(tables: Any, clip_norm: float, examples: int) -> Any:
        def keep(row_ids: tf.Tensor, values: tf.Tensor) -> None:
            pairs = zip(row_ids.numpy().tolist(), values.numpy().tolist(), strict=True)
            seen.update({row: value / clip_norm for row, value in pairs if value})

        found = original(tables, clip_norm, examples)
        tf.py_function(keep, [found.row_ids, found.values], [])
        return found

    with mock.patch.object(adafest, "contribution_map", spied):
        yield


def private_optimizer(
    problem: Problem, plan: dp_sparse.PrivacyPlan, **arguments: Any
) -> dp_sparse.DPAdaFESTOptimizer:
    """DP-AdaFEST whose steps move the weights by −S / (B·C), on every row that was looked up."""
    settings = {"threshold": EVERY_LOOKUP, **problem.optimizer, **arguments}
    make = settings.pop("make", dp_sparse.DPAdaFESTOptimizer)
    if make is not dp_sparse.DPAdaFESTOptimizer:
        settings.pop("threshold", None)
    wrapped = settings.pop("wrapped", None) or keras.optimizers.SGD(1.0 / problem.clip_norm)
    return make(wrapped, plan, problem.clip_norm, **settings)


def without(data: Any, index: int) -> Any:
    """The examples but one; the others move up, and zeros are last."""
    return tf.nest.map_structure(lambda leaf: _without(np.asarray(leaf), index), data)


def _without(leaf: np.ndarray, index: int) -> np.ndarray:
    rest = np.delete(leaf, index, axis=0)
    return np.concatenate([rest, np.zeros_like(leaf[:1])])


def zeroed(data: Any, index: int) -> Any:
    """The examples with padding in the place of one."""

    def of_leaf(leaf: Any) -> np.ndarray:
        leaf = np.array(leaf)
        leaf[index] = np.zeros((), leaf.dtype)
        return leaf

    return tf.nest.map_structure(of_leaf, data)

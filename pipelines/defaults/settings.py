"""What the study searches: a setting is an optimizer, a clip norm, a batch and a selection."""

import dataclasses
import math
from typing import Any

import keras
import numpy as np

from pipelines.defaults.tasks import Task

NON_PRIVATE = "non_private"
RECOMMENDED = "recommended"
DP_SGD, DP_FEST, DP_ADAFEST = "dp_sgd", "dp_fest", "dp_adafest"
OPTIMIZERS = ("SGD", "Adagrad", "Adam")

_CLIP_NORMS = (0.03, 0.1, 0.3, 1.0, 3.0)
_NOISE_RATIOS = (0.5, 1.0, 2.0, 5.0, 10.0)
_FALSE_ROWS = (3.0, 10.0, 32.0, 100.0)
_ROW_FRACTIONS = (0.03, 0.1, 0.3)
_ACCUMULATORS = (0.1, 1e-4, 1e-7)
_RATES = {"SGD": (0.1, 10.0), "Adagrad": (0.005, 0.5), "Adam": (3e-4, 3e-2)}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One point of the search.

    Attributes:
        method: One of `methods_of`, or "non_private"; "recommended" is what `recommend` says, for
            which the batch size alone counts.
        optimizer: The Keras optimizer that is wrapped.
        learning_rate: Its own. SGD's is for gradients clipped to 1: it is divided by the clip norm.
        batch_size: The expected batch size.
        clip_norm: C.
        accumulator: Adagrad's initial one.
        noise_ratio: σ1/σ2 of DP-AdaFEST.
        false_rows: Expected false rows a step of DP-AdaFEST.
        row_fraction: The part of all rows that DP-FEST selects.
    """

    method: str
    optimizer: str
    learning_rate: float
    batch_size: int
    clip_norm: float = 1.0
    accumulator: float = 0.1
    noise_ratio: float = 5.0
    false_rows: float = 32.0
    row_fraction: float = 0.1

    def keras_optimizer(self) -> keras.optimizers.Optimizer:
        """The optimizer to wrap, new."""
        rate: Any = self.learning_rate
        match self.optimizer:
            case "SGD":
                private = self.method != NON_PRIVATE
                return keras.optimizers.SGD(rate / self.clip_norm if private else rate)
            case "Adagrad":
                return keras.optimizers.Adagrad(rate, initial_accumulator_value=self.accumulator)
            case _:
                return keras.optimizers.Adam(rate)

    @property
    def family(self) -> tuple[str, str]:
        """What is compared: the method and the optimizer."""
        return self.method, self.optimizer


def steps_of(task: Task, batch_size: int) -> int:
    """Steps of all passes."""
    return max(1, round(task.passes * len(task.training) / batch_size))


def methods_of(task: Task) -> tuple[str, ...]:
    """The private methods for a task: selection is for tables."""
    return (DP_SGD, DP_FEST, DP_ADAFEST) if task.tables else (DP_SGD,)


def printed_recipe(task: Task) -> Setting:
    """What README printed before this study: DP-AdaFEST with its defaults around Adagrad(0.05)."""
    method = DP_ADAFEST if task.tables else DP_SGD
    return Setting(method, "Adagrad", 0.05, 2048)


def recommended(task: Task) -> Setting:
    """What `dp_sparse.recommend` says, at the task's largest batch."""
    return Setting(RECOMMENDED, "", 0.0, max(task.batch_sizes))


def for_large_tables(task: Task) -> Setting:
    """What `dp_sparse.recommend` says once tables are too large for DP-SGD."""
    batch = max(task.batch_sizes)
    rate = min(0.01, 0.2 / math.sqrt(steps_of(task, batch)))
    own = {"clip_norm": 0.3, "noise_ratio": 2.0, "false_rows": 10.0}
    return Setting(DP_ADAFEST, "Adam", float(f"{rate:.2g}"), batch, **own)


def fixed(task: Task) -> list[Setting]:
    """The private settings that run to the end on every task, whatever their scores."""
    large = [for_large_tables(task)] if task.tables else []
    return [printed_recipe(task), recommended(task), *large]


def drawn(task: Task, methods: tuple[str, ...], draws: int, seed: int) -> list[Setting]:
    """`draws` random settings for each method and optimizer, the same for the same seed."""
    rng = np.random.default_rng(seed)
    families = [(method, name) for method in methods for name in OPTIMIZERS]
    return [_draw(rng, task, *family) for family in families for _ in range(draws)]


def _draw(rng: np.random.Generator, task: Task, method: str, optimizer: str) -> Setting:
    low, high = np.log(_RATES[optimizer])
    rate, batch = float(f"{np.exp(rng.uniform(low, high)):.2g}"), int(rng.choice(task.batch_sizes))
    found: dict[str, Any] = {}
    if optimizer == "Adagrad":
        found["accumulator"] = float(rng.choice(_ACCUMULATORS))
    if method != NON_PRIVATE:
        found["clip_norm"] = float(rng.choice(_CLIP_NORMS))
    if method == DP_ADAFEST:
        found["noise_ratio"] = float(rng.choice(_NOISE_RATIOS))
        found["false_rows"] = float(rng.choice(_FALSE_ROWS))
    if method == DP_FEST:
        found["row_fraction"] = float(rng.choice(_ROW_FRACTIONS))
    return Setting(method, optimizer, rate, batch, **found)

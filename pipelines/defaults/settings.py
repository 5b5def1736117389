"""What the study searches: a setting is an optimizer, a clip norm, a batch and a selection."""

import dataclasses
import math
from typing import Any

import keras
import numpy as np

import dp_sparse
from pipelines.defaults.tasks import Task

NON_PRIVATE = "non_private"
DP_SGD, DP_FEST, DP_ADAFEST = "dp_sgd", "dp_fest", "dp_adafest"
OPTIMIZERS = ("SGD", "Adagrad", "Adam")

_CLIP_NORMS = (0.03, 0.1, 0.3, 1.0, 3.0)
_NOISE_RATIOS = (0.5, 1.0, 2.0, 5.0, 10.0)
_FALSE_ROWS = (3.0, 10.0, 32.0, 100.0)
_ROW_FRACTIONS = (0.03, 0.1, 0.3)
_ACCUMULATORS = (0.1, 1e-4, 1e-7)
GRID_EPSILONS = (1.0, 3.0)
_GRID_CLIP_NORMS, _GRID_QUANTILES = (0.3, 1.0, 3.0, 6.0, 10.0), (0.8, 0.9, 0.95)
_RATES = {"SGD": (0.1, 10.0), "Adagrad": (0.005, 0.5), "Adam": (3e-4, 3e-2)}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One point of the search.

    Attributes:
        method: One of `methods_of`, or "non_private".
        optimizer: The Keras optimizer that is wrapped.
        learning_rate: Its own. SGD's is for gradients clipped to 1: it is divided by the clip norm.
        batch_size: The expected batch size.
        clip_norm: C.
        accumulator: Adagrad's initial one.
        noise_ratio: σ1/σ2 of DP-AdaFEST.
        false_rows: Expected false rows a step of DP-AdaFEST.
        row_fraction: The part of all rows that DP-FEST selects.
        quantile: Of the gradients' norms, which C follows from `clip_norm` on; None keeps C.
        decays: Whether the learning rate falls to 0 along a line, over all steps.
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
    quantile: float | None = None
    decays: bool = False

    def keras_optimizer(self, steps: int) -> keras.optimizers.Optimizer:
        """The optimizer to wrap, new, for a run of so many steps."""
        rate: Any = self.learning_rate
        if self.decays:
            rate = keras.optimizers.schedules.PolynomialDecay(rate, steps, end_learning_rate=0.0)
        match self.optimizer:
            case "SGD":
                private = self.method != NON_PRIVATE
                return keras.optimizers.SGD(rate / self.clip_norm if private else rate)
            case "Adagrad":
                return keras.optimizers.Adagrad(rate, initial_accumulator_value=self.accumulator)
            case _:
                return keras.optimizers.Adam(rate)

    def clipping(self) -> dp_sparse.QuantileClipping | None:
        """How gradients are clipped, if C does not stay."""
        return None if self.quantile is None else dp_sparse.QuantileClipping(self.quantile)

    @property
    def family(self) -> tuple[str, str]:
        """What is compared: the method and the optimizer."""
        return self.method, self.optimizer


_RECOMMENDED: dict[tuple[str, int], Setting] = {}


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
    batch = max(task.batch_sizes)
    key = task.name, steps_of(task, batch)
    if key not in _RECOMMENDED:
        sampling = dp_sparse.PoissonSampling(10 * batch, batch, steps_of(task, batch))
        budget = dp_sparse.PrivacyBudget(1.0, 1e-5)
        plan = dp_sparse.PrivacyPlan(budget, sampling).with_noise(10.0)
        said = dp_sparse.recommend(task.model(), plan)
        assert said.method is dp_sparse.DPSGDOptimizer and said.wrapped == "Adam"
        rate, own = said.wrapped_arguments["learning_rate"], said.arguments
        style, decays = own.get("clipping"), not isinstance(rate, float)
        _RECOMMENDED[key] = Setting(
            DP_SGD,
            said.wrapped,
            rate.initial_learning_rate if decays else rate,
            batch,
            own["clip_norm"],
            quantile=None if style is None else style.target_quantile,
            decays=decays,
        )
    return _RECOMMENDED[key]


def formerly_recommended(task: Task) -> Setting:
    """What `dp_sparse.recommend` said while settings were chosen by AUC alone."""
    batch = max(task.batch_sizes)
    rate = min(0.01, 0.2 / math.sqrt(steps_of(task, batch)))
    return Setting(DP_SGD, "Adam", float(f"{rate:.2g}"), batch, 0.3)


def for_large_tables(task: Task) -> Setting:
    """What `dp_sparse.recommend` says once tables are too large for DP-SGD."""
    own = {"noise_ratio": 2.0, "false_rows": 10.0}
    return dataclasses.replace(recommended(task), method=DP_ADAFEST, **own)


def clip_norms(task: Task) -> list[Setting]:
    """DP-SGD with Adam at clip norms that stay, and at some that follow a quantile.

    They run to the end on tasks that ask for a probability, whatever their scores.
    """
    if not (task.binary and task.as_frequent):
        return []
    now, before = recommended(task), formerly_recommended(task)
    stay = [
        dataclasses.replace(before, clip_norm=norm, decays=decays)
        for decays in (False, True)
        for norm in _GRID_CLIP_NORMS
    ]
    return [*stay, *(dataclasses.replace(now, quantile=each) for each in _GRID_QUANTILES)]


def fixed(task: Task) -> list[Setting]:
    """The private settings that run to the end on every task, whatever their scores."""
    large = [for_large_tables(task)] if task.tables else []
    return [printed_recipe(task), formerly_recommended(task), recommended(task), *large]


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

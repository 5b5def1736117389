"""What plans of several batch sizes and lengths cost, before any training."""

import csv
import dataclasses
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path

from dp_sparse.accounting.budget import PrivacyBudget
from dp_sparse.accounting.calibration import signal_to_noise
from dp_sparse.accounting.plan import PrivacyPlan
from dp_sparse.core import require_matplotlib, validate, whole_file
from dp_sparse.sampling import PoissonSampling

_SIZES, _FACTOR = 6, 4  # of the batches that are tried by default
_EPOCHS = (1.0, 3.0, 10.0)
_HEADERS = ("batch size", "epochs", "steps", "sigma", "epsilon", "noise", "signal to noise")


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One plan.

    Attributes:
        batch_size: Expected batch size B.
        epochs: How often an example is expected to be drawn.
        steps: T.
        noise_multiplier: σ, which meets the budget; `calibrate` finds one some 1e-3 smaller.
        epsilon: ε that all steps spend, rounded up.
        noise: σ/B: the standard deviation of every coordinate of a step's mean gradient, in units
            of the clip norm.
        signal_to_noise: √T·B/σ: what all steps together move along one direction, over the
            deviation of their noise along it, if every example's clipped gradient points there.
            `Recommendation.signal_per_weight` is its part for one of the weights that get noise.
    """

    batch_size: float
    epochs: float
    steps: int
    noise_multiplier: float
    epsilon: float
    noise: float
    signal_to_noise: float


@dataclasses.dataclass(frozen=True)
class PlanTable:
    """Plans for one dataset at one budget; `print` shows them.

    Attributes:
        num_examples: N.
        budget: What each plan may spend.
        rows: The plans, by epochs and batch size.

    Examples:
        >>> import dp_sparse
        >>> table = dp_sparse.plan_table(100_000, epsilon=3.0, batch_sizes=[1000], epochs=[1])
        >>> print(table)
        100,000 examples, epsilon=3, delta=1e-05, Poisson sampling
        batch size  epochs  steps   sigma  epsilon      noise  signal to noise
             1,000       1    100  ...
    """

    num_examples: int
    budget: PrivacyBudget
    rows: list[PlanRow]

    def __str__(self) -> str:
        cells = [_HEADERS, *(tuple(map(_shown, dataclasses.astuple(row))) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        aligned = (zip(line, widths, strict=True) for line in cells)
        lines = ["  ".join(cell.rjust(width) for cell, width in line) for line in aligned]
        return "\n".join(
            [
                f"{self.num_examples:,} examples, epsilon={self.budget.epsilon:g}, "
                f"delta={self.budget.delta:.3g}, Poisson sampling",
                *lines,
                "noise: of each coordinate of a step's mean gradient, in clip norms (sigma / batch "
                "size).",
                "signal to noise: of all steps along one direction; larger is better. Steps cost "
                "time.",
            ]
        )

    def csv(self) -> str:
        """The plans as comma-separated values with a header line."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(field.name for field in dataclasses.fields(PlanRow))
        writer.writerows(map(dataclasses.astuple, self.rows))
        return text.getvalue()

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws signal to noise over batch sizes, a line for each number of epochs.

        Args:
            path: A file whose suffix matplotlib knows, such as .png or .svg.

        Raises:
            ImportError: matplotlib is missing; the message names the extra that installs it.
        """
        require_matplotlib("A plot")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for epochs in dict.fromkeys(row.epochs for row in self.rows):
            own = [row for row in self.rows if row.epochs == epochs]
            sizes, ratios = [r.batch_size for r in own], [r.signal_to_noise for r in own]
            axes.plot(sizes, ratios, marker="o", label=f"{epochs:g} epochs")
        axes.set(xscale="log", yscale="log", xlabel="expected batch size", ylabel="signal to noise")
        axes.set_title(f"{self.num_examples:,} examples, epsilon = {self.budget.epsilon:g}")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
        with whole_file(path) as file:
            figure.savefig(file, format=Path(path).suffix[1:] or "png", dpi=120)


def plan_table(
    num_examples: int,
    epsilon: float,
    delta: float | None = None,
    *,
    batch_sizes: Sequence[float] | None = None,
    epochs: Sequence[float] = _EPOCHS,
) -> PlanTable:
    """A plan for each batch size and number of epochs: which batch, how long, at what noise.

    Nothing is read of the data, and nothing is spent. A plan takes some tenths of a second.

    Args:
        num_examples: N, public.
        epsilon: ε of each plan.
        delta: Its δ; 1/N by default.
        batch_sizes: Expected batch sizes; by default six, up to a quarter of the examples.
        epochs: How often an example is expected to be drawn in all.

    Raises:
        ValueError: An argument out of its range, or none to try.

    Examples:
        >>> import dp_sparse
        >>> table = dp_sparse.plan_table(100_000, epsilon=3.0, batch_sizes=[1000], epochs=[1, 4])
        >>> [(row.steps, f"{row.noise_multiplier:.2f}") for row in table.rows]
        [(100, '0.65'), (400, '0.73')]
        >>> table.csv().splitlines()[0]
        'batch_size,epochs,steps,noise_multiplier,epsilon,noise,signal_to_noise'
    """
    num_examples = validate.positive_integer("num_examples", num_examples)
    budget = PrivacyBudget(epsilon, 1 / max(2, num_examples) if delta is None else delta)
    sizes = _default_sizes(num_examples) if batch_sizes is None else batch_sizes
    for name, tried in (("batch_sizes", sizes), ("epochs", epochs)):
        if not isinstance(tried, Sequence) or isinstance(tried, str) or not tried:
            raise ValueError(f"Expected {name} to be a list of numbers to try, got {tried!r}.")
    rows = [_row(num_examples, budget, size, each) for each in epochs for size in sizes]
    return PlanTable(num_examples, budget, rows)


def _row(num_examples: int, budget: PrivacyBudget, size: float, epochs: float) -> PlanRow:
    sampling = PoissonSampling(num_examples, size, epochs=epochs)
    sigma, spent = PrivacyPlan(budget, sampling).rough_noise()
    return PlanRow(
        batch_size=sampling.expected_batch_size,
        epochs=float(epochs),
        steps=sampling.steps,
        noise_multiplier=sigma,
        epsilon=spent,
        noise=sigma / size,
        signal_to_noise=signal_to_noise(sampling, sigma),
    )


def _default_sizes(num_examples: int) -> list[float]:
    """Six powers of 2, each 4 times the one before, the last at most a quarter of the examples."""
    last = 2 ** int(math.log2(max(4, num_examples) / 4))
    sizes = [last / _FACTOR**power for power in reversed(range(_SIZES))]
    return [size for size in sizes if size >= 1]


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or isinstance(value, int) else f"{value:.4g}"

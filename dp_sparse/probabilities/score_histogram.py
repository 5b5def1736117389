"""`ScoreHistogram`: how often examples of each score were positive, released with noise once.

A score is a log odds, log(p / (1 − p)), in 34 bins: half a unit wide between −4 and 4, wider up to
±30, since a clipped model may be that sure, and one on either side; or, of a regression, the place
of a prediction in the range of labels, in 32 bins and two outer ones. The bins are fixed here, so
they cannot follow from data.

### Formal Guarantees
Neighbouring datasets differ by one example added, removed or zeroed out. An example of score s,
label t in [0, 1] and weight w adds w'·(1 − t) to one cell and w'·t to the one beside it, in the bin
of s, with w' = min(w, cap)/cap: a vector of length at most 1. Both are rounded down to a multiple
of 1/1024, so sums are exact and the sensitivity is 1; the noise is a Gaussian value, rounded to the
same grid, which is post-processing of the unrounded sum. Public: the bins, the cap, the kind of the
model's output, the number of examples, and that no bad label stopped the count. The score of an
example must not depend on other examples: that is checked on the first ones, up to the rounding of
floats, which may differ with the place of an example in its batch.
"""

import dataclasses
import os
import secrets
from typing import Any

import dp_accounting
import numpy as np

from dp_sparse.accounting import Release
from dp_sparse.core import damage_told, read_arrays, validate, whole_file, write_arrays
from dp_sparse.selection import GaussianTopK, gaussian_values

BINS = 34
UNITS = 1024  # of a whole count
_POSITIVE = (*(n / 2 for n in range(1, 9)), 5.0, 6.0, 8.0, 10.0, 13.0, 17.0, 23.0, 30.0)
_LOG_ODDS = np.array([*(-edge for edge in reversed(_POSITIVE)), 0.0, *_POSITIVE])
_FORMAT = "dp-sparse-scores-1"
_INNER = BINS - 2


@dataclasses.dataclass(frozen=True)
class ScoreKind:
    """What a model's output is, as calibration reads it; all of it public.

    Attributes:
        name: "binary", "multiclass" (of the class with the largest probability: whether it is the
            label) or "regression".
        from_logits: Whether the outputs are logits.
        label_range: The least and the largest label of a regression; others are moved into it.
        output: The name or place of the output among several.
    """

    name: str
    from_logits: bool = False
    label_range: tuple[float, float] | None = None
    output: str | int | None = None

    @property
    def edges(self) -> np.ndarray:
        """What separates the bins, float64 `[33]`, in scores."""
        return np.linspace(0.0, 1.0, _INNER + 1) if self.name == "regression" else _LOG_ODDS

    @property
    def middles(self) -> np.ndarray:
        """The score that stands for each bin, float64 `[34]`."""
        edges = self.edges
        halves = np.diff(edges) / 2
        outer = [edges[0] - halves[0]], [edges[-1] + halves[-1]]
        return np.concatenate([outer[0], edges[:-1] + halves, outer[1]])


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreHistogram:
    """Noisy counts of negatives and positives by score.

    Attributes:
        counts: int64 `[34, 2]` in 1/1024 of a whole count, read-only: negatives and positives of
            each bin; some are below 0.
        noise_multiplier: Standard deviation of the noise of each cell, in whole counts.
        kind: What the scores are.
        weight_cap: Weights above it count as it, and all are divided by it.
        histogram_id: A random name.
        steps: After which steps of training it was drawn.
        paid_by: The run of the plan that pays for it; None if it has a budget of its own.
        budget: That budget, (ε, δ); None if a plan pays.

    Examples:
        >>> import dp_sparse, keras, numpy as np, tempfile
        >>> sampling = dp_sparse.StreamSampling(num_examples=400, batch_size=200)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-3), sampling)
        >>> plan = dp_sparse.reserve_calibration(plan, share=0.5).calibrate()
        >>> out = keras.layers.Dense(1, activation="sigmoid")
        >>> model = keras.Sequential([keras.Input((1,)), out])
        >>> optimizer = dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0)
        >>> model.compile(optimizer, loss="binary_crossentropy")
        >>> data = np.linspace(-1, 1, 400)[:, None], np.arange(400) % 2
        >>> histogram = dp_sparse.calibrate_probabilities(model, data).histogram
        >>> folder = tempfile.TemporaryDirectory()
        >>> histogram.save(f"{folder.name}/scores.npz")
        >>> dp_sparse.ScoreHistogram.load(f"{folder.name}/scores.npz").cells.shape
        (34, 2)

    ### Formal Guarantees
    One Gaussian mechanism of `noise_multiplier`. Neighbouring datasets differ by one example that
    is added, removed or zeroed out, which moves the counts by a vector of length at most 1. Public:
    the bins, `kind`, `weight_cap`, and the number of examples.
    """

    counts: np.ndarray
    noise_multiplier: float
    kind: ScoreKind
    weight_cap: float
    histogram_id: str
    steps: int
    paid_by: str | None
    budget: tuple[float, float] | None = None

    @property
    def statement(self) -> str:
        """What it cost apart from a model's plan; empty if the plan pays."""
        if self.budget is None:
            return ""
        epsilon, delta = self.budget
        return (
            "Predictions were calibrated on examples apart from those that trained the model: "
            f"({epsilon:g}, {delta:g})-differential privacy protects one of them, beside what else "
            "was released of them."
        )

    def is_paid_in(self, statement: str) -> bool:
        """Whether the plan of a statement pays for a histogram with this one's noise."""
        return self.budget is None and release_of(self.noise_multiplier).name in statement

    @property
    def cells(self) -> np.ndarray:
        """The counts, float64 `[34, 2]`."""
        return self.counts / UNITS

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one file, whole or not at all, in place of what was there."""
        header = {
            "noise_multiplier": self.noise_multiplier,
            "kind": dataclasses.asdict(self.kind),
            "weight_cap": self.weight_cap,
            "histogram_id": self.histogram_id,
            "steps": self.steps,
            "paid_by": self.paid_by,
            "budget": self.budget,
        }
        with whole_file(path) as file:
            write_arrays(file, _FORMAT, header, {"counts": self.counts})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ScoreHistogram":
        """The histogram that `save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is of another kind, or damaged.
        """
        told = (
            f"Expected {path} to be a histogram that ScoreHistogram.save wrote, got another or a "
            "damaged file.\nRestore it: a new one would spend again."
        )
        with damage_told(told):
            header, arrays = read_arrays(path, _FORMAT)
            kind, budget = header.pop("kind"), header.pop("budget")
            label_range = kind.pop("label_range")
            kind = ScoreKind(**kind, label_range=label_range and tuple(label_range))
            counts = arrays["counts"]
            counts.flags.writeable = False
            return cls(counts=counts, kind=kind, budget=budget and tuple(budget), **header)


class Tally:
    """Exact counts of scores, which are private data, and the release of them.

    Args:
        weight_cap: As `ScoreHistogram`.
    """

    def __init__(self, weight_cap: float) -> None:
        self._kind: ScoreKind | None = None
        self._cap = validate.positive("weight_cap", weight_cap)
        self._counts = np.zeros((BINS, 2), np.int64)

    def add(
        self,
        scores: np.ndarray,
        labels: np.ndarray,
        weights: np.ndarray | None,
        kind: ScoreKind,
    ) -> None:
        """Counts examples.

        Args:
            scores: `[n]`; an example whose score is no number counts nothing.
            labels: In [0, 1], `[n]`.
            weights: >= 0, `[n]`; None for 1.
            kind: What the scores are; the same for all.
        """
        self._kind = kind
        scores, labels = np.asarray(scores, np.float64), np.asarray(labels, np.float64)
        weights = np.ones(len(scores)) if weights is None else np.asarray(weights, np.float64)
        share = np.minimum(weights, self._cap) / self._cap * ~np.isnan(scores)
        bins = np.searchsorted(kind.edges, np.nan_to_num(scores, nan=0.0), side="right")
        for column, part in enumerate((1 - labels, labels)):
            units = np.floor(UNITS * share * part).astype(np.int64)
            np.add.at(self._counts[:, column], bins, units)

    def require_examples(self) -> None:
        """Raises ValueError if nothing was counted."""
        if self._kind is None:
            raise ValueError("Expected examples to calibrate with, got none.")

    def released(
        self,
        noise_multiplier: float,
        steps: int,
        paid_by: str | None,
        budget: tuple[float, float] | None = None,
    ) -> ScoreHistogram:
        """The counts with noise; call it once. Arguments as `ScoreHistogram`."""
        assert self._kind is not None
        noise = gaussian_values(self._counts.size) * UNITS * noise_multiplier
        counts = self._counts + np.rint(noise).astype(np.int64).reshape(BINS, 2)
        counts.flags.writeable = False
        name = secrets.token_hex(16)
        return ScoreHistogram(
            counts, noise_multiplier, self._kind, self._cap, name, steps, paid_by, budget
        )


RELEASE_NAME = f"score histogram of {BINS} bins, to calibrate probabilities"


def release_of(noise_multiplier: float) -> Release:
    """What the histogram costs, for a plan."""
    noise = GaussianTopK(noise_multiplier).description(1)
    return Release(f"{RELEASE_NAME} ({noise})", dp_accounting.GaussianDpEvent(noise_multiplier))


def noise_paid_by(releases: Any) -> float | None:
    """The noise multiplier of the histogram that releases of a plan pay for; None for none."""
    for release in releases:
        if release.name.startswith(RELEASE_NAME):
            return float(release.event.noise_multiplier)
    return None

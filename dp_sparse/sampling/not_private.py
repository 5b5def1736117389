"""Batches that follow from a seed, for debugging: everybody can tell which examples they have."""

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

import dp_accounting
import tensorflow as tf

from dp_sparse.core import key_bytes
from dp_sparse.sampling import input_guard
from dp_sparse.sampling.augmentation import Augment, augmented
from dp_sparse.sampling.base import BatchPart, Sampling
from dp_sparse.sampling.batch import SEEDED


@dataclasses.dataclass(frozen=True)
class NotPrivateSampling(Sampling):
    """Another sampler whose batches are the same in each run. No ε covers a run with them.

    Attributes:
        sampling: What it draws batches like.
        seed: What keys follow from, those of the noise of a run, too.

    ### Formal Guarantees
    None. Its fingerprint is not that of `sampling`, so a plan that guarantees something refuses
    these batches, and the state of runs with them; and a plan with this sampler refuses theirs.
    """

    sampling: Sampling
    seed: int
    _passes: int = dataclasses.field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.sampling, Mapping):  # a description
            object.__setattr__(self, "sampling", Sampling.from_config(self.sampling))
        if not isinstance(self.sampling, Sampling):
            raise ValueError(f"Expected a sampler, got sampling={self.sampling!r}.")
        whole = isinstance(self.seed, numbers.Integral) and not isinstance(self.seed, bool)
        if not whole or self.seed < 0:
            raise ValueError(f"Expected seed to be a whole number >= 0, got seed={self.seed!r}.")
        object.__setattr__(self, "seed", int(self.seed))

    @property
    def not_private_seed(self) -> int:
        """The seed: keys are no secret."""
        return self.seed

    @property
    def num_examples(self) -> int:  # type: ignore[override]
        """N."""
        return self.sampling.num_examples

    @property
    def steps(self) -> int:  # type: ignore[override]
        """T."""
        return self.sampling.steps

    @property
    def expected_batch_size(self) -> float:  # type: ignore[override]
        """B."""
        return self.sampling.expected_batch_size

    @property
    def batch_capacity(self) -> int:
        """The leading dimension of every batch."""
        return self.sampling.batch_capacity

    @property
    def neighbouring(self) -> str:
        """As of what it draws like."""
        return self.sampling.neighbouring

    @property
    def description(self) -> str:
        """A line that says what it is not."""
        return f"Batches and noise follow from seed {self.seed}, which is no secret."

    @property
    def steps_per_pass(self) -> int | None:
        """As of what it draws like."""
        return self.sampling.steps_per_pass

    @property
    def steps_per_round(self) -> int:
        """As of what it draws like."""
        return self.sampling.steps_per_round

    @property
    def steps_per_epoch(self) -> float | None:
        """As of what it draws like."""
        return self.sampling.steps_per_epoch

    def resumed_at(self, source: Any, spent: int) -> int:
        """As of what it draws like."""
        return self.sampling.resumed_at(source, spent)

    def event(self, mechanism: dp_accounting.DpEvent, steps: int) -> dp_accounting.DpEvent:
        """An event without any ε."""
        del mechanism, steps
        return dp_accounting.NonPrivateDpEvent()

    def participations(self, steps: int) -> float:
        """As of what it draws like."""
        return self.sampling.participations(steps)

    def batches(
        self,
        source: Any,
        *,
        first_step: int = 0,
        class_weight: dict[int, float] | None = None,
        augment: Augment | None = None,
    ) -> tf.data.Dataset:
        """Batches as `sampling` makes them, the same in each run.

        Where batches are drawn, each call draws others, so that a second `fit` does not begin again
        with the batches of the first one.

        Args:
            source: As in `sampling.batches`.
            first_step: For a stream, as in `StreamSampling.batches`.
            class_weight: Where batches are drawn, as in `PoissonSampling.batches`.
            augment: As there; its seeds are the same in each run, too.

        Raises:
            ValueError: As `sampling.batches`, or the other sampler's argument.
        """
        if self.steps_per_pass is not None:
            if class_weight is not None:
                raise ValueError(f"Expected no class_weight with a stream, got {class_weight}.")
            batches = self._own(self.sampling.batches(source, first_step=first_step))  # type: ignore[call-arg]
            return augmented(batches, augment, key_bytes(self.seed, "augmentation", first_step))
        if first_step:
            raise ValueError(f"Expected first_step with a stream alone, got {first_step}.")
        key = int.from_bytes(key_bytes(self.seed, "sampling", self._passes)(16), "little")
        seeds = key_bytes(self.seed, "augmentation", self._passes)
        object.__setattr__(self, "_passes", self._passes + 1)
        part = BatchPart(0, self.batch_capacity, key, SEEDED)
        batches = self.batches_of(source, part, first_step=0, class_weight=class_weight)
        return augmented(batches, augment, seeds)

    def batches_of(
        self,
        source: Any,
        part: BatchPart,
        *,
        first_step: int,
        class_weight: dict[int, float] | None = None,
    ) -> tf.data.Dataset:
        """One worker's part of them, under this sampler's fingerprint."""
        return self._own(
            self.sampling.batches_of(source, part, first_step=first_step, class_weight=class_weight)
        )

    def _own(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """The same batches under this sampler's fingerprint."""
        difference = [self.fingerprint - self.sampling.fingerprint, 0, 0, 0]

        def own(x: Any, y: Any, weights: dict[str, Any]) -> Any:
            return x, y, {**weights, "marker": weights["marker"] + difference}

        return input_guard.own(batches.map(own))

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description from which `from_config` makes an equal object."""
        return {
            "class": type(self).__name__,
            "sampling": self.sampling.get_config(),
            "seed": self.seed,
        }

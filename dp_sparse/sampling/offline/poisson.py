"""Poisson sampling whose batches were drawn before training, and are read in their order."""

import dataclasses
import secrets
from typing import Any

import tensorflow as tf

from dp_sparse.sampling.augmentation import Augment, augmented
from dp_sparse.sampling.base import BatchPart
from dp_sparse.sampling.offline.batches import OfflineBatches
from dp_sparse.sampling.offline.claim import claim, run_here
from dp_sparse.sampling.offline.files import Manifest
from dp_sparse.sampling.poisson import PoissonSampling


@dataclasses.dataclass(frozen=True)
class OfflinePoissonSampling(PoissonSampling):
    """Poisson sampling of a data set that is too large to read at random.

    A preparation throws the coins of each example for all steps and writes each step's batch in its
    place, so training reads files in their order. `offline_sampling` makes it.

    Attributes:
        num_examples: N, public.
        expected_batch_size: B; gradients are divided by it.
        steps: T, batches in the whole run.
        capacity: The most examples of a batch.
        draw_id: The name of the draw, SHA-256 of its key, in hexadecimal.
        shared: Whether several plans may train on the draw. Their runs do not compose as sampled,
            and the statement says so.
        plan: The fingerprint of the plan that the batches serve; `calibrate` sets it.

    Examples:
        >>> import dp_sparse
        >>> drawn = dp_sparse.OfflinePoissonSampling(1000, 100, 20, draw_id=64 * "0")
        >>> drawn.participations(20), drawn.capacity  # as those of PoissonSampling
        (2.0, 186)

    ### Formal Guarantees
    Neighbouring datasets differ by adding or removing one example. Amplification needs the key of
    the draw to be secret, and deleted when the batches are written, and the files to be as private
    as the data: whoever reads them knows the batches. A batch belongs to its step alone, so a run
    that goes on after k spent steps reads batch k. One draw pays for one run: a second plan on the
    same draw sees the same batches, and the privacy losses of the two add up within a batch.
    """

    draw_id: str = ""
    shared: bool = False
    plan: int | None = None
    _run: str = dataclasses.field(default="", init=False, repr=False, compare=False)

    def __post_init__(self, epochs: float | None) -> None:
        super().__post_init__(epochs)
        object.__setattr__(self, "_run", secrets.token_hex(8))
        hexadecimal = isinstance(self.draw_id, str) and len(self.draw_id) == 64
        if not hexadecimal or set(self.draw_id) - set("0123456789abcdef"):
            raise ValueError(
                f"Expected draw_id of a manifest, 64 hexadecimal digits, got {self.draw_id!r}: use "
                "offline_sampling(OfflineBatches(...))."
            )

    @property
    def steps_per_pass(self) -> int:
        """T: batch t belongs to step t alone."""
        return self.steps

    @property
    def composes(self) -> bool:
        """Not where other runs may see the same batches."""
        return not self.shared

    @property
    def description(self) -> str:
        """Lines for the statement."""
        lines = (
            f"{super().description}\n"
            f"The batches were drawn before training (draw {self.draw_id[:12]}); their files are "
            "as private as the data."
        )
        if not self.shared:
            return lines
        return (
            f"{lines}\nOther runs may train on the same draw: together they do not compose as "
            "Poisson-sampled runs, and no epsilon is stated for all of them."
        )

    def for_plan(self, fingerprint: int | None) -> "OfflinePoissonSampling":
        """The same batches, in the service of this plan."""
        return dataclasses.replace(self, plan=None if self.shared else fingerprint)

    def for_debugging(self) -> "OfflinePoissonSampling":
        """The same batches, without a claim to them."""
        return dataclasses.replace(self, shared=True, plan=None)

    def batches(  # type: ignore[override]
        self,
        source: OfflineBatches,
        *,
        first_step: int = 0,
        augment: Augment | None = None,
    ) -> tf.data.Dataset:
        """The run's batches from `first_step` on, each `[capacity, ...]` with zeros for padding.

        Args:
            source: The folder of the draw.
            first_step: Where a resumed run continues: `model.optimizer.steps_spent`.
            augment: Changes each example at random, as in `PoissonSampling.batches`.

        Raises:
            ValueError: The folder holds another draw, or `first_step` is outside the run.
            PrivacyError: The sampler has no calibrated plan, the draw serves another one, or a run
                began with it before and this one begins anew; `unpack` or `augment` draws random
                numbers that can be predicted; while iterating, a file holds something else, or
                `unpack` gives an example another row in another batch.
        """
        whole = (0, self.batch_capacity)
        return augmented(self._read(source, first_step, whole, run_here(self._run)), augment)

    def batches_of(
        self,
        source: OfflineBatches,
        part: BatchPart,
        *,
        first_step: int,
        class_weight: dict[int, float] | None = None,
    ) -> tf.data.Dataset:
        """One worker's part of the run's batches; every worker reads all of them."""
        if class_weight is not None:
            raise ValueError(
                f"Expected no class_weight with prepared batches, got {class_weight}: give each "
                "example its weight when they are unpacked."
            )
        return self._read(source, first_step, (part.begin, part.end), f"{part.nonce:x}")

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description from which `from_config` makes an equal object."""
        return {name: value for name, value in super().get_config().items() if name != "_run"}

    def _read(
        self, source: OfflineBatches, first_step: int, part: tuple[int, int], run: str
    ) -> tf.data.Dataset:
        if not isinstance(source, OfflineBatches):
            raise ValueError(
                f"Expected OfflineBatches(folder, unpack), got {type(source).__name__}: the "
                "batches of this plan were drawn before training."
            )
        if not 0 <= first_step < self.steps:
            raise ValueError(
                f"Expected 0 <= first_step < {self.steps}, got first_step={first_step}: after "
                f"{self.steps} steps the plan has none left."
            )
        _check_same(self, source)
        if not self.shared:
            claim(source.folder, self.plan, run, begins=first_step == 0)
        return source.dataset(self.fingerprint, first_step, *part)


def offline_sampling(source: OfflineBatches, *, shared: bool = False) -> OfflinePoissonSampling:
    """The sampler of a draw, for a plan.

    Args:
        source: The folder of the draw.
        shared: Whether other plans may train on it, too.

    Examples:
        See `OfflineBatches`.
        >>> import dp_sparse
        >>> dp_sparse.offline_sampling(source="a path")
        Traceback (most recent call last):
        ValueError: Expected OfflineBatches(folder, unpack), got source='a path'.
    """
    if not isinstance(source, OfflineBatches):
        raise ValueError(f"Expected OfflineBatches(folder, unpack), got source={source!r}.")
    drawn: Manifest = source.manifest
    return OfflinePoissonSampling(
        num_examples=drawn.num_examples,
        expected_batch_size=drawn.expected_batch_size,
        steps=drawn.steps,
        capacity=drawn.capacity,
        draw_id=drawn.draw_id,
        shared=shared,
    )


def _check_same(sampling: OfflinePoissonSampling, source: OfflineBatches) -> None:
    names = ("draw_id", "num_examples", "expected_batch_size", "steps", "capacity")
    for name in names:
        wanted, got = getattr(sampling, name), getattr(source.manifest, name)
        if wanted != got:
            raise ValueError(
                f"Expected prepared batches of {name}={wanted!r}, as the plan says, got {got!r} in "
                f"{source.folder}: make the plan with offline_sampling(...), or prepare again."
            )

"""Poisson sampling whose batches were drawn before training, and are read in their order.

Which steps each example joins, drawn before training: Poisson sampling without random access.

Every pair of an example and a step is a coin of probability q = B / N, as in `PoissonSampling`;
here all coins of an example are thrown when it is prepared, by geometric skips over the T steps. A
shuffle by step then brings each batch together. The coins follow from a secret key, the name of the
shard and the place of the example in it, so a worker that prepares a shard twice throws the same.

Time and memory are those of the pairs: T·q an example.

Whose run a folder of drawn batches serves: one run of one plan.

Two runs on the same batches are no two Poisson-sampled runs, also if each keeps to its plan: they
share the coins, and no composition theorem covers that. The folder's `plan.json` names the plan and
the run that began at step 0; other runs may go on behind it, as after a crash, but not begin anew.
A plan that was pickled into another process begins another run there. Of processes that begin at
once, one has the batches of a local folder; on other file systems of `tf.io.gfile`, which cannot
name a file only if there is none, begin one at a time. No folder can tell of copies of it.
"""

import dataclasses
import hashlib
import hmac
import json
import os
import secrets
import time
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from dp_sparse.core import PrivacyError, StateFile, first_file, validate
from dp_sparse.sampling.augmentation import Augment, augmented
from dp_sparse.sampling.base import BatchPart
from dp_sparse.sampling.offline.batches import OfflineBatches
from dp_sparse.sampling.offline.files import Manifest
from dp_sparse.sampling.poisson import PoissonSampling
from dp_sparse.sampling.skips import bernoulli_positions

CHUNK = 2**16  # examples whose coins come from one generator
KEY_BYTES = 32
_FILE = "plan.json"
_OTHERWISE = (
    "Prepare the batches again; or, if no run has begun with them, or nobody has seen anything of "
    "it, remove that file."
)
_PATIENCE = 5.0  # seconds for another process to write what it has begun


@dataclasses.dataclass(frozen=True)
class OfflineDraw:
    """The coins of all examples, for one run of T steps.

    Attributes:
        key: Secret, 32 bytes: anyone who knows it knows the batches.
        sampling_probability: q.
        steps: T.

    Examples:
        >>> from dp_sparse import offline
        >>> draw = offline.OfflineDraw(offline.new_key(), sampling_probability=0.1, steps=20)
        >>> places, steps = draw.of_chunk("day 3", 0)  # of its first 65,536 examples
        >>> bool(0 <= min(steps) and max(steps) < 20)
        True

    ### Formal Guarantees
    Joins are independent over examples and steps, each with probability q, to anyone who does not
    know the key. It cannot be pickled, so that no job description holds it.
    """

    key: bytes = dataclasses.field(repr=False)
    sampling_probability: float
    steps: int

    def __post_init__(self) -> None:
        if not isinstance(self.key, bytes) or len(self.key) != KEY_BYTES:
            raise ValueError(f"Expected a key of {KEY_BYTES} bytes, as new_key() makes them.")
        if not 0 < validate.positive("sampling_probability", self.sampling_probability) <= 1:
            raise ValueError(
                "Expected sampling_probability <= 1, got "
                f"sampling_probability={self.sampling_probability}."
            )
        validate.positive_integer("steps", self.steps)

    def of_chunk(self, shard: str, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of examples `chunk`·2¹⁶ to (`chunk` + 1)·2¹⁶ − 1 of a shard.

        Args:
            shard: The name of the shard; no two shards of a data set may share one.
            chunk: Which chunk of its examples.

        Returns:
            Places of examples in the chunk, in [0, 2¹⁶), and their steps, in [0, T); int64
            `[pairs]`, sorted by example and then by step. Leave out places without an example.
        """
        message = b"dp_sparse offline Poisson\0" + chunk.to_bytes(8, "little") + shard.encode()
        words = hmac.digest(self.key, message, "sha256")[:16]
        rng = np.random.Generator(np.random.Philox(key=int.from_bytes(words, "little")))
        cells = bernoulli_positions(rng, self.sampling_probability, CHUNK * self.steps)
        return cells // self.steps, cells % self.steps

    def __reduce__(self) -> NoReturn:
        raise PrivacyError("Expected the key of a draw to stay in its process, got a pickle of it.")


def new_key() -> bytes:
    """A secret key from the operating system.

    Examples:
        >>> from dp_sparse import offline
        >>> len(offline.new_key())
        32
    """
    return os.urandom(KEY_BYTES)


def draw_id(key: bytes) -> str:
    """The public name of all that a key draws: its SHA-256, in hexadecimal.

    Examples:
        >>> from dp_sparse import offline
        >>> offline.draw_id(bytes(32))
        '66687aadf862bd776c8fc18b8e9f8e20089714856ee233b3902a591d0d5f2925'
    """
    return hashlib.sha256(key).hexdigest()


class _Process:
    """The name of this process; a copy of a run in another one is another run."""

    name = secrets.token_hex(8)

    @classmethod
    def renew(cls) -> None:
        """Gives a forked process a name of its own."""
        cls.name = secrets.token_hex(8)


os.register_at_fork(after_in_child=_Process.renew)


def run_here(run: str) -> str:
    """The name of a run in this process: a pickle of its plan begins another run elsewhere."""
    return f"{run}-{_Process.name}"


def claim_draw(folder: str, plan: int | None, run: str, begins: bool) -> None:
    """Writes whom the batches serve, or compares.

    Args:
        folder: Of the batches.
        plan: The fingerprint of the plan, or None if it is not calibrated.
        run: A name of the run.
        begins: Whether it begins at step 0.

    Raises:
        PrivacyError: There is no plan; the batches serve another one, or another run that began; or
            what the folder says cannot be read.
        OSError: The folder cannot be written to.
    """
    if plan is None:
        raise PrivacyError(
            "Expected the sampler of a calibrated plan, which prepared batches serve alone: use "
            "plan.sampling.batches(...)."
        )
    path = f"{folder}/{_FILE}"
    if not tf.io.gfile.exists(path):
        _write_claim(folder, path, {"plan": plan, "run": run})
    claimed = _read_claim(path)
    if claimed["plan"] != plan:
        raise PrivacyError(
            f"Expected batches that no other plan trains on, got {folder}, which serves another "
            "one: two runs on one draw do not compose as sampled. Prepare the data again, or use "
            "offline_sampling(..., shared=True), whose statement says so."
        )
    if begins and claimed["run"] != run:
        raise PrivacyError(
            f"Expected batches that no run began with, got {folder}, with which one began at step "
            "0: a second one from there shares its batches, and the two do not compose as sampled. "
            f"Go on with first_step=, or prepare again. If nobody has seen anything of that run, "
            f"remove {path}."
        )


def _read_claim(path: str) -> dict[str, Any]:
    """Waits for what another process is about to write, where it cannot do so at once."""
    until, file = time.monotonic() + _PATIENCE, StateFile(path, _OTHERWISE)
    while True:
        try:
            return file.read(lambda found: {"plan": int(found["plan"]), "run": str(found["run"])})
        except PrivacyError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.05)


def _write_claim(folder: str, path: str, content: dict[str, int | str]) -> None:
    """Writes the claim; on a local file system one of several processes does."""
    described = json.dumps(content) + "\n"
    if "://" not in path:
        first_file(path, described.encode())
        return
    unfinished = f"{folder}/.{_FILE}.{content['run']}.tmp"
    with tf.io.gfile.GFile(unfinished, "w") as file:
        file.write(described)
    try:
        tf.io.gfile.rename(unfinished, path, overwrite=False)
    except tf.errors.AlreadyExistsError:  # another process was faster
        tf.io.gfile.remove(unfinished)


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
    as the data: anyone who reads them knows the batches. A batch belongs to its step alone, so a
    run that goes on after k spent steps reads batch k. One draw pays for one run: a second plan on
    the same draw sees the same batches, and the privacy losses of the two add up within a batch.
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
            claim_draw(source.folder, self.plan, run, begins=first_step == 0)
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

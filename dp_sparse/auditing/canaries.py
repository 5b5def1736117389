"""Canaries: examples whose presence in the data attacks are to tell, and the attacks."""

import abc
import dataclasses
import functools
import secrets
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse.accounting import PrivacyPlan
from dp_sparse.auditing.evidence import Evidence, Survival
from dp_sparse.auditing.placement import Placement
from dp_sparse.auditing.probe import Probe, probe_loss
from dp_sparse.auditing.scores import CanaryScores
from dp_sparse.core import validate
from dp_sparse.optimizers import DPAdaFESTOptimizer, PrivateOptimizer

Attacks = dict[str, CanaryScores]  # by name

_STEP = 0.01  # of the audited copy, in units of what a gradient of norm C moves


@dataclasses.dataclass(frozen=True)
class Trained:
    """What is trained: a model, its examples, and how.

    Attributes:
        model: Makes the model.
        x: Its inputs.
        y: Labels.
        weight: Sample weights, float32 `[examples]`.
        loss: As `compile` takes it.
        optimizer: Makes the private optimizer of a plan.
    """

    model: Callable[[], keras.Model]
    x: Any
    y: Any
    weight: np.ndarray
    loss: Any
    optimizer: Callable[[PrivacyPlan], PrivateOptimizer]


class Canaries(abc.ABC):
    """Canaries of one kind."""

    independent: bool  # whether noise alone makes their scores depend on each other

    @property
    @abc.abstractmethod
    def number(self) -> int:
        """How many."""

    @abc.abstractmethod
    def attacked(self, trained: Trained, placement: Placement, plan: PrivacyPlan) -> Attacks:
        """Trains one run with a coin for each canary, and attacks all of them.

        Args:
            trained: What is trained.
            placement: Where the canaries stand.
            plan: A plan of this run alone.

        Returns:
            The scores that each attack gives the canaries.
        """


@dataclasses.dataclass(frozen=True)
class GradientCanaries(Canaries):
    """The strongest attacker: canaries with a coordinate each, who sees every step.

    They are examples of a copy of the model that has one more layer, on whose weights they act. The
    copy is trained by plain SGD, so that released gradients can be read from the weights. To the
    model itself canaries look like the first example, whose lookups there are part of their map.

    Attributes:
        count: How many. More of them show more of ε: thousands for most of it.
        rows: Whether a canary's coordinate is a row of a table, which it looks up. By default where
            the optimizer chooses rows by DP-AdaFEST among all of them.

    Examples:
        >>> import dp_sparse
        >>> dp_sparse.GradientCanaries(count=1000).number
        1000

    ### Formal Guarantees
    No two canaries of a batch share a coordinate, and gradients of all other examples are 0 there.
    If the noise of coordinates and steps is independent, so are the canaries' scores.
    """

    count: int = 1000
    rows: bool | None = None
    independent = True

    def __post_init__(self) -> None:
        validate.positive_integer("count", self.count)

    @property
    def number(self) -> int:
        """`count`."""
        return self.count

    def attacked(self, trained: Trained, placement: Placement, plan: PrivacyPlan) -> Attacks:
        """As `Canaries.attacked`: by the likelihood ratio of all steps, and by updates of rows.

        The ratio is the best attack if the mechanism is what it claims to be. How often a row was
        updated at all is best where untouched rows do not survive as often as they should.
        """
        present = coins(self.count)
        optimizer = _reading(trained.optimizer(plan))
        probe = Probe(int(placement.coordinates.max()) + 1, self._acts_on_rows(optimizer))
        copy = probe.beside(trained.model(), trained.x)
        copy.compile(optimizer, loss={"model": trained.loss, "probe": probe_loss})
        clip_norm = optimizer.clip_norm
        source = placement.spread(
            probe.examples(trained.x, trained.y, trained.weight, clip_norm),
            probe.canaries(trained.x, trained.y, placement.coordinates, present, clip_norm),
        )
        ratios, updates = _watched(copy, probe, placement, plan, source)
        scores = {"likelihood ratio": ratios} | ({"updates": updates} if probe.rows else {})
        return {name: CanaryScores.of_coins(each, present) for name, each in scores.items()}

    def _acts_on_rows(self, optimizer: PrivateOptimizer) -> bool:
        if self.rows is not None:
            return self.rows
        return isinstance(optimizer, DPAdaFESTOptimizer) and optimizer.rows is None


def _watched(
    copy: keras.Model, probe: Probe, placement: Placement, plan: PrivacyPlan, source: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Trains the copy; each canary's evidence and how often it moved, float64 `[canaries]`."""
    optimizer, coordinates = copy.optimizer, placement.coordinates
    ratios, updates = np.zeros((2, len(coordinates)))
    evidence = None
    for step, batch in enumerate(plan.sampling.batches(source)):
        norm = float(optimizer.current_clip_norm)
        before = probe.weights(copy)
        copy.train_on_batch(*batch)
        if evidence is None:
            survival = Survival.of(optimizer, probe.coordinates + 1) if probe.rows else None
            evidence = Evidence(
                placement.sampling_probability, optimizer.gradient_noise_multiplier, survival
            )
        unit = float(optimizer.learning_rate) * norm / plan.sampling.expected_batch_size
        used = placement.used_in(step)
        moved = (probe.weights(copy) - before)[coordinates[used]] / unit
        ratios[used] += evidence.of(moved)
        updates[used] += moved != 0
    return ratios, updates


def _reading(optimizer: PrivateOptimizer) -> PrivateOptimizer:
    """The same private optimizer around plain SGD, which moves weights by released gradients."""
    wrapped = keras.optimizers.SGD(_STEP / optimizer.clip_norm)
    config = {**optimizer.get_config(), "optimizer": keras.saving.serialize_keras_object(wrapped)}
    if config.get("table_optimizer") is not None:
        config["table_optimizer"] = None
    return type(optimizer).from_config(config)


@dataclasses.dataclass(frozen=True)
class InputCanaries(Canaries):
    """An attacker who sees the final model alone: canaries that look like examples.

    Attributes:
        x: Inputs of all canaries, as the model takes them: unusual ones, or ones with wrong labels.
        y: Their labels.

    Examples:
        >>> import dp_sparse, numpy as np
        >>> dp_sparse.InputCanaries(np.ones((50, 3)), np.zeros(50)).number
        50
    """

    x: Any
    y: Any
    independent = False

    @property
    def number(self) -> int:
        """How many there are."""
        return len(tf.nest.flatten(self.y)[0])

    def attacked(self, trained: Trained, placement: Placement, plan: PrivacyPlan) -> Attacks:
        """As `Canaries.attacked`: by how much training lowered a canary's loss."""
        present, model = coins(self.number), trained.model()
        model.compile(trained.optimizer(plan), loss=trained.loss)
        there = tf.nest.map_structure(functools.partial(_or_nothing, present), (self.x, self.y))
        source = placement.spread(
            (trained.x, trained.y, trained.weight), (*there, present.astype(np.float32))
        )
        before = self._losses(model, trained.loss)
        model.fit(plan.sampling.batches(source), verbose=0)
        learned = before - self._losses(model, trained.loss)
        return {"loss": CanaryScores.of_coins(learned, present)}

    def _losses(self, model: keras.Model, loss: Any) -> np.ndarray:
        """The loss of each canary, float64 `[canaries]`."""
        outputs = model.predict(self.x, verbose=0)
        loss = keras.losses.get(loss)
        values = (loss.call if isinstance(loss, keras.losses.Loss) else loss)(self.y, outputs)
        return np.asarray(values, np.float64).reshape(self.number, -1).mean(axis=1)


def _or_nothing(present: np.ndarray, leaf: Any) -> np.ndarray:
    """An array `[canaries, ...]` with padding where a canary is not present."""
    leaf = np.array(leaf)
    leaf[~present] = b"" if leaf.dtype.kind in "OSU" else np.zeros((), leaf.dtype)
    return leaf


def coins(count: int) -> np.ndarray:
    """Fair coins that nobody can predict, bool `[count]`, not all the same."""
    if count < 2:
        raise ValueError(f"Expected 2 canaries or more, got {count}.")
    tossed = np.zeros(count, bool)
    while tossed.all() or not tossed.any():
        tossed = np.unpackbits(np.frombuffer(secrets.token_bytes(-(-count // 8)), np.uint8))[:count]
        tossed = tossed.astype(bool)
    return tossed

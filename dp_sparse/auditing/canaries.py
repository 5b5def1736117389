"""Canaries: examples whose presence in the data attacks are to tell, and the attacks.

What a step's released value of a coordinate says of its canary: a log-likelihood ratio.

With σ the noise in units of C, x a released value times B/C, and q the probability that the batch
has a canary that is in: log(1 − q + q·e^((2x − 1)/(2σ²))). Of rows that DP-AdaFEST chooses, whether
the row survived counts, too: q's term is multiplied by the ratio of both probabilities. Ratios add
up over steps, and their sum is the best test (Neyman and Pearson).

The audited copy of a model: the model and, beside it, a probe on which canaries act.

The probe is one layer with a weight for each coordinate, and an output of its own. A canary is an
example whose loss is that weight, times a large number: its gradient is clipped to C, and lies on
one coordinate (a Dirac canary; Nasr et al., USENIX Security 2023). The examples' own outputs do not
count for it, and the probe's do not for the other examples.

`Placement` says where canaries stand among the examples, and which steps may use them.
"""

import abc
import dataclasses
import functools
import secrets
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from scipy import stats

from dp_sparse import clipping
from dp_sparse.accounting import PrivacyPlan
from dp_sparse.auditing.estimators import CanaryScores
from dp_sparse.core import validate
from dp_sparse.optimizers import DPAdaFESTOptimizer, PrivateOptimizer
from dp_sparse.sampling import PoissonSampling, Sampling, StreamSampling

_FAR = 1e6  # times C: the norm of a canary's gradient before clipping
Attacks = dict[str, CanaryScores]  # by name
_STEP = 0.01  # of the audited copy, in units of what a gradient of norm C moves


@dataclasses.dataclass(frozen=True)
class Survival:
    """How likely a row survives.

    Attributes:
        looked_up: If one canary looks it up.
        untouched: If nobody does.
    """

    looked_up: float
    untouched: float

    @classmethod
    def of(cls, optimizer: PrivateOptimizer, rows: int) -> "Survival | None":
        """The chance of rows of the probe table, the optimizer's last; None if no row is chosen."""
        if not isinstance(optimizer, DPAdaFESTOptimizer) or not optimizer.tables:
            return None
        sizes = [table.shape[0] for table in optimizer.tables]
        untouched = optimizer.false_rows_per_step[sizes.index(rows)] / rows
        clip = optimizer.contribution_clip_norm
        lifted = min(1.0, clip) / (optimizer.contribution_noise_multiplier * clip)
        return cls(float(stats.norm.sf(stats.norm.isf(untouched) - lifted)), untouched)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The ratio of one step.

    Attributes:
        sampling_probability: q.
        noise_multiplier: σ of the gradients.
        survival: Of rows that are chosen.
    """

    sampling_probability: float
    noise_multiplier: float
    survival: Survival | None = None

    def of(self, values: np.ndarray) -> np.ndarray:
        """The ratio of each coordinate, float64.

        Args:
            values: x, float64; exactly 0 for a row that did not survive.
        """
        ratio = (2 * values - 1) / (2 * self.noise_multiplier**2)
        if self.survival is not None:
            seen, alone = self.survival.looked_up, self.survival.untouched
            survived = np.log(seen) - np.log(alone) + ratio
            ratio = np.where(values != 0, survived, np.log1p(-seen) - np.log1p(-alone))
        q = self.sampling_probability
        if q == 1:
            return ratio
        return np.logaddexp(np.log1p(-q), np.log(q) + ratio)


@dataclasses.dataclass(frozen=True)
class Probe:
    """A layer beside a model.

    Attributes:
        coordinates: How many.
        rows: Whether they are rows of a table, which canaries look up, or of a dense weight.
    """

    coordinates: int
    rows: bool

    def beside(self, model: keras.Model, x: Any) -> keras.Model:
        """The audited copy, which shares the model's variables.

        Args:
            model: With one output.
            x: Examples as the model takes them.

        Raises:
            ValueError: The model has several outputs.
        """
        inputs = tf.nest.map_structure(_input_like, clipping.named_inputs(model, x))
        output = model(inputs)
        if tf.nest.is_nested(output):
            raise ValueError(
                f"Expected a model of one output, got {model.name} with "
                f"{len(tf.nest.flatten(output))}: audit it without the others."
            )
        canary = keras.Input((1,), dtype="int32", name="canary")
        return keras.Model((inputs, canary), {"model": output, "probe": self._value(canary)})

    def _value(self, canary: Any) -> Any:
        """The weight of a canary's coordinate, `[batch, 1]`; 0 is no canary."""
        if self.rows:
            table = keras.layers.Embedding(
                self.coordinates + 1, 1, "zeros", mask_zero=True, name="probe"
            )
            return keras.ops.cast(table(canary)[:, :, 0], "float32")
        hot = keras.ops.one_hot(canary[:, 0] - 1, self.coordinates)
        return keras.layers.Dense(
            1, use_bias=False, kernel_initializer="zeros", dtype="float32", name="probe"
        )(hot)

    def weights(self, copy: keras.Model) -> np.ndarray:
        """One value for each coordinate, float64 `[coordinates]`."""
        (weight,) = copy.get_layer("probe").trainable_variables
        return weight.numpy().astype(np.float64)[int(self.rows) :, 0]

    def examples(self, x: Any, y: Any, weight: np.ndarray, clip_norm: float) -> Any:
        """`(x, y, sample_weight)` of examples that are no canaries."""
        count = len(weight)
        return self._filled(
            x, y, {"model": weight, "probe": np.zeros(count)}, np.zeros(count), clip_norm
        )

    def canaries(
        self, x: Any, y: Any, coordinates: np.ndarray, present: np.ndarray, clip_norm: float
    ) -> Any:
        """The same of canaries; those that are not present act on nothing and look nothing up.

        Args:
            x: One example as the model takes it, which fills the model's inputs.
            y: Its label.
            coordinates: int64 `[canaries]`.
            present: bool `[canaries]`.
            clip_norm: C.
        """
        x, y = (
            tf.nest.map_structure(lambda leaf: np.repeat(leaf[:1], len(present), axis=0), nest)
            for nest in (x, y)
        )
        weights = {"model": np.zeros(len(present)), "probe": present.astype(float)}
        return self._filled(x, y, weights, np.where(present, coordinates + 1, 0), clip_norm)

    def _filled(self, x: Any, y: Any, weights: Any, ids: np.ndarray, clip_norm: float) -> Any:
        far = np.full((len(ids), 1), _FAR * validate.positive("clip_norm", clip_norm), np.float32)
        x = x, ids.astype(np.int32)[:, np.newaxis]
        weights = tf.nest.map_structure(lambda leaf: np.asarray(leaf, np.float32), weights)
        return x, {"model": y, "probe": far}, weights


def probe_loss(far: Any, value: Any) -> Any:
    """−far·value: descent makes a canary's weight grow."""
    return -(far * value)[:, 0]


def _input_like(leaf: Any) -> Any:
    leaf = np.asarray(leaf)
    dtype = "string" if leaf.dtype.kind in "OSU" else leaf.dtype.name
    return keras.Input(leaf.shape[1:], dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Canaries among examples, spread evenly.

    Attributes:
        sampling: Of both together: steps, sampling probability or batch size, and passes are those
            of the plan that is audited.
        places: int64 `[canaries]`, increasing: where each stands.
    """

    sampling: Sampling
    places: np.ndarray

    @classmethod
    def of(cls, sampling: Sampling, canaries: int) -> "Placement":
        """So many canaries among the examples of a sampler.

        Raises:
            ValueError: Neither Poisson sampling nor a stream.
        """
        count = sampling.num_examples + canaries
        places = (np.arange(canaries) * count) // canaries
        if isinstance(sampling, PoissonSampling):
            batch_size = sampling.sampling_probability * count
            return cls(PoissonSampling(count, batch_size, sampling.steps), places)
        if isinstance(sampling, StreamSampling):
            return cls(StreamSampling(count, sampling.batch_size, sampling.passes), places)
        raise ValueError(
            f"Expected a plan with PoissonSampling or StreamSampling, got {sampling!r}: audit its "
            "noise under one of them (plan.with_noise)."
        )

    @property
    def sampling_probability(self) -> float:
        """That a canary is in a step's batch, if the step may use it."""
        sampling = self.sampling
        return sampling.sampling_probability if isinstance(sampling, PoissonSampling) else 1.0

    @property
    def coordinates(self) -> np.ndarray:
        """A number of each canary, int64 `[canaries]`, that no other in the same batch has."""
        if not isinstance(self.sampling, StreamSampling):
            return np.arange(len(self.places))
        _, first, batches = np.unique(self._batches, return_index=True, return_inverse=True)
        return np.arange(len(self.places)) - first[batches]

    def used_in(self, step: int) -> np.ndarray:
        """The numbers of the canaries that the batch of a step may hold."""
        if not isinstance(self.sampling, StreamSampling):
            return np.arange(len(self.places))
        return np.flatnonzero(self._batches == step % self.sampling.steps_per_pass)

    @property
    def _batches(self) -> np.ndarray:
        assert isinstance(self.sampling, StreamSampling)
        return self.places // self.sampling.batch_size

    def spread(self, examples: Any, canaries: Any) -> Any:
        """One nest of arrays `[examples + canaries, ...]` out of two, each at its place."""

        def of_leaf(among: np.ndarray, own: np.ndarray) -> np.ndarray:
            among, own = np.asarray(among), np.asarray(own)
            whole = np.empty((len(among) + len(own), *among.shape[1:]), among.dtype)
            at = np.zeros(len(whole), bool)
            at[self.places] = True
            whole[at], whole[~at] = own, among
            return whole

        return tf.nest.map_structure(of_leaf, examples, canaries)


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

"""What all private optimizers share.

They wrap a Keras optimizer and apply only what the private step hands them: `begin_step` spends a
step, `rows_of_step` selects, `release` adds noise, `update` applies what was released. A subclass
says which rows a step may touch, and which noise each part of the sums gets.

Arguments are checked here; each error says what to give instead.
"""

import abc
import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict

import keras
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.accounting import GaussianMechanism, Mechanism, PrivacyPlan
from dp_sparse.clipping import (
    STYLES,
    BeforeLookup,
    ClippedSums,
    ClippingStyle,
    FlatClipping,
    QuantileClipping,
)
from dp_sparse.core import PrivacyError, fingerprint, replicas, validate
from dp_sparse.optimizers.diagnostics import StepDiagnostics
from dp_sparse.optimizers.keras_wrapper import (
    NoForeignGradients,
    VariableSplit,
    WrappingOptimizer,
    regularised,
)
from dp_sparse.optimizers.release import MovingClipNorm, NoisyMeans
from dp_sparse.optimizers.replica_checks import nameless
from dp_sparse.optimizers.step_account import StepAccount
from dp_sparse.selection import StepChoice, TableLookups

_COUPLED = ("gradient_accumulation_steps", "loss_scale_factor")
_TO_LOAD = (
    "`import dp_sparse` before keras.models.load_model, or pass compile=False to predict only; "
    "dp_sparse.export_model writes models that need neither"
)


def checked_plan(
    plan: PrivacyPlan, mechanism: type[Mechanism], *others: type[Mechanism]
) -> PrivacyPlan:
    """A calibrated plan for steps of a mechanism; raises ValueError for any other."""
    if not isinstance(plan, PrivacyPlan) or not (plan.noise_multiplier and plan.plan_id):
        raise ValueError(
            f"Expected a calibrated PrivacyPlan, got plan={plan!r}: use plan.calibrate(), or "
            "plan.with_noise(...)."
        )
    if type(plan.mechanism) not in (mechanism, *others):
        raise ValueError(
            f"Expected a plan with mechanism={mechanism.__name__}(...), got "
            f"mechanism={plan.mechanism!r}: its noise is for other releases than this optimizer's."
        )
    return plan


def checked_style(clipping: ClippingStyle | None) -> ClippingStyle:
    """The style, flat by default; raises ValueError for what is none of `STYLES`.

    A subclass could give any factors, and the guarantee rests on them.
    """
    if clipping is not None and type(clipping) not in STYLES:
        names = ", ".join(f"{style.__name__}()" for style in STYLES)
        raise ValueError(
            f"Expected a clipping style, got clipping={clipping!r}: use one of {names}."
        )
    return clipping or FlatClipping()


def checked_optimizer(
    optimizer: keras.optimizers.Optimizer | str,
) -> keras.optimizers.Optimizer:
    """A plain Keras optimizer that a private one may wrap; raises ValueError for any other."""
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    validate.of_keras_3("an optimizer", optimizer)
    plain = isinstance(optimizer, keras.optimizers.Optimizer)
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if not plain or scaled or isinstance(optimizer, NoForeignGradients):
        raise ValueError(
            f"Expected a plain Keras optimizer to wrap, got optimizer={optimizer!r}: use one of "
            "keras.optimizers, such as keras.optimizers.Adam(), without a loss scale and without "
            "another private optimizer in it."
        )
    for name in _COUPLED:
        if getattr(optimizer, name, None):
            raise ValueError(
                f"Expected an optimizer without {name}, got {name}={getattr(optimizer, name)}: "
                "the plan pays for one update a batch."
            )
    return optimizer


class Options(TypedDict, total=False):
    """What every private optimizer takes by name.

    Attributes:
        microbatch_size: How many examples are in memory at a time; by default the whole batch. It
            changes neither the guarantee nor the numbers, only memory and time.
        clipping: `FlatClipping()` by default, `PerLayerClipping(...)`, `AutomaticClipping(...)` or
            `QuantileClipping(...)`, for which `clip_norm` is where C begins.
        name: As in Keras.
    """

    microbatch_size: int | None
    clipping: ClippingStyle | None
    name: str | None


class TableOptions(Options, total=False):
    """What optimizers that noise chosen rows take by name, beside `Options`.

    Attributes:
        table_optimizer: A Keras SGD, Adagrad, Adam or Ftrl for the tables alone, with a rate of
            its own; by default a row-wise twin of the optimizer itself.
    """

    table_optimizer: keras.optimizers.Optimizer | None


class PrivateOptimizer(WrappingOptimizer, abc.ABC):
    """A Keras optimizer that trains privately under `model.compile`.

    A saved model names the class of its optimizer. So `keras.models.load_model` needs
    `import dp_sparse` before it, or `compile=False`, which leaves the optimizer out; a folder of
    `dp_sparse.export_model` needs neither.

    Args:
        optimizer: The Keras optimizer to apply to the noisy gradients.
        plan: A calibrated plan, whose sampler must make the batches.
        clip_norm: C > 0, the L2 norm to which each example's whole gradient is clipped.
        microbatch_size: As `Options`, and so are `clipping` and `name`.

    Raises:
        ValueError: `clip_norm <= 0`, an uncalibrated plan, or a wrapped optimizer that couples
            steps.

    ### Formal Guarantees
    Under the plan's neighbouring relation the updates of a run are what `plan.statement()` says,
    provided every update came from `fit` or from a loop of `dp_sparse.distribution`. Gradients
    handed over in any other way are refused, not applied.
    """

    mechanism: type[Mechanism] = GaussianMechanism  # what the plan must pay for
    unproven_mechanisms: tuple[type[Mechanism], ...] = ()  # others, whose claims are not guaranteed
    delays_noise = False  # whether tables in memory lack noise between steps
    replicable = True  # nothing of a step but what `update` writes is a replica's own
    reads_cotangents = False  # whether `rows_of_step` needs them
    selects_rows = True  # whether a step noises chosen rows only; which ones is then released

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        plan: PrivacyPlan,
        clip_norm: float,
        *,
        microbatch_size: int | None = None,
        clipping: ClippingStyle | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate=0.0, name=name or type(self).__name__)
        self._clipping = checked_style(clipping)
        if microbatch_size is not None:
            microbatch_size = validate.positive_integer("microbatch_size", microbatch_size)
        self.microbatch_size = microbatch_size
        self.optimizer = checked_optimizer(optimizer)
        self._plan = checked_plan(plan, self.mechanism, *self.unproven_mechanisms)
        self._clip_norm = validate.clip_norm("clip_norm", clip_norm)
        self.steps_spent = self.add_variable(
            (), "zeros", "int64", "only_first_replica", name="steps_spent"
        )
        seal = self.add_variable((), "zeros", "int64", "only_first_replica", name="steps_seal")
        order = self.add_variable((), "zeros", "int64", "only_first_replica", name="own_order")
        self._account = StepAccount(plan, self.steps_spent, seal, order)
        self._moving_clip_norm = self._make_moving_clip_norm()
        self.diagnostics = StepDiagnostics()
        self.outside_tables: Sequence[Any] = ()  # of an embedding layer; each a `path` and `shape`
        self.compiles = False  # by XLA, as compile says
        # Called before anything of the steps so far leaves the process for others to see.
        self.before_publishing: Callable[[], None] = lambda: None
        self._model: weakref.ref[keras.Model] | None = None
        self._find_tables: Callable[[], list[keras.Variable]] | None = None
        self._split = VariableSplit([], [])
        self._settings = 0

    def __repr__(self) -> str:
        """Keras 2 shows it in its error, whose only sentence this is."""
        return f"<{type(self).__name__} of dp_sparse, for models of Keras 3: use `import keras`>"

    def bind(self, model: keras.Model, find_tables: Callable[[], list[keras.Variable]]) -> None:
        """Ties this optimizer to the one model whose private step may use it; called by `compile`.

        Raises:
            PrivacyError: It is tied to another model already.
        """
        bound = self._model() if self._model is not None else None
        if bound is not None and bound is not model:
            raise PrivacyError(
                f"This {type(self).__name__} already trains another model ({bound.name}): make an "
                f"optimizer and a plan "
                "for each model."
            )
        self._model, self._find_tables = weakref.ref(model), find_tables
        self._settings = fingerprint(nameless({**self.get_config(), "plan": None}))

    def use_noise_key(self, words: tf.Tensor) -> None:
        """Takes over a secret noise key, int64 `[2]`, that several workers share.

        It must be new: two runs with one key differ by nothing but their gradients.
        """
        self._account.noise_key.replace(words)

    def _make_moving_clip_norm(self) -> MovingClipNorm | None:
        if not isinstance(self.clipping, QuantileClipping):
            return None
        # Keras' Constant rounds to float32.
        initial = lambda shape, dtype: tf.constant(self.clip_norm, dtype, shape)  # noqa: E731
        variable = self.add_variable((), initial, "float64", name="moving_clip_norm")
        batch = self.plan.sampling.expected_batch_size
        return MovingClipNorm(self.clipping, variable, self._noise_multipliers[1], batch)

    @property
    def examples_in_memory(self) -> int:
        """The most examples of one forward pass."""
        capacity = self.plan.sampling.batch_capacity
        return capacity if self.microbatch_size is None else min(self.microbatch_size, capacity)

    @property
    def plan(self) -> PrivacyPlan:
        """The plan, for good: the ledger counts its steps."""
        return self._plan

    @property
    def steps_left(self) -> int:
        """Steps that the plan still has, for this and every other optimizer of the plan."""
        return self._account.steps_left()

    def watch_steps(self, what: str) -> Callable[[], None]:
        """Remembers the steps so far, before what they gave is written or stated.

        Args:
            what: Says what is written, for errors, such as "save wrote the model".

        Returns:
            A function for afterwards: it raises PrivacyError if a step began meanwhile, in another
            thread, since the weights may then hold more steps than what was written says.
        """
        before = self._account.counts()

        def check() -> None:
            if self._account.counts() != before:
                raise PrivacyError(
                    f"Steps were taken while {what}, in another thread: its weights may hold more "
                    "steps than are named beside them. Remove it if it is there, and write in the "
                    "thread that trains, as in on_epoch_end of a callback."
                )

        return check

    @property
    def clip_norm(self) -> float:
        """C, for good; where it moves, where it begins."""
        return self._clip_norm

    @property
    def clipping(self) -> ClippingStyle:
        """The style, for good: it decides what the noise is split into."""
        return self._clipping

    @property
    def noise_multiplier(self) -> float:
        """σ of what a step releases of rows and gradients: the plan's, less the style's part."""
        return self._noise_multipliers[0]

    @property
    def gradient_noise_multiplier(self) -> float:
        """σ of the clipped sum."""
        return self.noise_multiplier

    @property
    def _noise_multipliers(self) -> tuple[float, float]:
        assert self.plan.noise_multiplier is not None
        return self.clipping.noise_multipliers(self.plan.noise_multiplier)

    @property
    def current_clip_norm(self) -> float | tf.Tensor:
        """C of this step: `clip_norm`, or a float64 scalar that moves."""
        moving = self._moving_clip_norm
        return self.clip_norm if moving is None else moving.value()

    @property
    def non_private_variables(self) -> list[tf.Variable]:
        """What it keeps of batches without noise: no training code may read it."""
        return self.diagnostics.non_private_variables()

    def flush(self) -> None:
        """Brings the tables to what a step has promised; here they always are."""

    def settled(self) -> contextlib.AbstractContextManager[None]:
        """Keeps the tables at what steps have promised while the code inside reads them."""
        return contextlib.nullcontext()

    def before_lookup(self, draw: noise.Draw) -> BeforeLookup | None:
        """What the forward pass must do to a table's rows before it reads them."""
        del draw
        return None

    @property
    def tables(self) -> list[keras.Variable]:
        """The embedding tables, in the order of the model's variables; known once built."""
        return self._split.tables

    @property
    def dense_variables(self) -> list[keras.Variable]:
        """The trained variables that are no tables; known once built."""
        return self._split.dense

    @property
    def noised_tables(self) -> list[Any]:
        """The tables with their `path` and `shape`, also those that are not the model's."""
        return [*self.tables, *self.outside_tables]

    def begin_step(self, marker: tf.Tensor) -> tuple[noise.Draw, tf.Tensor]:
        """Spends a step on the batch with this marker; the update must wait for the count."""
        clip_norm, state = self.current_clip_norm, self.state_of_choice
        return self._account.begin(marker, clip_norm, self._settings, state)

    @abc.abstractmethod
    def rows_of_step(self, lookups: Sequence[TableLookups], draw: noise.Draw) -> StepChoice:
        """The rows of each table that this step may touch; `lookups` in the order of `tables`."""

    def public_rows(self, number: int, row_ids: tf.Tensor) -> tf.Tensor:
        """Those rows of a table, drawn without the batch, that a step may touch as well.

        Args:
            number: Of the table, in the order of `tables`.
            row_ids: int64 `[rows]`.
        """
        del number
        return row_ids

    def release(self, sums: ClippedSums, draw: noise.Draw) -> NoisyMeans:
        """Adds noise to the sums over all replicas, once, and writes nothing."""
        moving = self._moving_clip_norm
        unclipped = None if moving is None else moving.released(sums.amounts.statistic, draw)
        return self._noisy_means(sums, draw)._replace(unclipped=unclipped)

    @abc.abstractmethod
    def _noisy_means(self, sums: ClippedSums, draw: noise.Draw) -> NoisyMeans:
        """What `release` gives of the gradients."""

    def update(self, noisy: NoisyMeans) -> None:
        """Updates every variable by what was released, on all replicas."""
        replicas.merged(lambda: self.measure(noisy))
        pairs = replicas.merged(lambda: self.update_tables(noisy))
        if pairs:
            variables, gradients = zip(*pairs, strict=True)
            with _without_all_reduce(self.optimizer):
                self.optimizer.apply(replicas.parts(gradients), list(variables))
        else:
            replicas.merged(lambda: self.iterations.assign_add(1))
        moving = self._moving_clip_norm
        if moving is not None:
            replicas.merged(lambda: moving.move(noisy.unclipped))

    def remember(self, of_step: tuple[tf.Tensor, ...], draw: noise.Draw, step: tf.Tensor) -> None:
        """Keeps `StepChoice.to_remember` for later steps, once the update of step `step` is made.

        Steps count from 0 on; `step` is an int64 scalar, `draw` the step's random streams.
        """
        del of_step, draw, step

    def state_of_choice(self) -> tf.Tensor:
        """A fingerprint of what earlier steps left for the choice of rows, an int64 scalar."""
        return tf.zeros([], tf.int64)

    def update_tables(self, noisy: NoisyMeans) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Updates the tables, once for all replicas.

        Returns:
            What is left for the wrapped optimizer: each dense variable, its noisy mean gradient
            plus the gradient of its regulariser.
        """
        return [(variable, regularised(mean, variable)) for variable, mean in noisy.dense]

    def measure(self, noisy: NoisyMeans) -> None:
        """Adds what reports say of the noise to its running totals."""
        measured = noisy._replace(tables=[] if self.delays_noise else noisy.tables)
        deviation = self.current_clip_norm * self.gradient_noise_multiplier
        energies = measured.energies(deviation / self.plan.sampling.expected_batch_size)
        self.diagnostics.add_released(energies, noisy.unclipped)

    @property
    def measured_variables(self) -> list[keras.Variable]:
        """Those of `diagnostics.energies`; how many rows delayed noise reaches is not released."""
        return [*self.dense_variables, *([] if self.delays_noise else self.tables)]

    def stays_in_place(self, variable: keras.Variable) -> bool:
        """Whether updates alone change a variable, so that its movement tells what they added."""
        return True

    def load_own_variables(self, store: Any) -> None:
        """Restores slots and spent steps, and draws a new noise key.

        Raises:
            PrivacyError: The store does not fit, so the spent steps would be lost.
        """
        before = self._account.before_loading()
        names = list(store.keys())  # of what may be no mapping
        numbered = {name: store[name] for name in names if name.isdigit()}
        self._account.refuse_unfit(self.name, self.variables, numbered)
        super().load_own_variables(numbered)
        self._account.loaded(before)

    def count_spent(self, steps: int) -> None:
        """Counts at least so many steps as spent: of an earlier process, which published them."""
        self._account.count_spent(steps)

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description; never a key.

        Keras shows it in its error where this package was not imported; so it begins with the fix.
        """
        return {
            "to load": _TO_LOAD,
            "optimizer": keras.saving.serialize_keras_object(self.optimizer),
            "plan": self.plan.get_config(),
            "clip_norm": self.clip_norm,
            "microbatch_size": self.microbatch_size,
            "clipping": keras.saving.serialize_keras_object(self.clipping),
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "PrivateOptimizer":
        """The optimizer that `get_config` described, with a fresh noise key."""
        config = dict(config, plan=PrivacyPlan.from_config(config["plan"]))
        config.pop("to load", None)
        for name in ("optimizer", "table_optimizer", "clipping"):
            if config.get(name) is not None:
                config[name] = keras.saving.deserialize_keras_object(config[name], custom_objects)
        return cls(**config)

    def _split_variables(self, variables: list[keras.Variable]) -> None:
        """Learns which of the model's trainable variables are tables."""
        if self._find_tables is None:
            raise PrivacyError(
                f"{type(self).__name__} was built without a model: pass it to "
                f"model.compile(optimizer=...)."
            )
        tables = self._find_tables()
        ids = {id(table) for table in tables}
        self._split = VariableSplit([v for v in variables if id(v) not in ids], tables)
        self.clipping.check(variables)
        self.diagnostics.start(len(self.noised_tables), len(self.measured_variables))


@contextlib.contextmanager
def _without_all_reduce(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Leaves out Keras' sum over replicas where there is one.

    TensorFlow keeps that sum's gradient, and so the whole traced step, as long as the process.
    """
    if replicas.count() > 1:
        yield
        return
    vars(optimizer)["_all_reduce_sum_gradients"] = list
    try:
        yield
    finally:
        del vars(optimizer)["_all_reduce_sum_gradients"]


def private_optimizer_of(model: keras.Model, otherwise: str) -> PrivateOptimizer:
    """The model's private optimizer.

    Args:
        model: A model.
        otherwise: What to do if it has none, for the error.

    Raises:
        ValueError: It has none, or is of Keras 2.
    """
    validate.of_keras_3("a model", model)
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, PrivateOptimizer):
        raise ValueError(
            "Expected a model compiled with a private optimizer, got "
            f"{type(optimizer).__name__}: {otherwise}."
        )
    return optimizer

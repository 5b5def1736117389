"""One call around a compiled model: plan, batches, optimizer and checks, each of them chosen."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse.accounting import PrivacyBudget, PrivacyPlan
from dp_sparse.core import PrivacyError, UnsupportedLayerError, validate
from dp_sparse.optimizers import PrivateOptimizer, with_other_training
from dp_sparse.reports import Recommendation, check_model, recommend
from dp_sparse.runs.normalisation import without_batch_normalization
from dp_sparse.sampling import PoissonSampling, as_data_source
from dp_sparse.step import has_own_loss

MOST_OF_A_BATCH, PARTS = 4096, 12  # the expected batch size, and the least batches of a pass
_LOOKED_AT = 256  # examples, by check_model
_LINES = 10
MakeOptimizer = Callable[[PrivacyPlan], PrivateOptimizer]


def make_private(
    model: keras.Model,
    *,
    epsilon: float,
    examples: Any,
    epochs: float = 1,
    delta: float | None = None,
    batch_size: int | None = None,
    optimizer: MakeOptimizer | None = None,
    fix: bool = False,
    verbose: bool = True,
) -> "PrivateModel":
    """A compiled model with all that private training needs, chosen from shapes and noise.

    Args:
        model: Compiled, with its loss and metrics; its optimizer is replaced.
        epsilon: Of the whole training.
        examples: What trains: `(x, y)` or `(x, y, sample_weight)` arrays, a `RecordFile`, or a
            dataset of single examples with random access.
        epochs: Expected passes.
        delta: By default 1 / examples.
        batch_size: Expected; by default 4,096, or a twelfth of the examples if that is less.
        optimizer: From the plan to a private optimizer; by default what `recommend` says.
        fix: Whether to replace each BatchNormalization of a functional or Sequential model by
            GroupNormalization, with its scale and offset. The model is another one then.
        verbose: Whether to print what was chosen and why, in ten lines or as many as warnings need.

    Returns:
        The private model; `private.fit()` trains it.

    Raises:
        ValueError: A model without a loss, an argument out of its range, an `optimizer` that gives
            no private one of its plan, or `fix` of a model that cannot be copied layer by layer.
        UnsupportedLayerError: The model cannot be trained privately; every problem with its fix.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> layers = [keras.Input((2,)), keras.layers.Dense(1, activation="sigmoid")]
        >>> model = keras.Sequential(layers, name="clicks")
        >>> model.compile("adam", "binary_crossentropy")
        >>> x, y = np.random.rand(1000, 2).astype("float32"), np.ones((1000, 1), "float32")
        >>> private = dp_sparse.make_private(model, epsilon=3, examples=(x, y), verbose=False)
        >>> history = private.fit(x, y, validation_split=0.1, verbose=0)
        >>> private.plan.sampling.num_examples, private.predict(x[:1], verbose=0).shape
        (900, (1, 1))
        >>> private.statement().splitlines()[1]
        '  (3, 0.00112)-differential privacy protects one example after 12 of 12 steps; the ...'

    ### Formal Guarantees
    Those of the plan. What is chosen follows from shapes, the number of examples and noise, which
    are public; `check_model` reads a few examples and says only what is wrong with the model.
    """
    validate.of_keras_3("a model", model)
    if not isinstance(model, keras.Model):
        raise ValueError(f"Expected a compiled keras.Model, got model={model!r}.")
    if optimizer is not None and not callable(optimizer):
        raise ValueError(
            f"Expected optimizer= to be a function of the plan, got optimizer={optimizer!r}: "
            "optimizer=lambda plan: dp_sparse.DPSGDOptimizer('sgd', plan, clip_norm=1.0)."
        )
    if not model.compiled or (model._compile_loss is None and not has_own_loss(model)):
        raise ValueError(
            f"Expected {model.name} compiled with its loss, got it without: call "
            "model.compile(optimizer, loss, metrics) first."
        )
    changed: list[str] = []
    if fix:
        model, changed = _fixed(model)
    return PrivateModel(
        model, examples, epsilon, delta, epochs, batch_size, optimizer, changed, verbose
    )


class PrivateModel:
    """A model that `make_private` made; what it has not itself is that of the model.

    Attributes:
        model: The Keras model, compiled with a private optimizer.
        plan: Its plan.
        advice: What `recommend` said; None if an optimizer was given.
        changed: What stands now where BatchNormalization was, with its path.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> data = np.ones((100, 2), "float32"), np.ones((100, 1), "float32")
        >>> private = dp_sparse.make_private(model, epsilon=3, examples=data, verbose=False)
        >>> private.advice.method.__name__, private.plan.sampling.steps
        ('DPSGDOptimizer', 11)
    """

    model: keras.Model
    plan: PrivacyPlan
    advice: Recommendation | None

    def __init__(
        self,
        model: keras.Model,
        examples: Any,
        epsilon: float,
        delta: float | None,
        epochs: float,
        batch_size: int | None,
        optimizer: MakeOptimizer | None,
        changed: Sequence[str],
        verbose: bool,
    ) -> None:
        self.model, self.changed, self._verbose = model, list(changed), verbose
        self._examples, self._make = examples, optimizer
        self._epsilon, self._delta = epsilon, delta
        self._compiled = _compiled_with(model)
        source = as_data_source(examples)
        self._check(source)
        self._begin(len(source), epochs, batch_size)

    def _check(self, source: Any) -> None:
        found = check_model(self.model, source.gather(np.arange(min(len(source), _LOOKED_AT))))
        if not found.ok:
            told = [f"- {problem}" for problem in found.problems]
            if any("(BatchNormalization)" in problem for problem in found.problems):
                told.append("make_private(..., fix=True) replaces BatchNormalization.")
            raise UnsupportedLayerError(
                "\n".join([f"Cannot train {self.model.name} privately:", *told])
            )

    def _begin(self, count: int, epochs: float, batch_size: int | None) -> None:
        """Plans for so many examples, and compiles; nothing changes if that fails."""
        size = batch_size or max(1, min(MOST_OF_A_BATCH, math.ceil(count / PARTS)))
        budget = PrivacyBudget(self._epsilon, 1 / count if self._delta is None else self._delta)
        sampling = PoissonSampling(count, size, epochs=epochs)
        plan, advice = PrivacyPlan(budget, sampling).calibrate(), None
        if self._make is not None:
            optimizer = self._make(plan)
            _require_of_plan(optimizer, plan)
        else:
            batch = as_data_source(self._examples).gather(np.arange(1))
            advice = recommend(self.model, plan, batch)
            optimizer = advice.optimizer()
        self.model.compile(optimizer, **self._compiled)
        self.plan, self.advice = plan, advice
        self._epochs, self._batch_size = epochs, batch_size
        if self._verbose:
            print(self)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        *,
        epochs: float | None = None,
        batch_size: int | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        verbose: Any = "auto",
    ) -> keras.callbacks.History:
        """Trains under the plan, on the examples of `make_private` or on arrays in their place.

        Before the first step, other numbers of examples, epochs or examples in a batch than planned
        make another plan for the same budget.

        Args:
            x: Arrays, or anything that `make_private` takes as examples; by default its examples.
            y: Labels, if x is arrays.
            sample_weight: Weights, if x is arrays.
            epochs: Expected passes; by default those of `make_private`.
            batch_size: Expected; likewise.
            validation_split: The last share of arrays, which does not train.
            validation_data: As in Keras; no ε covers metrics on private rows.
            callbacks: As in Keras.
            verbose: As in Keras.

        Returns:
            Keras' history.

        Raises:
            ValueError: Another number of examples, epochs or examples in a batch after the first
                step, a split of what is not arrays or beside `validation_data`, or y or
                sample_weight without what goes before it.
            PrivacyError: All steps of the plan are spent, or the model was compiled again.
        """
        self._require_own_plan()
        examples = self._given(x, y, sample_weight)
        if validation_split and validation_data is not None:
            raise ValueError(
                f"Expected validation_split or validation_data, got both (validation_split="
                f"{validation_split:g}): leave one out."
            )
        if validation_split:
            examples, validation_data = _split(examples, validation_split)
        self._plan_for(len(as_data_source(examples)), epochs, batch_size)
        return self.model.fit(
            self.plan.sampling.batches(examples),
            epochs=max(1, math.ceil(self._epochs)),
            validation_data=validation_data,
            callbacks=list(callbacks or ()),
            verbose=verbose,
        )

    def _require_own_plan(self) -> None:
        """Raises PrivacyError if the model trains under another plan than this one."""
        plan = getattr(self.model.optimizer, "plan", None)
        if plan is None or plan.run_id != self.plan.run_id:
            raise PrivacyError(
                f"Expected {self.model.name} with the optimizer that make_private compiled it "
                "with, got another: it was compiled again, by compile or by make_private.\nUse the "
                "private model of the last call."
            )

    def _given(self, x: Any, y: Any, sample_weight: Any) -> Any:
        if (x is None and y is not None) or (y is None and sample_weight is not None):
            raise ValueError(
                "Expected arrays x, y and sample_weight one by one, got "
                f"{'y' if y is not None else 'sample_weight'} without "
                f"{'x' if x is None else 'y'}."
            )
        if x is None:
            return self._examples
        if y is None:
            return x
        return (x, y) if sample_weight is None else (x, y, sample_weight)

    def _plan_for(self, count: int, epochs: float | None, batch_size: int | None) -> None:
        sampling = self.plan.sampling
        asked = (
            count != sampling.num_examples,
            epochs not in (None, self._epochs),
            batch_size not in (None, self._batch_size),
        )
        if not any(asked):
            return
        optimizer = self.model.optimizer
        if optimizer.built and int(optimizer.steps_spent) > 0:
            raise ValueError(
                f"Expected fit on {sampling.num_examples:,} examples, the epochs and the batch "
                f"size with which training began, got {count:,} examples, epochs={epochs} and "
                f"batch_size={batch_size}.\nCall make_private again; it spends another budget."
            )
        self._begin(
            count,
            self._epochs if epochs is None else epochs,
            self._batch_size if batch_size is None else batch_size,
        )

    def statement(self, *, format: str = "text") -> str:
        """What the steps so far guarantee; as `PrivacyPlan.statement`.

        As text it also says what else trained the weights.

        Raises:
            PrivacyError: The model was compiled again.
        """
        self._require_own_plan()
        optimizer = self.model.optimizer
        steps = (int(optimizer.steps_spent) if optimizer.built else 0) or None
        if format != "text":
            return self.plan.statement(steps, format=format)
        statement = self.plan.statement(steps)
        return with_other_training(statement, self.model.variables, [self.plan.run_id])

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            raise AttributeError(name)  # before it is there
        return getattr(self.model, name)

    def __str__(self) -> str:
        sampling, budget = self.plan.sampling, self.plan.budget
        lines = [
            f"{self.model.name} trains privately: epsilon={budget.epsilon:g}, "
            f"delta={budget.delta:.3g}, one example protected.",
            f"{sampling.num_examples:,} examples, {sampling.expected_batch_size:,.0f} expected in "
            f"a batch, {self._epochs:g} expected passes: {sampling.steps:,} steps.",
            f"Noise multiplier {self.plan.noise_multiplier:.3f}, from privacy loss distributions.",
        ]
        if self.changed:
            lines.append(f"BatchNormalization became {_shown(self.changed)}.")
        if self.advice is not None:
            first, *rest = str(self.advice).splitlines()
            warned = [line for line in rest if line.startswith("! ")]
            lines += [first, *warned, *(line for line in rest if line.startswith("- "))]
            return "\n".join(lines[: max(_LINES, lines.index(first) + 1 + len(warned))])
        return "\n".join(lines)


def _require_of_plan(optimizer: Any, plan: PrivacyPlan) -> None:
    """Raises ValueError for an optimizer that does not train under the plan."""
    if not isinstance(optimizer, PrivateOptimizer) or optimizer.plan.run_id != plan.run_id:
        raise ValueError(
            "Expected optimizer= to give a private optimizer of the plan that it gets, got "
            f"{type(optimizer).__name__} without that plan.\nFor example: "
            "optimizer=lambda plan: dp_sparse.DPSGDOptimizer('sgd', plan, clip_norm=1.0)."
        )


def _fixed(model: keras.Model) -> tuple[keras.Model, list[str]]:
    """Without BatchNormalization, compiled as it was; its optimizer is replaced."""
    made, changed = without_batch_normalization(model)
    if changed:
        made.compile(**_compiled_with(model))
    return made, changed


def _shown(changed: Sequence[str]) -> str:
    more = f" and {len(changed) - 2} more" if len(changed) > 2 else ""
    return ", ".join(changed[:2]) + more


def _compiled_with(model: keras.Model) -> dict[str, Any]:
    """Loss, metrics and steps as `compile` got them."""
    loss, metrics = model._compile_loss, model._compile_metrics
    found: dict[str, Any] = {
        "run_eagerly": model.run_eagerly,
        "steps_per_execution": model.steps_per_execution,
    }
    if loss is not None:
        found |= {"loss": loss._user_loss, "loss_weights": loss._user_loss_weights}
    if metrics is not None:
        found |= {"metrics": metrics._user_metrics}
        found |= {"weighted_metrics": metrics._user_weighted_metrics}
    return found


def _split(examples: Any, share: float) -> tuple[Any, Any]:
    if not isinstance(examples, tuple) or not 0 < share < 1:
        raise ValueError(
            f"Expected 0 < validation_split < 1 with arrays, got {share} with "
            f"{type(examples).__name__}: split the data before, and pass validation_data."
        )
    count = len(as_data_source(examples))
    kept = math.floor(count * (1 - share))
    if not 0 < kept < count:
        raise ValueError(
            f"Expected examples on both sides of validation_split={share:g}, got {count} in all."
        )

    def part(which: slice) -> Any:
        return tf.nest.map_structure(lambda leaf: np.asarray(leaf)[which], examples)

    return part(slice(kept)), part(slice(kept, count))

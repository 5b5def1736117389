"""How `fit` shares the steps that a plan has left over its epochs, and ends when none is left.

Keras takes all batches of a dataset in each epoch, and a sampler's have all steps of the plan. So:

- `fit(batches)` takes all steps that are left.
- `fit(batches, epochs=E)` takes E of the plan's own epochs, if the plan was made in epochs
  (`PoissonSampling(epochs=...)`, `StreamSampling(passes=...)`) and has more than E left. Each ends
  where one of the plan does, so a later `fit` goes on with the next.
- Otherwise it takes all that is left in E shares, which are smaller than the plan's epochs.

`steps_per_epoch` is taken as it is given.
"""

import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras

from dp_sparse.accounting import PrivacyPlan
from dp_sparse.core import PrivacyError
from dp_sparse.optimizers import PrivateOptimizer
from dp_sparse.sampling import Sampling
from dp_sparse.training.quarantine import Quarantine


class FitSteps:
    """The steps of one model's `fit`.

    A run begins when callbacks do (`begin`); before and after each epoch it looks at what the plan
    has left. At the first step that the plan does not pay for, `end` decides whether training ends
    or the step is an error.

    Args:
        model: A model compiled with a private optimizer.
    """

    def __init__(self, model: keras.Model) -> None:
        self._of = weakref.ref(model)
        self._prepared: Callable[[], Any] = _nothing
        self._iterator: Callable[[], Any] = _nothing  # Keras' own over the epochs, while it lives
        self._divides = False  # whether epochs get their steps from here
        self._of_plan = False  # whether these are epochs of the plan
        self._at_begin: int | None = None  # steps left when training began; None outside of fit

    def prepare(self, iterator: Any) -> None:
        """Keras made the iterator of the `fit` to come."""
        self._prepared = weakref.ref(iterator)

    def forget(self) -> None:
        """No run has begun."""
        self._at_begin, self._iterator = None, _nothing
        self._divides = self._of_plan = False

    def begin(self) -> None:
        """A run begins: the `fit` that was prepared, or another loop."""
        self.forget()
        self._iterator, self._prepared = self._prepared, _nothing

    def before_epoch(self, epoch: int, run: keras.callbacks.CallbackList) -> None:
        """Gives the epoch its steps, if each would take all that the plan has left.

        Raises:
            PrivacyError: Training begins, and the plan has no steps left.
        """
        left = self._optimizer.steps_left
        if self._at_begin is None:  # callbacks have restored what they have
            self._at_begin = left
            if not left:
                raise PrivacyError(_nothing_left(self._optimizer.plan))
            self._divides = self._all_in_each_epoch(left)
            self._of_plan = self._divides and self._has_more(left, epoch, run)
        epochs, iterator = run.params.get("epochs"), self._iterator()
        if not self._divides or epochs is None:
            return
        together = iterator.steps_per_execution
        if self._of_plan:
            steps = rest_of_epoch(self._optimizer.plan.sampling, left, together)
        else:
            steps = share_of_steps(left, epochs - epoch, together)
        iterator.steps_per_epoch = steps
        run.set_params({**run.params, "steps": steps})  # the progress bar's

    def after_epoch(self, epoch: int, run: keras.callbacks.CallbackList) -> None:
        """Ends training where epochs are left, but no steps."""
        more = (run.params.get("epochs") or 0) - epoch - 1
        if more > 0 and not self._optimizer.steps_left and not self._model.stop_training:
            self._stop(f"{more} of {run.params['epochs']} epochs had no step left")

    def end(self, error: PrivacyError) -> Any:
        """Ends training with a warning, and returns the logs of a step; raises outside of `fit`.

        A step was refused since the plan has none left.
        """
        if not self._at_begin or self._optimizer.steps_left:
            raise error
        self._stop("fit asked for more")
        return self._model.get_metrics_result()

    def _stop(self, why: str) -> None:
        steps = self._optimizer.plan.sampling.steps
        warnings.warn(
            f"Training ends here: all {steps} steps of the plan are spent, and {why}. For longer "
            "training, calibrate a plan of more steps before it.",
            stacklevel=2,
        )
        self._model.stop_training = True

    def _all_in_each_epoch(self, left: int) -> bool:
        """Whether Keras would take as many batches in each epoch as the plan has left in all."""
        iterator = self._iterator()
        batches = getattr(iterator, "num_batches", None)
        return batches is not None and batches >= left and iterator.steps_per_epoch is None

    def _has_more(self, left: int, epoch: int, run: keras.callbacks.CallbackList) -> bool:
        """Whether a plan that was made in epochs has more of them left than `fit` is to take."""
        each, epochs = self._optimizer.plan.sampling.steps_per_epoch, run.params.get("epochs")
        if each is None or epochs is None:
            return False
        if epochs > 1:
            return bool(round((epochs - epoch) * each) < left)
        if round(each) < left:
            warnings.warn(
                f"fit takes all {left} steps that the plan has left, {left / each:.3g} of the "
                f"plan's epochs, in one epoch of Keras. For one epoch of the plan use "
                f"steps_per_epoch={round(each)}; for all of them one by one, epochs="
                f"{math.ceil(left / each)}.",
                stacklevel=2,
            )
        return False

    @property
    def _model(self) -> keras.Model:
        model = self._of()
        assert model is not None
        return model

    @property
    def _optimizer(self) -> PrivateOptimizer:
        return self._model.optimizer


def _nothing() -> None:
    """Stands for a reference to what is gone."""


_OF_MODELS: weakref.WeakKeyDictionary[keras.Model, FitSteps] = weakref.WeakKeyDictionary()


def of_fit(model: keras.Model) -> FitSteps:
    """New steps of the model's `fit`, for a new optimizer."""
    _OF_MODELS[model] = FitSteps(model)
    return _OF_MODELS[model]


def give_to_epochs(model: keras.Model, run: keras.callbacks.CallbackList) -> None:
    """Makes a run of callbacks give each epoch its steps before other callbacks see it."""
    steps = _OF_MODELS[model]
    steps.begin()
    epochs = _Epochs(steps, weakref.ref(run))
    epochs.set_model(model)
    run.callbacks.insert(0, epochs)


class _Epochs(keras.callbacks.Callback):
    def __init__(
        self, steps: FitSteps, run: weakref.ReferenceType[keras.callbacks.CallbackList]
    ) -> None:
        super().__init__()
        self._steps, self._run, self._quarantine = steps, run, Quarantine()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._quarantine.begin(self.model.optimizer)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps.before_epoch(epoch, self._callbacks())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps.after_epoch(epoch, self._callbacks())
        self._quarantine.warn(self.model.optimizer)

    def _callbacks(self) -> keras.callbacks.CallbackList:
        run = self._run()
        assert run is not None
        return run


def share_of_steps(left: int, epochs: int, steps_per_execution: int) -> int:
    """Steps of the next of `epochs` epochs: whole executions, and the last epoch has the rest."""
    if epochs <= 1:
        return max(1, left)
    return max(1, left // epochs // steps_per_execution * steps_per_execution)


def rest_of_epoch(sampling: Sampling, left: int, together: int) -> int:
    """Steps up to where an epoch of the plan ends, in whole executions of `together` steps."""
    each, spent = sampling.steps_per_epoch, sampling.steps - left
    assert each is not None
    ended = math.floor((spent + together - 0.5) / each)  # up to an execution that does not fit
    end = round((ended + 1) * each)
    if end >= sampling.steps:
        return left
    return max(1, (end - spent) // together * together)


def _nothing_left(plan: PrivacyPlan) -> str:
    steps, budget = plan.sampling.steps, plan.budget
    return (
        f"The plan has no steps left: {steps} of {steps} are spent. A second run on the same data "
        f"spends a second budget, with the first epsilon={2 * budget.epsilon:g} and "
        f"delta={2 * budget.delta:g} by basic composition. To do that, compile with a new "
        "optimizer and a new plan, plan.calibrate()."
    )

"""How `fit` shares the steps that a plan has left over its epochs, and ends when none is left.

Keras takes all batches of a dataset in each epoch, and a sampler's have all steps of the plan. So:

- `fit(batches)` takes all steps that are left.
- `fit(batches, epochs=E)` takes E of the plan's own epochs, if the plan was made in epochs
  (`PoissonSampling(epochs=...)`, `StreamSampling(passes=...)`) and has more than E left. Each ends
  where one of the plan does, so a later `fit` goes on with the next.
- Otherwise it takes all that is left in E shares, which are smaller than the plan's epochs.

`steps_per_epoch` is taken as it is given.

A fit also warns of examples that did not train because they were not finite, and saves and ends
when its process is asked to end.
"""

import contextlib
import math
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from dp_sparse.accounting import PrivacyPlan
from dp_sparse.core import PrivacyError
from dp_sparse.optimizers import PrivateOptimizer
from dp_sparse.sampling import Sampling

_DIVIDED = (
    "Look for divisions by 0, such as the mean of no rows where all ids of an example are masked, "
    "and for values that are not finite."
)
_DIVERGED = "The weights may have grown too large: lower the learning rate, and begin anew."
TERMINATED = 143  # 128 + SIGTERM, as shells say it


class NonFiniteWarning:
    """What a run has warned of so far. The count is covered by no ε, as the training loss is."""

    def __init__(self) -> None:
        self._seen = self._first = self._warned = 0

    def begin(self, optimizer: PrivateOptimizer) -> None:
        """A run begins: what an earlier one left out is not its own."""
        self._seen = int(optimizer.diagnostics.examples.numpy())
        self._first = self._warned = int(optimizer.diagnostics.not_finite.numpy())

    def warn(self, optimizer: PrivateOptimizer) -> None:
        """Warns if more examples than before were left out."""
        totals = optimizer.diagnostics
        count, before = int(totals.not_finite.numpy()), self._warned
        self._warned = count
        if count > before:
            left_out, drawn = count - self._first, int(totals.examples.numpy()) - self._seen
            why = _DIVERGED if 2 * left_out >= drawn else _DIVIDED
            warnings.warn(
                f"{left_out} of {drawn} examples that were drawn so far did not train: their loss "
                f"or gradient is nan or infinite. {why} (No epsilon covers this count.)",
                stacklevel=2,
            )


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
                f"{math.ceil((left - 0.5) / each)}.",
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
        self._steps, self._run, self._non_finite = steps, run, NonFiniteWarning()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._non_finite.begin(self.model.optimizer)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps.before_epoch(epoch, self._callbacks())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps.after_epoch(epoch, self._callbacks())
        self._non_finite.warn(self.model.optimizer)

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


class Sigterm:
    """Notes that SIGTERM came while a fit runs; a second one ends the process.

    Meanwhile it takes the place of the handler before, to which it passes on what comes when nobody
    waits any more, or to a child that was forked in a fit. A handler that was not set from Python
    stays, since nothing could set it again.

    Attributes:
        came: Whether it did since `wait`.
    """

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None
        self._process = 0  # which waits

    def wait(self) -> None:
        """From now on SIGTERM is noted; nothing changes outside the main thread."""
        self.end()
        self.came = False
        before = signal.getsignal(signal.SIGTERM)
        if _in_main_thread() and before is not None:
            self._before, self._process = before, os.getpid()
            _WAITING.append(self)
            signal.signal(signal.SIGTERM, self._note)

    def end(self) -> None:
        """Sets the handler again that was there before `wait`, unless another one came since."""
        if self in _WAITING and _in_main_thread():
            _WAITING.remove(self)
            if signal.getsignal(signal.SIGTERM) == self._note:
                signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: Any) -> None:
        if self not in _WAITING or os.getpid() != self._process:
            self._pass_on(number, frame)
        elif self.came:
            self.end()
            raise SystemExit(TERMINATED)
        else:
            self.came = True

    def _pass_on(self, number: int, frame: Any) -> None:
        if callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


_WAITING: list[Sigterm] = []  # of the main thread; the last one is that of the innermost fit


@contextlib.contextmanager
def around_fit() -> Iterator[None]:
    """Has nobody wait for SIGTERM who began to in this fit, also if an exception ends it.

    If it came, and the exception came before a step could end the process, the handler before gets
    it, after the exception was printed.
    """
    waited_before = len(_WAITING)
    try:
        yield
    except BaseException:
        if _in_main_thread() and any([_ended(each) for each in reversed(_WAITING[waited_before:])]):
            sys.excepthook(*sys.exc_info())
            signal.raise_signal(signal.SIGTERM)
        raise


def _ended(sigterm: Sigterm) -> bool:
    """Whether a signal came that nobody has acted on; from now on it counts as acted on."""
    sigterm.end()
    came, sigterm.came = sigterm.came, False
    return came


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()

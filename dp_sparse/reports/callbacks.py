"""`PrivacyReport`: ε in the progress bar, and a report of the run.

By default a report contains only post-processing of the private run: ε, noised rows per table, and
metrics on validation data. No ε covers training loss, clip fraction, batch sizes and quarantine
counts; a report contains them only with `diagnostics="non_private"`.
"""

import dataclasses
import math
import warnings
from typing import Any

import keras
import numpy as np

from dp_sparse.accounting import FIXED, rounded_up
from dp_sparse.core import require_matplotlib, validate
from dp_sparse.optimizers import private_optimizer_of, with_other_training
from dp_sparse.reports import report_page, run_diagnosis
from dp_sparse.reports.run_diagnosis import (
    EpsilonPoints,
    Signal,
    counts_without_noise,
    rows_per_step,
    totals,
)

_COUNTS = {
    "mean_batch_size": "mean realised batch size",
    "clip_fraction": "clip fraction",
    "quarantined_examples": "quarantined examples (loss or gradient not finite)",
}
_EPSILONS = 8  # of a run, at most: an evaluation takes as long as many steps
_DIAGNOSTICS = ("private", "non_private")


@dataclasses.dataclass
class RunHistory:
    """What a run released, point by point.

    Attributes:
        steps: Steps spent at each point.
        epsilon: ε spent at each point, or somewhat later, so that it is never too small: at the
            next eighth of the plan's steps. Of the last step of a fit it is exact. It holds if the
            run had been meant to end there; what holds where a run stopped because of what it saw
            is `plan.guaranteed(steps)`.
        rows: Mean rows noised a step in each table, since the previous point.
        validation: Each validation metric with its (step, value) pairs.
        diagnostics: Each value that no ε covers, with its pairs; empty unless requested.
        signals: Of each variable how its gradients stood to their noise, after the end of training.
        findings: A sentence for each thing that went wrong, after the end of training. It says so
            where it rests on a count that no ε covers, which needs `diagnostics="non_private"`.
    """

    steps: list[int] = dataclasses.field(default_factory=list)
    epsilon: list[float] = dataclasses.field(default_factory=list)
    rows: list[list[float]] = dataclasses.field(default_factory=list)
    validation: dict[str, list[tuple[int, float]]] = dataclasses.field(default_factory=dict)
    diagnostics: dict[str, list[tuple[int, float]]] = dataclasses.field(default_factory=dict)
    signals: list[Signal] = dataclasses.field(default_factory=list)
    findings: list[str] = dataclasses.field(default_factory=list)


class PrivacyReport(keras.callbacks.Callback):
    """Shows ε while training, and writes a report.

    The ε shown is that of the next eighth of the plan's steps, so it is never below what was spent,
    if the run was meant to end there; `plan.guaranteed` has that of a run that stopped because of
    what it saw. Each eighth costs one evaluation of the accountant (0.3 to 1 s), and a page with it
    another. Given to each of several `fit`s that go on with one run, it reports all of them;
    otherwise it begins anew.

    Args:
        path: Where to write an HTML page: at the end of training, and while it lasts at the end of
            an epoch in which the ε shown has changed. None writes nothing.
        diagnostics: What to do with values that no ε covers (training metrics, clip fraction,
            batch sizes, quarantine counts). "private" keeps them out of the file. "non_private"
            writes them into the file, and shows training metrics to all callbacks.
        points: How many points to record over the plan's steps.
        note: Sentences in front of the statement, such as who an example is, and what of the data
            counts as public.

    Raises:
        ValueError: Another `diagnostics`, or a model without a private optimizer.
        ImportError: A path, but no matplotlib to draw with.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> ids, table = keras.Input((), dtype="int32"), keras.layers.Embedding(10, 2)
        >>> model = keras.Sequential([ids, table, keras.layers.Dense(1)])
        >>> model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
        >>> report = dp_sparse.PrivacyReport(path=None)
        >>> batches = plan.sampling.batches((np.arange(8), np.ones(8)))
        >>> history = model.fit(batches, callbacks=[report], verbose=0)
        >>> report.history.steps, [f"{epsilon:.2f}" for epsilon in report.history.epsilon]
        ([1, 2], ['0.50', '0.50'])
    """

    def __init__(
        self,
        path: str | None = None,
        diagnostics: str = "private",
        points: int = 20,
        note: str = "",
    ) -> None:
        super().__init__()
        if diagnostics not in _DIAGNOSTICS:
            raise ValueError(f"Expected diagnostics in {_DIAGNOSTICS}, got {diagnostics!r}.")
        if path is not None:
            require_matplotlib("A report")
        self.path = path
        self.diagnostics = diagnostics
        self.points = validate.positive_integer("points", points)
        self.note = note
        self.history = RunHistory()
        self._added: list[tuple[str, str]] = []
        self._ended: tuple[Any, int] | None = None  # the optimizer, and its steps, of the last fit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts from the steps already spent, or goes on where its last fit ended."""
        optimizer = private_optimizer_of(self.model, "PrivacyReport has nothing to report")
        spent = int(optimizer.steps_spent.numpy())
        if self._ended is None or self._ended[0] is not optimizer or self._ended[1] != spent:
            self._optimizer, self.history = optimizer, RunHistory()
            self._every = max(1, math.ceil(optimizer.plan.sampling.steps / self.points))
            each = math.ceil(optimizer.plan.sampling.steps / min(self.points, _EPSILONS))
            self._epsilons = EpsilonPoints(optimizer.plan, each)
            self._of_page: float | None = None
            self._totals = self._first = totals(optimizer)
            self._begin: run_diagnosis.Snapshot | None = None
        self._aim_at_next_point(spent)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Keeps what the run begins with, when all callbacks have restored what they have."""
        if self._begin is None:
            self._begin, self._rates = run_diagnosis.snapshot(self._optimizer), [self._rate()]
            self._taken_before = int(self._optimizer.steps_spent.numpy())

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Shows ε in the progress bar, and records a point at its step."""
        step = int(self._optimizer.steps_spent.numpy())
        if step >= self._next_point:
            self._record(step)
            self._aim_at_next_point(step)
        self._show(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Records validation metrics and writes the page."""
        step = int(self._optimizer.steps_spent.numpy())
        for name, value in (logs or {}).items():
            if name.startswith("val_"):
                self.history.validation.setdefault(name, []).append((step, float(value)))
            elif self.diagnostics == "non_private" and not name.startswith("epsilon"):
                self.history.diagnostics.setdefault(f"training {name}", []).append(
                    (step, float(value))
                )
        self._show(logs)
        if not self.history.steps:
            self._record(step)
        if self._shown != self._of_page:
            self._of_page = self._shown
            self._write()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Records where training ended, writes the page, and warns of what went wrong."""
        step = int(self._optimizer.steps_spent.numpy())
        self._ended = self._optimizer, step
        if step and self.history.steps[-1:] != [step]:
            self._record(step)
        if step:
            self.history.epsilon[-1] = self._optimizer.plan.spent(step).epsilon
        self._find()
        if self.history.findings:
            warnings.warn("\n".join(["Of this run:", *self.history.findings]), stacklevel=2)
        self._write()

    def _find(self) -> None:
        """What released values say of all steps that were reported."""
        if self._begin is None:
            return
        begin, end = self._begin, run_diagnosis.snapshot(self._optimizer)
        rate = float(np.sqrt(np.mean(np.square(self._rates))))
        self.history.signals = run_diagnosis.signals(self._optimizer, begin, end, rate)
        unclipped = None
        if self.diagnostics == "non_private":
            unclipped = 1 - counts_without_noise(self._first, self._totals)["clip_fraction"]
        self.history.findings = run_diagnosis.findings_of(
            self._optimizer, begin, end, self.history.signals, unclipped
        )

    def _rate(self) -> float:
        """The learning rate of the dense variables, now."""
        return float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))

    def reduction(self) -> float:
        """Embedding-gradient reduction: table parameters ÷ mean table entries noised a step."""
        tables = self._optimizer.noised_tables
        if not self._optimizer.selects_rows or not self.history.rows:
            return 1.0
        widths = [table.shape[1] for table in tables]
        entries = float(np.mean(self.history.rows, axis=0) @ widths)
        return sum(math.prod(table.shape) for table in tables) / max(entries, 1e-9)

    def page(self) -> str:
        """The report as HTML."""
        history = self.history
        sections = [("What is guaranteed", report_page.text(self._statement()))]
        if history.epsilon and math.isfinite(history.epsilon[-1]):
            spent = {"epsilon": (history.steps, history.epsilon)}
            chart = report_page.text(self._spent()) + report_page.chart("step", "epsilon", spent)
            sections.append(("Privacy spent", chart))
        if history.findings:
            said = report_page.text("\n".join(history.findings))
            sections.insert(0, ("What went wrong", said))
        if history.signals:
            sections.append(("Gradients and their noise", _signals_table(history.signals)))
        if history.validation:
            sections.append(
                ("Validation", report_page.chart("step", "value", _as_series(history.validation)))
            )
        if history.rows:
            sections.append(("Embedding rows noised per step", self.rows_chart()))
        windows = getattr(self._optimizer, "windows", None)
        if windows is not None and len(windows):
            sections.append(("Rows that survived each window of steps", _windows_chart(windows)))
        if history.diagnostics:
            sections.append(("Covered by no epsilon", _diagnostics_table(history.diagnostics)))
        return report_page.page("dp_sparse: private training", [*sections, *self._added])

    def _statement(self) -> str:
        """What is guaranteed, to whom, and of which steps the page speaks, if not of all."""
        plan = self._optimizer.plan
        statement = plan.statement(int(self._optimizer.steps_spent.numpy()))
        lines = [with_other_training(statement, self.model.variables, [plan.run_id])]
        if self.note:
            lines.insert(0, self.note)
        if self._begin is not None and self._taken_before:
            lines.append(
                f"The first {self._taken_before} steps were taken before this report began: what "
                "it says of training, epsilon apart, is of the steps after them."
            )
        return "\n".join(lines)

    def _spent(self) -> str:
        """Says for which runs the points of the chart hold."""
        plan = self._optimizer.plan
        if plan.stopping != FIXED:
            return "Each point is of a run that stops there, by whatever rule."
        epsilon = rounded_up(plan.guaranteed(plan.sampling.steps).epsilon, 4)
        return (
            "Each point is of a run that was meant to end there. A run that stops because of what "
            f"it saw has the epsilon of all steps, {epsilon}."
        )

    def add_section(self, heading: str, body: str) -> None:
        """Adds a part to the page and writes it, such as `calibration.section()`.

        Args:
            heading: Its heading.
            body: HTML, of what ε covers.
        """
        self._added.append((heading, body))
        self._write()

    def rows_chart(self) -> str:
        """Rows noised per step, by table."""
        rows = np.array(self.history.rows)
        names = [table.path for table in self._optimizer.noised_tables]
        series = {name: (self.history.steps, rows[:, i].tolist()) for i, name in enumerate(names)}
        return report_page.chart("step", "rows per step", series, log_y=True)

    def _show(self, logs: dict[str, Any] | None) -> None:
        """ε of the next point, if there is one for this plan."""
        if logs is not None and math.isfinite(self._shown):
            logs["epsilon"] = self._shown
            unproven = self._optimizer.plan.mechanism.not_guaranteed
            if unproven is not None:
                logs["epsilon_not_guaranteed"] = unproven[1]

    def _write(self) -> None:
        if self.path is not None:
            report_page.write(self.path, self.page())

    def _aim_at_next_point(self, step: int) -> None:
        plan = self._optimizer.plan
        self._next_point = min((step // self._every + 1) * self._every, plan.sampling.steps)
        self._shown = self._epsilon(self._next_point)

    def _epsilon(self, step: int) -> float:
        """ε of at least so many steps; infinite without privacy."""
        epsilon = self._epsilons.at_least(step)
        return math.inf if epsilon is None else epsilon

    def _record(self, step: int) -> None:
        history = self.history
        history.steps.append(step)
        self._rates.append(self._rate())
        history.epsilon.append(self._epsilon(step))
        before, after = self._totals, totals(self._optimizer)
        if self._optimizer.selects_rows:
            history.rows.append(rows_per_step(before, after))
        if self.diagnostics == "non_private":
            for name, value in counts_without_noise(before, after).items():
                history.diagnostics.setdefault(_COUNTS[name], []).append((step, value))
        self._totals = after


def _as_series(metrics: dict[str, list[tuple[int, float]]]) -> dict[str, report_page.Points]:
    return {name: ([s for s, _ in pairs], [v for _, v in pairs]) for name, pairs in metrics.items()}


def _signals_table(signals: list[Signal]) -> str:
    headers = ["variable", "entries noised a step", "signal per weight of a step", "stood out"]
    rows = [(s.path, s.entries, s.signal_of_step, "yes" if s.stands_out else "no") for s in signals]
    return report_page.table(headers, rows)


def _windows_chart(windows: np.ndarray) -> str:
    """How many rows survived, and how many of those had trained during the window."""
    ends, survived, stayed = np.cumsum(windows[:, 0]).tolist(), windows[:, 1], windows[:, 2]
    series = {
        "survived": (ends, survived.tolist()),
        "of these, trained during the window": (ends, stayed.tolist()),
    }
    return report_page.chart("steps of this process", "rows", series, log_y=True)


def _diagnostics_table(diagnostics: dict[str, list[tuple[int, float]]]) -> str:
    rows = [(name, pairs[-1][0], pairs[-1][1]) for name, pairs in diagnostics.items()]
    return report_page.table(["quantity", "at step", "value"], rows)

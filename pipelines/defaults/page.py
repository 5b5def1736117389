"""The page of the study: what learned best on each task, by method and by optimizer."""

import statistics
from collections.abc import Callable, Sequence

from pipelines.defaults.run import Result
from pipelines.defaults.search import WHOLE, Results
from pipelines.defaults.settings import (
    DP_ADAFEST,
    DP_FEST,
    NON_PRIVATE,
    OPTIMIZERS,
    Setting,
    clip_norms,
    for_large_tables,
    formerly_recommended,
    methods_of,
    printed_recipe,
    recommended,
)
from pipelines.defaults.tasks import NAMES, Task
from pipelines.markdown import table

_HEAD = """# Which settings learn

Seven tasks at three budgets, δ = 1/examples, Poisson batches. For each method and optimizer {draws}
settings are drawn and run for a quarter of their steps. The best on validation examples run to the
end, and the best of these get three seeds. No ε covers that choice: it reads the validation
examples of every task. `python -m pipelines.defaults` runs what is missing and writes this page;
every run is a line of [defaults.jsonl](defaults.jsonl).

A share of gain is (score − constant) / (best private score at this ε − constant), on the test
examples. The constant is the best prediction that does not see the inputs. Settings are chosen on
the validation examples, so a share may be above 1. It is left out where that best gain is below
5 % of the gain without privacy: there privacy costs what could be learned.

Log loss and mean prediction are those of the test examples, means over seeds. Runs of before they
were measured have "-" in their place. The former search looked at the score alone: it found clip
norms that order examples well and say wrong probabilities. "Clip norms" are DP-SGD with Adam, one
seed: clip norms that stay, at a learning rate that stays and at one that falls to 0, and some that
follow a quantile of the gradients' norms (`dp_sparse.QuantileClipping`), from 1 on. Beside these,
some settings were tried by hand for their log loss.

"recommend" is what `dp_sparse.recommend` says of each task, DP-SGD with Adam; "former recommend" is
what it said before, with a clip norm of 0.3; "recommend, large tables" is what it says where tables
are too large for that, tried on these smaller ones.
"""
_HEADERS = (
    "ε",
    "what",
    "setting",
    "validation",
    "test",
    "log loss",
    "mean prediction",
    "± (seeds)",
    "share of gain",
)
_LEAST = 0.05  # of the gain without privacy, of a best private gain that others are compared with


class Found:
    """The settings of one task at one ε that ran to the end.

    Args:
        results: All finished runs.
        name: The task's name among the runs.
        epsilon: None without privacy.
    """

    def __init__(self, results: Results, name: str, epsilon: float | None) -> None:
        self._runs: dict[Setting, list[Result]] = {}
        for one, result in results.items():
            if (one.task, one.epsilon, one.part) == (name, epsilon, WHOLE):
                self._runs.setdefault(one.setting, []).append(result)

    def __bool__(self) -> bool:
        return bool(self._runs)

    def best(
        self, methods: Sequence[str], optimizers: Sequence[str] = OPTIMIZERS
    ) -> Setting | None:
        """The best on the validation examples, by the mean over seeds."""
        own = [s for s in self._runs if s.method in methods and s.optimizer in optimizers]
        return max(own, key=self.validation, default=None)

    def validation(self, setting: Setting) -> float:
        """The mean score on the validation examples."""
        return statistics.fmean(result["validation"] for result in self._runs[setting])

    def test(self, setting: Setting) -> float:
        """The mean score on the test examples."""
        return statistics.fmean(result["test"] for result in self._runs[setting])

    def beside(self, setting: Setting, name: str) -> float | None:
        """The mean of what was measured beside the score; None where no run has it."""
        values = [result.get(name) for result in self._runs[setting]]
        measured = [value for value in values if value is not None]
        return statistics.fmean(measured) if measured else None

    def spread(self, setting: Setting) -> str:
        """Between seeds, and how many there are."""
        scores = [result["test"] for result in self._runs[setting]]
        return f"{statistics.stdev(scores):.4f} ({len(scores)})" if len(scores) > 1 else "- (1)"

    def __contains__(self, setting: Setting) -> bool:
        return setting in self._runs


def page(load: Callable[[str], Task], results: Results, draws: int) -> str:
    """The page of what is finished.

    Args:
        load: The task of a name; called for those that have runs.
        results: All finished runs.
        draws: Settings of each method and optimizer.
    """
    sections = [_HEAD.format(draws=draws)]
    epsilons = sorted({one.epsilon for one, _ in results.items() if one.epsilon is not None})
    begun = {one.task for one, _ in results.items() if one.part == WHOLE}
    for name in (name for name in NAMES if name in begun):
        sections += _of_task(name, load(name), epsilons, results)
    return "\n".join(sections)


def _of_task(name: str, task: Task, epsilons: list[float], results: Results) -> list[str]:
    rows: list[tuple[str, ...]] = []
    without = Found(results, name, None)
    best = without.best([NON_PRIVATE])
    least = 0.0
    if best is not None:
        least = _LEAST * (without.test(best) - task.constant)
        rows.append(("none", NON_PRIVATE, _described(best), *_scores(without, best, task), "-"))
    for epsilon in epsilons:
        found = Found(results, name, epsilon)
        if found:
            rows += _of_budget(found, task, epsilon, least)
    size = (
        f"{len(task.training):,} training examples, {task.rows:,} rows in {len(task.tables)} tables"
    )
    return [
        f"## {task.name}\n",
        f"{task.metric}; {size}, {task.passes:g} passes; the constant has {_of_constant(task)}.\n",
        table(_HEADERS, rows),
        "",
        *_of_clip_norms(name, task, epsilons, results),
    ]


def _of_constant(task: Task) -> str:
    said = f"{task.constant:.4f}"
    if task.as_frequent:
        said += f" and a log loss of {task.constant_log_loss:.4f}"
    if task.as_frequent and task.binary:
        said += f"; the true rate is {task.rate:.4f}"
    return said


def _of_clip_norms(name: str, task: Task, epsilons: list[float], results: Results) -> list[str]:
    """A table of the clip norms that were run; nothing where there is none."""
    rows: list[tuple[str, ...]] = []
    for epsilon in epsilons:
        found = Found(results, name, epsilon)
        rows += [
            (
                f"{epsilon:g}",
                _clip_norm(setting),
                _rate(setting),
                *_scores(found, setting, task)[:-1],
            )
            for setting in clip_norms(task)
            if setting in found and found.beside(setting, "test_log_loss") is not None
        ]
    headers = ("ε", "clip norm", "rate", *_HEADERS[3:7])
    return [f"Clip norms:\n\n{table(headers, rows)}", ""] if rows else []


def _of_budget(found: Found, task: Task, epsilon: float, least: float) -> list[tuple[str, ...]]:
    best = found.best(methods_of(task))
    assert best is not None
    gain = found.test(best) - task.constant
    chosen: list[tuple[str, Setting | None]] = [
        *((f"best {method}", found.best([method])) for method in methods_of(task)),
        *((f"best {name}", found.best(methods_of(task), [name])) for name in OPTIMIZERS),
        ("former README", printed_recipe(task)),
        ("former recommend", formerly_recommended(task)),
        ("recommend", recommended(task)),
        ("recommend, large tables", for_large_tables(task)),
    ]
    return [
        (
            f"{epsilon:g}",
            what,
            _described(setting),
            *_scores(found, setting, task),
            f"{(found.test(setting) - task.constant) / gain:.2f}" if gain > least else "-",
        )
        for what, setting in chosen
        if setting is not None and setting in found
    ]


def _scores(found: Found, setting: Setting, task: Task) -> tuple[str, ...]:
    names = ("test_log_loss", "test_mean_prediction") if task.as_frequent else ("", "")
    beside = [found.beside(setting, name) for name in names]
    return (
        *(f"{score:.4f}" for score in (found.validation(setting), found.test(setting))),
        *("-" if value is None else f"{value:.4f}" for value in beside),
        found.spread(setting),
    )


def _clip_norm(setting: Setting) -> str:
    if setting.quantile is None:
        return f"{setting.clip_norm:g}"
    return f"{setting.quantile:g} quantile, from {setting.clip_norm:g}"


def _rate(setting: Setting) -> str:
    return f"{setting.learning_rate:g}{' to 0' if setting.decays else ''}"


def _described(setting: Setting) -> str:
    rate = f"{setting.optimizer}({_rate(setting)}"
    if setting.optimizer == "SGD" and setting.method != NON_PRIVATE:
        rate += f"/{setting.clip_norm:g}"
    if setting.optimizer == "Adagrad":
        rate += f", accumulator {setting.accumulator:g}"
    parts = [setting.method, f"{rate})", f"batch {setting.batch_size:,}"]
    if setting.method != NON_PRIVATE:
        parts.append(f"C = {_clip_norm(setting)}")
    if setting.method == DP_ADAFEST:
        parts.append(f"σ1/σ2 = {setting.noise_ratio:g}, {setting.false_rows:g} false rows")
    if setting.method == DP_FEST:
        parts.append(f"{setting.row_fraction:.0%} of the rows")
    return ", ".join(parts)

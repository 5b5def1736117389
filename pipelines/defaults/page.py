"""The page of the study: what learned best on each task, by method and by optimizer."""

import statistics
from collections.abc import Callable, Sequence

from pipelines.defaults.search import WHOLE, Results
from pipelines.defaults.settings import (
    DP_ADAFEST,
    DP_FEST,
    NON_PRIVATE,
    OPTIMIZERS,
    RECOMMENDED,
    Setting,
    for_large_tables,
    methods_of,
    printed_recipe,
    recommended,
)
from pipelines.defaults.tasks import NAMES, Task

_HEAD = """# Which settings learn

Six tasks at three budgets, δ = 1/examples, Poisson batches. For each method and optimizer {draws}
settings are drawn and run for a quarter of their steps. The best on validation examples run to the
end, and the best of these get three seeds. No ε covers that choice: it reads the validation
examples of every task. `python -m pipelines.defaults` runs what is missing and writes this page;
every run is a line of [defaults.jsonl](defaults.jsonl).

A share of gain is (score − constant) / (best private score at this ε − constant), on the test
examples. The constant is the best prediction that does not see the inputs. Settings are chosen on
the validation examples, so a share may be above 1. It is left out where that best gain is below
5 % of the gain without privacy: there privacy costs what could be learned.

"recommend" is what `dp_sparse.recommend` says of each task, DP-SGD with Adam; "recommend, large
tables" is what it says where tables are too large for that, tried on these smaller ones.
"""
_LEAST = 0.05  # of the gain without privacy, of a best private gain that others are compared with


class Found:
    """The settings of one task at one ε that ran to the end.

    Args:
        results: All finished runs.
        name: The task's name among the runs.
        epsilon: None without privacy.
    """

    def __init__(self, results: Results, name: str, epsilon: float | None) -> None:
        self._scores: dict[Setting, list[tuple[float, float]]] = {}
        for one, result in results.items():
            if (one.task, one.epsilon, one.part) == (name, epsilon, WHOLE):
                pair = result["validation"], result["test"]
                self._scores.setdefault(one.setting, []).append(pair)

    def __bool__(self) -> bool:
        return bool(self._scores)

    def best(
        self, methods: Sequence[str], optimizers: Sequence[str] = OPTIMIZERS
    ) -> Setting | None:
        """The best on the validation examples, by the mean over seeds."""
        own = [s for s in self._scores if s.method in methods and s.optimizer in optimizers]
        return max(own, key=self.validation, default=None)

    def validation(self, setting: Setting) -> float:
        """The mean score on the validation examples."""
        return statistics.fmean(score for score, _ in self._scores[setting])

    def test(self, setting: Setting) -> float:
        """The mean score on the test examples."""
        return statistics.fmean(score for _, score in self._scores[setting])

    def spread(self, setting: Setting) -> str:
        """Between seeds, and how many there are."""
        scores = [score for _, score in self._scores[setting]]
        return f"{statistics.stdev(scores):.4f} ({len(scores)})" if len(scores) > 1 else "- (1)"

    def __contains__(self, setting: Setting) -> bool:
        return setting in self._scores


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
        rows.append(("none", NON_PRIVATE, _described(best), *_scores(without, best), "-"))
    for epsilon in epsilons:
        found = Found(results, name, epsilon)
        if found:
            rows += _of_budget(found, task, epsilon, least)
    size = (
        f"{len(task.training):,} training examples, {task.rows:,} rows in {len(task.tables)} tables"
    )
    return [
        f"## {task.name}\n",
        f"{task.metric}; {size}, {task.passes:g} passes; the constant has {task.constant:.4f}.\n",
        _table(("ε", "what", "setting", "validation", "test", "± (seeds)", "share of gain"), rows),
        "",
    ]


def _of_budget(found: Found, task: Task, epsilon: float, least: float) -> list[tuple[str, ...]]:
    best = found.best(methods_of(task))
    assert best is not None
    gain = found.test(best) - task.constant
    chosen: list[tuple[str, Setting | None]] = [
        *((f"best {method}", found.best([method])) for method in methods_of(task)),
        *((f"best {name}", found.best(methods_of(task), [name])) for name in OPTIMIZERS),
        ("former README", printed_recipe(task)),
        ("recommend", recommended(task)),
        ("recommend, large tables", for_large_tables(task)),
    ]
    return [
        (
            f"{epsilon:g}",
            what,
            _described(setting),
            *_scores(found, setting),
            f"{(found.test(setting) - task.constant) / gain:.2f}" if gain > least else "-",
        )
        for what, setting in chosen
        if setting is not None and setting in found
    ]


def _scores(found: Found, setting: Setting) -> tuple[str, str, str]:
    scores = found.validation(setting), found.test(setting)
    return f"{scores[0]:.4f}", f"{scores[1]:.4f}", found.spread(setting)


def _described(setting: Setting) -> str:
    if setting.method == RECOMMENDED:
        return f"what dp_sparse.recommend says, batch {setting.batch_size:,}"
    rate = f"{setting.optimizer}({setting.learning_rate:g}"
    if setting.optimizer == "SGD" and setting.method != NON_PRIVATE:
        rate += f"/{setting.clip_norm:g}"
    if setting.optimizer == "Adagrad":
        rate += f", accumulator {setting.accumulator:g}"
    parts = [setting.method, f"{rate})", f"batch {setting.batch_size:,}"]
    if setting.method != NON_PRIVATE:
        parts.append(f"C = {setting.clip_norm:g}")
    if setting.method == DP_ADAFEST:
        parts.append(f"σ1/σ2 = {setting.noise_ratio:g}, {setting.false_rows:g} false rows")
    if setting.method == DP_FEST:
        parts.append(f"{setting.row_fraction:.0%} of the rows")
    return ", ".join(parts)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

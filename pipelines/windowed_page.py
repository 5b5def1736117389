"""The page of windowed selection: what windows are worth in the studies that have them.

`python -m pipelines.windowed_page` writes docs/results/windowed_selection.md from the finished runs
of three studies: the bag of words, click models and days that drift. Each of these runs what is
missing by its own command.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
import matplotlib.figure
import numpy as np

from pipelines.criteo.study_page import loss_of
from pipelines.files import whole_file
from pipelines.markdown import listed, table
from pipelines.points import Run
from pipelines.resampling import difference

RESULTS = Path("docs/results")
PICTURE = "windowed_selection.png"
_HELD_OUT, _BASELINE = "held_out", "DP-SGD"
_WINDOWED = "windowed DP-AdaFEST"
_BEST, _EPSILONS = "W=64, λ=100", (1.0, 3.0, 8.0)  # of windows on the bag, by held-out rows
_SPARSE = ("DP-AdaFEST", "DP-FEST", "DP-AdaFEST+")
_HEAD = """# Selection over windows of steps

What [windows](../windowed_selection.md) are worth at equal ε: DP-AdaFEST whose rows are chosen from
the sum of W steps' maps, beside DP-AdaFEST that chooses for each step, DP-FEST and DP-AdaFEST+. A
reduction is all entries of the tables over those that get noise in a step. ± is the standard error
of a difference over held-out rows and seeds; of click models it is two.

The runs are those of three studies, whose pages have their commands: [the bag of
words](bag.md), [Criteo](criteo_kaggle.md), [day by day](time_series.md). `python -m
pipelines.windowed_page` writes this page. Windows of 256 and more steps were not run: windows grow
by doubling, so that a run of 270 or 391 steps has none longer than 128.
"""


def page_of(bag: Sequence[Run], clicks: Sequence[Run], days: Sequence[Run]) -> str:
    """The page."""
    parts = [_HEAD, _conclusions(bag, clicks, days), _bag_section(bag)]
    parts += [_clicks_section(clicks, group) for group in ("two million", "sample")]
    parts.append(_days_section(days))
    return "\n".join(parts)


def _conclusions(bag: Sequence[Run], clicks: Sequence[Run], days: Sequence[Run]) -> str:
    """What the runs say, and what follows for defaults."""
    of_clicks = [x for x in clicks if x["group"] == "two million" and x["epsilon"] == 1.0]
    base = _best_point(of_clicks, _BASELINE)
    losses = []
    for method in ("DP-AdaFEST", _WINDOWED):
        best = _best_point(of_clicks, method)
        loss, error = loss_of(best, base)
        losses.append(f"{method} {-loss:+.4f} ± {2 * error:.4f} at {_times(best)}")
    on_days = [_best_of_days(days, method) for method in ("DP-AdaFEST", _WINDOWED)]
    return f"""## Findings

- **Where nearly all weights are in the table**, windows of 64 steps with 100 false rows and
  σ1/σ2 = 1 gain, by more than two standard errors,
  {_gains(bag)}:
{_of_bag_points(bag)}
  The point was chosen by earlier runs, which are not among these. The tables have other windows.
- **On made-up clicks windows gain nothing.** AUC above DP-SGD's, of the best point by validation
  rows: {losses[0]}; {losses[1]}. Single steps
  have nothing to win back there, and at larger reductions all methods lose alike.
- **On days that drift, trained from the first day on, they gain nothing either.** The best mean
  AUC, of the points below: {on_days[0]} with single steps, {on_days[1]} with windows.
- A few hundred rows are enough for these clicks: DP-FEST with 300 rows is not behind DP-SGD. A
  window adds rarer rows, whose gradients drown in their own noise.
- So `DPAdaFESTOptimizer` has `window=1`, Algorithm 1, by default. `recommend` takes windows of 64
  steps, 100 false rows and σ1/σ2 = 1 for models whose weights are nearly all in tables.
"""


def _best_of_days(lines: Sequence[Run], method: str) -> str:
    """The best mean over seeds of a method that trains on one period of 18 days."""
    own = [x for x in _made_up_days(lines) if _method_of(x) == method and _period_of(x) == 18]
    by_name = [_by_name(own, name) for name in dict.fromkeys(x["name"] for x in own)]
    best = max(by_name, key=lambda runs: statistics.fmean(run["auc"] for run in runs))
    return f"{statistics.fmean(run['auc'] for run in best):.4f} at {_times(best)}"


def _made_up_days(lines: Sequence[Run]) -> list[Run]:
    return [x for x in lines if x["group"] == "made-up days" and x["epsilon"] == 1.0]


def _method_of(line: Run) -> str:
    return str(line["name"].split(",")[0])


def _period_of(line: Run) -> int:
    return int(line["name"].rpartition(" ")[2])


def _bag_section(lines: Sequence[Run]) -> str:
    told = [
        "## A table that is nearly the whole model\n",
        "SST-2's phrases as a bag of RoBERTa's words, accuracy on held-out phrases. DP-FEST's",
        "counts are private.\n",
    ]
    for epsilon in _EPSILONS:
        base = _of_bag(lines, _BASELINE, epsilon)
        rows = [
            (name, _percent(runs), _difference(runs, base), _times(runs))
            for name, runs in _points_of_bag(lines, epsilon)
        ]
        headers = ("point", "accuracy", "minus DP-SGD, points", "reduction")
        told.append(f"### ε = {epsilon:g}\n\n{table(headers, rows)}\n")
    told.append(f"![accuracy against reduction]({PICTURE})\n")
    return "\n".join(told)


def _of_bag_points(lines: Sequence[Run]) -> str:
    """How far the window of 64 steps is ahead of the other methods, at each ε."""
    found = []
    for epsilon in _EPSILONS:
        own, apart = _of_bag(lines, _BEST, epsilon), []
        for method in _SPARSE:
            theirs = _of_bag(lines, method, epsilon)
            apart.append(f"{_difference(own, theirs)} points against {method} at {_times(theirs)}")
        found.append(f"  - ε = {epsilon:g}: {_percent(own)} at {_times(own)}; {listed(apart)}.")
    return "\n".join(found)


def _gains(lines: Sequence[Run]) -> str:
    """Over which methods the window is ahead by more than two standard errors, at each ε."""
    found = []
    for epsilon in _EPSILONS:
        own, behind = _of_bag(lines, _BEST, epsilon), []
        for method in _SPARSE:
            ahead, error = _ahead(own, _of_bag(lines, method, epsilon))
            behind += [method] if ahead > 2 * error else []
        over = f"over {listed(behind)}" if behind else "nothing"
        found.append(f"{over} at ε = {epsilon:g}")
    return "; ".join(found)


def _points_of_bag(lines: Sequence[Run], epsilon: float) -> list[tuple[str, list[Run]]]:
    """The points of one ε on 270 steps of 1,024, least reduction first."""
    names = [
        line["name"]
        for line in lines
        if line["epsilon"] == epsilon
        and (
            (line["group"] == "windows" and line["name"].startswith(("W=", "DP-AdaFEST+, W=")))
            or (line["group"] == "methods" and line["name"] in (_BASELINE, *_SPARSE))
        )
    ]
    points = [(name, _of_bag(lines, name, epsilon)) for name in dict.fromkeys(names)]
    return sorted(points, key=lambda point: _reduction(point[1]))


def _of_bag(lines: Iterable[Run], name: str, epsilon: float) -> list[Run]:
    groups = ("windows", "methods")
    return [
        x for x in lines if (x["name"], x["epsilon"]) == (name, epsilon) and x["group"] in groups
    ]


def _accuracies(runs: Sequence[Run]) -> list[float]:
    return [run["accuracy"][_HELD_OUT] for run in runs]


def _percent(runs: Sequence[Run]) -> str:
    return f"{100 * statistics.fmean(_accuracies(runs)):.1f} %"


def _difference(runs: Sequence[Run], base: Sequence[Run]) -> str:
    """In points, with its standard error."""
    if runs == base:
        return ""
    ahead, error = _ahead(runs, base)
    return f"{round(100 * ahead, 1) + 0.0:+.1f} ± {100 * error:.1f}"


def _ahead(runs: Sequence[Run], base: Sequence[Run]) -> tuple[float, float]:
    return difference(runs, _accuracies(runs), base, _accuracies(base))


def _reduction(runs: Sequence[Run]) -> float:
    return statistics.fmean(run["reduction"] for run in runs)


def _times(runs: Sequence[Run]) -> str:
    return f"{_reduction(runs):,.0f}×"


def _clicks_section(lines: Sequence[Run], group: str) -> str:
    own = [x for x in lines if x["group"] == group and x["epsilon"] == 1.0]
    base = _best_point(own, _BASELINE)
    names = dict.fromkeys(x["name"] for x in own if _method_of(x) in (_WINDOWED, *_SPARSE))
    rows = []
    for name in sorted(names, key=lambda name: _reduction(_by_name(own, name))):
        runs = _by_name(own, name)
        loss, error = loss_of(runs, base)
        auc = f"{statistics.fmean(run['auc'] for run in runs):.4f}"
        rows.append((name, auc, f"{loss:+.4f} ± {2 * error:.4f}", _times(runs)))
    title = {"two million": "Two million made-up clicks", "sample": "120,000 real clicks"}[group]
    headers = ("point", "AUC", f"loss against {base[0]['name']}", "reduction")
    best = " ".join(_best_of(own, method) for method in (_WINDOWED, "DP-AdaFEST"))
    return f"## {title}\n\npCTR at ε = 1. {best}\n\n{table(headers, rows)}\n"


def _best_of(lines: Sequence[Run], method: str) -> str:
    """A sentence on the best point of a method by the validation rows."""
    best = _best_point(lines, method)
    auc = statistics.fmean(run["auc"] for run in best)
    return f"The best of {method} has an AUC of {auc:.4f} at {_times(best)}."


def _best_point(lines: Sequence[Run], method: str) -> list[Run]:
    """The runs of a method's best point, by the validation rows."""
    names = dict.fromkeys(x["name"] for x in lines if _method_of(x) == method)
    points = [_by_name(lines, name) for name in names]
    return max(points, key=lambda runs: statistics.fmean(run["validation_auc"] for run in runs))


def _by_name(lines: Sequence[Run], name: str) -> list[Run]:
    return [line for line in lines if line["name"] == name]


def _days_section(lines: Sequence[Run]) -> str:
    own, rows = _made_up_days(lines), []
    for name in sorted(dict.fromkeys(x["name"] for x in own), key=lambda n: _by_days(own, n)):
        runs = _by_name(own, name)
        values = [run["auc"] for run in runs]
        spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
        method, _, period = name.rpartition(", period ")
        cells = (method, period, f"{statistics.fmean(values):.4f}{spread}", _times(runs))
        rows.append(cells)
    headers = ("method", "days of a period", "AUC of the last 6 days", "reduction")
    return (
        "## Days that drift\n\nMade-up days at ε = 1; ± is the deviation between seeds. From one "
        "period to the next a window's survivors stay.\n\n" + table(headers, rows) + "\n"
    )


def _by_days(lines: Sequence[Run], name: str) -> tuple[int, float]:
    period = int(name.rpartition(" ")[2])
    return -period, _reduction(_by_name(lines, name))


def draw(bag: Sequence[Run], path: Path) -> None:
    """Accuracy against reduction at each ε."""
    figure = matplotlib.figure.Figure(figsize=(12, 4), layout="constrained")
    for axes, epsilon in zip(figure.subplots(1, 3), _EPSILONS, strict=True):
        axes.set_prop_cycle(color=matplotlib.colormaps["tab20"].colors)
        for name, runs in _points_of_bag(bag, epsilon):
            values = [100 * own for own in _accuracies(runs)]
            error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
            marker = "s" if "W=" in name else "o"
            at = _reduction(runs), statistics.fmean(values)
            axes.errorbar(*at, yerr=error, fmt=marker, capsize=3, label=name)
        axes.set(
            xscale="log", xlabel="reduction", ylabel="accuracy, %", title=f"epsilon = {epsilon:g}"
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=110)


def main() -> int:
    """Writes the page and its picture."""
    bag, clicks, days = (
        [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text("utf-8").splitlines()]
        for name in ("bag", "criteo_kaggle", "time_series")
    )
    draw(bag, RESULTS / PICTURE)
    with whole_file(RESULTS / "windowed_selection.md") as file:
        file.write(page_of(bag, clicks, days).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())

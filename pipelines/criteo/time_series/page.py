"""The page of the experiment on days: tables and a plot for each data set, from finished runs."""

import statistics
import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib.figure
import ml_collections

from configs.criteo_time_series_study import EPSILONS, MADE_UP, PERIODS
from pipelines.files import whole_file
from pipelines.points import Run, told_missing

_OF_TABLE_5 = ("no privacy", "DP-SGD")
_SMALL = 0.002  # of AUC, about what seeds differ by

_HEAD = """# Day by day

Table 5, Figure 5 and Figure 6 of Ghazi et al. (NeurIPS 2023), scaled down: 18 days train, one
streaming period after the other, and the 6 days after them evaluate. Made-up days drift; slices of
the sample are 24 parts of equal length of Criteo-Kaggle's, which are not days. {epochs:g} passes
over each period in batches of {batch:,}; all other settings are those of
`configs/criteo_time_series.py`. ε is the largest of the periods' (`dp_sparse.DisjointPlans`), not
their sum. ± is the deviation between seeds; where there is none, one seed ran. Left out: sparse
methods at a period of 1 but DP-AdaFEST, and shorter periods of the slices.

```
python -m pipelines.criteo.generate --days 24 --rows 10000 --out days
python -m pipelines.criteo.time_series.cut --input DATA --output slices
python -m pipelines.criteo.time_series.study --made-up 'days/day_*.gz' --slices 'slices/day_*'
```

The last command runs what is missing and writes this page. Each run is a line of
[time_series.jsonl](time_series.jsonl).
"""


def write_page(config: ml_collections.ConfigDict, lines: Sequence[Run], path: Path) -> None:
    """Writes the page, and a plot beside it for each data set."""
    with whole_file(path) as file:
        file.write(page_of(config, lines).encode())
    for data in dict.fromkeys(line["group"] for line in lines):
        if sparse := _sparse(lines, data):
            _plot(sparse, path.with_name(_picture(data)))


def page_of(config: ml_collections.ConfigDict, lines: Sequence[Run]) -> str:
    """The page."""
    training = config.base.training
    parts = [_HEAD.format(epochs=training.epochs, batch=training.batch_size)]
    parts.append(told_missing(config.points, lines))
    parts.append(_conclusions(lines))
    for data in dict.fromkeys(line["group"] for line in lines):
        parts.append(f"\n## {data[0].upper()}{data[1:]}\n")
        parts.append(_table_5(lines, data))
        if _sparse(lines, data):
            parts.append(_table_of_sparse(lines, data))
    return "".join(parts)


def _conclusions(lines: Sequence[Run]) -> str:
    """What the made-up days say, beside the paper; empty until their first seeds have run."""
    found = defaultdict(list)
    for line in lines:
        if line["group"] == MADE_UP:
            found[line["name"], line["epsilon"]].append(line["auc"])
    by_seeds = {key: statistics.fmean(values) for key, values in found.items()}

    def auc(name: str, epsilon: float | None = 1.0, period: int = 18) -> float:
        return by_seeds[f"{name}, period {period}", epsilon]

    try:
        sentences = [_of_periods(auc), _of_counts(auc), _of_methods(auc), _of_both(auc)]
    except KeyError:
        return ""
    told = "".join(f"- {textwrap.fill(each, 98, subsequent_indent='  ')}\n" for each in sentences)
    return f"\nBeside the paper's, on made-up days, means over seeds:\n\n{told}"


def _of_periods(auc: Callable[..., float]) -> str:
    short, long = (PERIODS[0], PERIODS[-1])
    private = all(auc("DP-SGD", e, short) < auc("DP-SGD", e, long) for e in EPSILONS)
    own = auc("no privacy", None, short), auc("no privacy", None, long)
    return (
        f"Table 5: the AUC of DP-SGD {'grows' if private else 'does not always grow'} with the "
        f"streaming period, {auc('DP-SGD', 1.0, short):.4f} to {auc('DP-SGD', 1.0, long):.4f} at "
        f"ε = 1; in the paper it grows. Without privacy it goes from {own[0]:.4f} to {own[1]:.4f}; "
        "in the paper it stays. These days drift, and one long period takes old days as often as "
        "new ones."
    )


def _of_counts(auc: Callable[..., float]) -> str:
    first, running, everything = (
        auc(f"DP-FEST, k=100, {source}") for source in ("first_day", "running", "all_days")
    )
    kept = everything - running < 0.5 * (everything - first)
    return (
        "Figure 5: in the paper DP-FEST by running counts is almost as good as by those of all "
        f"days. {'So it is here' if kept else 'Not so here'}: at k = 100 it has {running:.4f} by "
        f"running counts, {everything:.4f} by those of all days, {first:.4f} by the first day's."
    )


def _of_methods(auc: Callable[..., float]) -> str:
    ada, fest = auc("DP-AdaFEST, λ=10"), auc("DP-FEST, k=100, running")
    told = "The opposite of the paper" if fest > ada + _SMALL else "So it is not here"
    return (
        "Figure 5: at the same AUC the paper's DP-AdaFEST has the larger reduction. Here DP-FEST "
        f"by running counts, k = 100, has {fest:.4f}, and DP-AdaFEST, λ = 10, {ada:.4f}; the table "
        f"has their reductions. {told}: a few rows of these tables have nearly "
        "all lookups, and 18 days of counts find them."
    )


def _of_both(auc: Callable[..., float]) -> str:
    both, fest = auc("DP-AdaFEST+, k=300, λ=1"), auc("DP-FEST, k=300, running")
    return (
        f"Figure 6: both together (DP-AdaFEST+, {both:.4f}) are "
        f"{'ahead of' if both > fest else 'not ahead of'} DP-FEST alone ({fest:.4f} at k = 300); "
        "in the paper they are, at a period of 1, which did not run here."
    )


def _sparse(lines: Sequence[Run], data: str) -> dict[str, list[Run]]:
    """The runs of the sparse methods on a data set, by the names of their points."""
    found = defaultdict(list)
    for line in lines:
        if line["group"] == data and not line["name"].startswith(_OF_TABLE_5):
            found[line["name"]].append(line)
    return dict(found)


def _table_5(lines: Sequence[Run], data: str) -> str:
    found = defaultdict(list)
    for line in lines:
        if line["group"] == data:
            found[line["name"], line["epsilon"]].append(line)

    def cell(period: int, epsilon: float | None) -> str:
        name = f"{_OF_TABLE_5[epsilon is not None]}, period {period}"
        return _shown(found.get((name, epsilon), []))

    rows = [
        f"| {period} | {' | '.join(cell(period, e) for e in (*EPSILONS, None))} |\n"
        for period in PERIODS
    ]
    return (
        "\nAUC (log loss) of DP-SGD and without privacy, by the days of a period (Table 5):\n\n"
        "| streaming period | ε = 1 | ε = 3 | ε = 8 | no privacy |\n|---|---|---|---|---|\n"
        + "".join(rows)
    )


def _table_of_sparse(lines: Sequence[Run], data: str) -> str:
    rows = []
    for name, runs in _sparse(lines, data).items():
        point, _, period = name.rpartition(", period ")
        rows.append(f"| {point} | {period} | {_shown(runs)} | {_reduction(runs):,.0f} |\n")
    return (
        f"\nSparse methods on {data} at ε = 1 (Figures 5 and 6):\n\n"
        "| method | period | AUC (log loss) | reduction |\n|---|---|---|---|\n"
        + "".join(rows)
        + f"\n![AUC against gradient-size reduction]({_picture(data)})\n"
    )


def _shown(runs: Sequence[Run]) -> str:
    if not runs:
        return "not run"
    aucs = [run["auc"] for run in runs]
    spread = f" ± {statistics.stdev(aucs):.4f}" if len(aucs) > 1 else ""
    loss = statistics.fmean(run["log_loss"] for run in runs)
    return f"{statistics.fmean(aucs):.4f}{spread} ({loss:.4f})"


def _reduction(runs: Sequence[Run]) -> float:
    return statistics.fmean(run["reduction"] for run in runs)


def _picture(data: str) -> str:
    return f"time_series_{data.replace(' ', '_')}.png"


def _plot(points: dict[str, list[Run]], path: Path) -> None:
    """Figure 5's shape: AUC against reduction, a mark for each method."""
    figure = matplotlib.figure.Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    kinds = defaultdict(list)
    for name, runs in points.items():
        kinds[_kind(name)].append((_reduction(runs), statistics.fmean(r["auc"] for r in runs)))
    for kind, found in sorted(kinds.items()):
        x, y = zip(*sorted(found), strict=True)
        axes.plot(x, y, marker="o", linestyle="", label=kind, alpha=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("gradient-size reduction")
    axes.set_ylabel("AUC on the last six days")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))  # beside all points
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=120)


def _kind(name: str) -> str:
    """The method, whose counts it selects rows by, and the period."""
    parts = name.split(", ")
    return ", ".join(part for part in parts if not part.startswith(("k=", "λ=")))

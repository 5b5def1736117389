"""The page of the experiment on days: a table and a plot for each data set, from finished runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure

from pipelines.files import whole_file

_HEAD = """# Day by day

Table 5, Figure 5 and Figure 6 of Ghazi et al. (NeurIPS 2023), scaled down: 18 days train, one
streaming period after the other, and the 6 days behind them evaluate. `made-up days` drift
(`python -m pipelines.criteo.generate --days 24 --rows 10000 --out days`); `Criteo sample` is the
public sample of Criteo-Kaggle in 24 slices of equal length (`python -m
pipelines.criteo.time_series.cut --input DATA --output slices`), whose slices are not days. Four
passes over each period in batches of 1,000; all other settings are those of
`configs/criteo_time_series.py`, tuned for neither. One seed: differences below some 0.005 in AUC
are noise. ε is the largest of the periods' (`dp_sparse.DisjointPlans`), not their sum. Log loss and
mean prediction are "-" for runs of before they were measured.

`python -m pipelines.criteo.time_series.study --data 'made-up days=days/day_*.gz' 'Criteo
sample=slices/day_*' --results docs/results/time_series.jsonl --page docs/results/time_series.md`
does the runs that are missing, and writes this page.
"""


def page(lines: Sequence[dict[str, Any]], path: Path, wanted: int) -> None:
    """Writes the page, and a plot beside it for each data set.

    Args:
        lines: The finished runs.
        path: The page.
        wanted: How many runs a data set has in all.
    """
    parts = [_HEAD]
    for data in dict.fromkeys(line["data"] for line in lines):
        own = [line for line in lines if line["data"] == data]
        parts += [f"## {data[0].upper()}{data[1:]}", f"{len(own)} of {wanted} runs are finished."]
        parts += [_table_5(own), _other_runs(own)]
        plot = path.with_name(f"{path.stem}_{data.replace(' ', '_')}.png")
        if _plot(own, plot):
            parts.append(f"![AUC against gradient-size reduction]({plot.name})")
    with whole_file(path) as file:
        file.write(("\n\n".join(part.strip() for part in parts) + "\n").encode())


def _table_5(lines: Sequence[dict[str, Any]]) -> str:
    """AUC of DP-SGD by period and ε, and without privacy; log loss and mean prediction beside it.

    Runs of before these two were measured have "-" in their place.
    """
    found: dict[tuple[int, float | None], dict[str, Any]] = {}
    for line in lines:
        if line["part"] == "table_5":
            changes = line["changes"]
            found[changes["period"], changes.get("privacy.epsilon")] = line["result"]
    budgets: list[float | None] = [1.0, 3.0, 8.0, None]
    rows = [
        f"| {period} | "
        + " | ".join(_shown(found.get((period, budget))) for budget in budgets)
        + " |"
        for period in sorted({period for period, _ in found})
    ]
    head = "| streaming period | ε = 1 | ε = 3 | ε = 8 | non-private |\n|---|---|---|---|---|"
    title = "AUC (log loss, mean prediction) of DP-SGD and without privacy (Table 5):"
    return "\n".join([title, "", head, *rows])


def _other_runs(lines: Sequence[dict[str, Any]]) -> str:
    """AUC, log loss, mean prediction and reduction of the sparse methods, by period and setting."""
    rows = []
    for line in sorted(lines, key=lambda line: str(line["name"])):
        if line["part"] == "table_5":
            continue
        changes, result = dict(line["changes"]), line["result"]
        method, period = changes.pop("method"), changes.pop("period")
        setting = ", ".join(f"{key.split('.')[-1]} {value}" for key, value in changes.items())
        shown = f"{_shown(result)} | {result['reduction']:,.0f}"
        rows.append(f"| {method} | {period} | {setting} | {shown} |")
    head = (
        "| method | period | setting | AUC (log loss, mean prediction) | reduction |\n"
        "|---|---|---|---|---|"
    )
    return "\n".join(["Sparse methods at ε = 1 (Figures 5 and 6):", "", head, *rows])


def _shown(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    beside = (result.get(name) for name in ("log_loss", "mean_prediction"))
    told = ", ".join("-" if value is None else f"{value:.4f}" for value in beside)
    return f"{result['auc']:.4f} ({told})"


def _plot(lines: Sequence[dict[str, Any]], path: Path) -> bool:
    """Figure 5's shape: AUC against reduction, a mark for each method; False without a run."""
    own = [line for line in lines if line["part"] != "table_5"]
    if not own:
        return False
    figure = matplotlib.figure.Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    kinds = sorted({_kind(line) for line in own})
    for kind in kinds:
        results = [line["result"] for line in own if _kind(line) == kind]
        x, y = zip(*sorted((r["reduction"], r["auc"]) for r in results), strict=True)
        axes.plot(x, y, marker="o", linestyle="", label=kind, alpha=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("gradient-size reduction")
    axes.set_ylabel("AUC on the last six days")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))  # beside all points
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=120)
    return True


def _kind(line: dict[str, Any]) -> str:
    changes = line["changes"]
    frequencies = changes.get("selection.frequencies")
    source = f", {frequencies}" if frequencies else ""
    return f"{changes['method']}{source}, period {changes['period']}"

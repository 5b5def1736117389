"""The page of `pipelines.criteo.study` and its pictures."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import ml_collections
import numpy as np

from configs.criteo_study import RATIOS, THRESHOLDS
from pipelines.criteo import budget_picture
from pipelines.files import whole_file
from pipelines.markdown import table
from pipelines.points import Run, told_missing
from pipelines.resampling import difference

Group = Sequence[Run]  # runs of one point, which differ in their seeds

_BASELINE = "DP-SGD"
_LOSSES = (0.001, 0.002, 0.005, 0.01)
_NOT_METHODS = ("no privacy", "frozen tables", "zero tables")  # how names of points begin
_TITLES = {
    "sample": "The sample",
    "two million": "Two million made-up rows",
    "twenty million": "Twenty million made-up rows",
}

_HEAD = """# Criteo: what sparsity costs

The pCTR model, whose 26 tables have {entries:,.0f} entries in 338,782 rows; Adam with a learning
rate of {rate:g} (with noise, of {walk:g}/√steps if that is less) that falls to 0, a clip norm that
follows the {quantile:.0%} quantile, batches of {batch:,}, {epochs:g} passes over the sample and one
over made-up rows, δ = 1/rows, σ1/σ2 = {ratio:g} in DP-AdaFEST: the settings of
`configs/criteo_sample.py`. λ is the number of rows that
are expected to get noise in a step although no example looks them up, τ a threshold, k the number
of rows of DP-FEST (selected for {share:.0%} of ε) or of exponential selection. LoRA is on each
table, which is frozen then; DP-AdaFEST beside it chooses rows of A.

Entries are those of tables, or of LoRA on them, that get noise in a step, on average; the reduction
is the entries of all tables ÷ these. Loss is DP-SGD's AUC on the held-out rows less that of the
point; ± is two standard errors of it, of rows that are drawn anew for both, and of seeds where
there are several. Log loss is that of calibrated probabilities ÷ that of a constant. No ε covers
the held-out rows.

```
python -m pipelines.criteo.generate --rows=2000000 --out=TWO.tsv
python -m pipelines.criteo.generate --rows=20000000 --out=TWENTY.tsv
python -m pipelines.criteo.study --sample=DATA --two-million=TWO.tsv --twenty-million=TWENTY.tsv
```

The last command runs what is missing and writes this page. Each run is a line of
[criteo_kaggle.jsonl](criteo_kaggle.jsonl).
"""


def write_page(config: ml_collections.ConfigDict, lines: Sequence[Run], path: Path) -> None:
    """Writes the page of what is finished, and its pictures beside it."""
    with whole_file(path) as file:
        file.write(page_of(config, lines).encode())
    for group in _TITLES:
        for epsilon in _epsilons(lines, group):
            _draw_tradeoff(path.parent, group, epsilon, _points(lines, group, epsilon))
    if budget_picture.at_several_budgets(lines):
        budget_picture.draw(lines, path.parent)
    grid = _grid(lines)
    if grid:
        _draw_grid(path.parent / "criteo_grid.png", grid)


def page_of(config: ml_collections.ConfigDict, lines: Sequence[Run]) -> str:
    """The page."""
    base = config.base
    private = [x for x in lines if x["method"] == "non_private" and x["group"] == "sample"]
    parts = [
        _HEAD.format(
            entries=private[0]["entries"] if private else 0,
            rate=base.optimizer.options.learning_rate,
            walk=base.optimizer.walk,
            quantile=base.privacy.clip_quantile,
            batch=base.training.batch_size,
            epochs=base.training.epochs,
            ratio=base.adafest.noise_ratio,
            share=base.selection.share,
        )
    ]
    parts.append(told_missing(config.points, lines))
    if budget_picture.at_several_budgets(lines):
        picture = f"![AUC and log loss against ε]({budget_picture.NAME})"
        parts.append(f"\nThe sample at several budgets, means over seeds:\n\n{picture}\n")
    for group, title in _TITLES.items():
        epsilons = _epsilons(lines, group)
        if epsilons:
            parts.append(f"\n## {title}\n\n{_sizes(lines, group)}\n")
        for epsilon in epsilons:
            parts.append(_tradeoff(lines, group, epsilon))
    grid = _grid(lines)
    if grid:
        parts.append(_GRID + table(("σ1/σ2, τ", "AUC", "log loss", "reduction"), _grid_rows(grid)))
        parts.append("\n\n![each and both](criteo_grid.png)\n")
    models = [line for line in lines if line["group"] == "models"]
    if models:
        rows = [(x["name"], _auc([x]), _relative([x]), _reduction([x])) for x in models]
        parts.append(_MODELS + table(("model", "AUC", "log loss", "reduction"), rows) + "\n")
    return "".join(parts)


_GRID = """
## The effect of σ1/σ2 and τ (figures 7 and 9)

On the sample at ε = 1, one seed.

"""
_MODELS = """
## Other click models

DLRM and DCN-v2 beside pCTR, four passes over the sample, ε = 8. Without privacy four passes
overfit: log loss is worse than a constant's. Clipping and noise prevent that here.

"""


def _sizes(lines: Sequence[Run], group: str) -> str:
    line = next(line for line in lines if line["group"] == group)
    return (
        f"{line['training_rows']:,} rows train and {line['held_out_rows']:,} judge; "
        f"{line['steps']:,} steps."
    )


def _epsilons(lines: Sequence[Run], group: str) -> list[float]:
    """Those at which the baseline ran."""
    own = {x["epsilon"] for x in lines if x["group"] == group and x["name"] == _BASELINE}
    return sorted(own)


def _points(lines: Sequence[Run], group: str, epsilon: float) -> dict[str, list[Run]]:
    """The runs of a group at one ε, by the names of their points."""
    found = defaultdict(list)
    for line in lines:
        if line["group"] == group and line["epsilon"] == epsilon:
            found[line["name"]].append(line)
    return dict(found)


def _tradeoff(lines: Sequence[Run], group: str, epsilon: float) -> str:
    points = _points(lines, group, epsilon)
    base = _base(points)
    headers = ("point", "AUC", "loss", "±", "log loss", "entries a step", "reduction")
    points_table = table(headers, [_row(name, runs, base) for name, runs in points.items()])
    reached = table(("method", *(f"loss ≤ {loss:g}" for loss in _LOSSES)), _reached(points, base))
    own = "" if points[_BASELINE] == base else f" (`{base[0]['name']}`, the best of them)"
    return (
        f"\n### ε = {epsilon:g}\n\n{_says(points, base)}{points_table}\n\n"
        f"The largest reduction of each method at a loss against DP-SGD{own} of at most:\n\n"
        f"{reached}\n\n"
        f"![AUC loss against reduction]({_picture(group, epsilon)})\n"
    )


def _says(points: Mapping[str, Group], base: Group) -> str:
    """What tables are worth, and the best point of each method by the validation rows."""
    frozen, whole = points.get("frozen tables"), base[0]["entries"]
    by_method = _by_method(points)
    if frozen is None or not by_method:
        return ""

    def told(runs: Group) -> str:
        loss, error = loss_of(runs, base)
        return f"{loss:+.4f} ± {2 * error:.4f}"

    found = []
    for own in by_method.values():
        best = max(own, key=lambda runs: _mean(runs, "validation_auc"))
        noised = f"noise on {_mean(best, 'entries'):,.0f} of {whole:,.0f} entries a step"
        found.append(f"- {best[0]['name']}: {told(best)}, {noised} (1 in {_reduction(best)}).")
    return (
        f"Tables that never train lose {told(frozen)}. The best point of each method by the "
        "validation rows loses:\n\n" + "\n".join(found) + "\n\n"
    )


def _base(points: Mapping[str, Group]) -> Group:
    """DP-SGD with whole tables at its best settings, by the validation rows."""
    own = [runs for name, runs in points.items() if name.startswith(_BASELINE)]
    return max(own, key=lambda runs: statistics.fmean(x["validation_auc"] for x in runs))


def _row(name: str, runs: Group, base: Group) -> tuple[str, ...]:
    loss, error = loss_of(runs, base)
    apart = ("", "") if runs is base else (f"{loss:+.4f}", f"{2 * error:.4f}")
    entries = statistics.fmean(run["entries"] for run in runs)
    return (name, _auc(runs), *apart, _relative(runs), f"{entries:,.0f}", _reduction(runs))


def loss_of(runs: Group, base: Group) -> tuple[float, float]:
    """The base's AUC less that of a point, mean over the seeds that both have, and its error."""
    ahead, error = difference(runs, _aucs(runs), base, _aucs(base))
    return 0.0 - ahead, error


def _aucs(runs: Group) -> list[float]:
    return [run["auc"] for run in runs]


def _reached(points: Mapping[str, Group], base: Group) -> list[tuple[str, ...]]:
    rows = []
    for method, own in _by_method(points).items():
        found = [(loss_of(runs, base)[0], _mean(runs, "reduction")) for runs in own]
        cells = []
        for most in _LOSSES:
            fit = [reduction for loss, reduction in found if loss <= most]
            cells.append(f"{max(fit):,.0f}" if fit else "-")
        rows.append((method, *cells))
    return rows


def _by_method(points: Mapping[str, Group]) -> dict[str, list[Group]]:
    """The points of each method that does not put noise on every row."""
    found: dict[str, list[Group]] = defaultdict(list)
    for name, runs in points.items():
        if not name.startswith((*_NOT_METHODS, _BASELINE)):
            found[_method(name)].append(runs)
    return found


def _method(name: str) -> str:
    """What a point is one setting of."""
    first = name.partition(",")[0]
    return first if not first.startswith("LoRA") else "LoRA" + " + DP-AdaFEST" * ("+" in first)


def _mean(runs: Group, key: str) -> float:
    return statistics.fmean(run[key] for run in runs)


def _auc(runs: Group) -> str:
    values = [run["auc"] for run in runs]
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}"


def _relative(runs: Group) -> str:
    found = (run["calibrated_log_loss"] / run["constant_log_loss"] for run in runs)
    return f"{statistics.fmean(found):.3f}"


def _reduction(runs: Group) -> str:
    found = [run["reduction"] for run in runs if run["reduction"] is not None]
    return f"{statistics.fmean(found):,.0f}" if found else "no gradient"


def _grid(lines: Sequence[Run]) -> dict[tuple[float, float], Run]:
    names = {f"{r:g}, {t:g}": (r, t) for r in RATIOS for t in THRESHOLDS}
    return {names[x["name"]]: x for x in lines if x["group"] == "grid"}


def _grid_rows(grid: Mapping[tuple[float, float], Run]) -> list[tuple[str, ...]]:
    return [
        (f"{ratio:g}, {threshold:g}", _auc([run]), _relative([run]), _reduction([run]))
        for (ratio, threshold), run in sorted(grid.items())
    ]


def _picture(group: str, epsilon: float) -> str:
    return f"criteo_{group.replace(' ', '_')}_eps{epsilon:g}.png"


def _draw_tradeoff(folder: Path, group: str, epsilon: float, points: Mapping[str, Group]) -> None:
    base = _base(points)
    figure, axes = plt.subplots(figsize=(7, 4.5))
    by_method = defaultdict(list)
    for name, runs in points.items():
        loss, error = loss_of(runs, base)
        if name == "frozen tables":
            axes.axhline(loss, color="black", linestyle="--", label="tables not trained")
        elif name == "no privacy":
            axes.axhline(loss, color="green", linestyle=":", label=name)
        elif not name.startswith(_NOT_METHODS) and not name.startswith(f"{_BASELINE},"):
            reduction = _mean(runs, "reduction")
            by_method[_method(name)].append((reduction, loss, 2 * error))
    for method, found in by_method.items():
        x, y, error = zip(*sorted(found), strict=True)
        axes.errorbar(x, y, yerr=error, fmt="o-", capsize=3, label=method)
    axes.set(
        xscale="log",
        xlabel="entries of all tables ÷ entries noised a step",
        ylabel="AUC of DP-SGD − AUC",
        title=f"{_TITLES[group]}, epsilon = {epsilon:g}",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    _saved(figure, folder / _picture(group, epsilon))


def _draw_grid(path: Path, grid: Mapping[tuple[float, float], Run]) -> None:
    def cells(key: str) -> np.ndarray:
        found = [grid[r, t][key] if (r, t) in grid else np.nan for r in RATIOS for t in THRESHOLDS]
        return np.array(found, float).reshape(len(RATIOS), len(THRESHOLDS))

    auc, reduction = cells("auc"), cells("reduction")
    figure, both = plt.subplots(2, 2, figsize=(11, 8))
    maps = (("AUC", auc, ".3f"), ("log10 of the reduction", np.log10(reduction), ".1f"))
    for axes, (title, values, form) in zip(both[0], maps, strict=True):
        axes.imshow(values, cmap="viridis", aspect="auto", origin="lower")
        axes.set_xticks(range(len(THRESHOLDS)), [f"{t:g}" for t in THRESHOLDS])
        axes.set_yticks(range(len(RATIOS)), [f"{r:g}" for r in RATIOS])
        axes.set(xlabel="threshold", ylabel="sigma1 / sigma2", title=title)
        for (i, j), value in np.ndenumerate(values):
            axes.text(j, i, format(value, form), ha="center", va="center", color="white")
    for axes, values, label in zip(both[1], (auc, reduction), ("AUC", "reduction"), strict=True):
        for ratio, own in zip(RATIOS, values, strict=True):
            axes.plot(THRESHOLDS, own, marker="o", label=f"sigma1/sigma2 = {ratio:g}")
        axes.set(xscale="log", xlabel="threshold", ylabel=label)
        axes.grid(alpha=0.3)
    both[1][1].set_yscale("log")
    both[1][0].legend(fontsize=8)
    _saved(figure, path)


def _saved(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)

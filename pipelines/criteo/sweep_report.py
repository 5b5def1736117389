"""The table and the figures of a sweep."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import ml_collections
import numpy as np

from pipelines.criteo.records import PreparedData

Result = Mapping[str, Any]  # the JSON that `pipelines.criteo.sweep` wrote for a point, and its path

_RESAMPLES = 2_000
_LOSSES = (0.001, 0.005, 0.01, 0.02)
_FROZEN = "frozen_tables"  # part of the names of points that train no row


def write_report(config: ml_collections.ConfigDict, data: PreparedData, done: list[Result]) -> None:
    """`results.md` and the figures of `config.kind` in `config.directory`; prints the table."""
    directory = Path(config.directory)
    if not done:
        print("no point is finished")
        return
    sections = _KINDS[config.kind](directory, done, _labels(data, config.base.data.test_fraction))
    text = "\n\n".join(sections) + "\n"
    (directory / "results.md").write_text(text)
    print(text)


def _labels(data: PreparedData, fraction: float) -> np.ndarray:
    return data.records()["label"][round(data.num_records * (1 - fraction)) :]


def _tradeoff(directory: Path, done: list[Result], labels: np.ndarray) -> list[str]:
    sections = []
    for epsilon in sorted({_epsilon(r) for r in done}):
        own = [r for r in done if _epsilon(r) == epsilon]
        base = _by_seed([r for r in own if _method(r) == "dp_sgd"])
        if not base:
            continue
        groups = _grouped(own)
        figure = f"utility_loss_eps{epsilon:g}.png"
        _draw_tradeoff(directory / figure, groups, base, epsilon)
        methods = sorted({_method(r) for r in own})
        best = [_chosen(groups, method) for method in methods]
        sections += [
            f"### epsilon = {epsilon:g}",
            _table(_HEADERS, [_row(group, base) for group in groups.values()]),
            "Best of each method, chosen on the validation rows among points of a reduction of "
            "at least 100 (DP-SGD aside), and its loss against DP-SGD on the held-out rows with "
            "95 % intervals of a bootstrap paired over rows:",
            _table(
                ("method", "point", "reduction", "loss", "interval"),
                [_compared(group, base, labels) for group in best if group],
            ),
            "Largest reduction of each method at a mean loss of at most:",
            _table(
                ("method", *(f"{loss:g}" for loss in _LOSSES)),
                [_reductions(groups, base, m) for m in methods if m != _FROZEN],
            ),
            f"![utility loss against gradient reduction]({figure})",
        ]
    return sections


def _hyperparameters(directory: Path, done: list[Result], labels: np.ndarray) -> list[str]:
    del labels
    ratios = sorted({r["changes"]["adafest.noise_ratio"] for r in done})
    thresholds = sorted({r["changes"]["adafest.threshold"] for r in done})
    found = {
        (r["changes"]["adafest.noise_ratio"], r["changes"]["adafest.threshold"]): r for r in done
    }
    shape = (len(ratios), len(thresholds))

    def grid(value: Callable[[Result], float]) -> np.ndarray:
        cells = [
            value(found[r, t]) if (r, t) in found else math.nan for r in ratios for t in thresholds
        ]
        return np.array(cells).reshape(shape)

    auc, size = grid(lambda r: r["auc"]), grid(lambda r: 1 / r["reduction"])
    loss, mean = grid(lambda r: r["log_loss"]), grid(lambda r: r["mean_prediction"])
    _draw_heat_maps(directory / "heat_maps.png", ratios, thresholds, auc, size)
    _draw_effects(directory / "effects.png", ratios, thresholds, auc, size)
    rows = [
        (
            f"{r:g}",
            f"{t:g}",
            f"{auc[i, j]:.4f}",
            f"{loss[i, j]:.4f}",
            f"{mean[i, j]:.4f}",
            f"{1 / size[i, j]:,.0f}",
        )
        for i, r in enumerate(ratios)
        for j, t in enumerate(thresholds)
    ]
    return [
        _table(
            ("sigma1/sigma2", "threshold", "AUC", "log loss", "mean prediction", "reduction"), rows
        ),
        "![effect of each](effects.png)",
        "![joint effect](heat_maps.png)",
    ]


def _models(directory: Path, done: list[Result], labels: np.ndarray) -> list[str]:
    """One table of all points, without a figure."""
    del directory, labels
    rows = [
        (*_row(group, {})[:-2], _reduction(group), f"{_mean(group, 'ms_per_step'):.0f}")
        for group in _grouped(done).values()
    ]
    return [_table((*_HEADERS[:-2], "reduction", "ms a step"), rows)]


_KINDS = {"tradeoff": _tradeoff, "hyperparameters": _hyperparameters, "models": _models}
_OF_POINT = ("point", "seeds", "AUC", "± between seeds", "log loss", "mean prediction")
_HEADERS = (*_OF_POINT, "validation AUC", "AUC loss", "reduction")


def _method(result: Result) -> str:
    return _FROZEN if _FROZEN in result["name"] else str(result["method"])


def _epsilon(result: Result) -> float:
    return float(result["changes"]["privacy.epsilon"])


def _grouped(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Runs of one point with different seeds."""
    groups = defaultdict(list)
    for result in results:
        groups[result["name"]].append(result)
    return dict(groups)


def _by_seed(results: Sequence[Result]) -> dict[int, Result]:
    return {result["seed"]: result for result in results}


def _loss(group: Sequence[Result], base: Mapping[int, Result]) -> list[float]:
    """AUC of DP-SGD less a point's, for each seed that both have."""
    return [base[r["seed"]]["auc"] - r["auc"] for r in group if r["seed"] in base]


def _mean(group: Sequence[Result], key: str) -> float:
    return float(np.mean([result[key] for result in group]))


def _row(group: Sequence[Result], base: Mapping[int, Result]) -> tuple[str, ...]:
    aucs = [result["auc"] for result in group]
    spread = f"{np.std(aucs, ddof=1):.4f}" if len(aucs) > 1 else "-"
    losses = _loss(group, base)
    return (
        group[0]["name"],
        str(len(group)),
        f"{np.mean(aucs):.4f}",
        spread,
        f"{_mean(group, 'log_loss'):.4f}",
        f"{_mean(group, 'mean_prediction'):.4f}",
        f"{_mean(group, 'validation_auc'):.4f}",
        f"{np.mean(losses):.4f}" if losses else "-",
        _reduction(group),
    )


def _reduction(group: Sequence[Result]) -> str:
    return "-" if _method(group[0]) == _FROZEN else f"{_mean(group, 'reduction'):,.1f}"


def _chosen(groups: Mapping[str, list[Result]], method: str) -> list[Result]:
    """The point of a method that is best on the validation rows; [] if none is small enough."""
    own = [
        group
        for group in groups.values()
        if _method(group[0]) == method and (method == "dp_sgd" or _mean(group, "reduction") >= 100)
    ]
    return max(own, key=lambda group: _mean(group, "validation_auc"), default=[])


def _compared(
    group: Sequence[Result], base: Mapping[int, Result], labels: np.ndarray
) -> tuple[str, ...]:
    losses = _loss(group, base)
    compared = ("-", "-")
    if losses:
        low, high = _interval(group, base, labels)
        compared = (f"{np.mean(losses):.4f}", f"[{low:.4f}, {high:.4f}]")
    return (_method(group[0]), group[0]["name"], _reduction(group), *compared)


def _interval(
    group: Sequence[Result], base: Mapping[int, Result], labels: np.ndarray
) -> tuple[float, float]:
    """Of the mean loss over seeds; rows and seeds are drawn anew, with repetition, each time."""
    pairs = [(_scores(base[r["seed"]]), _scores(r)) for r in group if r["seed"] in base]
    ranked = [tuple(np.unique(s, return_inverse=True)[1] for s in pair) for pair in pairs]
    rng = np.random.default_rng(0)
    losses = np.zeros(_RESAMPLES)
    for i in range(_RESAMPLES):
        rows = rng.integers(0, len(labels), len(labels))
        times = np.bincount(rows, minlength=len(labels))
        of_seed = [
            _auc(labels, theirs, times) - _auc(labels, ours, times) for theirs, ours in ranked
        ]
        losses[i] = np.mean(rng.choice(of_seed, len(of_seed)))
    return float(np.quantile(losses, 0.025)), float(np.quantile(losses, 0.975))


def _scores(result: Result) -> np.ndarray:
    return np.load(Path(result["path"]).with_suffix(".npy"))


def _auc(labels: np.ndarray, ranks: np.ndarray, times: np.ndarray) -> float:
    """Of rows that occur `times` times each; equal ranks, from 0, count half. O(rows)."""
    positive = np.bincount(ranks, weights=times * (labels > 0))
    negative = np.bincount(ranks, weights=times * (labels <= 0))
    below = np.cumsum(negative) - negative / 2
    return float(positive @ below / (positive.sum() * negative.sum()))


def _reductions(
    groups: Mapping[str, list[Result]], base: Mapping[int, Result], method: str
) -> tuple[str, ...]:
    own = [g for g in groups.values() if _method(g[0]) == method and _loss(g, base)]

    def largest(loss: float) -> str:
        fit = [_mean(group, "reduction") for group in own if np.mean(_loss(group, base)) <= loss]
        return f"{max(fit):,.1f}" if fit else "-"

    return (method, *map(largest, _LOSSES))


def _draw_tradeoff(
    path: Path, groups: Mapping[str, list[Result]], base: Mapping[int, Result], epsilon: float
) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.5))
    by_method = defaultdict(list)
    for group in groups.values():
        losses = _loss(group, base)
        if losses:
            spread = np.std(losses, ddof=1) if len(losses) > 1 else 0.0
            point = _mean(group, "reduction"), float(np.mean(losses)), float(spread)
            by_method[_method(group[0])].append(point)
    for _, loss, _ in by_method.pop(_FROZEN, []):
        axes.axhline(loss, color="black", linestyle="--", label="tables not trained")
    for method, points in by_method.items():
        x, y, spread = zip(*sorted(points), strict=True)
        axes.errorbar(x, y, yerr=spread, fmt="o", capsize=3, label=method)
    axes.set(
        xscale="log",
        xlabel="embedding gradient size reduction",
        ylabel="AUC of DP-SGD − AUC",
        title=f"epsilon = {epsilon:g}",
    )
    axes.axhline(0.0, color="gray", linewidth=0.8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    _saved(figure, path)


def _draw_heat_maps(
    path: Path, ratios: list[float], thresholds: list[float], auc: np.ndarray, size: np.ndarray
) -> None:
    figure, both = plt.subplots(1, 2, figsize=(11, 4))
    shown = (("AUC", auc, ".3f"), ("log10 of the reduction", -np.log10(size), ".1f"))
    for axes, (title, values, form) in zip(both, shown, strict=True):
        image = axes.imshow(values, cmap="viridis", aspect="auto", origin="lower")
        axes.set_xticks(range(len(thresholds)), [f"{t:g}" for t in thresholds])
        axes.set_yticks(range(len(ratios)), [f"{r:g}" for r in ratios])
        axes.set(xlabel="threshold", ylabel="sigma1 / sigma2", title=title)
        for (i, j), value in np.ndenumerate(values):
            axes.text(
                j, i, format(value, form), ha="center", va="center", color="white", fontsize=8
            )
        figure.colorbar(image, ax=axes)
    _saved(figure, path)


def _draw_effects(
    path: Path, ratios: list[float], thresholds: list[float], auc: np.ndarray, size: np.ndarray
) -> None:
    figure, both = plt.subplots(1, 2, figsize=(11, 4))
    for axes, values, label in zip(
        both, (auc, size), ("AUC", "gradient size / DP-SGD's"), strict=True
    ):
        for i, ratio in enumerate(ratios):
            axes.plot(thresholds, values[i], marker="o", label=f"sigma1/sigma2 = {ratio:g}")
        axes.set(xscale="log", xlabel="threshold", ylabel=label)
        axes.grid(alpha=0.3)
    both[1].set_yscale("log")
    both[0].legend(fontsize=8)
    _saved(figure, path)


def _saved(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

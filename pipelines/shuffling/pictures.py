"""The pictures of the page."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from pipelines.shuffling import theory


def draw(results: dict[str, Any], folder: Path) -> None:
    """Writes a PNG for each figure."""
    for name, picture in (
        ("figure_2", approximations),
        ("figure_3", sigmas),
        ("figure_4", heat_map),
    ):
        figure = picture(results[name])
        figure.savefig(folder / f"shuffling_{name}.png", dpi=110)


def approximations(found: list[dict[str, Any]]) -> Figure:
    """The distribution function of the log sum, by each normal approximation."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, one in zip(figure.subplots(1, 2), found, strict=True):
        for name, (mean, spread) in one["normals"].items():
            x = np.linspace(mean - 3 * spread, mean + 3 * spread, 200)
            axes.plot(x, stats.norm.cdf(x, mean, spread), label=name)
        for name in ("Monte Carlo", "KDE"):
            marker = "o" if name == "KDE" else "x"
            axes.plot(one["quantiles"][name], theory.QUANTILES, marker, label=name)
        axes.set(xlabel="log of the sum", ylabel="probability below")
        axes.set_title(f"sigma = {one['sigma']:g}, {one['terms']:,} terms")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def sigmas(rows: list[dict[str, Any]]) -> Figure:
    """σ against ε, claimed and needed."""
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    models = list(dict.fromkeys(row["model"] for row in rows))
    for axes, model in zip(figure.subplots(2, 3).flat, models, strict=True):
        own = [row for row in rows if row["model"] == model]
        epsilons = [row["epsilon"] for row in own]
        axes.plot(epsilons, [row["dp_sgd_sigma"] for row in own], "o-", label="DP-SGD, guaranteed")
        axes.plot(epsilons, [row["sigma"] for row in own], "s-", label="Theorem 6, claimed")
        axes.set(title=model, xlabel="epsilon", ylabel="sigma", xscale="log", ylim=(0, 15))
        axes.set_xticks(epsilons, [f"{each:g}" for each in epsilons])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    return figure


def heat_map(rows: list[dict[str, Any]]) -> Figure:
    """σ over ε and the number of weights."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    values = np.array([row["sigma"] for row in rows])
    axes.imshow(np.log(values), aspect="auto", cmap="viridis")
    for (i, j), value in np.ndenumerate(values):
        dark = np.log(value) < 1.2
        axes.text(j, i, f"{value:.2f}", ha="center", va="center", color="w" if dark else "k")
    names = ["1 (DP-SGD)", *(f"{d:.0e}" for d in theory.DIMENSIONS)]
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(rows)), [f"{row['epsilon']:g}" for row in rows])
    axes.set(xlabel="dimension", ylabel="claimed epsilon")
    axes.set_title("sigma by Theorem 6, delta = 1e-5, c'/c = sqrt(250)")
    return figure

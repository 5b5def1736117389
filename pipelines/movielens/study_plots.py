"""The pictures of the comparison: curves (Figure 4), sharing (Figure 7)."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure

from pipelines.files import whole_file

Lines = Sequence[dict[str, Any]]
_SHARING = {
    "vanilla": ("-", "tied"),
    "without_sharing": ("--", "not tied"),
    "without_sharing_half_width": (":", "not tied, half the width"),
}


def of(lines: Lines, **wanted: Any) -> Lines:
    """The lines whose point has these values."""
    return [e for e in lines if all(e["point"][key] == value for key, value in wanted.items())]


def plot_curves(lines: Lines, models: Sequence[str], epsilons: Sequence[float], path: Path) -> bool:
    """NDCG@10 by epochs, a picture for each ε; False without a run."""
    runs = of(lines, held_out="test")
    if not runs:
        return False
    figure = matplotlib.figure.Figure(figsize=(10, 3.4), layout="constrained")
    axes = figure.subplots(1, len(epsilons), sharey=True, squeeze=False)[0]
    for place, epsilon in zip(axes, epsilons, strict=True):
        for model in models:
            own = [each["result"]["curve"] for each in of(runs, model=model, epsilon=epsilon)]
            if own:
                epochs = list(own[0])
                by_epoch = [[curve[epoch][0] for curve in own] for epoch in epochs]
                x = list(map(int, epochs))
                (line,) = place.plot(x, list(map(statistics.fmean, by_epoch)), label=model)
                low, high = list(map(min, by_epoch)), list(map(max, by_epoch))
                place.fill_between(x, low, high, color=line.get_color(), alpha=0.2)
        place.set_title(f"ε = {epsilon:g}")
        place.set_xlabel("epochs")
    axes[0].set_ylabel("NDCG@10 in %")
    axes[0].legend(fontsize=7)
    _save(figure, path)
    return True


def plot_sharing(lines: Lines, path: Path) -> bool:
    """Validation NDCG@10 by learning rate, a line for each batch size; False without both."""
    figure = matplotlib.figure.Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for model, (style, name) in _SHARING.items():
        own = of(lines, model=model, held_out="validation")
        if not own and model in ("vanilla", "without_sharing"):
            return False
        for color, batch in enumerate(sorted({each["point"]["batch_size"] for each in own})):
            line = sorted(
                (each["point"]["learning_rate"], each["result"]["ndcg"])
                for each in of(own, batch_size=batch)
            )
            label = f"{name}, batch {batch:,}"
            axes.plot(*zip(*line, strict=True), style, marker="o", color=f"C{color}", label=label)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("NDCG@10 in %")
    axes.legend(fontsize=7, handlelength=4)
    _save(figure, path)
    return True


def _save(figure: matplotlib.figure.Figure, path: Path) -> None:
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=120)

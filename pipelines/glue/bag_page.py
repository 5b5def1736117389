"""The page of the study of the bag of words."""

import math
import re
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

import ml_collections

from pipelines.files import whole_file
from pipelines.glue.data import HELD_OUT, VALIDATION
from pipelines.glue.tasks import DEV
from pipelines.markdown import listed
from pipelines.points import Run, missing, told_missing

_BASELINE = "DP-SGD"
_HEAD = """# A bag of words: where the table is everything

SST-2's phrases as a bag of embeddings over RoBERTa's {rows:,} words: rows of width {width}, their
sum over √words, and one logit. {training:,} rows train, {held_out:,} judge and {validation:,}
others are for choices; no row of a side contains one of another. Every run takes {steps} steps;
Adam at {rate:g}, clip norm {clip:g}, δ = 1/rows; batches of 1,024 unless said. Reduction is the
entries of the word table ÷ those that get noise in a step, on average. DP-AdaFEST has σ1/σ2 = 1 and
1,000 expected false rows unless said; DP-FEST trains 1,000 rows and DP-AdaFEST+ chooses among
3,000, selected for {share:.0%} of ε. LoRA is a frozen random table plus A·B of rank 1, and
DP-AdaFEST beside it chooses rows of A, so that the savings of both multiply.

`python -m pipelines.glue.bag_study --data FOLDER --tokenizer FOLDER` runs what is missing and
writes this page; each run is a line of [bag.jsonl](bag.jsonl). Accuracies are of the held-out rows,
of which the standard error is 0.5 points. ± is the deviation between seeds; where there is no
±, one seed ran. No ε covers the held-out rows.
"""


def write_page(config: ml_collections.ConfigDict, lines: Sequence[Run], path: Path) -> None:
    """Writes the page of what is finished."""
    with whole_file(path) as file:
        file.write(page_of(config, lines).encode())


def page_of(config: ml_collections.ConfigDict, lines: Sequence[Run]) -> str:
    """The page."""
    base = config.base
    head = _HEAD.format(
        rows=lines[0]["words"] if lines else 0,
        width=base.model.width,
        training=lines[0]["training_rows"] if lines else 0,
        held_out=base.data.held_out,
        validation=base.data.validation,
        steps=lines[0]["steps"] if lines else 0,
        rate=base.optimizer.options.learning_rate,
        clip=base.privacy.clip_norm,
        share=base.selection.share,
    )
    parts = [head, told_missing(config.points, lines)]
    told_here = [own for own in config.points if own["group"] != "windows"]
    groups = {"methods", *TITLES} - {"windows"}
    if groups <= {x["group"] for x in lines} and not missing(told_here, lines):
        parts.append(f"\n## What it says\n\n{_conclusions(lines)}\n")
    parts.append("\n## Methods\n\n" + _methods_table(lines))
    for group in dict.fromkeys(point["group"] for point in config.points):
        own = [line for line in lines if line["group"] == group and line["epsilon"] == _EPSILON]
        if group != "methods" and own:
            parts.append(f"\n## {TITLES[group]}\n\nAt ε = 3.\n\n{_table(own)}")
    return "".join(parts)


_EPSILON = 3.0  # of all groups but the first
TITLES = {
    "windows": "Rows chosen over windows of W steps",
    "LoRA": "LoRA on the table, alone and with DP-AdaFEST",
    "batch size": "Larger batches, as many steps",
    "rows selected before": "Rows selected before training",
    "contribution clip norm": "C1, the clip norm of contributions",
    "grid": "σ1/σ2 and expected false rows of DP-AdaFEST",
}


def _methods_table(lines: Sequence[Run]) -> str:
    rows = [
        "| ε | method | held-out rows | minus DP-SGD | dev file | reduction |",
        "|---" * 6 + "|",
    ]
    own = [line for line in lines if line["group"] == "methods"]
    for epsilon in sorted({x["epsilon"] for x in own}, key=lambda e: math.inf if e is None else e):
        here = [line for line in own if line["epsilon"] == epsilon]
        base = [x["accuracy"][HELD_OUT] for x in here if x["name"] == _BASELINE]
        for name in dict.fromkeys(line["name"] for line in here):
            runs = [line for line in here if line["name"] == name]
            found = [x["accuracy"][HELD_OUT] for x in runs]
            apart = ""
            if base and name != _BASELINE:
                apart = f"{100 * (statistics.fmean(found) - statistics.fmean(base)):+.1f}"
            cells = (
                "none" if epsilon is None else f"{epsilon:g}",
                name,
                _percent(found),
                apart,
                _percent([x["accuracy"][DEV] for x in runs]),
                _reduction(runs),
            )
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _table(lines: Sequence[Run]) -> str:
    rows = ["| setting | held-out rows | validation rows | reduction |", "|---" * 4 + "|"]
    for name in dict.fromkeys(line["name"] for line in lines):
        runs = [line for line in lines if line["name"] == name]
        by_side = [_percent([x["accuracy"][s] for x in runs]) for s in (HELD_OUT, VALIDATION)]
        rows.append(f"| {' | '.join((name, *by_side, _reduction(runs)))} |")
    return "\n".join(rows) + "\n"


def _percent(values: Sequence[float]) -> str:
    mean = f"{100 * statistics.fmean(values):.1f} %"
    return mean if len(values) < 2 else f"{mean} ± {100 * statistics.stdev(values):.1f}"


def _reduction(runs: Sequence[Run]) -> str:
    found = [run["reduction"] for run in runs if run["reduction"] is not None]
    return f"{statistics.fmean(found):,.0f}×" if found else "no gradient"


def _conclusions(lines: Sequence[Run]) -> str:
    """What the paper's figures and tables say, and what this data does."""

    def loss(name: str, epsilon: float = 3.0) -> str:
        own = _runs(lines, "methods", name, epsilon)
        found = _lost(own, _runs(lines, "methods", _BASELINE, epsilon))
        return found if own[0]["reduction"] is None else f"{found} at {_reduction(own)}"

    def both(name: str) -> str:
        return f"{loss(name)} (ε = 3) and {loss(name, 8.0)} (ε = 8)"

    def at_batches_of(size: str) -> str:
        names = f"{_BASELINE}, {size}", f"LoRA + DP-AdaFEST, {size}"
        base, own = (_runs(lines, "batch size", name, 3.0)[0] for name in names)
        points = 100 * (base["accuracy"][HELD_OUT] - own["accuracy"][HELD_OUT])
        return f"{points:.1f} at {size}"

    public, private = (
        statistics.fmean(x["accuracy"][HELD_OUT] for x in lines if x["name"] == f"{source}, k=1000")
        for source in ("public", "gaussian")
    )
    sizes = dict.fromkeys(x["name"].partition(", ")[2] for x in lines if x["group"] == "batch size")
    text = f"""Losses are against DP-SGD of the same ε and batches, ± the standard error over seeds.

- **The table matters** (Table 6): a frozen one loses {loss("frozen table")}.
- **DP-AdaFEST against DP-FEST** (Figure 3, where DP-AdaFEST is always ahead): {loss("DP-AdaFEST")}
  against {loss("DP-FEST")} at ε = 3, and at ε = 1 {loss("DP-AdaFEST", 1.0)} against
  {loss("DP-FEST", 1.0)}. Rows by public counts are {100 * (private - public):.1f} points behind
  rows by private ones: words that are frequent elsewhere say little of sentiment.
- **Both together** (Figure 4, where DP-AdaFEST+ is ahead of either): {both("DP-AdaFEST+")};
  DP-AdaFEST alone {both("DP-AdaFEST")}. At ε = 1 DP-AdaFEST+ loses {loss("DP-AdaFEST+", 1.0)}.
- **LoRA against DP-AdaFEST** (Table 1, where DP-AdaFEST saves more at equal accuracy): here LoRA of
  rank 1 loses less, {loss("LoRA")}, and at ε = 1 {loss("LoRA", 1.0)}. Its reduction ends at the
  width of the table.
- **LoRA with DP-AdaFEST** goes on from there: {both("LoRA + DP-AdaFEST")}. Larger
  batches have more votes, but show no trend: single runs at ε = 3 lose
  {", ".join(map(at_batches_of, sizes))}.
- **σ1/σ2** (Figure 7b): the best of each row of the grid is {_best_of_grid(lines)}. Words want
  precise votes: C1 bounds the votes of all words of a sentence together.

A loss of at most 2 points at a reduction of 30 was wanted, and of at most 4 at 1,000. These are
within the first: {_within(lines, 2, 30)}. Within the second: {_within(lines, 4, 1000)}. Each batch
votes by itself: a word stands in few of its sentences, and its vote has the noise of all words of a
sentence.
"""
    return "\n".join(map(_filled, re.split(r"\n(?=- |\n)", text)))


def _filled(text: str) -> str:
    """A paragraph, or a point of a list, in lines of 100 characters."""
    lead = "\n" if text.startswith("\n") else ""
    return lead + textwrap.fill(
        " ".join(text.split()),
        width=100,
        subsequent_indent="  " if text.startswith("- ") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _best_of_grid(lines: Sequence[Run]) -> str:
    best: dict[str, float] = {}
    for line in lines:
        if line["group"] == "grid":
            ratio = line["name"].partition(",")[0]
            best[ratio] = max(best.get(ratio, 0.0), 100 * line["accuracy"][HELD_OUT])
    return ", ".join(f"{value:.1f} % at {ratio}" for ratio, value in best.items())


def _runs(lines: Sequence[Run], group: str, name: str, epsilon: float) -> list[Run]:
    own = [x for x in lines if x["group"] == group and x["name"] == name]
    return [line for line in own if line["epsilon"] == epsilon]


def _within(lines: Sequence[Run], most_lost: float, reduction: float) -> str:
    """Which methods lose at most so many points at no less than a reduction, and at which ε."""
    found: dict[str, list[str]] = {}
    own = [x for x in lines if x["group"] == "methods" and x["epsilon"] is not None]
    for name, epsilon in dict.fromkeys((x["name"], x["epsilon"]) for x in own):
        runs = _runs(lines, "methods", name, epsilon)
        if name == _BASELINE or runs[0]["reduction"] is None:
            continue
        lost = _points_lost(runs, _runs(lines, "methods", _BASELINE, epsilon))
        if lost <= most_lost and statistics.fmean(x["reduction"] for x in runs) >= reduction:
            found.setdefault(name, []).append(f"{epsilon:g}")
    told = [f"{name} at ε = {listed(sorted(each))}" for name, each in found.items()]
    return "; ".join(told) or "no method"


def _points_lost(runs: Sequence[Run], base: Sequence[Run]) -> float:
    own, other = (statistics.fmean(x["accuracy"][HELD_OUT] for x in each) for each in (runs, base))
    return 100 * (other - own)


def _lost(runs: Sequence[Run], base: Sequence[Run]) -> str:
    """Points that accuracy falls by, and the standard error of several seeds."""
    own, other = ([100 * x["accuracy"][HELD_OUT] for x in each] for each in (runs, base))
    error = math.sqrt(statistics.variance(own) / len(own) + statistics.variance(other) / len(other))
    return f"{_points_lost(runs, base):.1f} ± {error:.1f} points"

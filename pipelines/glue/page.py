"""The page of the study of the word table: accuracies by method and ε, paired over seeds."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import ml_collections

from pipelines.glue.data import HELD_OUT, VALIDATION
from pipelines.glue.tasks import DEV

BASELINE, SPARSE, FROZEN = "DP-SGD", "DP-AdaFEST", "frozen words"
UNKNOWN = "unknown"  # of a run that was killed between its last step and its line

_HEAD = """# Language models: MiniLM on SST-2

all-MiniLM-L6-v2 (a BERT of 6 layers and width 384, 30,522 words) with LoRA of rank {rank} on query
and value, a head and the word table; {length} tokens, {epochs:g} passes over the rows in
Poisson batches of {batch:,} (without privacy shuffled ones, of the size below), δ = 1/rows.
DP-AdaFEST has σ1/σ2 = {ratio:g} and {false:,.0f} expected false rows, DP-FEST {rows:,} rows for
{share:.0%} of ε.
`python -m pipelines.glue.study --data FOLDER` runs what is missing and writes this page; each run
is a line of [language.jsonl](language.jsonl).

The training file's rows are phrases of each other. {held_out:,} rows judge and {validation:,}
others choose settings; no row of a side contains one of another (`pipelines.glue.held_out` says
how). Settings are chosen at ε = {first:g} by the validation rows of one seed; without privacy only
one setting was tried. No ε covers that choice, nor the split, which looks at all rows. An example
is a row: one sentence of SST-2 has about ten of them.

± is the deviation between seeds, and behind a difference the standard error of its mean. The
standard error of an accuracy p of n rows is √(p(1−p)/n): from 87 to 80 % it is 0.4 to 0.5 points
for the held-out rows, and 1.1 to 1.4 points for the 872 rows of the dev file. Reduction is the
entries of the word table ÷ those that get noise in a step, on average.
"""
_NOT_YET = """
**Unfinished: {missing} runs are missing, and more become known as settings are chosen.** The
command above goes on with them.
"""


def page(
    config: ml_collections.ConfigDict,
    lines: Sequence[dict[str, Any]],
    chosen: dict[str, dict[str, Any] | None],
    missing: int,
) -> str:
    """The page.

    Args:
        config: Of the study.
        lines: Every finished run.
        chosen: The setting of each method, None where it is not chosen yet.
        missing: How many runs are known to be missing.
    """
    base = config.base
    head = _HEAD.format(
        rank=base.model.rank,
        length=base.data.length,
        epochs=base.training.epochs,
        batch=base.training.batch_size,
        held_out=base.data.held_out,
        validation=base.data.validation,
        first=config.epsilons[0],
        ratio=base.adafest.noise_ratio,
        false=base.adafest.expected_false_rows,
        rows=base.selection.rows,
        share=base.selection.share,
    )
    parts = [head, _NOT_YET.format(missing=missing)] if missing else [head]
    parts.append(f"\n## Accuracy by method\n\n{_by_method(config, lines, chosen)}")
    verdict = _verdict(config.epsilons[0], lines, chosen) + _against_frozen(config, lines, chosen)
    noise = _of_noise(config, lines, chosen)
    parts.append(f"\n## What was asked for\n\n{verdict}{noise}")
    parts.append(f"\n## Every finished run, on the validation rows\n\n{_choices(lines)}")
    return "".join(parts)


def _by_method(
    config: ml_collections.ConfigDict,
    lines: Sequence[dict[str, Any]],
    chosen: dict[str, dict[str, Any] | None],
) -> str:
    rows = [
        "| ε | method | seeds | held-out rows | minus DP-SGD, paired | dev file | reduction |",
        "|---" * 7 + "|",
    ]
    for epsilon in (*sorted(config.epsilons), None):
        for method, setting in chosen.items():
            own = _runs(lines, method, epsilon, setting)
            baseline = _runs(lines, BASELINE, epsilon, chosen[BASELINE])
            rows += [_row(epsilon, method, own, baseline)] if own else []
    if len(rows) == 2:
        return "No setting is chosen yet.\n"
    return "\n".join(rows) + "\n"


def _runs(
    lines: Sequence[dict[str, Any]],
    method: str,
    epsilon: float | None,
    setting: dict[str, Any] | None,
) -> dict[int, dict[str, Any]]:
    """The finished runs of one setting by seed."""
    wanted = (method, epsilon, setting)
    return {x["seed"]: x for x in lines if (x["method"], x["epsilon"], x["setting"]) == wanted}


def _row(
    epsilon: float | None,
    method: str,
    own: dict[int, dict[str, Any]],
    baseline: dict[int, dict[str, Any]],
) -> str:
    found = _reductions(own)
    shown = f"{statistics.fmean(found):,.1f}×" if found else UNKNOWN
    cells = (
        "none" if epsilon is None else f"{epsilon:g}",
        method,
        str(len(own)),
        _percent([x["accuracy"][HELD_OUT] for x in own.values()]),
        _points(_differences(own, baseline)) if epsilon is not None and method != BASELINE else "",
        _percent([x["accuracy"][DEV] for x in own.values()]),
        "no gradient" if None in [x["reduction"] for x in own.values()] else shown,
    )
    return f"| {' | '.join(cells)} |"


def _reductions(runs: dict[int, dict[str, Any]]) -> list[float]:
    """Those that are known."""
    found = [x["reduction"] for x in runs.values()]
    return [each for each in found if each not in (None, UNKNOWN)]


def _verdict(
    first: float, lines: Sequence[dict[str, Any]], chosen: dict[str, dict[str, Any] | None]
) -> str:
    """At the first ε: within 0.5 points of DP-SGD at smaller gradients, and better than frozen."""
    found = {name: _runs(lines, name, first, chosen[name]) for name in (BASELINE, SPARSE, FROZEN)}
    sparse = found[SPARSE]
    said = []
    for other, question in (
        (BASELINE, "Is DP-AdaFEST within 0.5 points of DP-SGD?"),
        (FROZEN, "Does training the word table by DP-AdaFEST beat freezing it?"),
    ):
        differences = _differences(sparse, found[other])
        if len(differences) < 3:
            said.append(f"- {question} Not known yet: {len(differences)} of 3 seeds.")
            continue
        mean = 100 * statistics.fmean(differences)
        yes = mean >= -0.5 if other == BASELINE else mean > 0
        said.append(f"- {question} {'Yes' if yes else 'No'}: {_points(differences)} points.")
    if reductions := _reductions(sparse):
        said.append(
            f"- Its word-table gradients are {min(reductions):,.1f} times smaller, at least."
        )
    return "\n".join(said) + "\n"


def _against_frozen(
    config: ml_collections.ConfigDict,
    lines: Sequence[dict[str, Any]],
    chosen: dict[str, dict[str, Any] | None],
) -> str:
    """The second question at the other ε; empty without such runs."""
    said = []
    for epsilon in sorted(config.epsilons[1:]):
        sparse, frozen = (_runs(lines, name, epsilon, chosen[name]) for name in (SPARSE, FROZEN))
        if differences := _differences(sparse, frozen):
            said.append(f"{_points(differences)} at ε = {epsilon:g}")
    return f"- DP-AdaFEST minus frozen words elsewhere: {', '.join(said)}.\n" if said else ""


def _of_noise(
    config: ml_collections.ConfigDict,
    lines: Sequence[dict[str, Any]],
    chosen: dict[str, dict[str, Any] | None],
) -> str:
    """What more noise costs, from the largest ε to the smallest; empty without such runs."""
    least, most = min(config.epsilons), max(config.epsilons)
    moved, steps = [], 0
    for method, setting in chosen.items():
        found = [_runs(lines, method, epsilon, setting) for epsilon in (least, most)]
        differences = _differences(*found)
        if differences:
            moved.append(f"{method} {_points(differences)}")
            steps = next(iter(found[0].values()))["steps"]
    if not moved:
        return ""
    return (
        f"- From ε = {most:g} to ε = {least:g} accuracy moves by these points: {', '.join(moved)}. "
        f"Where that is within its error, the {steps} steps are the limit, and not the noise.\n"
    )


def _choices(lines: Sequence[dict[str, Any]]) -> str:
    rows = [
        "| ε | method | setting | seed | validation rows | steps |",
        "|---|---|---|---|---|---|",
    ]
    for x in lines:
        setting = ", ".join(f"{key}={value}" for key, value in x["setting"].items())
        epsilon = "none" if x["epsilon"] is None else f"{x['epsilon']:g}"
        accuracy = f"{100 * x['accuracy'][VALIDATION]:.2f} %"
        cells = (epsilon, x["method"], setting, str(x["seed"]), accuracy, str(x["steps"]))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n" if lines else "None is finished yet.\n"


def _differences(own: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]]) -> list[float]:
    """Of held-out accuracy, seed by seed."""
    return [
        own[seed]["accuracy"][HELD_OUT] - other[seed]["accuracy"][HELD_OUT]
        for seed in sorted(own.keys() & other.keys())
    ]


def _percent(values: Sequence[float]) -> str:
    spread = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.2f} %{spread}"


def _points(differences: Sequence[float]) -> str:
    """Mean, and its standard error over seeds."""
    if not differences:
        return "not known yet"
    mean = f"{100 * statistics.fmean(differences):+.2f}"
    if len(differences) == 1:
        return mean
    error = 100 * statistics.stdev(differences) / math.sqrt(len(differences))
    return f"{mean} ± {error:.2f}"

"""The page and the console table of one or several Criteo runs."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dp_sparse.reports import report_page
from pipelines.criteo.records import PreparedData
from pipelines.criteo.train import RunResult
from pipelines.scores import constant_log_loss, of_probabilities

_HEADERS = (
    "run",
    "AUC",
    "log loss",
    "calibrated",
    "mean prediction",
    "epsilon",
    "delta",
    "gradient size reduction",
    "ms/step",
    "steps",
)

_CAVEAT = (
    "No epsilon covers the held-out rows (AUC, log loss and mean prediction are computed on them), "
    "the non-private run, or step times. The number of rows, malformed ones left out, is taken to "
    "be public."
)
_TITLES = {
    "non_private": "no privacy",
    "dp_sgd": "DP-SGD",
    "lazy_dp_sgd": "LazyDP",
    "dp_adafest": "DP-AdaFEST",
    "dp_adafest_plus": "DP-AdaFEST+",
    "dp_fest": "DP-FEST",
    "exponential": "exponential selection",
}


def is_private(result: RunResult) -> bool:
    """Whether a run has an ε."""
    return not math.isinf(result.epsilon)


def title(result: RunResult) -> str:
    """A run's method and ε, in the words of tables."""
    name = _TITLES[result.method]
    return f"{name}, epsilon={result.epsilon:.2g}" if is_private(result) else name


def rows(results: Sequence[RunResult]) -> list[tuple[object, ...]]:
    """One row of the comparison for each run; the mean prediction is of calibrated predictions."""
    return [
        (
            title(result),
            f"{result.auc:.4f}",
            f"{result.log_loss:.4f}",
            f"{result.calibrated_log_loss:.4f}" if result.calibration else "",
            f"{result.calibrated_mean_prediction:.4f}",
            f"{result.epsilon:.3f}" if is_private(result) else "none",
            f"{result.delta:.2g}" if is_private(result) else "none",
            f"{result.reduction:,.1f}x",
            f"{result.ms_per_step:.1f}",
            result.steps,
        )
        for result in results
    ]


def console_table(results: Sequence[RunResult]) -> str:
    """The comparison as aligned text."""
    lines = [_HEADERS, *rows(results)]
    widths = [max(len(str(line[i])) for line in lines) for i in range(len(_HEADERS))]
    return "\n".join(
        "  ".join(str(cell).rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def notes(results: Sequence[RunResult]) -> list[str]:
    """What a constant reaches on the held-out rows, and which runs give no probabilities."""
    rate = results[0].rate
    constant = (
        f"A constant has log loss {constant_log_loss(rate):.4f}; the true rate is {rate:.4f}."
    )
    found = [
        of_probabilities(
            title(r),
            r.calibrated_log_loss,
            r.calibrated_mean_prediction,
            r.rate,
            r.calibration is not None,
        )
        for r in results
    ]
    return [constant, *(line for lines in found for line in lines)]


def costs(results: Sequence[RunResult]) -> list[str]:
    """What privacy and sparsity cost each run with selected rows, in AUC, a sentence each."""
    free = [r.auc for r in results if not is_private(r)]
    dense = {f"{r.epsilon:.2g}": r.auc for r in results if r.method == "dp_sgd"}
    lines = []
    for result in results:
        if result.reduction <= 1 or not is_private(result):
            continue
        parts = [_apart(result.auc, auc, "no privacy") for auc in free]
        if (auc := dense.get(f"{result.epsilon:.2g}")) is not None:
            parts.append(_apart(result.auc, auc, "DP-SGD"))
        of_entries = f"noise on 1 table entry of {result.reduction:,.0f} a step"
        lines.append(f"{title(result)}: {', '.join([*parts, of_entries])}.")
    return lines


def _apart(auc: float, other: float, name: str) -> str:
    side = "above" if auc > other else "below"
    return f"{abs(auc - other):.3f} AUC {side} {name}"


def statements(results: Sequence[RunResult]) -> list[str]:
    """The whole statement of one run, and of each other one its first sentence."""
    private = [r for r in results if is_private(r)]
    shown = next((r for r in private if r.reduction > 1), private[0] if private else None)
    lines = [
        f"{title(result)}: {_first_sentence(result.statement)}"
        for result in results
        if result is not shown
    ]
    return lines if shown is None else [f"{title(shown)}:\n{shown.statement}", *lines]


def _first_sentence(statement: str) -> str:
    """The guarantee, without its heading."""
    heading, *rest = statement.splitlines()
    return rest[0].strip() if heading == "Guarantee" and rest else heading


def write_report(path: Path, results: Sequence[RunResult], data: PreparedData, source: str) -> None:
    """One self-contained page of results.

    A picture and a table of the comparison, what is guaranteed, AUC and ε over steps, calibrated
    probabilities and survivors of each run with selected rows.
    """
    told = report_page.text("\n".join([*costs(results), *notes(results)]))
    picture = report_page.svg(_picture(results)) if len(results) > 1 else ""
    compared = picture + report_page.table(_HEADERS, rows(results)) + told
    sections = [("Comparison", compared)]
    guaranteed = report_page.text("\n\n".join(statements(results)))
    sections.append(("What is guaranteed", guaranteed))
    curves = {title(r): ([s for s, _ in r.curve], [v for _, v in r.curve]) for r in results}
    sections.append(("AUC on held-out rows", report_page.chart("step", "AUC", curves)))
    private = [r for r in results if r.report is not None]
    if private:
        sections.append(("Epsilon over steps", _epsilons(private)))
    for result in private:
        sections.extend(_private_sections(result))
    quarantine = [(reason, count) for reason, count in data.quarantined.items()] or [("none", 0)]
    if private and all(
        r.report.diagnostics == "non_private" for r in private if r.report is not None
    ):
        sections.append(
            ("Malformed rows set aside", report_page.table(("reason", "rows"), quarantine))
        )
    sections.append(("Data", report_page.text(f"{source}\n{_CAVEAT}")))
    report_page.write(path, report_page.page("Criteo pCTR", sections))


def _picture(results: Sequence[RunResult]) -> Figure:
    """AUC, log loss over a constant's, and the share of table entries that get noise."""
    figure = Figure(figsize=(11, 0.7 + 0.45 * len(results)), layout="constrained")
    quality, loss, noise = figure.subplots(1, 3, sharey=True)
    constant = constant_log_loss(results[0].rate)
    aucs = [result.auc for result in results]
    losses = [result.calibrated_log_loss / constant for result in results]
    shares = [1 / r.reduction if is_private(r) else math.nan for r in results]
    _bars(quality, "AUC: larger is better", results, aucs, [f"{auc:.3f}" for auc in aucs], 0.5)
    labels = [f"{value:.3f}" for value in losses]
    _bars(loss, "log loss over a constant's: smaller is better", results, losses, labels, 0.0)
    one_in = [
        "none" if not is_private(r) else "unknown" if math.isnan(s) else _one_in(s)
        for r, s in zip(results, shares, strict=True)
    ]
    heading = "table entries that get noise in a step"
    _bars(noise, heading, results, shares, one_in, 1e-6)
    noise.set(xscale="log", xlim=(1e-6, 30))
    quality.set_ylim(len(results) - 0.5, -0.5)
    return figure


def _one_in(share: float) -> str:
    return "all" if share == 1 else f"1 in {1 / share:,.0f}"


def _bars(
    axes: Axes,
    heading: str,
    results: Sequence[RunResult],
    values: Sequence[float],
    labels: Sequence[str],
    left: float,
) -> None:
    """One bar for each run, from `left` to its value."""
    lengths = [0.0 if math.isnan(value) else max(0.0, value - left) for value in values]
    colours = ["tab:blue" if is_private(result) else "tab:gray" for result in results]
    bars = axes.barh([title(r) for r in results], lengths, left=left, color=colours)
    axes.bar_label(bars, labels, padding=3)
    axes.set_title(heading, fontsize="medium")
    axes.set_xlim(left, left + 1.2 * max(*lengths, 1e-3))
    axes.spines[["top", "right"]].set_visible(False)


def _epsilons(private: Sequence[RunResult]) -> str:
    series = {
        title(r): (r.report.history.steps, r.report.history.epsilon)
        for r in private
        if r.report is not None
    }
    return report_page.chart("step", "epsilon", series)


def _private_sections(result: RunResult) -> list[tuple[str, str]]:
    assert result.report is not None
    history, sections = result.report.history, []
    if result.calibration is not None and result.reduction > 1:
        heading = f"{title(result)}: probabilities, by a histogram that epsilon covers"
        sections.append((heading, result.calibration.section()))
    if history.rows:
        heading = f"{title(result)}: rows noised per step, by table"
        sections.append((heading, result.report.rows_chart()))
    if history.diagnostics:
        pairs = [(name, points[-1][1]) for name, points in history.diagnostics.items()]
        heading = f"{title(result)}: covered by no epsilon (diagnostics='non_private')"
        sections.append((heading, report_page.table(("quantity", "last value"), pairs)))
    return sections

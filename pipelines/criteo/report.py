"""The page and the console table of one or several Criteo runs."""

import math
from collections.abc import Sequence
from pathlib import Path

from dp_sparse.reports import report_page
from pipelines.criteo.records import PreparedData
from pipelines.criteo.train import RunResult
from pipelines.scores import constant_log_loss, of_probabilities

_HEADERS = (
    "method",
    "AUC",
    "log loss",
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


def rows(results: Sequence[RunResult]) -> list[tuple[object, ...]]:
    """One row of the comparison for each run."""
    return [
        (
            result.method,
            f"{result.auc:.4f}",
            f"{result.log_loss:.4f}",
            f"{result.mean_prediction:.4f}",
            "none" if math.isinf(result.epsilon) else f"{result.epsilon:.3f}",
            "none" if math.isinf(result.epsilon) else f"{result.delta:.2g}",
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
    found = [of_probabilities(r.method, r.log_loss, r.mean_prediction, r.rate) for r in results]
    return [constant, *(line for lines in found for line in lines)]


def write_report(path: Path, results: Sequence[RunResult], data: PreparedData, source: str) -> None:
    """One self-contained page of results.

    The comparison, what is guaranteed, AUC and ε over steps, survivors per table.
    """
    compared = report_page.table(_HEADERS, rows(results))
    sections = [("Comparison", compared + report_page.text("\n".join(notes(results))))]
    curves = {r.method: ([s for s, _ in r.curve], [v for _, v in r.curve]) for r in results}
    sections.append(("AUC on held-out rows", report_page.chart("step", "AUC", curves)))
    private = [r for r in results if r.report is not None]
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


def _private_sections(result: RunResult) -> list[tuple[str, str]]:
    assert result.report is not None
    history = result.report.history
    spent = {"epsilon": (history.steps, history.epsilon)}
    sections = [
        (f"{result.method}: what is guaranteed", report_page.text(result.statement)),
        (f"{result.method}: epsilon over steps", report_page.chart("step", "epsilon", spent)),
    ]
    if history.rows:
        sections.append(
            (f"{result.method}: rows noised per step, by table", result.report.rows_chart())
        )
    if history.diagnostics:
        pairs = [(name, points[-1][1]) for name, points in history.diagnostics.items()]
        heading = f"{result.method}: covered by no epsilon (diagnostics='non_private')"
        sections.append((heading, report_page.table(("quantity", "last value"), pairs)))
    return sections

"""Reports: one self-contained HTML page of tables and line charts.

Charts are inline SVG drawn by matplotlib, so a page needs neither network nor other files.
"""

import html
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dp_sparse.core import require_matplotlib, whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = tuple[Sequence[float], Sequence[float]]  # x, y

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}
td,th{padding:.3rem .8rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}pre{background:#f6f6f6;padding:1rem;white-space:pre-wrap}
svg{max-width:100%;height:auto}
"""


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """An HTML page of `(heading, body)` sections; bodies come from `table`, `chart` and `text`."""
    body = "\n".join(f"<h2>{html.escape(heading)}</h2>\n{part}" for heading, part in sections)
    return (
        f"<!doctype html>\n<html lang='en'><head><meta "
        f"charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def text(content: str) -> str:
    """Preformatted text."""
    return f"<pre>{html.escape(content)}</pre>"


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; numbers are shown with four significant digits."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headers)
    lines = ["".join(f"<td>{html.escape(shown(cell))}</td>" for cell in row) for row in rows]
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def shown(value: object) -> str:
    """A cell's text."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)


def chart(x_label: str, y_label: str, series: Mapping[str, Points], *, log_y: bool = False) -> str:
    """A line chart as inline SVG.

    Raises:
        ImportError: matplotlib is missing; the message names the extra that installs it.
    """
    require_matplotlib("A report")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dp_sparse"}):
        crowded = len(series) > 10
        figure = Figure(figsize=(8, 5.4 if crowded else 3.6), layout="constrained")
        axes = figure.subplots()
        for label, (x, y) in series.items():
            axes.plot(x, y, marker=".", linewidth=1.2, label=label)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(alpha=0.3)
        if log_y:
            axes.set_yscale("symlog")
        if crowded:
            figure.legend(fontsize="xx-small", ncols=5, loc="outside lower center")
        elif len(series) > 1:
            axes.legend(fontsize="small")
        return svg(figure)


def svg(figure: "Figure") -> str:
    """A figure of matplotlib as inline SVG."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def write(path: str | os.PathLike[str], content: str) -> None:
    """Writes a text file whole or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as file:
        file.write(content.encode())

"""Pages are self-contained, escape what they show, and are written whole or not at all."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from dp_sparse.reports import report_page


def test_a_page_needs_nothing_else() -> None:
    chart = report_page.chart("step", "AUC", {"a": ([1, 2], [0.5, 0.6]), "b": ([1, 2], [0.4, 0.7])})
    page = report_page.page(
        "Title", [("Chart", chart), ("Table", report_page.table(["x"], [[1.0]]))]
    )
    references = re.findall(r"(?:src|href)=['\"]([^'\"]+)", page)
    assert all(reference.startswith("#") for reference in references)
    assert "<h2>Chart</h2>" in page and "<svg" in page


def test_a_chart_is_well_formed_and_names_its_axes_and_series() -> None:
    drawn = report_page.chart("step", "rows", {"a": ([1], [3.0]), "b": ([1], [4.0])}, log_y=True)
    text = " ".join(ElementTree.fromstring(drawn).itertext())
    assert all(name in text for name in ("step", "rows", "a", "b"))


def test_a_chart_is_the_same_every_time() -> None:
    series = {"a": ([1, 2], [3.0, 4.0])}
    assert report_page.chart("x", "y", series) == report_page.chart("x", "y", series)


def test_text_is_escaped() -> None:
    page = report_page.page(
        "<t>", [("<h>", report_page.text("<b>") + report_page.table(["<c>"], [["<d>"]]))]
    )
    assert not re.search("<[tbd]>", page) and "&lt;c&gt;" in page


@pytest.mark.parametrize(
    ("value", "expected"), [(0.123456, "0.1235"), (123456.7, "123,457"), (7, "7"), ("x", "x")]
)
def test_numbers_as_shown(value: object, expected: str) -> None:
    assert report_page.shown(value) == expected


def test_a_failed_write_leaves_the_old_page(tmp_path: Path) -> None:
    page = tmp_path / "runs" / "page.html"
    report_page.write(page, "old")
    with pytest.raises(UnicodeEncodeError):
        report_page.write(page, "new \ud800")
    assert page.read_text() == "old"
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]

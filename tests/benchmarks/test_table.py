"""The page says what the results say, and the table takes the newest of each benchmark."""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import table


def line(row: table.Row, **changed: object) -> dict[str, object]:
    """What a benchmark may print: each figure of the row is 1.234."""
    keys = re.findall(r"{(\w+)", row.value)
    return {
        "benchmark": row.benchmark,
        "metrics": dict.fromkeys(keys, 1.234),
        "quick": False,
        "machine": {"cpu": "Abacus", "cores": 2},
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "abc1234",
        "versions": {"tensorflow": "2.21.0", "keras": "3.15.0"},
    } | changed


FIRST, SECOND = table.Row("one", "first", "{a}; {b}"), table.Row("two", "second", "{c:.1%}")


@pytest.fixture
def two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "ROWS", (FIRST, SECOND))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The page and results to change."""
    for name in ("PAGE", "RESULTS"):
        source = getattr(table, name)
        monkeypatch.setattr(table, name, Path(shutil.copy(source, tmp_path)))
    return tmp_path


def test_readme_is_what_the_results_say() -> None:
    assert table.main(["--check"]) == 0


def test_no_figure_under_measured_is_typed_by_hand() -> None:
    _, _, section = table.PAGE.read_text().partition("\n## Measured\n")
    section, _, _ = section.partition("\n## ")
    before, _, rest = section.partition(table.BEGIN)
    _, _, after = rest.partition(table.END)
    assert rest and not re.search(r"\d", before + after)


def test_another_figure_is_found_and_mended(
    copies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = table.PAGE.read_text()
    changed = re.sub(r"\| (\d\.\d\d) \|", "| 0.01 |", page, count=1)
    assert changed != page
    table.PAGE.write_text(changed)
    assert table.main(["--check"]) == 1
    assert "run `python -m benchmarks.table`" in capsys.readouterr().err
    assert table.PAGE.read_text() == changed
    assert table.main([]) == 0
    assert table.PAGE.read_text() == page


@pytest.mark.usefixtures("two_rows")
def test_the_newest_line_of_each_counts() -> None:
    lines = [
        line(FIRST, commit="new", date="2026-01-03T00:00:00+00:00"),
        line(SECOND),
        line(FIRST, commit="old"),
        line(FIRST, benchmark="other"),
    ]
    results = table.newest(table.by_date([json.dumps(each) for each in lines]))
    assert results["first"]["commit"] == "new" and results["second"]["commit"] == "abc1234"
    with pytest.raises(ValueError, match=r"a line of second .* benchmarks.second --out bench"):
        table.newest([line(FIRST)])


@pytest.mark.usefixtures("two_rows")
def test_rows_have_value_and_command_and_the_last_line_tells_the_origin() -> None:
    results = {"first": line(FIRST), "second": line(SECOND, quick=True)}
    assert table.table(results).splitlines() == [
        "| | measured | printed by |",
        "|---|---|---|",
        "| one | 1.23; 1.23 | `python -m benchmarks.first` |",
        "| two | 123.4% | `python -m benchmarks.second --quick` |",
        "",
        "Measured on Abacus, 2 cores, TensorFlow 2.21.0, Keras 3.15.0; 2026-01-02, commit abc1234.",
    ]


@pytest.mark.usefixtures("two_rows")
def test_runs_of_several_commits_are_told_apart() -> None:
    results = {"first": line(FIRST), "second": line(SECOND, commit="def5678+")}
    *_, one, two = table.table(results).splitlines()
    assert one.endswith("commit abc1234: first.") and two.endswith("commit def5678+: second.")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0123, "0.01"),
        (9.994, "9.99"),
        (23.44, "23.4"),
        (3246.1, "3,250"),
        (6.43e6, "6.4 million"),
    ],
)
def test_digits(value: float, written: str) -> None:
    assert f"{table.Figure(value)}" == written


def printed_line(name: str, *text: str, date: str = "2026-01-02") -> str:
    own = line(FIRST, benchmark=name, date=f"{date}T03:04:05+00:00", printed=list(text))
    return json.dumps(own)


def test_a_page_has_the_newest_table_of_each_benchmark_that_it_names() -> None:
    page = "before\n<!-- printed: clipping_depth -->\nold\n<!-- end -->\nafter\n"
    lines = [
        printed_line("clipping_depth", "new", "er", date="2026-01-03"),
        printed_line("clipping_depth", "older"),
        json.dumps(line(FIRST, benchmark="clipping_depth", date="2026-01-04T00:00:00+00:00")),
    ]
    measured = table.by_date(lines)
    told = table.printed(page, measured)
    assert "\n```\nnew\ner\n```\n<!-- end -->\nafter\n" in told and "old" not in told
    assert "`python -m benchmarks.clipping --sweep depth`, on Abacus, 2 cores" in told
    assert table.printed(told, measured) == told
    with pytest.raises(ValueError, match="Expected the table of clipping_depth among the results"):
        table.printed(page, measured[2:])


def test_speed_ups_are_those_of_the_largest_batch() -> None:
    head = "model  batch  stock  nxBP  multiLoss  tensorflow-privacy  ours"
    rows = ("  mlp     64      1     9          9                   9     9",)
    rows += ("  mlp    128      2    40      1,000                   -     4",)
    told = table.speed_ups(table.by_date([printed_line("clipping", head, *rows)]))
    assert told.endswith("\n| mlp | 10.0 | 20.0 | 250 |  |") and told.count("mlp") == 1


def test_bounds_are_met_by_all_runs_or_missed() -> None:
    keys = [key for _, _, key, _ in table.BOUNDS]
    runs = [line(FIRST, benchmark="clipping", metrics=dict.fromkeys(keys, v)) for v in (1.2, 1.4)]
    told = table.bounds(runs)
    assert "| MLP over stock Keras | 1.3 | 1.20 to 1.40 | missed |" in told
    assert "| RNN over stock Keras | 1.6 | 1.20 to 1.40 | met |" in told
    assert "| naive loop over ours, CNN | 10 | 1.20 to 1.40 | missed |" in told


def test_readme_has_the_times_of_the_optimizers() -> None:
    rows = [f"{step} {size} {time} 1" for step in table.STEPS.values() for size, time in TIMES]
    readme = "\n".join(f"| `{optimizer}` | when | 0.7; 0.6 | 9; 9 |" for optimizer in table.STEPS)
    told = table.timed(readme, table.by_date([printed_line("selection", *rows)]))
    assert told == readme.replace("9; 9", "1.5; 2.5")


TIMES = (("1e5", "1.5"), ("1e6", "2.5"), ("1e7", "3.5"))


@pytest.mark.parametrize("marks", ["", "b", "e", "eb", "bbe", "bebe"])
def test_a_page_without_its_markers_is_refused(marks: str) -> None:
    page = "\n".join({"b": table.BEGIN, "e": table.END}[mark] for mark in marks)
    with pytest.raises(ValueError, match="Expected one line '<!-- begin"):
        table.rewritten(page, "text", table.BEGIN)

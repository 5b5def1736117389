"""Which tests run when: what a fault names always, and what is above a change."""

import ast
from pathlib import Path

import pytest

from tests import tiers
from tests.mutations.faults import FAULTS

ROOT = Path(__file__).parents[1]


def test_no_fault_names_a_test_of_another_tier() -> None:
    """A test that is marked slow, or some of whose cases are, does not run beside each change."""
    named = {tiers.function_of(test) for fault in FAULTS for test in fault.tests}
    late = {
        f"{path}::{name}"
        for path in sorted({n.partition("::")[0] for n in named})
        for name in marked_late(ROOT / path)
    }
    assert not named & late


def marked_late(path: Path) -> set[str]:
    """Functions marked slow or for a TPU, those of a class behind its name."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        of_class = is_late(node)
        found |= {
            prefix + each.name
            for each in inside
            if isinstance(each, ast.FunctionDef) and (of_class or is_late(each))
        }
    return found


def is_late(node: ast.AST) -> bool:
    marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
    return bool({"pytest.mark.slow", "pytest.mark.tpu"} & set(marks))


def test_a_costly_test_is_broad(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"tests/export/test_x.py::test_long": 3.0, "tests/attacks/test_attacks.py::test": 2.0}
    costs["tests/test_site.py::test"] = 6.0
    monkeypatch.setattr(tiers, "costs", lambda: costs)
    assert tiers.is_broad("tests/export/test_x.py::test_long[a]")
    assert not tiers.is_broad("tests/export/test_x.py::test_short")
    assert tiers.is_broad("tests/attacks/test_attacks.py::test[a mean: xla]")
    assert not tiers.is_broad("tests/attacks/test_attacks.py::test[a mean: graph]")
    assert not tiers.is_broad("tests/test_site.py::test")


def test_every_folder_of_tests_has_a_floor() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    others = {"__pycache__", "mutations", "parity", "saved_before", "tpu"}
    assert folders - others <= set(tiers.FLOOR_OF)


@pytest.mark.parametrize(
    ("path", "reached", "apart"),
    [
        ("dp_sparse/core/xla.py", {"core", "noise", "benchmarks"}, set()),
        ("dp_sparse/export/full.py", {"export", "attacks", "pipelines"}, {"training", "auditing"}),
        ("tests/export/test_full.py", {"export"}, {"pipelines"}),
        ("tests/training_cases.py", {"core", "pipelines"}, set()),
        ("pipelines/criteo/train.py", {"pipelines", "benchmarks"}, {"attacks"}),
        ("README.md", set(), {"core", "reports"}),
        ("docs/notebooks/clicks.ipynb", {"reports"}, {"core", "pipelines"}),
    ],
)
def test_what_a_change_reaches(path: str, reached: set[str], apart: set[str]) -> None:
    found = set(tiers.floors_of([path]))
    assert reached <= found and not apart & found


def test_the_nearest_run_first_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    far, near = "tests/pipelines/test_b.py::test", "tests/export/test_a.py::test"
    monkeypatch.setattr(tiers, "costs", lambda: {far: 1.0, near: 1.0})
    cases = [f"{name}[{i}]" for name in (far, near) for i in range(100)]
    changed = ["dp_sparse/export/full.py"]
    taken = tiers.reached(cases, 1.0, changed)  # two workers
    assert len(taken) == 120 and all(name.startswith(near) for name in taken[:100])
    assert len(tiers.reached(cases, 2.0, changed)) == 200
    assert tiers.reached(cases, 1.0, ["tests/clipping/test_gradient_terms.py"]) == []
    assert len(tiers.reached(cases, 1.0, None)) == 120


def test_costs_are_read_from_results(tmp_path: Path) -> None:
    case = '<testcase classname="{}" name="{}" time="{}"/>'
    cases = [
        case.format("tests.test_tiers", "test_x[1]", 0.1),
        case.format("tests.test_tiers", "test_x[2]", 0.3),
        case.format("tests.export.test_full.TestY", "test_z", 2),
    ]
    (tmp_path / "results.xml").write_text(f"<testsuite>{''.join(cases)}</testsuite>")
    assert tiers.measured([tmp_path / "results.xml"]) == {
        "tests/test_tiers.py::test_x": 0.2,
        "tests/export/test_full.py::TestY::test_z": 2.0,
    }

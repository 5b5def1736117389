"""The list of faults fits the code: each can be planted, and the tests that it names are there."""

import ast
import collections
from pathlib import Path

import pytest

from tests.mutations.fault import Fault
from tests.mutations.faults import FAULTS

ROOT = Path(__file__).parents[2]


def name_of(fault: Fault) -> str:
    return fault.name


def functions_of(path: Path) -> set[str]:
    """Names of functions, those of a class behind its name."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + each.name for each in inside if isinstance(each, ast.FunctionDef)}
    return found


def test_names_are_words_and_unique() -> None:
    counts = collections.Counter(map(name_of, FAULTS))
    assert not [name for name, count in counts.items() if count > 1 or not name.isidentifier()]


def test_no_fault_is_planted_twice() -> None:
    assert len({(fault.path, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_it_can_be_planted(fault: Fault) -> None:
    """Its text stands once in its file, and what it makes of the file is another program."""
    text = (ROOT / fault.path).read_text(encoding="utf-8")
    planted = fault.applied(text)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_its_tests_are_there(fault: Fault) -> None:
    assert fault.tests
    for test in fault.tests:
        path, _, function = test.partition("::")
        assert function.partition("[")[0] in {"", *functions_of(ROOT / path)}, test


def test_a_text_that_does_not_stand_once_is_refused() -> None:
    fault = Fault("a_name", "a/file.py", "x", "y", ())
    for text in ("", "x x"):
        with pytest.raises(ValueError, match="a_name once in a/file.py"):
            fault.applied(text)

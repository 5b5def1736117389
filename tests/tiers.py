"""Which tests run when.

Tier 1, `make test`: all tests that take less than a tenth of a second, those that a planted fault
names, attacks in graph mode, and the documentation site. Tier 2, marked `broad`: the others.
`make reached` runs those of them that a change can reach, the nearest first, for as many minutes
as it is given; `make whole` runs all. Tier 3 is marked `slow`, by hand.

What a test takes stands in `costs.json`, seconds of a case, without those of tier 1. A new test is
in tier 1 until `python -m tests.tiers results.xml ...` writes the file anew, from what
`pytest --junitxml=results.xml` measured.
"""

import collections
import functools
import hashlib
import json
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests import floors
from tests.mutations.faults import FAULTS

ROOT = Path(__file__).parents[1]
COSTS = ROOT / "tests" / "costs.json"
CHECKED = ROOT / ".ci" / "checked"  # the commit on which all of tier 2 passed last
LIGHT = 0.1  # seconds of a case
ALWAYS = "tests/test_site.py"  # a change of a page reaches no folder of tests
WORKERS = 2

# Folders of tests: those of the library's rooms, and of what uses them.
ABOVE = ({"attacks", "reports", "models"}, {"pipelines", "configs"}, {"benchmarks"})
FLOORS = ({"reference"}, *floors.FLOORS, *ABOVE)
FLOOR_OF = {folder: number for number, folders in enumerate(FLOORS) for folder in folders}


def function_of(nodeid: str) -> str:
    """A test without its case."""
    return nodeid.partition("[")[0]


def is_broad(nodeid: str) -> bool:
    """Whether a test is of tier 2, if it is not slow."""
    if function_of(nodeid) not in costs() or _of_a_fault(nodeid) or nodeid.startswith(ALWAYS):
        return False
    return not (nodeid.startswith("tests/attacks/") and nodeid.endswith(": graph]"))


@functools.cache
def costs() -> dict[str, float]:
    """Seconds of a case, by the name of its function; those of light ones are not there."""
    return json.loads(COSTS.read_text()) if COSTS.exists() else {}


@functools.cache
def _named_by_faults() -> frozenset[str]:
    return frozenset(test for fault in FAULTS for test in fault.tests)


def _of_a_fault(nodeid: str) -> bool:
    file = nodeid.partition("::")[0]
    return not _named_by_faults().isdisjoint({nodeid, function_of(nodeid), file})


def changed_files() -> list[str] | None:
    """Paths that differ from the commit on which all tests passed; None if that is not known."""
    if not CHECKED.exists():
        return None
    command = ["git", "diff", "--name-only", CHECKED.read_text().strip(), "HEAD"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return found.stdout.split() if found.returncode == 0 else None


def floors_of(paths: Iterable[str]) -> dict[str, int]:
    """The folders of tests that a change of these files reaches, by how far above it they stand."""
    found: dict[str, int] = {}
    for path in paths:
        first, *rest = path.split("/")
        own = rest[0] if first in {"dp_sparse", "tests"} and len(rest) > 1 else first
        if first == "tests" and own in FLOOR_OF:
            reached = {own: 0}
        elif first == "tests" and path.endswith(".py"):
            reached = dict(FLOOR_OF)
        elif own in FLOOR_OF:
            begin = FLOOR_OF[own]
            above = {f: n - begin for f, n in FLOOR_OF.items() if n > begin}
            reached = {own: 0, **above}
        elif path.endswith(".ipynb"):
            reached = {folder_of("tests/test_notebooks.py"): 0}
        elif first == "dp_sparse" or path in {"setup.py", "pyproject.toml"}:
            reached = dict(FLOOR_OF)
        else:
            continue
        for folder, distance in reached.items():
            found[folder] = min(distance, found.get(folder, distance))
    return found


def reached(nodeids: Sequence[str], minutes: float, paths: Sequence[str] | None) -> list[str]:
    """The tests of tier 2 that a change can reach: the nearest first, then by a hash.

    Args:
        nodeids: Tests of tier 2.
        minutes: How long they may take, by `costs`.
        paths: What changed; None for anything.
    """
    floors = dict(FLOOR_OF) if paths is None else floors_of(paths)
    by_distance = sorted(
        (floors[folder_of(nodeid)], hashlib.sha256(nodeid.encode()).digest(), nodeid)
        for nodeid in nodeids
        if folder_of(nodeid) in floors
    )
    left, taken = 60 * minutes * WORKERS, []
    for _, _, nodeid in by_distance:
        left -= costs().get(function_of(nodeid), LIGHT)
        if left < 0:
            break
        taken.append(nodeid)
    return taken


def folder_of(nodeid: str) -> str:
    """The folder of a test below `tests`; those of no floor use all of the library."""
    parts = nodeid.split("/")
    return parts[1] if parts[1] in FLOOR_OF else "reports"


def measured(results: Iterable[Path]) -> dict[str, float]:
    """Mean seconds of a case of each test, from files of JUnit's form."""
    seconds = collections.defaultdict(list)
    for result in results:
        for case in xml.etree.ElementTree.parse(result).iter("testcase"):
            name = _nodeid(case.attrib["classname"], case.attrib["name"])
            if not name:  # a process that died has no test
                continue
            seconds[function_of(name)].append(float(case.attrib["time"]))
    return {name: sum(each) / len(each) for name, each in seconds.items()}


def _nodeid(classname: str, name: str) -> str:
    parts = classname.split(".") if classname else []
    for length in range(len(parts), 0, -1):
        path = Path(*parts[:length]).with_suffix(".py")
        if (ROOT / path).exists():
            return "::".join([path.as_posix(), *parts[length:], name])
    return ""


def main(results: Sequence[str]) -> None:
    """Writes the costs; tests that were not measured this time keep theirs."""
    found = {**costs(), **measured(map(Path, results))}
    kept = {name: round(cost, 2) for name, cost in sorted(found.items()) if cost >= LIGHT}
    COSTS.write_text(json.dumps(kept, indent=0) + "\n")


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests of tier 2; of them keeps those that `--reached=MINUTES` asks for."""
    broad = [item for item in items if is_broad(item.nodeid)]
    for item in broad:
        item.add_marker(pytest.mark.broad)
    minutes = config.getoption("--reached")
    if minutes is None:
        return
    quick = [item.nodeid for item in broad if not item.get_closest_marker("slow")]
    taken = set(reached(quick, minutes, changed_files()))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in taken])
    items[:] = [item for item in items if item.nodeid in taken]


if __name__ == "__main__":
    main(sys.argv[1:])

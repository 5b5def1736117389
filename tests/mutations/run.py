"""Plants each fault in a copy of the tree and runs the tests that must catch it.

`python -m tests.mutations.run [--only NAME] [--out FILE] [--workers N]` writes one JSON line for
each fault as soon as its tests are over, so a run that was stopped goes on where it was. The tests
of each fault run once without it, too: if they fail then, they tell nothing. A fault is caught if a
test fails, not if the tests can no longer be collected or the time is over.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutations.fault import Fault
from tests.mutations.faults import FAULTS
from tests.subprocesses import HANG

ROOT = Path(__file__).parents[2]
_SOME_FAILED = 1  # what pytest returns then; anything else but 0 is no verdict
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info"
)
_WRITING = threading.Lock()
_OUTPUT = {"runs", "build", "dist"}  # of the root alone


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run of pytest said.

    Attributes:
        verdict: "passed", "failed" or why there is none.
        test: The test that failed first, or "".
        seconds: How long it took.
    """

    verdict: str
    test: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is left to run; 1 unless every fault that was asked for is caught."""
    parser = argparse.ArgumentParser(description="Plants faults and runs the tests against them.")
    parser.add_argument("--only", action="append", help="faults whose name contains this")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants.jsonl")
    parser.add_argument("--workers", type=int, default=1, help="faults that run at once")
    options = parser.parse_args(arguments)
    faults = [f for f in FAULTS if not options.only or any(o in f.name for o in options.only)]
    if not faults:
        parser.error(f"Expected --only to name a fault, got {options.only}.")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    commit = _commit()

    def judge(alike: Sequence[Fault]) -> None:
        for fault in alike:
            _judge_without(fault, alike, commit, options.out)
            _judge(fault, commit, options.out)

    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        for _ in pool.map(judge, _by_file(faults)):
            pass
    return _report(faults, _entries(options.out))


def _by_file(faults: Sequence[Fault]) -> list[list[Fault]]:
    """The faults by the file of their first test; one worker takes all of a file."""
    found: dict[str, list[Fault]] = {}
    for fault in faults:
        found.setdefault(_file_of(fault), []).append(fault)
    return list(found.values())


def _file_of(fault: Fault) -> str:
    return fault.tests[0].partition("::")[0]


def _left_out(folder: str, names: list[str]) -> set[str]:
    """What of a folder a fault is not planted beside."""
    output = _OUTPUT if Path(folder) == ROOT else set()
    return _LEFT_OUT(folder, names) | (output & set(names))


def _judge_without(fault: Fault, alike: Sequence[Fault], commit: str, out: Path) -> None:
    """Writes whether the tests of a fault pass without it, if that is not known yet.

    What others of the same file (`alike`) ask is run with it: a process takes longer to begin than
    most of the tests to run. If something fails, each fault's tests run alone.
    """
    known = _entries(out)
    if _without(fault) in known:
        return
    alike = [f for f in alike if _without(f) not in known]
    together = run_tests(list(dict.fromkeys(test for f in alike for test in f.tests)))
    for tests in dict.fromkeys(f.tests for f in alike):
        own = together if together.verdict == "passed" else run_tests(tests)
        _write(out, _name_of(tests), commit, own, None)


def _judge(fault: Fault, commit: str, out: Path) -> None:
    """Writes whether a fault is caught, if that is not known yet."""
    known = _entries(out)
    if fault.name in known:
        return
    sound = known[_without(fault)]["verdict"] == "passed"
    outcome = run_tests(fault.tests, fault) if sound else Outcome("no baseline", "", 0.0)
    _write(out, fault.name, commit, outcome, outcome.verdict == "failed")


def _without(fault: Fault) -> str:
    return _name_of(fault.tests)


def _name_of(tests: Sequence[str]) -> str:
    """The name of the line that says whether tests pass as the code is."""
    return "without a fault: " + " ".join(tests)


def run_tests(tests: Sequence[str], fault: Fault | None = None) -> Outcome:
    """Runs tests until one fails, in a copy of the tree with the fault in it."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder) / "tree"
        shutil.copytree(ROOT, root, ignore=_left_out, symlinks=True)
        if fault is not None:
            path = root / fault.path
            path.write_text(fault.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
        begin = time.monotonic()
        verdict, test = _pytest(root, tests)
        return Outcome(verdict, test, round(time.monotonic() - begin, 1))


def _pytest(root: Path, tests: Sequence[str]) -> tuple[str, str]:
    plugins = ["-p", "no:cacheprovider", "-p", "tests.mutations.unshrunk"]
    command = [sys.executable, "-m", "pytest", "-x", "-rfE", "-m", "", *plugins, *tests]
    # The copy comes first, wherever the package is installed from.
    environment = {**os.environ, "PYTHONPATH": str(root)}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=HANG
        )
    except subprocess.TimeoutExpired:
        return f"over {HANG:.0f} s", ""
    failed = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 0:
        return "passed", ""
    if done.returncode == _SOME_FAILED and failed:
        return "failed", failed[1]
    return f"pytest returned {done.returncode}: {done.stdout[-300:]}", ""


def _write(out: Path, name: str, commit: str, outcome: Outcome, caught: bool | None) -> None:
    entry = {"name": name, "commit": commit, "caught": caught, **dataclasses.asdict(outcome)}
    with _WRITING, out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
    print(f"{outcome.seconds:6.1f} s  {name}: {outcome.verdict} {outcome.test}", flush=True)


def _entries(out: Path) -> dict[str, dict[str, Any]]:
    """The lines so far, by the name of the fault or its tests; the last of a name holds."""
    if not out.exists():
        return {}
    lines = out.read_text(encoding="utf-8").splitlines()
    return {entry["name"]: entry for entry in map(json.loads, lines)}


def _report(faults: Sequence[Fault], known: dict[str, dict[str, Any]]) -> int:
    missed = [known[fault.name] for fault in faults if not known[fault.name]["caught"]]
    print(f"{len(faults) - len(missed)} of {len(faults)} faults were caught.")
    for entry in missed:
        print(f"- {entry['name']}: {entry['verdict']}")
    return 1 if missed else 0


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

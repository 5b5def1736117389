"""Each benchmark has a smoke test and figures on their page, and `make bench` runs all of them."""

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import table

ROOT = Path(__file__).parents[2]
BENCHMARKS = [
    path.stem
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if "\ndef main(" in path.read_text() and path.stem != "table"
]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_smoke_test_runs_its_command(name: str) -> None:
    smoke = Path(__file__).with_name(f"test_{name}.py")
    assert smoke.exists(), f"{name} has no smoke test: write tests/benchmarks/{smoke.name}"
    assert re.search(rf"= quick_run\({name}\)", smoke.read_text())


def test_each_has_figures_in_the_table() -> None:
    assert {row.benchmark for row in table.ROWS} == set(BENCHMARKS)


def test_make_bench_runs_to_its_end_and_names_what_failed(tmp_path: Path) -> None:
    python, installed, called = (tmp_path / name for name in ("python", "installed", "called"))
    python.write_text(
        f"#!/bin/sh\necho $* >> {called}\ncase $2 in *.noise|*.clipping) exit 3;; esac\n"
    )
    python.chmod(0o755)
    installed.touch()
    command = ["make", "-C", str(ROOT), "bench", f"RUN={python}", f"INSTALLED={installed}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert called.read_text().splitlines() == [f"-m benchmarks.{n} --quick" for n in BENCHMARKS]
    assert done.returncode != 0 and "Failed: clipping noise\n" in done.stderr
    python.write_text("#!/bin/sh\n")
    assert subprocess.run(command, capture_output=True).returncode == 0

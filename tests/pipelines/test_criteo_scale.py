"""Rows made up, prepared and trained on by commands that are killed on their way."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from pipelines import watched
from pipelines.criteo import scale
from pipelines.criteo.scale_page import page_of
from pipelines.watched import Watched

COMMAND = """
import pathlib, sys, time
begun = pathlib.Path(sys.argv[1])
if begun.exists():
    print("the rest is done")
else:
    begun.touch()
    time.sleep(60)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that sleeps when it runs for the first time."""
    (tmp_path / "sleeps_first.py").write_text(COMMAND)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(watched, "_SECONDS", 0.05)
    return "sleeps_first"


def test_a_command_is_killed_once_and_given_again(tmp_path: Path, module: str) -> None:
    begun, folder = tmp_path / "begun", tmp_path / "measured"
    clock = time.monotonic()
    part = Watched(folder, "a part")
    assert part.run([module, str(begun)], kill=begun.exists) == "the rest is done\n"
    found = part.found(folder)
    assert 0 < found["killed_after"] < found["seconds"] <= time.monotonic() - clock
    assert found["memory"] > 10**6 and found["disk"] > 0
    again = Watched(folder, "a part")  # another process goes on from there
    again.run([module, str(begun)], kill=lambda: True)
    assert again.found(folder)["killed_after"] == found["killed_after"]
    assert again.found(folder)["seconds"] > found["seconds"]


def test_a_command_that_fails_is_told_with_its_last_line(tmp_path: Path, module: str) -> None:
    with pytest.raises(OSError, match=r"sleeps_first failed: IndexError: .*a_part\.errors"):
        Watched(tmp_path, "a part").run([module], kill=lambda: False)


def test_rows_without_room_are_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"GB free for 1,000,000,000,000 rows"):
        scale.measure(10**12, tmp_path / "folder", 16_384, 2)
    assert not any(tmp_path.iterdir())


def test_fewer_rows_than_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = scale.main(
        [
            "--rows=19",
            f"--folder={tmp_path / 'folder'}",
            f"--results={tmp_path / 'x.jsonl'}",
            f"--page={tmp_path / 'x.md'}",
        ]
    )
    assert status == 1 and "--rows >= 20" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def measured(rows: int, **of_prepared: Any) -> dict[str, Any]:
    part = {"seconds": 60.0, "memory": 0, "disk": rows * 90, "killed_after": None}
    own = {"memory": 2 * 10**9, "disk": rows * 160, "killed_after": 30.0} | of_prepared
    return {
        "rows": rows,
        "batch_size": 100,
        "steps": rows // 100,
        "made up": part,
        "prepared": part | own,
        "trained": part | own | {"told": "AUC"},
    }


def test_the_page_goes_from_the_largest_measurement_to_the_terabyte() -> None:
    text = page_of([measured(10**6), measured(10**8, seconds=3600.0)], 20)
    assert "| 60.0 min | 27,778 | 2.0 GB | 16.00 GB | after 0.5 min |" in text
    assert "44 times" in text and "44 hours for batches" in text and "0.70 TB" in text


@pytest.mark.slow
def test_a_small_measurement(tmp_path: Path) -> None:
    results, folder = tmp_path / "scale.jsonl", tmp_path / "folder"
    arguments = ["--rows=20000", "--batch_size=512", f"--folder={folder}"]
    page = tmp_path / "scale.md"
    assert scale.main([*arguments, f"--results={results}", f"--page={page}"]) == 0
    line = json.loads(results.read_text())
    assert line["steps"] == 39 and not folder.exists()
    assert all(line[part]["killed_after"] > 0 for part in ("prepared", "trained"))
    assert "DP-AdaFEST" in line["trained"]["told"] and "Guarantee" not in page.read_text()

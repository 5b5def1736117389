"""The runner plants a fault in a copy, sees it caught, and does not judge it again."""

import json
from pathlib import Path

from tests.mutations.run import main

NAME = "event_of_a_smaller_sampling_probability"


def test_a_fault_is_planted_and_caught(tmp_path: Path) -> None:
    out = tmp_path / "mutants.jsonl"
    arguments = ["--only", NAME, "--out", str(out)]
    assert main(arguments) == 0
    written = out.read_text()
    [verdict] = [line for line in map(json.loads, written.splitlines()) if line["name"] == NAME]
    assert verdict["caught"] and "test_poisson.py::test_event" in verdict["test"]
    assert main(arguments) == 0
    assert out.read_text() == written

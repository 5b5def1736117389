"""`python -m dp_sparse audit`: what it prints, and what it returns."""

import re
import shlex
from pathlib import Path

import pytest

from dp_sparse.__main__ import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "audits.md"


def test_the_command_of_the_page_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (command,) = re.findall(r"python -m dp_sparse (.*)", PAGE.read_text())
    assert main(shlex.split(command)) == 0
    picture = tmp_path / "audit.png"
    printed = capsys.readouterr().out
    assert printed.startswith("Claimed epsilon=3 at delta=0.0001.\n1000 canaries, ")
    assert "That proves no privacy." in printed and picture.stat().st_size > 1000


def test_the_example_of_the_page_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(example, {})
    assert capsys.readouterr().out == "True\n"


RECOGNISED = """
from dp_sparse.auditing import CanaryScores
from dp_sparse.auditing.canaries import Canaries
from tests.auditing.audited import audit_of, stream_plan

class Recognised(Canaries):
    independent, number = False, 400

    def attacked(self, trained, placement, plan):
        return {"name": CanaryScores([1.0] * 200, [0.0] * 200)}

def get_audit():
    return audit_of("dpsgd", stream_plan(1.0), canaries=Recognised())
"""


def test_it_exits_with_3_if_the_claim_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "audit.py"
    file.write_text(RECOGNISED)
    assert main(["audit", "--config", str(file)]) == 3
    assert "The claim is wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "Expected a Python file with a function get_audit(), got no file"),
        ("x = 1\n", "Expected a function get_audit() in"),
        ("def get_audit():\n    return 7\n", "to return a dp_sparse.Audit: 7"),
        ("def get_audit():\n    raise ValueError('no rows')\n", "no rows"),
        (
            "import dp_sparse\ndef get_audit():\n    raise dp_sparse.PrivacyError('is spent')\n",
            "error: is spent",
        ),
    ],
)
def test_a_file_that_describes_no_audit(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "audit.py"
    if text is not None:
        file.write_text(text)
    assert main(["audit", "--config", str(file)]) == 1
    assert message in capsys.readouterr().err

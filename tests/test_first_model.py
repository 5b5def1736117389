"""The scripts and the commands of docs/first_model.md run as printed, on fewer rows."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

import dp_sparse
from dp_sparse.__main__ import main
from dp_sparse.probabilities import calibration
from tests.subprocesses import ROOT, run_python

PAGE = (ROOT / "docs" / "first_model.md").read_text()
FEWER = {
    "200_000": "4_000",
    "50_000": "1_000",
    "expected_batch_size=4096, epochs=10": "expected_batch_size=1000, epochs=2",
    "epochs=10, validation_data": "epochs=2, validation_data",
}
WITHOUT = 'import sys\nsys.modules["dp_sparse"] = None\n'


def scripts() -> dict[str, str]:
    """Those that the page gives a name, for fewer rows and steps."""
    found = dict(re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", PAGE, re.DOTALL))
    text = "\n".join(found.values())
    for printed, fewer in FEWER.items():
        assert text.count(printed) == 1, printed
        found = {name: code.replace(printed, fewer) for name, code in found.items()}
    return found


def commands() -> list[list[str]]:
    """What the page runs in the environment that has the package."""
    printed = "\n".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL))
    return [
        shlex.split(each) for each in re.findall(r"^environment/bin/python (.*)", printed, re.M)
    ]


def test_the_page_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibration, "release_noise", lambda *_: 10.0)  # its search takes a while
    for name, code in scripts().items():
        Path(name).write_text(code)
    *allowed, beyond = commands()
    assert [each[0] for each in allowed] == [
        "make_clicks.py",
        "prepare.py",
        "-m",
        *["train.py"] * 2,
    ]
    for command in allowed:
        if command[0] == "-m":
            assert main(command[2:]) == 0
            continue
        monkeypatch.setattr(sys, "argv", command)
        runpy.run_path(command[0], run_name="__main__")
    printed = capsys.readouterr().out
    assert "monday: 4000 rows, log loss of the true chances" in printed and "monday 4000" in printed
    assert len(re.findall(r"^Tuesday: AUC 0\.\d{4}, log loss \d\.\d{4}$", printed, re.M)) == 2
    account = dp_sparse.BudgetAccount("clicks.budget.json")
    assert [charge.epsilon for charge in account.charges] == [1, 3]
    monkeypatch.setattr(sys, "argv", beyond)
    with pytest.raises(dp_sparse.PrivacyError, match="Expected a plan within what is left"):
        runpy.run_path(beyond[0], run_name="__main__")
    served = run_python(WITHOUT + Path("serve.py").read_text(), packages=tmp_path)
    plain, saved = re.findall(r"\[(.*?)\]", served)
    assert [float(each) for each in plain.split()] == pytest.approx(
        [float(each) for each in saved.split()], rel=1e-4
    )
    card = Path("exports/first/README.md").read_text()
    assert "| AUC on Tuesday's rows | 0." in card.partition("**Not private")[2]


def test_serving_needs_what_setup_pins() -> None:
    """The second environment has the versions that train, and the first what reads a CSV."""
    pins = (ROOT / "setup.py").read_text()
    pinned = re.findall(r"'([\w-]+[<>=.,\d]+)'", "\n".join(re.findall(r"pip install .*", PAGE)))
    assert len(pinned) == 3 and not [each for each in pinned if f'"{each}"' not in pins]


def test_figures_of_criteo_are_those_of_the_studies() -> None:
    text = " ".join(PAGE.split())
    (rows, private, other) = re.findall(
        r"On (\S+) rows of Criteo it is (\S+) at ε = 1 and (\S+) without privacy", text
    )[0]
    tables = (ROOT / "docs" / "results" / "defaults.md").read_text()
    clicks = tables.partition(f"AUC; {rows} training examples")[2].partition("\nAUC; ")[0]
    assert re.search(rf"^\| none \| non_private \|.*\| {other} \|", clicks, re.M)
    assert re.search(rf"^\| 1 \| recommend \|.*\| {private} \|", clicks, re.M)
    ((before, after),) = re.findall(r"took the log loss from (\S+) to (\S+)\. ", text)
    results = (ROOT / "docs" / "results" / "README.md").read_text()
    assert re.search(rf"^\| 1 \| `COMMAND` \|.*\| {before} \| {after} \|", results, re.M)

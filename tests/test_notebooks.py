"""The notebooks of docs/notebooks store nothing, run whole, and show what they say."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.subprocesses import HANG, ROOT, environment

FOLDER = ROOT / "docs" / "notebooks"
CLAIMS = {
    "clicks": (
        "private_auc > 0.65",
        "1000 * noised < entries",
        "calibrated_log_loss < constant_log_loss - 0.03",
        "calibrated_log_loss < private_log_loss",
        "'Expected a plan within what is left' in rejection and len(account.charges) == 2",
    ),
    "retrieval": (
        "private_recall > popular_recall + 0.08",
        "'In-batch negatives' in rejection",
    ),
    "ranking": (
        "private_ndcg > average_ndcg + 0.015",
        "average_ndcg > random_ndcg + 0.05",
    ),
    "images": (
        "private_accuracy > chance + 0.4",
        "len(problems) == 2 and all('GroupNormalization' in each for each in problems)",
    ),
    "sequence": (
        "private_recall > popular_recall + 0.3",
        "by_users < 0.1 and by_steps > 0.9",
    ),
    "language": (
        "private_accuracy > most_frequent + 0.12",
        "frozen_accuracy > most_frequent + 0.2",
        "count_names(vocabulary) == num_examples",
        "names_found < 5",  # each name may be found with a probability that delta has
    ),
}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
IMPORTS = {"dp_sparse", "keras", "keras_rs", "numpy", "scipy", "tempfile"}
CELLS = range(6, 12 + 1)
LONGEST = 35  # lines of a cell


def run(notebook: Path, folder: Path, *claims: str) -> subprocess.CompletedProcess[str]:
    """Runs it in a process of its own, whose files are in `folder`, on one thread."""
    own = {"HOME": str(folder), "TMPDIR": str(folder), "MPLBACKEND": "Agg"}
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tests.notebook_runner", str(notebook), *claims],
        cwd=folder,
        env={**environment(), **own, **threads},
        capture_output=True,
        text=True,
        timeout=HANG,
    )


@pytest.mark.parametrize("name", CLAIMS)
def test_a_notebook_runs_and_shows_what_it_says(name: str, tmp_path: Path) -> None:
    done = run(FOLDER / f"{name}.ipynb", tmp_path, *CLAIMS[name])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "-differential privacy protects one example" in done.stdout
    assert "UserWarning" not in done.stderr


CONNECTS = "import socket\ntry: socket.create_connection(('127.0.0.1', 9))\nexcept OSError: pass"


@pytest.mark.parametrize(
    ("cell", "claims", "words"),
    [
        ("x = 1 / 0", (), "ZeroDivisionError"),
        ("x = 0.25", ("x > 0.2", "x > 0.3"), "false: ['x > 0.3']"),
        ("x = 0.25", ("y > 0.2",), "NameError"),
        (CONNECTS, (), "A notebook may not do this: socket."),
        ("try: open('../x', 'w')\nexcept Exception: pass", (), "tried: [\"open('../x', 'w'"),
        ("import os; os.mkdir('../folder')", (), "A notebook may not do this: os.mkdir"),
        ("import os; os.rename('book.ipynb', '../x')", (), "A notebook may not do this: os.rename"),
    ],
)
def test_what_a_notebook_may_not_do_is_found(
    cell: str, claims: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "working"
    folder.mkdir()
    done = run(written(folder, "import json", cell), folder, *claims)
    assert done.returncode == 1 and words in done.stderr
    assert list(tmp_path.iterdir()) == [folder]


def test_cells_share_names_and_write_in_their_folder(tmp_path: Path) -> None:
    write = "import tempfile\nx = 0.5\nwith open('a', 'w') as f: f.write('text')"
    more = "with open(f'{tempfile.mkdtemp()}/b', 'w') as f: f.write(str(x))\nprint('said')"
    done = run(written(tmp_path, write, more), tmp_path, "x == 0.5", "open('a').read() == 'text'")
    assert done.returncode == 0 and "said" in done.stdout and "{'x': 0.5}" in done.stdout


def written(folder: Path, *cells: str) -> Path:
    path = folder / "book.ipynb"
    path.write_text(json.dumps(book(*cells)))
    return path


def book(*cells: str) -> dict[str, Any]:
    """A notebook of a title, code, and the statement, as it should be."""
    title = {"cell_type": "markdown", "id": "title", "metadata": {}, "source": ["# Title\n"]}
    code = [
        {
            "cell_type": "code",
            "id": f"code-{place}",
            "metadata": {},
            "execution_count": None,
            "outputs": [],
            "source": cell.splitlines(keepends=True),
        }
        for place, cell in enumerate(cells)
    ]
    return {"cells": [title, *code], "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def faults(found: dict[str, Any]) -> list[str]:
    """What is wrong with the form of a notebook."""
    cells, texts = found["cells"], ["".join(cell["source"]) for cell in found["cells"]]
    code = [text for cell, text in zip(cells, texts, strict=True) if cell["cell_type"] == "code"]
    stored = [c for c in cells if c.get("outputs") or c.get("execution_count") is not None]
    holds = {
        "nbformat": found["nbformat"] == 4,
        "metadata": found["metadata"] == METADATA and not any(c["metadata"] for c in cells),
        "ids": len({cell["id"] for cell in cells}) == len(cells),
        "stored": not stored,
        "number": len(cells) in CELLS,
        "title": cells[0]["cell_type"] == "markdown" and texts[0].startswith("# "),
        "long": all(len(text.splitlines()) <= LONGEST for text in texts),
        "statement": any("print(" in text and "statement()" in text for text in code),
    }
    return [name for name, good in holds.items() if not good] + faults_of_code("\n".join(code))


def faults_of_code(text: str) -> list[str]:
    """Imports of what users may not have, names of Jupyter's own, and paths of a machine."""
    nodes = list(ast.walk(ast.parse(text)))
    imported = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
    paths = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and str(node.value).startswith(("/home", "/tmp", "~"))
    ]
    jupyter = {node.id for node in nodes if isinstance(node, ast.Name)} & {"display", "get_ipython"}
    return [*sorted(n for n in imported if n.split(".")[0] not in IMPORTS), *paths, *jupyter]


@pytest.mark.parametrize("name", CLAIMS)
def test_a_notebook_stores_nothing_and_its_links_lead_somewhere(name: str) -> None:
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    found = json.loads(text)
    assert faults(found) == []
    assert text == json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links and all((FOLDER / link.partition("#")[0]).is_file() for link in links)
    for page, _, heading in (link.partition("#") for link in links):
        assert not heading or heading in anchors(FOLDER / page)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_faults_of_form_are_found() -> None:
    good = ["import keras", "x = 1", "x = 2", "x = 3", "print(plan.statement())"]
    assert faults(book(*good)) == []
    bad = book("x = 1", "import os", "display('/tmp/x')", "y = 1\n" * 36, "print(x)")
    bad["cells"][1]["outputs"], bad["cells"][2]["id"] = [{"text": "1"}], "code-0"
    bad["nbformat"], bad["metadata"] = 3, {}
    names = ["nbformat", "metadata", "ids", "stored", "long", "statement"]
    assert faults(bad) == [*names, "os", "/tmp/x", "display"]
    counted = book(*good)
    counted["cells"][1]["execution_count"] = 1
    assert faults(counted) == ["stored"]
    assert faults(book(*good[:-1])) == ["number", "statement"]


def test_every_notebook_is_listed() -> None:
    names = {path.stem for path in FOLDER.iterdir()}
    assert names == CLAIMS.keys()
    listed = re.findall(r"\(notebooks/(\w+)\.ipynb\)", (ROOT / "docs" / "README.md").read_text())
    assert set(listed) == names and len(listed) == len(names)

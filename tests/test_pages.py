"""What pages of docs say of the code is what the code says: errors, defaults, examples."""

import ast
import re
import sys
from pathlib import Path

from dp_sparse.reports import recommendation as rules
from tests.subprocesses import ROOT
from tests.test_architecture import literal

DOCS = ROOT / "docs"


def texts_of(path: Path) -> list[str]:
    """Every string of a file; {} stands for what is filled in."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(literal(part) or "{}" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def told(page: Path) -> list[str]:
    """The quoted errors and warnings of a page's tables: several words, and no code."""
    rows = re.findall(r"^\| .* \|$", page.read_text(), re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    return [text for text in quoted if " " in text and not re.search(r'[()"]', text)]


def test_pitfalls_quote_errors_word_by_word() -> None:
    library = "\n".join(
        text for path in (ROOT / "dp_sparse").rglob("*.py") for text in texts_of(path)
    )
    quoted = told(DOCS / "pitfalls.md")
    assert len(quoted) > 30 and not [text for text in quoted if text not in library]
    assert "Expected something that nobody raises" not in library


def test_each_grade_of_pitfalls_says_what_catches_them() -> None:
    text = (DOCS / "pitfalls.md").read_text()
    tables = re.findall(r"^\| pitfall \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert len(tables) == 4
    for row in "".join(tables).splitlines():
        assert len(row.split(" | ")) == 3 and row.split(" | ")[2].strip(" |"), row


def test_choosing_has_the_numbers_of_the_code() -> None:
    text = (DOCS / "choose.md").read_text()
    chosen = sys.modules["dp_sparse.runs.make_private"]  # the package has the function of that name
    for said in (
        f"at most {rules.MOST_DENSE_ENTRIES / 1e6:g} million entries",
        f"takes {chosen.MOST_OF_A_BATCH:,}, or a twelfth of the examples",
        f"`clip_norm={rules.CLIP_NORM_OF_ONE_VALUE:g}, "
        f"clipping=QuantileClipping({rules.CLIP_QUANTILE:g})`; "
        f"{rules.RATE:g} or {rules.WALK:g}/√steps",
        f"`clip_norm={rules.CLIP_NORM:g}`; {rules.RATE:g} or {rules.WALK:g}/√steps",
    ):
        assert said in text, said
    assert chosen.PARTS == 12


def test_the_landing_page_has_the_example_and_the_figures_of_the_readme() -> None:
    readme, landing = (ROOT / "README.md").read_text(), (DOCS / "README.md").read_text()
    (example,) = re.findall(r"```python\n.*?```", landing, re.DOTALL)
    assert example in readme
    told = re.search(r"On two million .*? and DP-SGD \d\.\d{4}", " ".join(landing.split()))
    assert told and told[0] in " ".join(readme.split())


def test_no_page_names_a_registry_that_does_not_have_the_package() -> None:
    """The package is installed from a clone alone, so no text may have `pip install dp-sparse`."""
    files = [path for end in ("md", "py", "toml", "yml") for path in ROOT.rglob(f"*.{end}")]
    files = [path for path in files if ".venv" not in path.parts and path != Path(__file__)]
    assert len(files) > 500
    named = re.compile(r"pip3? install[^\n]*[\s'\"]dp[_-]sparse(?!/)\b")
    assert named.search("pip install -U 'dp_sparse[data]'") and not named.search(
        "pip install ./dp_sparse/x"
    )
    assert not [str(path) for path in files if named.search(path.read_text(encoding="utf-8"))]

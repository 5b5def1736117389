"""The arrows of docs/architecture.md: who may import whom."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = sorted((ROOT / "dp_sparse").rglob("*.py"))
USERS = [
    path for room in ("models", "pipelines", "configs") for path in (ROOT / room).rglob("*.py")
]
TIMERS = sorted((ROOT / "benchmarks").glob("*.py"))

STEP = {"contribution", "exponential", "forecast", "restriction", "scores", "skips", "threshold"}
JOINING = ("ambient", "training", "passes", "batch_sums", "microbatches", "flushing", "callbacks")
JOINING += ("callback_guard",)
CORE_OF_TABLES = {"configs", "host", "lattice", "lookups", "updates"}  # TensorFlow alone
ROOMS_OF_BENCHMARKS = {"noise", "selection", "tied_embedding", "clipping_ways"}


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, also of names from modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def room(name: str) -> str:
    """The first part of a name below `dp_sparse`."""
    parts = name.split(".")
    return parts[1] if parts[0] == "dp_sparse" and len(parts) > 1 else ""


def uses(path: Path, *rooms: str) -> list[str]:
    return [name for name in imports(path) if room(name) in rooms]


@pytest.mark.parametrize("path", LIBRARY, ids=module)
def test_arrows_of_the_library(path: Path) -> None:
    name = module(path)
    own = room(name)
    if own in ("selection", "noise", "rows", "philox", "normal_quantile", "sampling", "plan"):
        assert not [other for other in imports(path) if other.split(".")[0] == "keras"]
        assert not uses(path, "optimizers", "clipping", *JOINING)
    if own == "selection" and name.rsplit(".", 1)[-1] in STEP:
        assert not uses(path, "plan", "sampling", "accountant", "release")
    if own == "plan":
        assert {n.split(".")[2] for n in uses(path, "selection")} <= {"forecast"}
    if own == "clipping":
        assert not uses(path, "optimizers", "plan", "selection", *JOINING)
    if own == "optimizers":
        assert not uses(path, *JOINING)
    if name in {f"dp_sparse.distribution.tables.{part}" for part in CORE_OF_TABLES}:
        assert not [other for other in imports(path) if other.split(".")[0] == "keras"]
    if name != "dp_sparse.__init__":
        assert not uses(path, "training") or own in ("training", "distribution")


@pytest.mark.parametrize("path", LIBRARY, ids=module)
def test_no_private_name_of_another_room(path: Path) -> None:
    private = [
        n for n in imports(path) if n.startswith("dp_sparse.") and "._" in n and "__" not in n
    ]
    assert not private


@pytest.mark.parametrize("path", USERS, ids=module)
def test_jobs_and_models_use_public_names(path: Path) -> None:
    rooms = {room(name) for name in imports(path)} - {""}
    assert rooms <= ({"reporting"} if module(path) == "pipelines.criteo.report" else set())


@pytest.mark.parametrize("path", TIMERS, ids=module)
def test_few_benchmarks_import_a_room(path: Path) -> None:
    assert path.stem in ROOMS_OF_BENCHMARKS or not any(map(room, imports(path)))

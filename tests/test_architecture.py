"""The arrows of docs/architecture.md: who may import whom."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import floors

ROOT = Path(__file__).parents[1]
LIBRARY = sorted((ROOT / "dp_sparse").rglob("*.py"))
USERS = [
    path for room in ("models", "pipelines", "configs") for path in (ROOT / room).rglob("*.py")
]
TIMERS = sorted((ROOT / "benchmarks").glob("*.py"))

FLOORS = (*floors.FLOORS, {"", "__main__"})  # dp_sparse/__init__.py and the command line
WITHOUT_KERAS = {"core", "noise", "sampling", "accounting", "selection"}
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
CLOSED = (
    "dp_sparse.clipping.gradient_terms",
    "dp_sparse.selection.top_k",
)  # to the rest of their room
ROOMS_OF_USERS = {"auditing", "distribution", "layers"}
ALLOWED = {"pipelines.criteo.report": {"reports"}, "pipelines.files": {"core"}}
ROOMS_OF_BENCHMARKS = {
    "clipping_ways",
    "noise",
    "selection",
    "shuffling",
    "tied_embedding",
    "windowed_selection",
}


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """What a file imports: a module, and the name from it or ''."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name their module in full"
            yield from ((node.module or "", alias.name) for alias in node.names)


def own_imports(path: Path) -> list[tuple[str, str]]:
    """Those from the package; a room that is imported as a module stands for itself."""
    found = [pair for pair in imports(path) if pair[0].split(".")[0] == "dp_sparse"]
    return [
        (f"dp_sparse.{n}", "") if m == "dp_sparse" and n in FLOOR_OF else (m, n) for m, n in found
    ]


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room(name: str) -> str:
    """The first part of a module's name below `dp_sparse`."""
    return [*name.split("."), ""][1]


def test_every_folder_has_a_floor_and_there_are_eighteen_at_most() -> None:
    there = {p.name for p in (ROOT / "dp_sparse").iterdir() if p.name != "__pycache__"}
    files = {"__init__.py", "__main__.py", "py.typed"}
    assert there - files == set(FLOOR_OF) - {"", "__main__"}
    assert len(there - files) <= 18 and len(FLOORS) <= 11


@pytest.mark.parametrize("path", LIBRARY, ids=module)
def test_arrows_point_down(path: Path) -> None:
    own = room(module(path))
    for name, _ in own_imports(path):
        assert room(name) == own or FLOOR_OF[room(name)] < FLOOR_OF[own], name
    if own in WITHOUT_KERAS:
        assert "keras" not in {name.split(".")[0] for name, _ in imports(path)}


@pytest.mark.parametrize("path", LIBRARY, ids=module)
def test_other_rooms_give_what_their_init_exports(path: Path) -> None:
    """Nothing else, so that what a room may change by itself can be seen in one place."""
    own = room(module(path))
    for name, what in own_imports(path):
        if room(name) != own and what:
            assert name.count(".") == 1, f"{name}: a module inside of another room"
            assert what in importlib.import_module(name).__all__, f"{what} of {name}"


@pytest.mark.parametrize("path", LIBRARY, ids=module)
def test_no_private_name_of_another_module(path: Path) -> None:
    names = [f"{name}.{what}" for name, what in own_imports(path)]
    assert not [name for name in names if "._" in name and "__" not in name]


@pytest.mark.parametrize("folder", CLOSED)
def test_a_room_inside_knows_nothing_of_what_is_around_it(folder: str) -> None:
    inside = [path for path in LIBRARY if module(path).startswith(folder)]
    found = [name for path in inside for name, _ in own_imports(path)]
    assert inside
    assert not [name for name in found if room(name) == room(folder) and folder not in name]


def test_modules_of_a_room_import_each_other_in_one_direction() -> None:
    """No circle anywhere: each module is imported after all that it uses."""
    names = {module(path): path for path in LIBRARY}
    terms = {
        name: {
            f"{m}.{n}" if f"{m}.{n}" in names else m
            for m, n in own_imports(path)
            if room(m) == room(name)
        }
        for name, path in names.items()
        if path.name != "__init__.py"
    }
    waiting = {name: {u for u in used if u in terms} - {name} for name, used in terms.items()}
    while waiting:
        free = {name for name, used in waiting.items() if not used & waiting.keys()}
        assert free, f"a circle among {sorted(waiting)}"
        waiting = {name: used for name, used in waiting.items() if name not in free}


@pytest.mark.parametrize("path", USERS, ids=module)
def test_jobs_and_models_use_public_names(path: Path) -> None:
    rooms = {room(name) for name, _ in own_imports(path)} - {"", *ROOMS_OF_USERS}
    assert rooms <= ALLOWED.get(module(path), set())


@pytest.mark.parametrize("path", TIMERS, ids=module)
def test_few_benchmarks_import_a_room(path: Path) -> None:
    rooms = {room(name) for name, _ in own_imports(path)} - {"", *ROOMS_OF_USERS}
    assert path.stem in ROOMS_OF_BENCHMARKS or not rooms


def body_length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body, docstring apart."""
    begin, *_ = function.body
    documented = isinstance(begin, ast.Expr) and isinstance(begin.value, ast.Constant)
    body = function.body[1:] if documented else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", LIBRARY, ids=module)
def test_modules_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    functions = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert not [each.name for each in functions if body_length(each) > 40]


def test_waits_for_other_processes_end_when_they_hang() -> None:
    """`tests.subprocesses.HANG` is the only limit, since a busy machine reaches a shorter one."""
    limits = [
        f"{path}:{node.value.lineno}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword)
        and node.arg == "timeout"
        and isinstance(node.value, ast.Constant)
    ]
    assert not limits


def test_test_files_are_short() -> None:
    tests = (ROOT / "tests").rglob("*.py")
    assert not [str(path) for path in tests if len(path.read_text().splitlines()) > 600]


def literal(node: ast.expr) -> str:
    """The text of a message, without what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_errors_are_read_at_a_glance() -> None:
    """What is wrong, where and what to do, in at most three lines of 100 characters."""
    raised = [
        (f"{path}:{node.lineno}", literal(node.exc.args[0]))
        for path in LIBRARY
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
    ]
    assert len(raised) > 100
    assert not [where for where, text in raised if len(text) > 300 or text.count("\n") > 2]

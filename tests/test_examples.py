"""The examples in the docstrings of public names run, and print what they say."""

import doctest
import inspect
import warnings

import pytest

import dp_sparse
from dp_sparse import auditing, distribution, layers, losses, offline

WITHOUT = {
    "dp_sparse.__version__",  # a string
    "dp_sparse.auditing",  # a module; its names are below
    "dp_sparse.distribution",  # a module; its names are below
    "dp_sparse.distribution.RankingModel",  # needs a process with legacy Keras
    "dp_sparse.layers",  # a module; its names are below
    "dp_sparse.layers.losses",  # a module; its names are below
    "dp_sparse.losses",  # the same module
    "dp_sparse.offline",  # a module; its names are below
    "dp_sparse.sampling.offline.CHUNK",  # a number
}
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PUBLIC = {
    f"{room.__name__}.{name}": getattr(room, name)
    for room in (dp_sparse, auditing, distribution, layers, losses, offline)
    for name in room.__all__
}
SHOWN = sorted(PUBLIC.keys() - WITHOUT)
OF_KERAS = "`shuffle=True` was passed"  # said of every dataset that fit is given


def example_of(name: str) -> doctest.DocTest:
    text = inspect.getdoc(PUBLIC[name]) or ""
    return doctest.DocTestParser().get_doctest(text, {}, name, name, 0)


@pytest.mark.parametrize("name", SHOWN)
def test_the_example_prints_what_it_says(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """And nothing else: no progress bar, no log, no warning."""
    example = example_of(name)
    assert example.examples, f"{name} has no example: add `Examples:` to its docstring"
    printed: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", OF_KERAS)
        outcome = doctest.DocTestRunner(optionflags=OPTIONS).run(example, out=printed.append)
    assert outcome.failed == 0, "".join(printed)
    assert "".join(capfd.readouterr()) == ""


def test_only_public_names_are_left_out() -> None:
    assert PUBLIC.keys() >= WITHOUT

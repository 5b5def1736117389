"""A function in a process of its own."""

import os

import pytest

from pipelines.own_process import in_own_process


def test_it_returns_and_raises_what_the_function_does_from_another_process() -> None:
    assert in_own_process(os.getpid) != os.getpid()
    with pytest.raises(ValueError, match="invalid literal"):
        in_own_process(int, "x")

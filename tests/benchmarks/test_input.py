"""Preparing, reading and waiting for batches are timed."""

from collections.abc import Callable

import pytest

pytest.importorskip("apache_beam")

from benchmarks import input


@pytest.mark.slow
def test_the_quick_run_has_its_metrics(
    quick_run: Callable[..., tuple[list[str], dict[str, float]]],
) -> None:
    _, metrics = quick_run(input)
    assert metrics.keys() == {
        "read_rows_per_second",
        "input_wait_share",
        "prepare_rows_per_second_per_core",
        "prepare_memory_many_over_few",
    }
    assert 0 <= metrics["input_wait_share"] < 1

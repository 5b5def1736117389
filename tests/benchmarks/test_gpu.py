"""The prepared script for a GPU runs on a CPU, and would see a difference."""

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks import gpu


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "BATCH", 16)
    monkeypatch.setattr(gpu, "SIZES", {"1e5": 50, "1e8": 10**8})
    monkeypatch.setattr(gpu, "QUICK_ROUNDS", 1)


@pytest.mark.slow
def test_the_quick_run_has_every_metric(
    few: None, quick_run: Callable[..., tuple[list[str], dict[str, float]]]
) -> None:
    lines, metrics = quick_run(gpu)
    assert metrics.keys() == {
        "largest_difference",
        "operations_without_gpu_kernel",
        "ms_1e5_graph",
        "ms_1e5_xla",
    }
    assert metrics["largest_difference"] == 0 < metrics["operations_without_gpu_kernel"]
    assert sum("largest difference" in line for line in lines) == 8


@pytest.mark.parametrize("name", gpu.optimizers())
def test_two_steps_with_known_noise_move_the_table_alike(few: None, name: str) -> None:
    make = gpu.optimizers()[name]
    one, other = (gpu.trained(make, name, "CPU:0", False) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    assert np.count_nonzero(one) > 0


def test_other_noise_would_be_seen(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    make = gpu.optimizers()["fest"]
    one = gpu.trained(make, "fest", "CPU:0", False)
    monkeypatch.setattr(gpu, "SEED", 8)
    assert np.max(np.abs(one - gpu.trained(make, "fest", "CPU:0", False))) > 1e-5


def test_operations_are_named_with_their_dtype(few: None) -> None:
    found = gpu.operations_without_kernel()
    assert any(name.startswith("ResourceCountUpTo") for name in found)
    assert not any(name.startswith("MatMul") for name in found)


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--device=gpu"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "sees no GPU" in capsys.readouterr().err

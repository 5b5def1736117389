"""Every method has its line and its metric, and what is counted is what was asked for."""

import json
import sys

import keras
import pytest

import dp_sparse
from benchmarks import one_table, selection


def test_the_quick_run_has_every_metric(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["selection", "--quick"])
    monkeypatch.setattr(selection, "SIZES", {"1e5": 260, "1e9": 2600})
    monkeypatch.setattr(one_table, "SIZES", {"1e5": 50, "1e6": 60, "1e7": 70})
    monkeypatch.setattr(one_table, "BATCH", 8)
    monkeypatch.setattr(selection, "SELECTED", 10)
    monkeypatch.setattr(selection, "ROWS_PER_STEP", 5)
    monkeypatch.setattr(selection, "QUICKLY_COUNTED", 1_000)
    selection.main()
    *lines, last = capsys.readouterr().out.splitlines()
    methods = ["adafest", "fest", "adafest_plus", "exponential", "lazy"]
    assert json.loads(last)["metrics"].keys() == {
        "threshold_flatness_1e9_over_1e5",
        "top_k_rows_per_second",
        *(f"{method}_flatness_1e7_over_1e5" for method in methods),
    }
    for method in methods:
        assert sum(line.split()[0] == method for line in lines) == 3
    assert sum(line.split()[0] == "dpsgd" for line in lines) == 2  # 1e7 rows take too long


OPTIMIZERS = {
    "adafest": dp_sparse.DPAdaFESTOptimizer,
    "fest": dp_sparse.DPFESTOptimizer,
    "adafest_plus": dp_sparse.DPAdaFESTOptimizer,
    "exponential": dp_sparse.ExponentialSelectionOptimizer,
    "lazy": dp_sparse.LazyDPSGDOptimizer,
    "dpsgd": dp_sparse.DPSGDOptimizer,
}


@pytest.mark.parametrize("method", OPTIMIZERS)
def test_the_step_is_that_of_the_method(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "SELECTED", 10)
    monkeypatch.setattr(one_table, "BATCH", 8)
    made = []

    def make(plan: dp_sparse.PrivacyPlan) -> keras.optimizers.Optimizer:
        made.append(selection.makers(50)[method](plan))
        return made[0]

    mechanism = dp_sparse.ExponentialSelection(5) if method == "exponential" else None
    step = one_table.private_step(50, 2, make, mechanism)
    assert type(made[0]) is OPTIMIZERS[method]
    assert (getattr(made[0], "rows", None) is not None) == (method in ("fest", "adafest_plus"))
    for spent in (1, 2):
        assert "loss" in step()  # type: ignore[operator]
        assert int(made[0].steps_spent) == spent
    with pytest.raises(StopIteration):
        step()

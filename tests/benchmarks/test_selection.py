"""Methods have lines and metrics, and what is counted is what was asked for."""

from collections.abc import Callable

import keras
import pytest

import dp_sparse
from benchmarks import one_table, selection


@pytest.mark.slow
def test_the_quick_run_has_every_metric(
    monkeypatch: pytest.MonkeyPatch, quick_run: Callable[..., tuple[list[str], dict[str, float]]]
) -> None:
    monkeypatch.setattr(selection, "SIZES", {"1e5": 260, "1e9": 2600})
    monkeypatch.setattr(one_table, "SIZES", {"1e5": 50, "1e6": 60, "1e7": 70})
    monkeypatch.setattr(one_table, "BATCH", 8)
    monkeypatch.setattr(selection, "SELECTED", 10)
    monkeypatch.setattr(selection, "ROWS_PER_STEP", 5)
    monkeypatch.setattr(selection, "QUICKLY_COUNTED", 1_000)
    makers = selection.makers
    monkeypatch.setattr(
        selection, "makers", lambda size: {name: makers(size)[name] for name in ("fest", "dpsgd")}
    )
    lines, metrics = quick_run(selection)
    assert metrics.keys() == {
        "threshold_flatness_1e9_over_1e5",
        "fest_flatness_1e7_over_1e5",
        "top_k_rows_per_second",
    }
    assert [line.split()[0] for line in lines[3:]] == 3 * ["fest"] + 2 * ["dpsgd"]  # 1e7: too long


OPTIMIZERS = {
    "adafest": dp_sparse.DPAdaFESTOptimizer,
    "fest": dp_sparse.DPFESTOptimizer,
    "adafest_plus": dp_sparse.DPAdaFESTOptimizer,
    "exponential": dp_sparse.ExponentialSelectionOptimizer,
    "lazy": dp_sparse.LazyDPSGDOptimizer,
    "dpsgd": dp_sparse.DPSGDOptimizer,
}


def test_every_method_is_timed() -> None:
    assert selection.makers(50).keys() == OPTIMIZERS.keys()


@pytest.mark.slow
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

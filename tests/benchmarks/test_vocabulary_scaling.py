"""All four steps are timed at each size, and dense noise meets every row."""

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import harness, one_table, vocabulary_scaling


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (one_table, vocabulary_scaling):
        monkeypatch.setattr(module, "BATCH", 8)


def test_the_quick_run_has_every_metric(
    monkeypatch: pytest.MonkeyPatch, quick_run: Callable[..., tuple[list[str], dict[str, float]]]
) -> None:
    monkeypatch.setattr(vocabulary_scaling, "SIZES", {"1e5": 50, "1e6": 60, "1e7": 70})
    monkeypatch.setattr(vocabulary_scaling, "SMALL", {"1e3": 40})
    lines, metrics = quick_run(vocabulary_scaling)
    assert metrics.keys() == {
        "flatness_1e7_over_1e5",
        "dpsgd_over_adafest_1e7",
        "adafest_over_stock_1e7",
        "adafest_over_stock_1e3",
        "stock_over_nonprivate_1e3",
        "adafest_over_nonprivate_1e7",
    }
    assert [line.split()[-1] for line in lines[1:]] == ["-", "3.045", "20.75", "176.8"]
    cells = [[float(cell.replace(",", "")) for cell in line.split()[:-1]] for line in lines[1:]]
    assert [line[0] for line in cells] == [40, 50, 60, 70]
    small, (_, first, *_), _, (_, adafest, stock, plain, dense, _) = cells
    assert metrics["flatness_1e7_over_1e5"] == pytest.approx(adafest / first, rel=2e-3)
    assert metrics["dpsgd_over_adafest_1e7"] == pytest.approx(dense / adafest, rel=2e-3)
    assert metrics["adafest_over_stock_1e7"] == pytest.approx(adafest / stock, rel=2e-3)
    assert metrics["adafest_over_stock_1e3"] == pytest.approx(small[1] / small[2], rel=2e-3)
    assert metrics["stock_over_nonprivate_1e3"] == pytest.approx(small[2] / small[3], rel=2e-3)
    assert metrics["adafest_over_nonprivate_1e7"] == pytest.approx(adafest / plain, rel=2e-3)


@pytest.mark.parametrize(
    ("make", "moved"),
    [(vocabulary_scaling.dpsgd_step, 200), (vocabulary_scaling.non_private_step, 8)],
)
def test_noise_moves_all_rows_and_a_plain_step_those_that_were_looked_up(
    make: Callable[[int], Callable[[], object]], moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = []
    variable = tf.Variable
    monkeypatch.setattr(
        tf,
        "Variable",
        lambda *given, **named: tables.append(variable(*given, **named)) or tables[-1],
    )
    step = make(200)
    before = tables[0].numpy()
    harness.finish(step())
    changed = int(np.any(tables[0].numpy() != before, axis=1).sum())
    assert changed == 200 if moved == 200 else 0 < changed <= moved

"""Day by day: the points of `pipelines.criteo.time_series.study`.

Table 5, Figure 5 and Figure 6 of Ghazi et al., NeurIPS 2023. `base` is
`configs/criteo_time_series.py` with two passes over each period in batches of 2,000. A group is a
data set: days that are made up and drift, and a file in slices, which are not days.
"""

import ml_collections

from configs import criteo_time_series
from pipelines.points import Changes, Point, point

MADE_UP, SLICES = "made-up days", "slices of the sample"
PERIODS = (1, 4, 18)
EPSILONS = (1.0, 3.0, 8.0)
_FIRST, _RUNNING, _ALL = "first_day", "running", "all_days"
_SEEDS = (0, 1, 2)


def get_config() -> ml_collections.ConfigDict:
    """The study."""
    config = ml_collections.ConfigDict()
    config.base = criteo_time_series.get_config()
    config.base.training.update({"batch_size": 2000, "epochs": 2.0})
    config.base.adafest.window = 1
    config.points = tuple(
        p for data in (MADE_UP, SLICES) for p in (*_table_5(data), *_figures_5_and_6(data))
    )
    return config


def _table_5(data: str) -> list[Point]:
    """The fewest periods first: they take the least time. Slices do not drift: one period."""
    return [
        point(data, name, epsilon, {**changes, "period": period}, _seeds(data, period, epsilon))
        for period in (reversed(PERIODS) if data == MADE_UP else PERIODS[-1:])
        for name, epsilon, changes in (
            (f"no privacy, period {period}", None, {"method": "non_private"}),
            *((f"DP-SGD, period {period}", e, {"method": "dp_sgd"}) for e in EPSILONS),
        )
    ]


def _figures_5_and_6(data: str) -> list[Point]:
    drifts = data == MADE_UP
    adafest = {f"DP-AdaFEST, λ={rows:g}": _adafest(rows) for rows in (10.0, 100.0)}
    windows = {
        f"windowed DP-AdaFEST, W={window}, λ=10": {**_adafest(10.0), "adafest.window": window}
        for window in (8, 64)
    }
    fest = {
        f"DP-FEST, k={rows}, {source}": _fest(rows, source)
        for rows in ((30, 100, 300) if drifts else (100,))
        for source in ((_FIRST, _RUNNING, _ALL) if drifts else (_FIRST, _ALL))
    }
    both = {
        "DP-AdaFEST+, k=300, λ=1": {
            **_fest(300, _RUNNING),
            **_adafest(1.0),
            "method": "dp_adafest_plus",
        }
    }
    ways: dict[int, dict[str, Changes]] = {18: {**adafest, **fest}}
    if drifts:
        ways = {18: {**adafest, **fest, **both, **windows}, 1: {**adafest, **windows}}
    return [
        point(data, f"{name}, period {p}", 1.0, {**changes, "period": p}, _seeds(data, p, 1.0))
        for p in ways
        for name, changes in ways[p].items()
    ]


def _adafest(false_rows: float) -> Changes:
    return {"method": "dp_adafest", "adafest.expected_false_rows": false_rows}


def _fest(rows: int, frequencies: str) -> Changes:
    return {
        "method": "dp_fest",
        "selection.rows": rows,
        "selection.frequencies": frequencies,
    }


def _seeds(data: str, period: int, epsilon: float | None) -> tuple[int, ...]:
    """Three where days drift, in few periods, at the ε of the figures."""
    return _SEEDS if data == MADE_UP and period == 18 and epsilon == 1.0 else _SEEDS[:1]

"""The study of the bag of words: what methods that choose rows lose where tables are everything.

All runs have 270 steps. Every point is a line of the results: its group on the page, its name, ε,
the changes of the base config, and its seeds.
"""

import ml_collections

from configs import common, glue_bag
from pipelines.points import Changes, Point, point

SEEDS = (0, 1, 2)
_TWICE_AS_MANY = (*SEEDS, 3, 4, 5)  # of what windows are compared with
_PASSES_OF_1024 = 5.0


def get_config() -> ml_collections.ConfigDict:
    """The study."""
    config = ml_collections.ConfigDict()
    config.base = glue_bag.get_config()
    config.base.adafest = common.adafest_of_words()
    config.base.adafest.window = 1
    config.points = tuple(_points())
    return config


def _points() -> list[Point]:
    first = [
        point("methods", "no privacy", None, {"method": "non_private"}, SEEDS),
        *(
            point("methods", name, epsilon, changes, _seeds_of(name))
            for epsilon in (3.0, 1.0, 8.0)
            for name, changes in _methods().items()
        ),
    ]
    one = (0,)
    grid = [
        point("grid", f"{ratio:g}, {false:g}", 3.0, _adafest(false, ratio), one)
        for ratio in (0.5, 1.0, 2.0, 5.0)
        for false in (30.0, 100.0, 300.0, 1000.0)
    ]
    clipped = [
        point(
            "contribution clip norm",
            f"{norm:g}",
            3.0,
            {**_adafest(1000.0), "adafest.contribution_clip_norm": norm},
            one,
        )
        for norm in (1.0, 4.0, 16.0)
    ]
    fest = [
        point("rows selected before", f"{source}, k={rows}", 3.0, _fest(rows, source), one)
        for source in ("gaussian", "public")
        for rows in (300, 1000, 3000)
    ]
    lora = [
        point("LoRA", name, 3.0, changes, one)
        for rank in (1, 2, 4)
        for name, changes in {
            f"rank {rank}, DP-SGD": {"method": "dp_sgd", **_lora(rank)},
            f"rank {rank}, 1,000 false rows": {**_adafest(1000.0), **_lora(rank)},
            f"rank {rank}, 100 false rows": {**_adafest(100.0), **_lora(rank)},
        }.items()
    ]
    batches = [
        point("batch size", f"{name}, {size:,}", 3.0, {**changes, **_batch(size)}, one)
        for size in (1024, 2048, 4096, 8192)
        for name, changes in _methods().items()
        if name in ("DP-SGD", "DP-AdaFEST", "LoRA + DP-AdaFEST")
    ]
    return [*first, *_windows(), *lora, *batches, *fest, *clipped, *grid]


def _windows() -> list[Point]:
    """DP-AdaFEST and DP-AdaFEST+ whose rows are chosen over windows of steps."""
    points = [
        point("windows", f"W={window}, λ={false:g}", 3.0, _window(window, false), SEEDS)
        for window in (16, 64)
        for false in (10.0, 300.0)
    ]
    points += [
        point("windows", f"W={window}, λ=100", epsilon, _window(window, 100.0), seeds)
        for epsilon in (3.0, 1.0, 8.0)
        for window, seeds in ((64, _TWICE_AS_MANY), (16, SEEDS))
    ]
    points += [
        point("windows", f"W=64, λ=100, σ1/σ2={ratio:g}", 3.0, _window(64, 100.0, ratio), SEEDS)
        for ratio in (2.0, 4.0)
    ]
    points.append(point("windows", "W=128, λ=100", 3.0, _window(128, 100.0), SEEDS))
    changes = {**_window(64, 100.0), "method": "dp_adafest_plus", "selection.rows": 3000}
    points.append(point("windows", "DP-AdaFEST+, W=64, λ=100", 3.0, changes, SEEDS[:1]))
    large = {**_window(64, 10.0), **_batch(4096)}
    points.append(point("windows", "batch 4,096, W=64, λ=10", 3.0, large, SEEDS[:1]))
    return points


def _methods() -> dict[str, Changes]:
    return {
        "DP-SGD": {"method": "dp_sgd"},
        "DP-AdaFEST": _adafest(1000.0),
        "DP-FEST": _fest(1000, "gaussian"),
        "DP-AdaFEST+": {**_adafest(1000.0), "method": "dp_adafest_plus", "selection.rows": 3000},
        "LoRA": {"method": "dp_sgd", **_lora(1)},
        "LoRA + DP-AdaFEST": {**_adafest(1000.0), **_lora(1)},
        "frozen table": {"method": "dp_sgd", "model.words": "frozen"},
    }


def _seeds_of(method: str) -> tuple[int, ...]:
    compared = ("DP-SGD", "DP-AdaFEST", "DP-FEST", "DP-AdaFEST+")
    return _TWICE_AS_MANY if method in compared else SEEDS


def _adafest(false_rows: float, ratio: float = 1.0) -> Changes:
    return {
        "method": "dp_adafest",
        "adafest.expected_false_rows": false_rows,
        "adafest.noise_ratio": ratio,
    }


def _window(window: int, false_rows: float, ratio: float = 1.0) -> Changes:
    return {**_adafest(false_rows, ratio), "adafest.window": window}


def _fest(rows: int, source: str) -> Changes:
    return {"method": "dp_fest", "selection.rows": rows, "selection.source": source}


def _lora(rank: int) -> Changes:
    return {"model.words": "lora", "model.word_rank": rank}


def _batch(size: int) -> Changes:
    """As many steps."""
    return {"training.batch_size": size, "training.epochs": _PASSES_OF_1024 * size / 1024}

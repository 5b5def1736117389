"""What sparsity costs a click model: the points of `pipelines.criteo.study`.

`base` is `configs/criteo_sample.py` with rows to choose by and one evaluation at the end; every
group has rows of its own.
"""

import ml_collections

from configs import criteo_sample
from pipelines.points import Changes, Point, point

RATIOS, THRESHOLDS = (0.1, 1.0, 10.0), (5.0, 20.0, 100.0, 500.0)
MODELS = ("pctr", "dlrm", "dcn")
_ONE, _THREE = (0,), (0, 1, 2)

# One pass over made-up rows; of many more rows, fewer are held out and batches are larger.
_TWO_MILLION: Changes = {"training.epochs": 1.0}
_TWENTY_MILLION: Changes = {
    "training.epochs": 1.0,
    "training.batch_size": 16_384,
    "data.test_fraction": 0.01,
    "data.validation_fraction": 0.01,
}


def get_config() -> ml_collections.ConfigDict:
    """The study."""
    config = ml_collections.ConfigDict()
    config.base = criteo_sample.get_config()
    config.base.data.validation_fraction = 0.1
    config.base.training.evaluations = 1
    config.base.report.update({"verbose": 0, "points": 2})
    config.base.adafest.window = 1
    config.points = (
        *_sample(),
        *_two_million(),
        *_windows(),
        *_twenty_million(),
        *_grid(),
        *_models(),
    )
    return config


def _sample() -> list[Point]:
    of_one = {
        "no privacy": {"method": "non_private"},
        "DP-SGD": {"method": "dp_sgd"},
        "frozen tables": _frozen(),
        **{f"DP-AdaFEST, λ={rows:g}": _adafest(rows) for rows in (10.0, 1.0, 100.0)},
        **{f"DP-AdaFEST, τ={t:g}": {"adafest.threshold": t} for t in (100.0, 500.0)},
        "DP-AdaFEST, λ=10, C1=5": {**_adafest(10.0), "adafest.contribution_clip_norm": 5.0},
        **{f"DP-FEST, k={rows:,}": _fest(rows) for rows in (300, 3_000, 30_000)},
        "DP-AdaFEST+, k=3,000, λ=1": _plus(3_000, 1.0),
        "exponential selection, k=1,000": {"method": "exponential"},
        "zero tables, DP-SGD": {"method": "dp_sgd", **_zero()},
        "zero tables, DP-AdaFEST, λ=10": {**_adafest(10.0), **_zero()},
        **_lora_ranks(1, 2, 4),
    }
    again = {
        "DP-SGD": of_one["DP-SGD"],
        "frozen tables": of_one["frozen tables"],
        "DP-AdaFEST, λ=10": _adafest(10.0),
        "DP-FEST, k=3,000": _fest(3_000),
        "LoRA of rank 1 + DP-AdaFEST, λ=10": of_one["LoRA of rank 1 + DP-AdaFEST, λ=10"],
    }
    several = {*again, "DP-AdaFEST+, k=3,000, λ=1"}
    return [
        *(
            point("sample", name, 1.0, changes, _THREE if name in several else _ONE)
            for name, changes in of_one.items()
        ),
        *(
            point("sample", name, epsilon, changes, _ONE)
            for epsilon in (3.0, 8.0)
            for name, changes in again.items()
        ),
    ]


def _two_million() -> list[Point]:
    methods = {
        "no privacy": {"method": "non_private"},
        "DP-SGD": {"method": "dp_sgd"},
        **{
            f"DP-SGD, learning rate {rate:g}": {
                "method": "dp_sgd",
                "optimizer.options.learning_rate": rate,
                "optimizer.walk": 0.0,
            }
            for rate in (0.003, 0.03)
        },
        "frozen tables": _frozen(),
        **{f"DP-AdaFEST, λ={rows:g}": _adafest(rows) for rows in (1.0, 10.0, 100.0, 1000.0)},
        "DP-AdaFEST, τ=500": {"adafest.threshold": 500.0},
        "DP-AdaFEST, λ=10, C1=5": {**_adafest(10.0), "adafest.contribution_clip_norm": 5.0},
        **{f"DP-FEST, k={rows:,}": _fest(rows) for rows in (100, 300, 1_000)},
        "DP-AdaFEST+, k=300, λ=1": _plus(300, 1.0),
        "DP-AdaFEST+, k=1,000, λ=10": _plus(1_000, 10.0),
        "exponential selection, k=300": {
            "method": "exponential",
            "exponential.rows_per_step": 300,
        },
        "zero tables, DP-SGD": {"method": "dp_sgd", **_zero()},
        "zero tables, DP-AdaFEST, λ=10": {**_adafest(10.0), **_zero()},
        **_lora_ranks(1, 2),
    }
    return [
        point("two million", name, 1.0, {**_TWO_MILLION, **changes}, _ONE)
        for name, changes in methods.items()
    ]


def _twenty_million() -> list[Point]:
    methods = {
        "DP-SGD": {"method": "dp_sgd"},
        "DP-AdaFEST, λ=10": _adafest(10.0),
        **{f"DP-AdaFEST, τ={t:g}": {"adafest.threshold": t} for t in (16.0, 32.0)},
    }
    return [
        point("twenty million", name, 1.0, {**_TWENTY_MILLION, **changes}, _ONE)
        for name, changes in methods.items()
    ]


def _windows() -> list[Point]:
    """DP-AdaFEST whose rows are chosen over windows of steps."""
    chosen: dict[str, Changes] = {
        **{f"W={window}, λ=1": {**_adafest(1.0), "adafest.window": window} for window in (16, 64)},
        **{
            f"W={window}, τ={threshold:g}": {
                "adafest.threshold": threshold,
                "adafest.window": window,
            }
            for window, threshold in ((16, 16.0), (16, 32.0), (64, 64.0), (64, 160.0))
        },
    }
    return [
        point(
            "two million",
            "DP-AdaFEST, τ=20",
            1.0,
            {**_TWO_MILLION, "adafest.threshold": 20.0},
            _ONE,
        ),
        *(
            point(
                "two million",
                f"windowed DP-AdaFEST, {name}",
                1.0,
                {**_TWO_MILLION, **changes},
                _ONE,
            )
            for name, changes in chosen.items()
        ),
        point(
            "sample",
            "windowed DP-AdaFEST, W=8, λ=10",
            1.0,
            {**_adafest(10.0), "adafest.window": 8},
            _THREE,
        ),
    ]


def _grid() -> list[Point]:
    return [
        point(
            "grid",
            f"{ratio:g}, {threshold:g}",
            1.0,
            {"adafest.noise_ratio": ratio, "adafest.threshold": threshold},
            _ONE,
        )
        for ratio in RATIOS
        for threshold in THRESHOLDS
    ]


def _models() -> list[Point]:
    return [
        point(
            "models",
            f"{model}, {name}",
            8.0,
            {"model": model, "method": method, "training.epochs": 4.0},
            _ONE,
        )
        for model in MODELS
        for name, method in (("no privacy", "non_private"), ("DP-AdaFEST", "dp_adafest"))
    ]


def _adafest(false_rows: float) -> Changes:
    return {"method": "dp_adafest", "adafest.expected_false_rows": false_rows}


def _fest(rows: int) -> Changes:
    return {"method": "dp_fest", "selection.rows": rows}


def _plus(rows: int, false_rows: float) -> Changes:
    return {**_adafest(false_rows), "method": "dp_adafest_plus", "selection.rows": rows}


def _frozen() -> Changes:
    return {"method": "dp_sgd", "table_weights.trained": False}


def _zero() -> Changes:
    return {"table_weights.initial": "zeros"}


def _lora_ranks(*of_both: int) -> dict[str, Changes]:
    """LoRA of rank 1 alone, and of some ranks with DP-AdaFEST."""
    ranks = {rank: {"table_weights.lora_rank": rank} for rank in of_both}
    return {
        "LoRA of rank 1": {"method": "dp_sgd", **ranks[1]},
        **{
            f"LoRA of rank {rank} + DP-AdaFEST, λ=10": {**_adafest(10.0), **own}
            for rank, own in ranks.items()
        },
    }

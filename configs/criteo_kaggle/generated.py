"""Utility loss against gradient-size reduction on made-up rows, of which the tables explain most.

`python -m pipelines.criteo.generate --rows=2000000 --out=FILE` makes them. One pass at ε = 1.
"""

import ml_collections

from configs.criteo_kaggle import tradeoff

SETTINGS = ((1.0, 5.0), (1.0, 10.0), (5.0, 10.0), (5.0, 20.0), (5.0, 50.0), (5.0, 100.0))
TOP_ROWS = (30, 100, 300, 1_000)
AMONG = ((100, 20.0), (300, 5.0), (300, 20.0), (300, 50.0))  # rows and threshold
ROWS_PER_STEP = (30, 300, 3_000)
SGD_RATES = (0.5, 2.0)  # LazyDP is for plain SGD alone


def get_config() -> ml_collections.ConfigDict:
    """The sweep; 5 to 8 minutes a point on one core."""
    config = tradeoff.get_config()
    config.directory = "runs/criteo_generated"
    config.base.training.epochs = 1.0
    private = {"privacy.epsilon": 1.0}
    methods = [
        ("without_privacy", {"method": "non_private"}),
        ("dp_sgd", {"method": "dp_sgd"}),
        ("frozen_tables", tradeoff.adafest("dp_adafest", 5.0, tradeoff.NEVER)),
    ]
    for ratio, threshold in SETTINGS:
        name = f"dp_adafest_r{ratio:g}_t{threshold:g}"
        methods.append((name, tradeoff.adafest("dp_adafest", ratio, threshold)))
    for rows in TOP_ROWS:
        methods.append((f"dp_fest_k{rows}", {"method": "dp_fest", "selection.rows": rows}))
    for rows, threshold in AMONG:
        changes = tradeoff.adafest("dp_adafest_plus", 5.0, threshold)
        name = f"dp_adafest_plus_k{rows}_t{threshold:g}"
        methods.append((name, {**changes, "selection.rows": rows}))
    for rows in ROWS_PER_STEP:
        changes = {"method": "exponential", "exponential.rows_per_step": rows}
        methods.append((f"exponential_k{rows}", changes))
    for rate in SGD_RATES:
        sgd = {"optimizer.name": "SGD", "optimizer.options": {"learning_rate": rate}}
        methods.append((f"lazy_dp_sgd_lr{rate:g}", {"method": "lazy_dp_sgd", **sgd}))
    config.points = tuple(
        {"name": f"eps1_{name}", "seed": 0, "changes": {**private, **changes}}
        for name, changes in methods
    )
    return config

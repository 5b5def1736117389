"""Utility loss against gradient-size reduction on a sample of Criteo-Kaggle.

Figures 3, 4 and 8 of Ghazi et al., NeurIPS 2023, with the grids of its D.1.1 thinned out.
"""

from typing import Any

import ml_collections

from configs import common, criteo_sample

SEEDS = (0, 1, 2)
RATIOS = (1.0, 5.0)
THRESHOLDS = (5.0, 20.0, 50.0)
TOP_ROWS = (300, 3_000, 30_000)
ROWS_PER_STEP = (100, 1_000, 10_000)
NEVER = 1e6  # a threshold that no row reaches: what the tables add to a model at all


def get_config() -> ml_collections.ConfigDict:
    """The sweep; 0.5 to 1 minute a point on one core."""
    config = ml_collections.ConfigDict()
    config.directory = "runs/criteo_kaggle_tradeoff"
    config.kind = "tradeoff"
    config.workers = 2
    config.data = ml_collections.ConfigDict({"path": ""})
    config.base = base()
    config.points = tuple(
        {"name": f"eps{epsilon:g}_{name}", "seed": seed, "changes": changes}
        for epsilon, seeds in ((1.0, SEEDS), (3.0, SEEDS[:1]), (8.0, SEEDS[:1]))
        for name, changes in _methods(epsilon)
        for seed in seeds
    )
    return config


def base() -> ml_collections.ConfigDict:
    """The run that every point changes: rows to choose by, one evaluation at the end."""
    config = criteo_sample.get_config()
    config.data.validation_fraction = 0.1
    config.training.evaluations = 1
    config.training.epochs = 3.0
    config.report.verbose = 0
    config.report.points = 2
    with_former_settings(config)
    return config


def with_former_settings(config: ml_collections.ConfigDict) -> None:
    """Adagrad and a clip norm of 1, with which the runs on the pages in docs/results were made."""
    config.optimizer.update({**common.adagrad(), "decays": False})
    config.privacy.update({"clip_norm": 1.0, "clip_quantile": 0.0, "calibration_share": 0.0})
    config.training.batch_size = 2048
    config.adafest = common.former_adafest()


def _methods(epsilon: float) -> list[tuple[str, dict[str, Any]]]:
    private = {"privacy.epsilon": epsilon}
    found = [("dp_sgd", {**private, "method": "dp_sgd"})]
    for ratio in RATIOS:
        for threshold in THRESHOLDS:
            name = f"dp_adafest_r{ratio:g}_t{threshold:g}"
            found.append((name, {**private, **adafest("dp_adafest", ratio, threshold)}))
    for rows in TOP_ROWS:
        changes = {**private, "method": "dp_fest", "selection.rows": rows}
        found.append((f"dp_fest_k{rows}", changes))
    for rows in TOP_ROWS[:-1]:
        for threshold in THRESHOLDS[:2] if rows == TOP_ROWS[0] else THRESHOLDS:
            name = f"dp_adafest_plus_k{rows}_t{threshold:g}"
            changes = {**private, **adafest("dp_adafest_plus", 5.0, threshold)}
            found.append((name, {**changes, "selection.rows": rows}))
    found.append(("frozen_tables", {**private, **adafest("dp_adafest", 5.0, NEVER)}))
    for rows in ROWS_PER_STEP:
        changes = {**private, "method": "exponential", "exponential.rows_per_step": rows}
        found.append((f"exponential_k{rows}", changes))
    return found


def adafest(method: str, ratio: float, threshold: float) -> dict[str, Any]:
    """Changes for a noise ratio and an absolute threshold."""
    return {
        "method": method,
        "adafest.noise_ratio": ratio,
        "adafest.threshold": threshold,
    }

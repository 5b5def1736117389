"""Trains one setting on one task, for a part of its steps, and scores it."""

import functools
import math
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from pipelines.defaults.settings import (
    DP_ADAFEST,
    DP_FEST,
    DP_SGD,
    NON_PRIVATE,
    Setting,
    steps_of,
)
from pipelines.defaults.tasks import Examples, Sources, Task, load

_SELECTION_SHARE = 0.02  # of ε, of DP-FEST

Result = dict[str, Any]


@functools.cache
def task_of(name: str, sources: Sources) -> Task:
    """The task, loaded once in a process."""
    return load(name, sources)


def run(
    task: Task, setting: Setting, epsilon: float | None, part: float = 1.0, seed: int = 0
) -> Result:
    """Trains, and returns scores on validation and test examples.

    Args:
        task: What is learned.
        setting: How.
        epsilon: Of the budget, whose δ is 1/examples; None without privacy.
        part: The part of the plan's steps after which it stops; noise is that of all steps.
        seed: Of the initial weights.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model = task.model()
    begun = time.perf_counter()
    all_steps = steps_of(task, setting.batch_size)
    steps = max(1, math.ceil(all_steps * part))
    if epsilon is None:
        optimizer: keras.optimizers.Optimizer = setting.keras_optimizer(all_steps)
        batches = _stock_batches(task.training, setting.batch_size, seed)
    else:
        optimizer = private_optimizer(task, model, setting, epsilon)
        batches = optimizer.plan.sampling.batches((task.training.x, task.training.y))
    model.compile(optimizer, loss=task.loss)
    model.fit(batches, steps_per_epoch=steps, verbose=0)
    return {
        **_scores(task, model, task.validation, "validation"),
        **_scores(task, model, task.test, "test"),
        "steps": steps,
        "noise_multiplier": None if epsilon is None else optimizer.plan.noise_multiplier,
        "rows_per_step": _rows_per_step(optimizer, steps),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def private_optimizer(
    task: Task, model: keras.Model, setting: Setting, epsilon: float
) -> keras.optimizers.Optimizer:
    """The private optimizer of a setting with a calibrated plan."""
    plan = plan_of(task, setting, epsilon)
    wrapped = setting.keras_optimizer(plan.sampling.steps)
    own = {"clip_norm": setting.clip_norm, "clipping": setting.clipping()}
    if setting.method == DP_SGD:
        return dp_sparse.DPSGDOptimizer(wrapped, plan.calibrate(), **own)
    if setting.method == DP_FEST:
        rows = _selected(task, plan, max(1, round(setting.row_fraction * task.rows)))
        plan = dp_sparse.PrivacyPlan(plan.budget, plan.sampling, releases=(rows.release,))
        return dp_sparse.DPFESTOptimizer(wrapped, plan.calibrate(), **own, rows=rows)
    if setting.method == DP_ADAFEST:
        return dp_sparse.DPAdaFESTOptimizer(
            wrapped,
            plan.calibrate(),
            **own,
            noise_ratio=setting.noise_ratio,
            expected_false_rows=setting.false_rows,
        )
    raise ValueError(
        f"Expected a private method, or epsilon=None with {NON_PRIVATE!r}, got "
        f"method={setting.method!r}."
    )


def plan_of(task: Task, setting: Setting, epsilon: float) -> dp_sparse.PrivacyPlan:
    """The plan of a setting, before it is calibrated."""
    examples = len(task.training)
    return dp_sparse.PrivacyPlan(
        dp_sparse.PrivacyBudget(epsilon, 1 / examples),
        dp_sparse.PoissonSampling(examples, setting.batch_size, steps_of(task, setting.batch_size)),
    )


def _selected(task: Task, plan: dp_sparse.PrivacyPlan, count: int) -> dp_sparse.SelectedRows:
    examples = (task.ids(task.training.x), task.training.y)
    noise = dp_sparse.calibrate_top_k(plan, task.tables, count, share=_SELECTION_SHARE)
    return dp_sparse.select_top_k(examples, task.tables, count, noise.source, progress=False)


def _stock_batches(examples: Examples, batch_size: int, seed: int) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices((examples.x, examples.y))
    shuffled = dataset.shuffle(len(examples), seed=seed).repeat()
    return shuffled.batch(batch_size, drop_remainder=True).prefetch(2)


def _rows_per_step(optimizer: keras.optimizers.Optimizer, steps: int) -> list[float] | None:
    if not getattr(optimizer, "selects_rows", False):
        return None
    return (optimizer.diagnostics.rows.numpy() / steps).tolist()


def _scores(
    task: Task, model: keras.Model, examples: Examples, name: str
) -> dict[str, float | None]:
    """The task's score, the log loss, and the mean prediction where labels are 0 and 1."""
    outputs = np.nan_to_num(model.predict(examples.x, batch_size=2048, verbose=0))
    return {
        name: task.score(outputs, examples.y),
        f"{name}_log_loss": task.log_loss(outputs, examples.y),
        f"{name}_mean_prediction": task.mean_prediction(outputs),
    }

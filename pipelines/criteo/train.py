"""Trains one model on prepared Criteo records, privately or not, and evaluates it on the last rows
in time.

The first rows of the file train, or other files (`sources.py`). The last `test_fraction` are held
out: neither selection nor training reads them. It does not read those of `validation_fraction`
before them either, which may be used to choose hyper-parameters. All methods have the same model,
expected batch size and wrapped optimizer, so their AUC and step times can be compared.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import keras
import ml_collections
import numpy as np
import tensorflow as tf

import dp_sparse
from configs.criteo_sample import get_config
from models.pctr import pctr
from pipelines.criteo.methods import calibration_of, private_optimizer
from pipelines.criteo.records import PreparedData
from pipelines.criteo.sources import batches_from, parts, schedule
from pipelines.criteo.tables import LayerJob, reader_of
from pipelines.methods import METHODS, NON_PRIVATE
from pipelines.optimizers import optimizer_of
from pipelines.runs import Run
from pipelines.scores import exact_auc, log_loss, mean_prediction
from pipelines.steps import StepTimer, steps_taken, stock_batches

Scores = Callable[[Any], np.ndarray]  # from inputs to logits


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of one run.

    Attributes:
        method: One of `METHODS`.
        auc: Exact AUC on the held-out rows.
        log_loss: Mean log loss on them.
        mean_prediction: Mean probability of a click that is predicted for them.
        rate: The part of them that was clicked.
        calibrated_log_loss: As `log_loss`, of calibrated probabilities; without any, the same.
        calibrated_mean_prediction: Likewise.
        calibration: What calibrated them; None if nothing did.
        validation_auc: AUC on the validation rows before them; None without any.
        scores: Logits of the held-out rows, float32 `[examples]`.
        steps: Steps taken; of a private run those that are spent, also if their weights were lost.
        ms_per_step: Median time of a step, after the first; NaN if no step was left.
        reduction: Entries of all tables ÷ entries of them, or of LoRA on them, that get noise in a
            step, on average; 1 without selection and LoRA, infinite if no table trains, NaN if no
            step was left.
        entries: Entries that get noise in a step; those of all tables without privacy.
        statement: The plan's statement, or that there is no guarantee.
        epsilon: ε spent; infinite without privacy.
        delta: Its δ; 1 without privacy.
        curve: (step, AUC on held-out rows) during training.
        report: The privacy report's callback, for its history; None without privacy.
    """

    method: str
    auc: float
    log_loss: float
    mean_prediction: float
    rate: float
    calibrated_log_loss: float
    calibrated_mean_prediction: float
    calibration: dp_sparse.Calibration | None
    validation_auc: float | None
    scores: np.ndarray
    steps: int
    ms_per_step: float
    reduction: float
    entries: float
    statement: str
    epsilon: float
    delta: float
    curve: list[tuple[int, float]]
    report: dp_sparse.PrivacyReport | None


def train(
    config: ml_collections.ConfigDict,
    data: PreparedData,
    strategy: tf.distribute.TPUStrategy | None = None,
    run: Run | None = None,
    export: str = "",
) -> RunResult:
    """Trains `config.method` on `data`, evaluates it, and exports it if a path is given.

    With a strategy it does so on its TPU.

    With a `run` it goes on where that is. What was trained before is in no curve of the result.

    Raises:
        ValueError: An unknown method or model, or too few rows for one batch.
    """
    if config.method not in METHODS:
        raise ValueError(f"Expected method to be one of {METHODS}, got method={config.method!r}.")
    keras.utils.set_random_seed(
        config.seed
    )  # of the initial weights; noise and sampling have their own keys
    training, validation, held_out = parts(config, data)
    epochs, steps, steps_per_epoch = schedule(config, training)
    if config.tables == "layer":
        return _train_with_layer(config, data, strategy)
    if config.tables != "keras" or strategy is not None:
        raise ValueError(
            f"Expected tables to be keras, or layer, as a TPU needs it, got {config.tables!r}."
        )
    model = _model(config, data.vocabularies)
    scores_of = functools.partial(_predicted, model)
    timer, curve = StepTimer(), _HeldOutScores(held_out, scores_of)
    report, spent = None, 0
    if config.method == NON_PRIVATE:
        batches = stock_batches(training, config.training.batch_size, steps)
        _compile(model, optimizer_of(config, steps=steps, noisy=False))
    else:
        report = _report(config)  # may refuse settings: before rows are selected
        optimizer = private_optimizer(config, data, training, steps, run)
        _compile(model, optimizer)
        spent = run.restore(model) if run is not None else 0
        batches = batches_from(optimizer.plan.sampling, training, min(spent, steps - 1))
        if run is not None:
            batches = run.timed(batches)
    callbacks = [timer, *([report] if report is not None else []), curve]
    if spent < steps:
        model.fit(
            batches,
            epochs=epochs,
            initial_epoch=spent * epochs // steps,
            steps_per_epoch=steps_per_epoch if run is None else None,  # shares of what is left
            callbacks=[*callbacks, *(run.callbacks() if run is not None else [])],
            verbose=config.report.verbose,
        )
    else:  # it was killed after its last step
        curve.set_model(model)
        curve.on_epoch_end(epochs)
        report.history.steps.append(spent)
        report.history.epsilon.append(optimizer.plan.spent(spent).epsilon)
    calibration = None
    if report is not None:
        calibration = calibration_of(config, model, data, training, run)
    if export:
        dp_sparse.export_model(model, export, as_model=calibration)
    return _result(config.method, model, timer, curve, validation, report, scores_of, calibration)


def _train_with_layer(
    config: ml_collections.ConfigDict,
    data: PreparedData,
    strategy: tf.distribute.TPUStrategy | None,
) -> RunResult:
    """Trains the same model with its tables in an embedding layer, by `train_tables`."""
    _require_usual_tables(config)
    training, validation, held_out = parts(config, data, reader_of(config.model))
    epochs, steps, _ = schedule(config, training)
    job = LayerJob(config, data, training, steps, strategy)
    _compile(job.model, job.optimizer)
    timer, curve = StepTimer(), _HeldOutScores(held_out, job.scores)
    report = _report(config)
    dp_sparse.distribution.train_tables(
        job.model,
        job.tables,
        job.layer,
        training,
        epochs=epochs,
        steps_per_epoch=steps // epochs,
        callbacks=[timer, report, curve],
        verbose=config.report.verbose,
    )
    return _result(config.method, job.model, timer, curve, validation, report, job.scores)


def _report(config: ml_collections.ConfigDict) -> dp_sparse.PrivacyReport:
    return dp_sparse.PrivacyReport(
        diagnostics=config.report.diagnostics, points=config.report.points
    )


def _model(config: ml_collections.ConfigDict, vocabularies: Sequence[int]) -> keras.Model:
    weights = config.table_weights
    if config.model == "pctr":
        return pctr(
            vocabularies,
            embeddings_initializer=weights.initial,
            lora_rank=weights.lora_rank,
            trains_tables=weights.trained,
        )
    if config.model not in ("dlrm", "dcn"):
        raise ValueError(
            f"Expected model to be pctr, dlrm or dcn, or ranking with tables=layer, got "
            f"model={config.model!r}."
        )
    _require_usual_tables(config)
    from models import dlrm  # needs keras-rs, which pCTR does not

    return getattr(dlrm, config.model)(vocabularies)


def _require_usual_tables(config: ml_collections.ConfigDict) -> None:
    given = dict(config.table_weights)
    if given != dict(get_config().table_weights):
        raise ValueError(
            f"Expected model=pctr and tables=keras with table_weights={given}, got "
            f"model={config.model!r} and tables={config.tables!r}."
        )


def _compile(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    model.compile(optimizer=optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True))


class _HeldOutScores(keras.callbacks.Callback):
    """Exact AUC, log loss and mean prediction on held-out rows after each epoch, in the logs."""

    def __init__(self, held_out: dp_sparse.RecordFile, scores_of: Scores) -> None:
        super().__init__()
        self._x, self.labels = held_out.gather(np.arange(len(held_out)))
        self._scores_of, self.rate = scores_of, float(np.mean(self.labels > 0))
        self.points: list[tuple[int, float]] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.scores = self._scores_of(self._x)
        auc = exact_auc(self.labels, self.scores)
        self.points.append((int(self.model.optimizer.iterations.numpy()), auc))
        self.log_loss = log_loss(self.labels, self.scores)
        self.mean_prediction = mean_prediction(self.scores)
        if logs is not None:
            logs["val_auc"], logs["val_log_loss"] = auc, self.log_loss
            logs["val_mean_prediction"] = self.mean_prediction


def _predicted(model: keras.Model, x: Any) -> np.ndarray:
    return model.predict(x, batch_size=8192, verbose=0)[:, 0]


def _result(
    method: str,
    model: keras.Model,
    timer: StepTimer,
    curve: _HeldOutScores,
    validation: dp_sparse.RecordFile | None,
    report: dp_sparse.PrivacyReport | None,
    scores_of: Scores,
    calibration: dp_sparse.Calibration | None = None,
) -> RunResult:
    milliseconds = 1000 * statistics.median(timer.seconds[1:] or timer.seconds or [math.nan])
    validation_auc = None
    if validation is not None:
        x, labels = validation.gather(np.arange(len(validation)))
        validation_auc = exact_auc(labels, scores_of(x))
    calibrated = curve.scores if calibration is None else calibration.score_map(curve.scores)
    common = {
        "method": method,
        "auc": curve.points[-1][1],
        "log_loss": curve.log_loss,
        "mean_prediction": curve.mean_prediction,
        "rate": curve.rate,
        "calibrated_log_loss": log_loss(curve.labels, calibrated),
        "calibrated_mean_prediction": mean_prediction(calibrated),
        "calibration": calibration,
        "validation_auc": validation_auc,
        "scores": curve.scores,
        "ms_per_step": milliseconds,
        "curve": curve.points,
        "report": report,
    }
    whole = float(sum(math.prod(table) for table in _tables(model)))
    if report is None:
        return RunResult(
            **common,
            steps=steps_taken(model.optimizer),
            reduction=1.0,
            entries=whole,
            statement="No guarantee: gradients were neither clipped nor noised.",
            epsilon=math.inf,
            delta=1.0,
        )
    plan, steps = model.optimizer.plan, steps_taken(model.optimizer)
    spent = plan.guaranteed(steps)
    entries = _noised_entries(model, report) if timer.seconds else math.nan
    return RunResult(
        **common,
        steps=steps,
        reduction=math.inf if entries == 0 else whole / entries,
        entries=entries,
        statement=plan.statement(steps),
        epsilon=spent.epsilon,
        delta=spent.delta,
    )


def _tables(model: keras.Model) -> list[tuple[int, int]]:
    """Rows and width of every table, also of those that are not the model's."""
    own = [
        (layer.input_dim, layer.output_dim)
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.Embedding)
    ]
    return own or [tuple(table.shape) for table in model.optimizer.noised_tables]


def _noised_entries(model: keras.Model, report: dp_sparse.PrivacyReport) -> float:
    """Entries of tables, or of LoRA on them, that get noise in a step, on average."""
    trained = sum(math.prod(table.shape) for table in model.optimizer.noised_tables)
    beside = [
        math.prod(layer.lora_embeddings_b.shape)
        for layer in model._flatten_layers()
        if getattr(layer, "lora_enabled", False) and layer.trainable
    ]
    return trained / report.reduction() + sum(beside)

"""Fine-tunes one language model on one task, privately or not, and says how often it is right.

LoRA's matrices, the head and the word table train (Ghazi et al., NeurIPS 2023, 4.1.1 and D.1.2);
`model.words` freezes the table (their Table 6) or puts LoRA on it (Table 1).
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import keras
import ml_collections
import numpy as np

import dp_sparse
from models.pretrained import load_backbone, minilm_folder
from models.roberta_lora import TextClassifier, text_classifier, word_table
from pipelines.glue import exporting
from pipelines.glue.data import Data, load, protected
from pipelines.glue.records import Tokens
from pipelines.glue.settings import check, optimizer_for, steps_of
from pipelines.glue.tasks import task_of
from pipelines.glue.tokens import TextTokenizer, tokenizer_of
from pipelines.glue.words import selected_rows
from pipelines.methods import NON_PRIVATE, calibrated, optimizer_under
from pipelines.runs import Run
from pipelines.steps import StepTimer, steps_taken, stock_batches

MINILM = "minilm"
_JUDGED_AT_ONCE = 256


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a run.

    Attributes:
        method: One of `settings.METHODS`.
        accuracy: The part of the examples that were classified correctly, by what judged.
        curve: (step, accuracy) on `data.judge` during training.
        steps: Steps taken; of a private run those that are spent, also if their weights were lost.
        ms_per_step: The median, after the first; NaN if no step was left.
        entries: Mean entries of the word table, or of LoRA on it, that got noise in a step; without
            privacy all entries. NaN if no step was left.
        reduction: Entries of the word table ÷ `entries`; infinite if it is frozen.
        statement: What is guaranteed, to whom.
        epsilon: ε spent; infinite without privacy.
        training_rows: Examples that trained.
        counts: What was left out, cut or dropped of the data.
        model: The trained model.
    """

    method: str
    accuracy: dict[str, float]
    curve: list[tuple[int, float]]
    steps: int
    ms_per_step: float
    entries: float
    reduction: float
    statement: str
    epsilon: float
    training_rows: int
    counts: dict[str, int]
    model: TextClassifier


def train(
    config: ml_collections.ConfigDict,
    run: Run | None = None,
    export: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Loads, trains and judges, and exports the model if a path is given.

    With a `run` it goes on where that is.

    Raises:
        GlueDataError: The text or the tokenizer cannot be used.
        ValueError: A setting, the weights, or what they are for cannot be used.
    """
    keras.utils.set_random_seed(config.seed)  # initial weights; noise and sampling have own keys
    task, source = task_of(config), source_of_weights(config)
    check(config, task)
    tokenizer = tokenizer_of(config.model.tokenizer or source)
    backbone = load_backbone(source, max_length=config.data.length, dropout=config.model.dropout)
    tokenizer.check_table(backbone.vocabulary_size)
    exporting.check(config, export, tokenizer, backbone)
    data = load(config, task, tokenizer, "segment_ids" in backbone.input)
    if data.counts:
        say(", ".join(f"{name} {number:,}" for name, number in data.counts.items()))
    steps = steps_of(config, len(data.training))
    model = text_classifier(
        backbone,
        classes=task.classes,
        rank=config.model.rank,
        words=config.model.words,
        word_rank=config.model.word_rank or None,
        pooling=config.model.pooling,
        dropout=config.model.dropout,
    )
    result = _fitted(config, model, data, tokenizer, steps, run)
    if export:
        exporting.export(config, task, model, export, tokenizer)
    return result


def source_of_weights(config: ml_collections.ConfigDict) -> str:
    """`model.source`, the folder of its package for MiniLM."""
    return str(minilm_folder()) if config.model.source == MINILM else config.model.source


def _fitted(
    config: ml_collections.ConfigDict,
    model: TextClassifier,
    data: Data,
    tokenizer: TextTokenizer,
    steps: int,
    run: Run | None,
) -> Result:
    """The model, trained for the steps that are left, and judged."""
    timer = StepTimer()
    curve = _Accuracy(data.judging[config.data.judge])
    report, spent = None, 0
    if config.method == NON_PRIVATE:
        _compile(model, optimizer_for(config, "optimizer", steps, model))
        batches = stock_batches(data.training, config.training.batch_size, steps)
    else:
        report = _report(config)  # may refuse settings: before rows are selected
        optimizer = _private_optimizer(config, model, data, tokenizer, steps, run)
        _compile(model, optimizer)
        batches = optimizer.plan.sampling.batches(data.training)
        if run is not None:
            spent, batches = run.restore(model), run.timed(batches)
    if spent < steps:
        epochs = max(1, min(config.training.evaluations, steps))
        model.fit(
            batches,
            epochs=epochs,
            initial_epoch=spent * epochs // steps,
            steps_per_epoch=steps // epochs if report is None else None,  # shares of what is left
            callbacks=[
                timer,
                *([report] if report is not None else []),
                curve,
                *(run.callbacks() if run is not None else []),
            ],
            verbose=config.report.verbose,
        )
    rows = np.mean(report.history.rows, axis=0) if report and report.history.rows else None
    return _result(config, model, data, timer, curve, _entries(model, rows, bool(timer.seconds)))


def _report(config: ml_collections.ConfigDict) -> dp_sparse.PrivacyReport:
    return dp_sparse.PrivacyReport(
        f"{config.report.directory}/report.html" if config.report.directory else None,
        diagnostics=config.report.diagnostics,
        note=protected(config),
    )


def _compile(model: TextClassifier, optimizer: keras.optimizers.Optimizer) -> None:
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def _private_optimizer(
    config: ml_collections.ConfigDict,
    model: TextClassifier,
    data: Data,
    tokenizer: TextTokenizer,
    steps: int,
    run: Run | None,
) -> keras.optimizers.Optimizer:
    table = word_table(model)
    sampling = dp_sparse.PoissonSampling(
        num_examples=len(data.training),
        expected_batch_size=config.training.batch_size,
        steps=steps,
    )
    select = functools.partial(
        selected_rows, config, table.name, table.input_dim, data.training, tokenizer
    )

    def build(
        plan: dp_sparse.PrivacyPlan, rows: dp_sparse.SelectedRows | None
    ) -> keras.optimizers.Optimizer:
        own = (
            optimizer_for(config, "table_optimizer", steps) if config.table_optimizer.name else None
        )
        wrapped = optimizer_for(config, "optimizer", steps, model)
        parts = config.training.microbatch_size or None
        return optimizer_under(config, plan, rows, wrapped, own, parts)

    return build(*calibrated(config, sampling, select, build, run))


class _Accuracy(keras.callbacks.Callback):
    """The accuracy after each epoch."""

    def __init__(self, examples: Tokens) -> None:
        super().__init__()
        self._examples = examples
        self.points: list[tuple[int, float]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        steps = int(self.model.optimizer.iterations.numpy())
        self.points.append((steps, accuracy(self.model, self._examples)))


def accuracy(model: keras.Model, examples: Tokens) -> float:
    """The part of the examples whose largest logit is that of their class.

    Examples of about equal length are judged at once, without the padding that all of them have.
    """
    lengths, right = np.asarray(examples.records["length"]), 0
    order = np.argsort(lengths, kind="stable")
    for begin in range(0, len(examples), _JUDGED_AT_ONCE):
        rows = order[begin : begin + _JUDGED_AT_ONCE]
        x, labels = examples.gather(rows)
        x = {name: values[:, : lengths[rows[-1]]] for name, values in x.items()}
        logits = np.asarray(model.predict_on_batch(x))
        right += int((np.nan_to_num(logits).argmax(axis=1) == labels).sum())
    return right / len(examples)


def _result(
    config: ml_collections.ConfigDict,
    model: TextClassifier,
    data: Data,
    timer: StepTimer,
    curve: _Accuracy,
    entries: float,
) -> Result:
    found = {name: accuracy(model, examples) for name, examples in data.judging.items()}
    table = model.backbone.vocabulary_size * model.backbone.token_embedding.output_dim
    optimizer, steps = model.optimizer, steps_taken(model.optimizer)
    statement, epsilon = "No guarantee: gradients were neither clipped nor noised.", math.inf
    if config.method != NON_PRIVATE:
        statement = f"{protected(config)}\n{optimizer.plan.statement(steps)}"
        epsilon = optimizer.plan.guaranteed(steps).epsilon
    return Result(
        method=config.method,
        accuracy=found,
        curve=curve.points,
        steps=steps,
        ms_per_step=1000 * statistics.median(timer.seconds[1:] or timer.seconds or [math.nan]),
        entries=entries,
        reduction=table / entries if entries else math.inf,
        statement=statement,
        epsilon=epsilon,
        training_rows=len(data.training),
        counts=data.counts,
        model=model,
    )


def _entries(model: TextClassifier, rows: np.ndarray | None, trained: bool) -> float:
    """Entries of the words' weights that a step changes, on average.

    Args:
        model: After its run.
        rows: Mean rows of each table that got noise in a step, if steps chose rows.
        trained: Whether any step was taken.
    """
    sizes = {each.path: math.prod(each.shape) for each in model.word_lookup.trainable_variables}
    if not getattr(model.optimizer, "selects_rows", False) or not sizes:
        return float(sum(sizes.values()))
    if not trained or rows is None:
        return math.nan
    table = word_table(model)
    dense = sum(size for path, size in sizes.items() if path != table.embeddings.path)
    return float(rows.sum() * table.output_dim + dense)

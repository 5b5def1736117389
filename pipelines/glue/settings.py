"""What a config asks for: settings that are refused before anything is read, steps, optimizers."""

import math

import keras
import ml_collections

from models.roberta_lora import TextClassifier, require_choices, word_table
from pipelines.glue.data import sources_of
from pipelines.glue.tasks import Task
from pipelines.methods import NON_PRIVATE
from pipelines.optimizers import optimizer_of
from pipelines.schedules import WarmUpAndDecay

METHODS = (NON_PRIVATE, "dp_sgd", "dp_adafest", "dp_fest", "dp_adafest_plus")


def check(config: ml_collections.ConfigDict, task: Task) -> None:
    """Refuses what is wrong before weights and text are read.

    Raises:
        GlueDataError: The text is not there, or what is held out of it cannot be.
        ValueError: Another setting cannot be used.
    """
    if config.method not in METHODS:
        raise ValueError(f"Expected method to be one of {METHODS}, got method={config.method!r}.")
    if config.method not in (NON_PRIVATE, "dp_sgd") and config.model.words == "frozen":
        raise ValueError(
            f"Expected model.words that trains with method={config.method!r}, got 'frozen': there "
            "are no rows to choose. Use method='dp_sgd'."
        )
    model = config.model
    require_choices(task.classes, model.rank, model.words, model.word_rank or None, model.pooling)
    optimizer_for(config, "optimizer", 1)
    if config.table_optimizer.name:
        optimizer_for(config, "table_optimizer", 1)
    if config.training.microbatch_size < 0:
        raise ValueError(
            "Expected training.microbatch_size >= 0, 0 for whole batches, got "
            f"training.microbatch_size={config.training.microbatch_size}."
        )
    for name in ("batch_size", "evaluations"):
        if config.training[name] < 1:
            raise ValueError(
                f"Expected training.{name} >= 1, got training.{name}={config.training[name]}."
            )
    if not 0 < config.training.epochs < math.inf:
        raise ValueError(
            f"Expected a finite training.epochs > 0, got training.epochs={config.training.epochs}."
        )
    sources_of(config, task)


def steps_of(config: ml_collections.ConfigDict, rows: int) -> int:
    """Steps of all epochs over so many rows.

    Without privacy every evaluation comes after the same number of steps.

    Raises:
        ValueError: A batch has more rows than there are.
    """
    if config.training.batch_size > rows:
        raise ValueError(
            f"Expected training.batch_size <= {rows}, the training rows, got "
            f"training.batch_size={config.training.batch_size}."
        )
    steps = max(1, round(config.training.epochs * rows / config.training.batch_size))
    if config.method == NON_PRIVATE:
        steps -= steps % min(config.training.evaluations, steps)
    return steps


def optimizer_for(
    config: ml_collections.ConfigDict, of: str, steps: int, model: TextClassifier | None = None
) -> keras.optimizers.Optimizer:
    """Keras' optimizer; weight decay, if it has any, leaves the word table of `model` out."""
    schedule = WarmUpAndDecay(config[of].learning_rate, steps, config[of].warm_up)
    rate = keras.optimizers.schedules.serialize(schedule)
    optimizer = optimizer_of(config, of, learning_rate=rate)
    if model is not None and getattr(optimizer, "weight_decay", None):
        optimizer.exclude_from_weight_decay(var_list=list(word_table(model).trainable_variables))
    return optimizer

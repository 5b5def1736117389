"""Trains one classifier on labelled images by DP-SGD and evaluates it on images held out.

The held-out images are the test split. With `data.validation_fraction`, which is for choosing
hyper-parameters, they are that last part of the training split, and the test split is not used.
"""

import dataclasses
import time
from collections.abc import Callable

import keras
import ml_collections
import numpy as np
import tensorflow as tf

import dp_sparse
from models import classifiers, vision
from pipelines.images.data import LabelledImages, hold_out
from pipelines.optimizers import optimizer_of
from pipelines.runs import Run
from pipelines.steps import steps_taken

MODELS: dict[str, Callable[..., keras.Model]] = {
    "mlp": classifiers.mlp,
    "cnn": classifiers.cnn,
    "rnn": classifiers.rnn,
    "lstm": classifiers.lstm,
    "resnet18": vision.resnet18,
    "resnet101": vision.resnet101,
    "vgg16": vision.vgg16,
}


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of one run.

    Attributes:
        accuracy: The part of the held-out images that are classified correctly.
        evaluated_on: "test" or "validation".
        steps: Steps taken.
        seconds: The time of training.
        statement: The plan's statement.
        epsilon: ε spent.
        delta: Its δ.
    """

    accuracy: float
    evaluated_on: str
    steps: int
    seconds: float
    statement: str
    epsilon: float
    delta: float


def train(
    config: ml_collections.ConfigDict,
    training: LabelledImages,
    test: LabelledImages,
    run: Run | None = None,
) -> RunResult:
    """Trains `config.model` on `training` and evaluates it; with a `run` it goes on where that is.

    Raises:
        ValueError: An unknown model, or a setting that the model, the plan or the optimizer
            refuses.
    """
    held_out, evaluated_on = test, "test"
    if config.data.validation_fraction:
        training, held_out = hold_out(training, config.data.validation_fraction)
        evaluated_on = "validation"
    keras.utils.set_random_seed(
        config.seed
    )  # initial weights; noise and sampling have keys of their own
    model = _model(config, training.images.shape[1:])
    plan = _plan(config, len(training))
    plan = plan.calibrate() if run is None else run.plan(plan.calibrate)
    _compile(model, config, plan)
    begun = time.perf_counter()
    examples = training.images, training.labels
    batches = plan.sampling.batches(examples) if run is None else run.batches(examples)
    _fit(model, batches, config, run)
    seconds = time.perf_counter() - begun
    return _result(model, plan, accuracy(model, held_out), evaluated_on, seconds)


def _fit(
    model: keras.Model,
    batches: tf.data.Dataset,
    config: ml_collections.ConfigDict,
    run: Run | None,
) -> None:
    callbacks = [_report(config)]
    if run is not None:
        run.restore(model)
        callbacks += run.callbacks()
    if model.optimizer.steps_left:
        model.fit(batches, callbacks=callbacks, verbose=config.report.verbose)
    else:  # it was killed after its last step, perhaps before averages replaced the weights
        model.optimizer.finalize_variable_values(model.trainable_variables)


def accuracy(model: keras.Model, held_out: LabelledImages) -> float:
    """The part of the images whose largest logit is that of their label."""
    logits = model.predict(held_out.images, batch_size=512, verbose=0)
    return float(np.mean(np.argmax(logits, axis=1) == held_out.labels))


def _model(config: ml_collections.ConfigDict, input_shape: tuple[int, ...]) -> keras.Model:
    if config.model.name not in MODELS:
        raise ValueError(
            f"Expected model.name to be one of {tuple(MODELS)}, got "
            f"model.name={config.model.name!r}."
        )
    try:
        return MODELS[config.model.name](
            input_shape, config.data.num_classes, **config.model.options.to_dict()
        )
    except TypeError as error:  # an option that the model does not have
        raise ValueError(f"model.options: {error}.") from error


def _plan(config: ml_collections.ConfigDict, num_examples: int) -> dp_sparse.PrivacyPlan:
    return dp_sparse.PrivacyPlan(
        budget=dp_sparse.PrivacyBudget(epsilon=config.privacy.epsilon, delta=config.privacy.delta),
        sampling=dp_sparse.PoissonSampling(
            num_examples=num_examples,
            expected_batch_size=config.training.batch_size,
            steps=config.training.steps,
        ),
    )


def _compile(
    model: keras.Model, config: ml_collections.ConfigDict, plan: dp_sparse.PrivacyPlan
) -> None:
    rate = keras.optimizers.schedules.CosineDecay(
        config.optimizer.learning_rate, decay_steps=plan.sampling.steps
    )
    schedule = keras.optimizers.schedules.serialize(rate)
    wrapped = optimizer_of(config, learning_rate=schedule)
    model.compile(
        optimizer=dp_sparse.DPSGDOptimizer(wrapped, plan, clip_norm=config.privacy.clip_norm),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


def _report(config: ml_collections.ConfigDict) -> dp_sparse.PrivacyReport:
    return dp_sparse.PrivacyReport(
        f"{config.report.directory}/report.html", diagnostics=config.report.diagnostics
    )


def _result(
    model: keras.Model,
    plan: dp_sparse.PrivacyPlan,
    accuracy: float,
    evaluated_on: str,
    seconds: float,
) -> RunResult:
    steps = steps_taken(model.optimizer)
    spent = plan.guaranteed(steps)
    return RunResult(
        accuracy=accuracy,
        evaluated_on=evaluated_on,
        steps=steps,
        seconds=seconds,
        statement=plan.statement(steps),
        epsilon=spent.epsilon,
        delta=spent.delta,
    )

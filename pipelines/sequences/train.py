"""Trains one next-item model privately, or without privacy, with a score every few epochs.

Adam with weight decay on normalised gradients (Ding et al., ICML 2024, D.3 and D.6). Weight decay
is applied by Adam to the weights after noise: it is computed from what was released.
"""

import dataclasses
import time
from collections.abc import Callable

import keras
import ml_collections
import tensorflow as tf

import dp_sparse
from models.sequence_transformer import Encoder, sequence_model
from pipelines.runs import Run
from pipelines.sequences.examples import SequenceExamples
from pipelines.sequences.plans import Accounted, accounted, steps_of
from pipelines.sequences.schedule import WarmUpAndDecay

Score = Callable[[keras.Model], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model after its run.

    Attributes:
        model: The model.
        curve: Scores by epochs done, from where this process began.
        steps: Steps taken.
        seconds: The time of training in this process, without that of scores.
        plan: What was paid; None without privacy.
    """

    model: keras.Model
    curve: dict[int, dict[str, float]]
    steps: int
    seconds: float
    plan: dp_sparse.PrivacyPlan | None


def train(
    config: ml_collections.ConfigDict,
    examples: SequenceExamples,
    score: Score,
    frequencies: dp_sparse.RowFrequencies | None = None,
    run: Run | None = None,
) -> Trained:
    """Trains `config.model` on the examples; a private run goes on where its directory is.

    Args:
        config: The experiment; `privacy.method` is "dp_sgd" or "none".
        examples: What it is trained on.
        score: Called after every `training.score_every` epochs, and at the end.
        frequencies: Of the tokens, if they were counted already.
        run: What is kept of a private run; None to keep nothing.

    Raises:
        ValueError: A setting that the model, the plan or the optimizer refuses.
    """
    keras.utils.set_random_seed(config.seed)  # initial weights alone
    if config.privacy.method not in ("dp_sgd", "none"):
        raise ValueError(
            f"Expected privacy.method 'dp_sgd' or 'none', got {config.privacy.method!r}."
        )
    if config.privacy.method == "none":
        model, batches = _compiled(config, examples, None)
        return _fitted(config, examples, model, batches, score, None, None)
    paid = accounted(config, examples, frequencies, run)
    model, batches = _compiled(config, examples, paid)
    return _fitted(config, examples, model, batches, score, paid.plan, run)


def _compiled(
    config: ml_collections.ConfigDict, examples: SequenceExamples, paid: Accounted | None
) -> tuple[keras.Model, tf.data.Dataset]:
    """The model and its batches."""
    model = sequence_model(_encoder(config, examples, paid), examples.y.shape[1])
    steps = steps_of(config, len(examples))
    rate = WarmUpAndDecay(config.optimizer.learning_rate, steps, config.optimizer.warm_up)
    optimizer = keras.optimizers.Adam(rate, weight_decay=config.optimizer.weight_decay or None)
    data = examples.x, examples.y
    if paid is None:
        batches = _shuffled(data, len(examples), config.training.batch_size)
    else:
        optimizer = dp_sparse.DPSGDOptimizer(
            optimizer,
            paid.plan,
            config.privacy.clip_norm,
            clipping=dp_sparse.AutomaticClipping(),
            microbatch_size=config.training.microbatch_size or None,
        )
        batches = paid.plan.sampling.batches(data)
    # A padded position has no item to come, and no loss.
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    model.compile(optimizer, loss)
    return model, batches


def _encoder(
    config: ml_collections.ConfigDict, examples: SequenceExamples, paid: Accounted | None
) -> Encoder:
    errors = None
    if config.model.kind == "re_attention":
        if paid is None or paid.frequencies is None:
            raise ValueError(
                "Expected model.kind without Re-Attention for privacy.method='none', got "
                "model.kind='re_attention': without noise there are no errors to correct."
            )
        errors = dp_sparse.layers.effective_errors(
            paid.plan, config.privacy.clip_norm, paid.frequencies
        )
    return Encoder(examples.num_tokens, examples.x.shape[1], errors=errors, **config.model)


def _fitted(
    config: ml_collections.ConfigDict,
    examples: SequenceExamples,
    model: keras.Model,
    batches: tf.data.Dataset,
    score: Score,
    plan: dp_sparse.PrivacyPlan | None,
    run: Run | None,
) -> Trained:
    """Fits a few epochs at a time, with a score after each part, which is printed if wanted."""
    curve: dict[int, dict[str, float]] = {}
    done = run.restore(model) if run is not None else 0
    steps, seconds = steps_of(config, len(examples)), 0.0
    every = config.training.score_every or config.training.epochs
    for epoch in [*range(every, config.training.epochs, every), config.training.epochs]:
        part = round(steps * epoch / config.training.epochs) - done
        if part > 0:
            begun = time.perf_counter()
            model.fit(
                batches,
                steps_per_epoch=part,
                verbose=config.report.verbose,
                callbacks=_callbacks(config, plan, run, last=done + part == steps),
            )
            seconds, done = seconds + time.perf_counter() - begun, done + part
        if part > 0 or epoch == config.training.epochs:  # a part of few steps may have none
            curve[epoch] = score(model)
            if config.report.verbose:
                print(f"epoch {epoch}:", *(f"{n} {v:.4f}" for n, v in curve[epoch].items()))
    return Trained(model, curve, done, seconds, plan)


def _callbacks(
    config: ml_collections.ConfigDict,
    plan: dp_sparse.PrivacyPlan | None,
    run: Run | None,
    last: bool,
) -> list[keras.callbacks.Callback]:
    """What keeps a private run, and its report, once, at its end."""
    kept = [] if run is None else run.callbacks()
    if plan is None or not last or not config.report.directory:
        return kept
    return [dp_sparse.PrivacyReport(f"{config.report.directory}/report.html"), *kept]


def _shuffled(data: tuple[object, ...], examples: int, batch_size: int) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(examples).repeat()
    return dataset.batch(batch_size, drop_remainder=True).prefetch(2)

"""One run on a text, and how well the model predicts the held-out part."""

import dataclasses

import keras
import ml_collections
import numpy as np
from scipy import special

from pipelines.runs import Run
from pipelines.sequences.examples import SequenceExamples
from pipelines.sequences.train import check, train
from pipelines.shakespeare.text import load

_WINDOW = (
    "An example is a window of {} characters: the guarantee is for such a window, and not for a "
    "speech, a play or an author. Where windows begin, and which are held out, counts as public."
)
_NONE = "No privacy: this run was trained without noise."


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a run.

    Attributes:
        loss: Mean cross-entropy of a held-out character, in nats.
        accuracy: The part of them with the largest logit.
        curve: Both by epochs done.
        steps: Steps taken.
        seconds: The time of training.
        epsilon: ε spent; None without privacy.
        statement: What is guaranteed, to whom.
        left_out: Characters that were taken out of the text.
    """

    loss: float
    accuracy: float
    curve: dict[int, dict[str, float]]
    steps: int
    seconds: float
    epsilon: float | None
    statement: str
    left_out: int


def run(config: ml_collections.ConfigDict, kept: Run | None = None) -> Result:
    """Loads, trains and judges; a private run goes on where what is kept of it is.

    Raises:
        TextError: The text cannot be used.
        ValueError: A setting cannot be used.
    """
    text = load(config.data)
    check(config, text.training)
    protected = _WINDOW.format(config.data.length + 1)
    trained = train(
        config, text.training, lambda model: scores(model, text.held_out), protected, run=kept
    )
    last, plan = trained.curve[config.training.epochs], trained.plan
    statement = _NONE
    if plan is not None:
        statement = f"{protected}\n{plan.statement(trained.steps)}"
    return Result(
        loss=last["loss"],
        accuracy=last["accuracy"],
        curve=trained.curve,
        steps=trained.steps,
        seconds=trained.seconds,
        epsilon=None if plan is None else plan.guaranteed(trained.steps).epsilon,
        statement=statement,
        left_out=text.left_out,
    )


def scores(
    model: keras.Model, held_out: SequenceExamples, batch_size: int = 64
) -> dict[str, float]:
    """Mean cross-entropy and accuracy over all held-out characters."""
    losses, right = [], []
    for start in range(0, len(held_out), batch_size):
        part = slice(start, start + batch_size)
        logits = np.asarray(model.predict_on_batch(held_out.x[part]))[..., 1:]
        labels = held_out.y[part, :, np.newaxis] - 1
        own = np.take_along_axis(special.log_softmax(logits, axis=-1), labels, axis=-1)
        losses.append(-own.ravel())
        right.append((logits.argmax(axis=-1) == labels[..., 0]).ravel())
    return {
        "loss": float(np.concatenate(losses).mean()),
        "accuracy": float(np.concatenate(right).mean()),
    }

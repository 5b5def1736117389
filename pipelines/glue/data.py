"""What trains and what judges: records of the training file, some held out, and the dev file."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import ml_collections
import numpy as np

from pipelines.glue.held_out import split
from pipelines.glue.reading import TextFile, TfdsSplit, source_of
from pipelines.glue.records import Tokens, tokens_of
from pipelines.glue.tasks import DEV, TRAIN, GlueDataError, Task
from pipelines.glue.tokens import TextTokenizer

VALIDATION, HELD_OUT = "validation", "held_out"
_ROW = (
    "An example is one row of the training file: the guarantee is for a row, not for a sentence of "
    "which the file has several rows, nor for who wrote it. Weights and tokenizer from which the "
    "run began count as public. No epsilon covers accuracies, nor the rows that they are of."
)
_SPLIT = (
    "Rows were held out by what all rows say (data.held_out, data.validation): one row more may "
    "move others out of training. Which rows train, and how many, counts as public."
)


@dataclasses.dataclass(frozen=True)
class Data:
    """The examples of a run.

    Attributes:
        training: What it trains on.
        judging: What judges, by name: `DEV`, and `VALIDATION` and `HELD_OUT` if rows are held out.
        counts: What was left out, cut or dropped, for anyone who runs the job.
    """

    training: Tokens
    judging: dict[str, Tokens]
    counts: dict[str, int]


def protected(config: ml_collections.ConfigDict) -> str:
    """Whom a private run's statement speaks of, and what of the data it takes as public."""
    return f"{_ROW}\n{_SPLIT}" if _holds_out(config) else _ROW


def _holds_out(config: ml_collections.ConfigDict) -> bool:
    return bool(config.data.held_out or config.data.validation)


def load(
    config: ml_collections.ConfigDict, task: Task, tokenizer: TextTokenizer, segments: bool
) -> Data:
    """The examples of `config.data`, tokenized once.

    Tokens are as private as the text: they are kept beside the run's directory, not in it.

    Raises:
        GlueDataError: The text cannot be used, or not divided as the config asks for.
    """
    settings = config.data
    sources = sources_of(config, task)
    if not settings.prepared and not config.report.directory:
        raise GlueDataError(
            "Expected data.prepared, a folder for tokens, or report.directory, beside which they "
            "are kept, got neither: pass --config.data.prepared=FOLDER."
        )
    directory = Path(settings.prepared or f"{config.report.directory}-tokens")
    found = {
        name: tokens_of(
            source,
            name,
            tokenizer,
            settings.length,
            directory,
            segments=segments,
            progress=bool(config.report.verbose),
        )
        for name, source in sources.items()
    }
    counts = {f"{name}: {what}": n for name in found for what, n in found[name].counts.items()}
    judging = {DEV: found[DEV]}
    training = found[TRAIN]
    if _holds_out(config):
        texts = sources[TRAIN].read().texts[0]
        if len(texts) != len(training):
            raise GlueDataError(
                f"Expected tokens of {len(texts)} examples in {directory}, got {len(training)}: "
                "the text was changed while it was read. Begin again."
            )
        training, parts, dropped = _held_out(settings, texts, training)
        judging |= parts
        counts["train: on no side"] = dropped
    return Data(training, judging, counts)


def sources_of(config: ml_collections.ConfigDict, task: Task) -> dict[str, TextFile | TfdsSplit]:
    """Where the examples of each split are; nothing is read yet.

    Raises:
        GlueDataError: There are none, or settings of what is held out of them cannot be used.
    """
    settings = config.data
    for name in ("held_out", "validation"):
        if settings[name] < 0:
            raise GlueDataError(f"Expected data.{name} >= 0, got data.{name}={settings[name]}.")
    if _holds_out(config) and len(task.splits[TRAIN].texts) > 1:
        raise GlueDataError(
            f"Expected data.held_out=0 and data.validation=0 for task={task.name!r}, got "
            f"{settings.held_out} and {settings.validation}: rows are held out of tasks on "
            "single sentences."
        )
    sides = {DEV: True, HELD_OUT: settings.held_out, VALIDATION: settings.validation}
    judges = tuple(name for name, there in sides.items() if there)
    if settings.judge not in judges:
        raise GlueDataError(
            f"Expected data.judge to be one of {judges}, got data.judge={settings.judge!r}."
        )
    return {name: source_of(settings, task, name) for name in (TRAIN, DEV)}


def _held_out(
    settings: ml_collections.ConfigDict, texts: Sequence[str], tokens: Tokens
) -> tuple[Tokens, dict[str, Tokens], int]:
    """Rows that train, rows that choose and judge, and how many are on no side."""
    sides = split(texts, settings.held_out, settings.validation, settings.split_seed)
    parts = {HELD_OUT: tokens.at(sides.held_out), VALIDATION: tokens.at(sides.validation)}
    judging = {name: part for name, part in parts.items() if len(part)}
    return tokens.at(np.asarray(sides.training)), judging, len(sides.dropped)

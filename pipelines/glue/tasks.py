"""The tasks: which files, which columns, which labels.

Files are as GLUE (Wang et al., ICLR 2019) and XNLI (Conneau et al., EMNLP 2018) publish them: a
header, tab-separated, no quoting.
"""

import dataclasses
from collections.abc import Mapping

import ml_collections

TRAIN, DEV = "train", "dev"


class GlueDataError(ValueError):
    """Text is missing, or in a form that the pipeline does not read."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """Where a file has what.

    Attributes:
        file: Its name, without `.gz`.
        texts: The columns of one sentence, or of a pair in its order.
        label: The column of the label.
        tfds: The same split of tensorflow-datasets, `NAME:SPLIT`; empty if it has none.
    """

    file: str
    texts: tuple[str, ...]
    label: str
    tfds: str = ""


@dataclasses.dataclass(frozen=True)
class Task:
    """A classification of sentences or of pairs.

    Attributes:
        name: Its name in configs.
        labels: The class of each label as the files write it.
        splits: The files, by `TRAIN` and `DEV`.
    """

    name: str
    labels: Mapping[str, int]
    splits: Mapping[str, Columns]

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return max(self.labels.values()) + 1


def _glue(name: str, texts: tuple[str, ...], labels: tuple[str, ...], label: str = "label") -> Task:
    splits = {
        TRAIN: Columns("train.tsv", texts, label, f"glue/{name}:train"),
        DEV: Columns("dev.tsv", texts, label, f"glue/{name}:validation"),
    }
    return Task(name, {text: number for number, text in enumerate(labels)}, splits)


_NLI = {"entailment": 0, "neutral": 1, "contradiction": 2, "contradictory": 2}

TASKS = {
    "sst2": _glue("sst2", ("sentence",), ("0", "1")),
    "qnli": _glue("qnli", ("question", "sentence"), ("entailment", "not_entailment")),
    "qqp": _glue("qqp", ("question1", "question2"), ("0", "1"), "is_duplicate"),
    # Trained on English, as XNLI has it; its dev file has all 15 languages.
    "xnli": Task(
        "xnli",
        _NLI,
        {
            TRAIN: Columns("multinli.train.en.tsv", ("premise", "hypo"), "label"),
            DEV: Columns("xnli.dev.tsv", ("sentence1", "sentence2"), "gold_label"),
        },
    ),
}


def task_of(config: ml_collections.ConfigDict) -> Task:
    """The task that `config.task` names.

    Raises:
        GlueDataError: There is no such task.
    """
    if config.task not in TASKS:
        raise GlueDataError(f"Expected task to be one of {tuple(TASKS)}, got task={config.task!r}.")
    return TASKS[config.task]

"""Windows of a text as examples; the characters are the 95 printable ones of ASCII, and newline.

That set is public. Characters outside of it are taken out, and counted. Windows do not overlap, so
a character is in one example; the last part of the text is held out.
"""

import dataclasses
from pathlib import Path

import ml_collections
import numpy as np

from pipelines.sequences.examples import SequenceExamples

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))


class TextError(ValueError):
    """The text is missing or too short."""


@dataclasses.dataclass(frozen=True)
class Text:
    """Windows to train on and windows that judge, and how many characters were taken out."""

    training: SequenceExamples
    held_out: SequenceExamples
    left_out: int


def load(config: ml_collections.ConfigDict) -> Text:
    """The windows of `config.data`: `length` characters each, and the one after each of them.

    Raises:
        TextError: There is no such file, it has fewer than two windows in either part, or a setting
            is out of its range.
    """
    path = Path(config.path)
    if not config.path or not path.is_file():
        raise TextError(
            f"Expected data.path, a text file, got data.path={config.path!r}: pass "
            "--config.data.path=FILE."
        )
    if not 0 < config.held_out_fraction < 1 or config.length < 1:
        raise TextError(
            "Expected 0 < data.held_out_fraction < 1 and data.length >= 1, got "
            f"data.held_out_fraction={config.held_out_fraction}, data.length={config.length}."
        )
    text = path.read_text(encoding="utf-8", errors="replace")
    tokens = encoded(text)
    boundary = round(len(tokens) * (1 - config.held_out_fraction))
    training, held_out = (
        _windows(part, config.length) for part in (tokens[:boundary], tokens[boundary:])
    )
    if min(len(training), len(held_out)) < 2:
        raise TextError(
            f"Expected a text of at least two windows of {config.length + 1} characters to train "
            f"on and two to judge by, got {len(tokens)} characters: lower data.length."
        )
    return Text(training, held_out, len(text) - len(tokens))


def encoded(text: str) -> np.ndarray:
    """int32 tokens from 1 on, without characters outside of the set."""
    number = {character: place for place, character in enumerate(CHARACTERS, 1)}
    return np.array([number[each] for each in text if each in number], np.int32)


def _windows(tokens: np.ndarray, length: int) -> SequenceExamples:
    count = len(tokens) // (length + 1)
    whole = tokens[: count * (length + 1)].reshape(count, length + 1)
    return SequenceExamples(whole[:, :-1], whole[:, 1:], len(CHARACTERS))

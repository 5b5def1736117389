"""Sequences as examples of one length: tokens, and after each of the last ones the token to come.

Tokens are numbered from 1; 0 is padding, in front.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class SequenceExamples:
    """Training examples, one a sequence.

    Attributes:
        x: int32 `[examples, length]`.
        y: int32 `[examples, predicted]`: what follows each of the last positions; 0 for nothing.
        num_tokens: Tokens are from 1 to `num_tokens`.
    """

    x: np.ndarray
    y: np.ndarray
    num_tokens: int

    def __len__(self) -> int:
        return len(self.x)


def last_of(sequences: list[np.ndarray], length: int) -> np.ndarray:
    """The last `length` tokens of each sequence behind padding, int32 `[sequences, length]`."""
    found = np.zeros((len(sequences), length), np.int32)
    for row, tokens in zip(found, sequences, strict=True):
        kept = tokens[max(0, len(tokens) - length) :]
        row[length - len(kept) :] = kept
    return found


def training_examples(
    sequences: list[np.ndarray], length: int, predicted: int, num_tokens: int
) -> SequenceExamples:
    """One example of each sequence: its last `length` tokens but one, and what follows them.

    Raises:
        ValueError: `predicted` is not between 1 and `length`.
    """
    if not 1 <= predicted <= length:
        raise ValueError(
            f"Expected 1 <= data.predicted <= data.length={length}, got data.predicted={predicted}."
        )
    whole = last_of(sequences, length + 1)
    return SequenceExamples(whole[:, :-1], whole[:, 1:][:, -predicted:], num_tokens)

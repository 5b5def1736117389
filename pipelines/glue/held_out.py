"""Rows held out of a training file whose rows are phrases of each other, as those of SST-2 are.

SST-2's training file has sentences and the phrases of their parse trees. A phrase in training gives
the label of the sentence around it away, so rows that one of them contains, word by word, belong on
one side. Linking all of them makes one group of almost the whole file, since single words are rows,
too. Here is what works:

1. A row is *maximal* if no other row contains it. Every row has its maximal rows around it.
2. Maximal rows that share a row of `LINKING_WORDS` words or more are one group. Groups are divided
   among the sides at random.
3. A row is on a side if all maximal rows around it are; a row with some on either side is dropped.

If a row contains another, the maximal rows around it are also around the other. So no row of a side
contains a row of another side, whatever the groups are; they only keep few rows from being dropped.
`python -m pipelines.glue.held_out --data FOLDER` prints both. Rows are compared by lower-case words
between spaces.

It takes O(words · lengths of rows) look-ups of short strings of bytes.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from pipelines.glue.reading import source_of
from pipelines.glue.tasks import TASKS, TRAIN, GlueDataError

LINKING_WORDS = 4


@dataclasses.dataclass(frozen=True)
class Containment:
    """Which rows contain which.

    Attributes:
        of_row: int64 `[rows]`: the number of each row's text among the distinct texts.
        words: int64 `[texts]`: how many words each text has.
        around: The maximal texts around each text, itself if it is maximal.
    """

    of_row: np.ndarray
    words: np.ndarray
    around: tuple[tuple[int, ...], ...]

    @property
    def maximal(self) -> list[int]:
        """The texts that no other one contains."""
        return [text for text, around in enumerate(self.around) if around == (text,)]


@dataclasses.dataclass(frozen=True)
class Split:
    """Rows of each side, int64, sorted; no row of a side contains one of another.

    Attributes:
        training: Rows that train.
        validation: Rows that choose settings.
        held_out: Rows that judge.
        dropped: Rows on no side.
    """

    training: np.ndarray
    validation: np.ndarray
    held_out: np.ndarray
    dropped: np.ndarray


def containment(sentences: Sequence[str]) -> Containment:
    """Finds the maximal texts around each row."""
    number: dict[str, int] = {}
    texts: dict[bytes, int] = {}
    of_row = []
    for sentence in sentences:
        ids = [number.setdefault(word, len(number)) for word in sentence.lower().split()]
        of_row.append(texts.setdefault(np.array(ids, np.int32).tobytes(), len(texts)))
    inside = [_texts_inside(text, texts) for text in texts]
    contained = set().union(*inside)
    around: list[list[int]] = [[] for _ in texts]
    for text, found in enumerate(inside):
        if text not in contained:
            around[text].append(text)
            for inner in found:
                around[inner].append(text)
    words = np.array([len(text) // 4 for text in texts], np.int64)
    return Containment(np.array(of_row, np.int64), words, tuple(map(tuple, around)))


def _texts_inside(text: bytes, texts: dict[bytes, int]) -> set[int]:
    """The other texts that one contains, of words of four bytes."""
    found = set()
    for begin in range(0, len(text), 4):
        for end in range(begin + 4, len(text) + 1, 4):
            inner = texts.get(text[begin:end])
            if inner is not None:
                found.add(inner)
    return found - {texts[text]}


def groups(found: Containment, linking_words: int = LINKING_WORDS) -> np.ndarray:
    """The group of each maximal text, int64 `[texts]`; -1 for other texts."""
    parent = np.arange(len(found.around))

    def root(text: int) -> int:
        while parent[text] != text:
            parent[text] = parent[parent[text]]
            text = parent[text]
        return text

    for around, words in zip(found.around, found.words, strict=True):
        if words >= linking_words:
            for other in around[1:]:
                parent[root(other)] = root(around[0])
    group = np.full(len(parent), -1)
    for text in found.maximal:
        group[text] = root(text)
    return group


def split(
    sentences: Sequence[str],
    held_out: int,
    validation: int,
    seed: int,
    linking_words: int = LINKING_WORDS,
) -> Split:
    """Holds rows out: `held_out` to judge by, `validation` to choose settings by.

    Args:
        sentences: The rows.
        held_out: How many, exactly.
        validation: How many others, exactly.
        seed: Of the choice of groups.
        linking_words: See `groups`.

    Raises:
        GlueDataError: The rows of groups that can be held out are too few, or none would train.
    """
    found = containment(sentences)
    group = groups(found, linking_words)
    rng = np.random.default_rng(seed)
    order = rng.permutation(np.unique(group[group >= 0]))
    of_group = _rows_of_groups(found, group)
    sides, rest = [], list(order)
    for wanted in (held_out, validation):
        taken, rest = _taken(of_group, rest, wanted)
        rows = rng.permutation(_wholly_inside(found, group, taken))[:wanted]
        sides.append(np.sort(rows))
    training = _wholly_inside(found, group, set(rest))
    if len(sides[0]) < held_out or len(sides[1]) < validation or not len(training):
        raise GlueDataError(
            f"Expected rows to train on and {held_out} and {validation} others of sentences apart, "
            f"got {len(sentences)} rows in {len(order)} groups: lower data.held_out and "
            "data.validation."
        )
    kept = np.concatenate([*sides, training])
    dropped = np.setdiff1d(np.arange(len(sentences)), kept)
    return Split(training, sides[1], sides[0], dropped)


def measure(sentences: Sequence[str], held_out: int, seed: int = 0) -> list[dict[str, int]]:
    """What linking by rows of 1, 2, … words gives: groups, the largest, rows that are dropped."""
    found = containment(sentences)
    lines = []
    for words in (1, 2, 3, 4, 6, 8):
        group = groups(found, words)
        rows = _rows_of_groups(found, group)
        line = {
            "linking_words": words,
            "groups": len(rows),
            "largest": max(map(len, rows.values())),
        }
        order = list(np.random.default_rng(seed).permutation(sorted(rows)))
        taken, rest = _taken(rows, order, held_out)
        kept = [len(_wholly_inside(found, group, side)) for side in (taken, set(rest))]
        lines.append({**line, "dropped": len(sentences) - sum(kept)})
    return lines


def _rows_of_groups(found: Containment, group: np.ndarray) -> dict[int, list[int]]:
    """The rows that maximal texts of one group alone are around, by group."""
    rows: dict[int, list[int]] = {int(number): [] for number in np.unique(group[group >= 0])}
    for row, text in enumerate(found.of_row):
        own = {int(group[maximal]) for maximal in found.around[text]}
        if len(own) == 1:
            rows[own.pop()].append(row)
    return rows


def _taken(
    of_group: dict[int, list[int]], order: list[int], wanted: int
) -> tuple[set[int], list[int]]:
    """The first groups with as many rows as wanted, and the rest."""
    total = 0
    for count, group in enumerate(order):
        if total >= wanted:
            return set(order[:count]), order[count:]
        total += len(of_group[group])
    return set(order), []


def _wholly_inside(found: Containment, group: np.ndarray, side: set[int]) -> np.ndarray:
    """The rows of which all maximal texts around are in some groups."""
    inside = np.array([all(group[m] in side for m in around) for around in found.around], bool)
    return np.flatnonzero(inside[found.of_row])


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what each way to link SST-2's sentences gives, for 10,000 rows that do not train."""
    parser = argparse.ArgumentParser(description="Rows held out of SST-2, by how they are linked.")
    parser.add_argument("--data", required=True, help="a folder with train.tsv, or .gz")
    parser.add_argument("--rows", type=int, default=10_000, help="that do not train")
    options = parser.parse_args(arguments)
    config: Any = SimpleNamespace(path=options.data, tfds=False, quarantine=False, directory="")
    try:
        sentences = source_of(config, TASKS["sst2"], TRAIN).read().texts[0]
    except GlueDataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("| words that link | groups | rows of the largest | rows dropped |\n|---|---|---|---|")
    for line in measure(sentences, options.rows):
        print(f"| {' | '.join(f'{value:,}' for value in line.values())} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())

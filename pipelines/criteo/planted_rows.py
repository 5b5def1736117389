"""The rows of generated click data: what they hold, and the planted model of their labels.

Category ranks follow a truncated Zipf law, counts are log-normal, values are missing as often as
in the Criteo Kaggle rows, and labels are Bernoulli with logit

    bias + spread · (√0.7 · category effects + √0.3 · count effects),

both parts standardised. The effect of a category decreases with its rank, so that a model can learn
most of it in a few hundred batches. Effects come from a hash, not from a table. A chunk of rows
depends only on the seed, the day and its number. Time is about 10 µs per row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipelines.criteo.schema import (
    NUM_CATEGORIES,
    NUM_INTEGERS,
    TABLE3_VOCABULARIES,
    log_transform,
    mix64,
    validate_vocabularies,
)

POSITIVE_RATE = 0.25

_CHUNK_ROWS = 1 << 14
MISSING = -1  # the rank of a missing category
_RANK_BITS = 27  # with 5 bits of feature, a category is 32 bits: 8 hexadecimal digits
_LOGIT_SPREAD = 1.35
_CATEGORY_SHARE = 0.7  # the part of the logit's variance that comes from categories
_FADING_RANK = 32.0
MAX_DIGITS = 8
_VERSION_STEP = np.uint32(0x9E3779B1)  # odd: 2³² over the golden ratio

# Per feature, as measured on the public Criteo Kaggle sample.
_INTEGER_MISSING = (0.45, 0, 0.21, 0.21, 0.03, 0.22, 0.04, 0, 0.04, 0.45, 0.04, 0.77, 0.21)
_CATEGORY_MISSING = (
    *(0, 0, 0.03, 0.03, 0, 0.12, 0, 0, 0, 0, 0, 0.03, 0),
    *(0, 0, 0.03, 0, 0, 0.44, 0.44, 0.03, 0.76, 0, 0.03, 0.44, 0.44),
)
_LOG_MEANS = (0.9, 2.1, 2.1, 1.7, 7.3, 3.4, 1.6, 2.0, 3.5, 0.4, 0.9, 0.3, 1.7)
_LOG_SPREADS = (1.0, 2.1, 1.2, 0.9, 3.0, 1.8, 1.4, 1.2, 1.6, 0.4, 0.8, 0.6, 1.0)
_NEGATIVE_CODES = np.arange(NUM_INTEGERS) == 1  # the feature in which Criteo has -1


@dataclass(frozen=True)
class Drift:
    """How the rows of a day differ from those of day 0.

    Attributes:
        day: Which day, from 0.
        renewal: How often a day a category of given rank is replaced by a new one, with an effect
            of its own.
        turn: The angle a day, in radians, by which the effects of values turn towards others.
    """

    day: int = 0
    renewal: float = 0.05
    turn: float = 0.03


NO_DRIFT = Drift()


@dataclass(frozen=True)
class GeneratedRows:
    """Rows before they are written.

    Attributes:
        labels: [rows] bool.
        counts: [rows, 13] int64.
        count_missing: [rows, 13] bool.
        ranks: The frequency rank of each category from 0, or -1 if missing, [rows, 26] int64.
        codes: The number of each category, another one for each feature, [rows, 26] uint32.
        probabilities: What the planted model gives each row, [rows] float64.
    """

    labels: npt.NDArray[np.bool_]
    counts: npt.NDArray[np.int64]
    count_missing: npt.NDArray[np.bool_]
    ranks: npt.NDArray[np.int64]
    codes: npt.NDArray[np.uint32]
    probabilities: npt.NDArray[np.float64]


def generated_rows(
    rows: int,
    seed: int = 0,
    vocabularies: Sequence[int] = TABLE3_VOCABULARIES,
    zipf_exponent: float = 1.1,
    drift: Drift = NO_DRIFT,
) -> Iterator[GeneratedRows]:
    """Draws the rows that `generate` writes, in chunks."""
    sizes = validate_vocabularies(vocabularies)
    _check_arguments(rows, seed, sizes, zipf_exponent)
    cumulative = [_zipf_cumulative(size, zipf_exponent) for size in sizes]
    return _draw_chunks(rows, seed, cumulative, drift)


def planted_probabilities(
    rows: int,
    seed: int = 0,
    vocabularies: Sequence[int] = TABLE3_VOCABULARIES,
    zipf_exponent: float = 1.1,
    drift: Drift = NO_DRIFT,
) -> npt.NDArray[np.float64]:
    """Returns the probability of a click of each row that `generate` writes, [rows].

    No model ranks these rows better in expectation: its AUC on their labels is the Bayes AUC.
    """
    chunks = generated_rows(rows, seed, vocabularies, zipf_exponent, drift)
    return np.concatenate([chunk.probabilities for chunk in chunks])


def _check_arguments(rows: int, seed: int, sizes: tuple[int, ...], zipf_exponent: float) -> None:
    if rows < 1:
        raise ValueError(f"Expected rows >= 1, got rows={rows}.")
    if seed < 0:
        raise ValueError(f"Expected seed >= 0, got seed={seed}.")
    if not 0 <= zipf_exponent < np.inf:
        raise ValueError(f"Expected a finite zipf_exponent >= 0, got {zipf_exponent=}.")
    if max(sizes) > 1 << _RANK_BITS:
        raise ValueError(f"Expected vocabularies <= {1 << _RANK_BITS}, got {max(sizes)}.")


def _zipf_cumulative(size: int, exponent: float) -> npt.NDArray[np.float64]:
    cumulative = np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -exponent)
    cumulative /= cumulative[-1]
    return cumulative


def _draw_chunks(
    rows: int, seed: int, cumulative: list[npt.NDArray[np.float64]], drift: Drift
) -> Iterator[GeneratedRows]:
    # The planted model is scaled on chunk 0 of day 0, which is in no file.
    counts, count_missing, ranks = _draw_features(_chunk_rng(seed, 0, 0), cumulative)
    codes = _category_codes(ranks, seed, NO_DRIFT)
    weights, bias = _plant(_effects(seed, counts, count_missing, ranks, codes, NO_DRIFT))
    for chunk, start in enumerate(range(0, rows, _CHUNK_ROWS), start=1):
        rng = _chunk_rng(seed, drift.day, chunk)
        counts, count_missing, ranks = _draw_features(rng, cumulative)
        codes = _category_codes(ranks, seed, drift)
        logits = bias + _effects(seed, counts, count_missing, ranks, codes, drift) @ weights
        probabilities = 1.0 / (1.0 + np.exp(-logits))
        labels = rng.random(_CHUNK_ROWS) < probabilities
        kept = slice(rows - start)  # a last, shorter chunk begins as the whole one would
        parts = labels, counts, count_missing, ranks, codes, probabilities
        yield GeneratedRows(*(part[kept] for part in parts))


def _chunk_rng(seed: int, day: int, chunk: int) -> np.random.Generator:
    return np.random.default_rng((seed, chunk, day) if day else (seed, chunk))


def _draw_features(
    rng: np.random.Generator, cumulative: list[npt.NDArray[np.float64]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Draws the counts, which of them are missing, and the ranks of one chunk."""
    logs = _LOG_MEANS + _LOG_SPREADS * rng.standard_normal((_CHUNK_ROWS, NUM_INTEGERS))
    counts = np.rint(np.expm1(np.clip(logs, 0, np.log(10.0**MAX_DIGITS - 1)))).astype(np.int64)
    counts -= _NEGATIVE_CODES & (counts == 0)
    count_missing = rng.random(counts.shape) < _INTEGER_MISSING
    uniforms = rng.random((NUM_CATEGORIES, _CHUNK_ROWS))
    inverted = [
        np.searchsorted(distribution, uniform, side="right")
        for distribution, uniform in zip(cumulative, uniforms, strict=True)
    ]
    ranks = np.stack(inverted, axis=1)
    ranks[rng.random(ranks.shape) < _CATEGORY_MISSING] = MISSING
    return counts, count_missing, ranks


def _effects(
    seed: int,
    counts: npt.NDArray[np.int64],
    count_missing: npt.NDArray[np.bool_],
    ranks: npt.NDArray[np.int64],
    codes: npt.NDArray[np.uint32],
    drift: Drift,
) -> npt.NDArray[np.float64]:
    """What categories and counts add to the logit before scaling, [rows, 2]."""
    slopes = np.random.default_rng(seed).standard_normal((2, NUM_INTEGERS)) / _LOG_SPREADS
    angle = drift.day * drift.turn
    category_effects = _uniform(codes, seed)
    if angle:
        turned = _uniform(codes, seed + 1)
        category_effects = np.cos(angle) * category_effects + np.sin(angle) * turned
    category_effects /= np.sqrt(1.0 + ranks / _FADING_RANK)
    category_effects[ranks == MISSING] = 0.0
    seen_counts = log_transform(np.where(count_missing, 0, counts))
    of_counts = seen_counts @ (np.cos(angle) * slopes[0] + np.sin(angle) * slopes[1])
    return np.stack([category_effects.sum(axis=1), of_counts], axis=1)


def _uniform(codes: npt.NDArray[np.uint32], seed: int) -> npt.NDArray[np.float64]:
    """A number in [-1, 1) for each category, from a hash."""
    hashes = mix64(mix64(np.full(1, seed, np.uint64)) ^ codes.astype(np.uint64))
    return np.asarray((hashes >> np.uint64(11)) * 2.0**-52 - 1.0)


def _plant(effects: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], float]:
    """The weights and the bias that give `effects` the planned spread and positive rate."""
    spreads = _LOGIT_SPREAD * np.sqrt([_CATEGORY_SHARE, 1.0 - _CATEGORY_SHARE])
    weights = spreads / effects.std(axis=0)
    logits = effects @ weights
    low, high = -30.0 - logits.max(), 30.0 - logits.min()
    for _ in range(50):
        bias = (low + high) / 2
        too_many = np.mean(1.0 / (1.0 + np.exp(-logits - bias))) > POSITIVE_RATE
        low, high = (low, bias) if too_many else (bias, high)
    return weights, bias


def _category_codes(
    ranks: npt.NDArray[np.int64], seed: int, drift: Drift
) -> npt.NDArray[np.uint32]:
    """Numbers every category of every feature differently, [rows, 26].

    The category of a rank has a version, which grows by 1 every 1 / renewal days, for each rank at
    another time. Versions of one rank are far apart among the 2²⁷ numbers of a feature.
    """
    features = np.arange(NUM_CATEGORIES, dtype=np.uint32) << np.uint32(_RANK_BITS)
    numbers = np.maximum(ranks, 0).astype(np.uint32)
    if drift.day:
        phases = (_uniform(features | numbers, seed + 2) + 1.0) / 2.0
        versions = np.floor(drift.day * drift.renewal + phases).astype(np.uint32)
        numbers = (numbers + versions * _VERSION_STEP) & np.uint32((1 << _RANK_BITS) - 1)
    return features | numbers

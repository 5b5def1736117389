"""Generates click rows in the shape of the Criteo data, with labels from a planted model.

Category ranks follow a truncated Zipf law, counts are log-normal, values are missing as often as
in the Criteo Kaggle rows, and labels are Bernoulli with logit

    bias + spread · (√0.7 · category effects + √0.3 · count effects),

both parts standardised. The effect of a category decreases with its rank, so that a model can learn
most of it in a few hundred batches. Effects come from a hash, not from a table. A chunk of rows
depends only on the seed and its number: the same seed gives the same bytes, a longer file begins
with the shorter one, and memory is bounded. Time is about 10 µs per row.

`python -m pipelines.criteo.generate --rows N --out FILE --seed S`
"""

import argparse
import gzip
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from pipelines.criteo.schema import (
    NUM_CATEGORIES,
    NUM_INTEGERS,
    TABLE3_VOCABULARIES,
    log_transform,
    mix64,
    validate_vocabularies,
)
from pipelines.files import whole_file

POSITIVE_RATE = 0.25

_CHUNK_ROWS = 1 << 14
_MISSING = -1  # the rank of a missing category
_RANK_BITS = 27  # with 5 bits of feature, a category is 32 bits: 8 hexadecimal digits
_LOGIT_SPREAD = 1.35
_CATEGORY_SHARE = 0.7  # the part of the logit's variance that comes from categories
_FADING_RANK = 32.0
_MAX_DIGITS = 8

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
class GeneratedRows:
    """Rows before they are written.

    Attributes:
        labels: [rows] bool.
        counts: [rows, 13] int64.
        count_missing: [rows, 13] bool.
        ranks: The frequency rank of each category from 0, or -1 if missing, [rows, 26] int64.
        probabilities: What the planted model gives each row, [rows] float64.
    """

    labels: npt.NDArray[np.bool_]
    counts: npt.NDArray[np.int64]
    count_missing: npt.NDArray[np.bool_]
    ranks: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]


def generate(
    rows: int,
    out: Path,
    seed: int = 0,
    vocabularies: Sequence[int] = TABLE3_VOCABULARIES,
    zipf_exponent: float = 1.1,
    progress: bool = True,
) -> None:
    """Writes `rows` tab-separated rows to `out`, compressed if its name ends in .gz.

    A failure leaves `out` as it was.

    Args:
        rows: The number of rows.
        out: The file to write.
        seed: What determines every byte, together with the other arguments.
        vocabularies: The number of categories of each of the 26 features.
        zipf_exponent: Frequencies fall as 1 / (1 + rank)**zipf_exponent.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If an argument is out of range.
    """
    chunks = generated_rows(rows, seed, vocabularies, zipf_exponent)
    bar = tqdm(total=rows, unit="row", unit_scale=True, desc=out.name, disable=not progress)
    with bar, whole_file(out) as raw, _compressor(out, raw) as output:
        for chunk in chunks:
            output.write(encode(chunk))
            bar.update(len(chunk.labels))


def generated_rows(
    rows: int,
    seed: int = 0,
    vocabularies: Sequence[int] = TABLE3_VOCABULARIES,
    zipf_exponent: float = 1.1,
) -> Iterator[GeneratedRows]:
    """Draws the rows that `generate` writes, in chunks."""
    sizes = validate_vocabularies(vocabularies)
    _check_arguments(rows, seed, sizes, zipf_exponent)
    cumulative = [_zipf_cumulative(size, zipf_exponent) for size in sizes]
    return _draw_chunks(rows, seed, cumulative)


def planted_probabilities(
    rows: int,
    seed: int = 0,
    vocabularies: Sequence[int] = TABLE3_VOCABULARIES,
    zipf_exponent: float = 1.1,
) -> npt.NDArray[np.float64]:
    """Returns the probability of a click of each row that `generate` writes, [rows].

    No model ranks these rows better in expectation: its AUC on their labels is the Bayes AUC.
    """
    chunks = generated_rows(rows, seed, vocabularies, zipf_exponent)
    return np.concatenate([chunk.probabilities for chunk in chunks])


def encode(rows: GeneratedRows) -> bytes:
    """Returns the rows as lines of text.

    They are written into fixed-width fields padded with zero bytes, which are then removed.
    """
    columns = [
        (rows.labels + ord("0")).astype(np.uint8)[:, None, None],
        np.where(rows.count_missing[..., None], 0, _decimal(rows.counts)),
        np.where(rows.ranks[..., None] == _MISSING, 0, _hexadecimal(rows.ranks)),
    ]
    separated = [np.insert(field, field.shape[-1], ord("\t"), axis=-1) for field in columns]
    text = np.concatenate([field.reshape(len(field), -1) for field in separated], axis=1)
    text[:, -1] = ord("\n")
    return bytes(text[text != 0])


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
    rows: int, seed: int, cumulative: list[npt.NDArray[np.float64]]
) -> Iterator[GeneratedRows]:
    # The planted model is scaled on chunk 0, which is in no file.
    weights, bias = _plant(_effects(seed, *_draw_features(_chunk_rng(seed, 0), cumulative)))
    for chunk, start in enumerate(range(0, rows, _CHUNK_ROWS), start=1):
        rng = _chunk_rng(seed, chunk)
        counts, count_missing, ranks = _draw_features(rng, cumulative)
        logits = bias + _effects(seed, counts, count_missing, ranks) @ weights
        probabilities = 1.0 / (1.0 + np.exp(-logits))
        labels = rng.random(_CHUNK_ROWS) < probabilities
        kept = slice(rows - start)  # a last, shorter chunk begins as the whole one would
        yield GeneratedRows(
            labels[kept], counts[kept], count_missing[kept], ranks[kept], probabilities[kept]
        )


def _chunk_rng(seed: int, chunk: int) -> np.random.Generator:
    return np.random.default_rng((seed, chunk))


def _draw_features(
    rng: np.random.Generator, cumulative: list[npt.NDArray[np.float64]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Draws the counts, which of them are missing, and the ranks of one chunk."""
    logs = _LOG_MEANS + _LOG_SPREADS * rng.standard_normal((_CHUNK_ROWS, NUM_INTEGERS))
    counts = np.rint(np.expm1(np.clip(logs, 0, np.log(10.0**_MAX_DIGITS - 1)))).astype(np.int64)
    counts -= _NEGATIVE_CODES & (counts == 0)
    count_missing = rng.random(counts.shape) < _INTEGER_MISSING
    uniforms = rng.random((NUM_CATEGORIES, _CHUNK_ROWS))
    inverted = [
        np.searchsorted(distribution, uniform, side="right")
        for distribution, uniform in zip(cumulative, uniforms, strict=True)
    ]
    ranks = np.stack(inverted, axis=1)
    ranks[rng.random(ranks.shape) < _CATEGORY_MISSING] = _MISSING
    return counts, count_missing, ranks


def _effects(
    seed: int,
    counts: npt.NDArray[np.int64],
    count_missing: npt.NDArray[np.bool_],
    ranks: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """What categories and counts add to the logit before scaling, [rows, 2]."""
    hashes = mix64(mix64(np.full(1, seed, np.uint64)) ^ _category_codes(ranks).astype(np.uint64))
    category_effects = (hashes >> np.uint64(11)) * 2.0**-52 - 1.0  # uniform in [-1, 1)
    category_effects /= np.sqrt(1.0 + ranks / _FADING_RANK)
    category_effects[ranks == _MISSING] = 0.0
    slopes = np.random.default_rng(seed).standard_normal(NUM_INTEGERS) / _LOG_SPREADS
    seen_counts = log_transform(np.where(count_missing, 0, counts))
    return np.stack([category_effects.sum(axis=1), seen_counts @ slopes], axis=1)


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


def _category_codes(ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Numbers every category of every feature differently, [rows, 26]."""
    features = np.arange(NUM_CATEGORIES, dtype=np.uint32) << np.uint32(_RANK_BITS)
    return features | np.maximum(ranks, 0).astype(np.uint32)


def _hexadecimal(ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """The 8 digits of each category, [rows, 26, 8]; distinct for distinct (feature, rank)."""
    # The finaliser of MurmurHash3 is a bijection of 32 bits; the digits look like Criteo's.
    mixed = _category_codes(ranks)
    mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    mixed = mixed ^ (mixed >> np.uint32(16))
    pairs = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), np.uint16)
    octets = np.ascontiguousarray(mixed.astype(">u4")).view(np.uint8)  # [rows, 104]
    return pairs[octets].view(np.uint8).reshape(len(ranks), NUM_CATEGORIES, 8)


def _decimal(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """The sign and the digits of each count, padded with zero bytes, [rows, 13, 9]."""
    text = np.zeros((*counts.shape, 1 + _MAX_DIGITS), np.uint8)
    text[..., 0] = np.where(counts < 0, ord("-"), 0)
    remaining = np.abs(counts).astype(np.uint32)
    for position in range(_MAX_DIGITS, 0, -1):
        shown = (remaining > 0) | (position == _MAX_DIGITS)
        remaining, digits = np.divmod(remaining, np.uint32(10))
        text[..., position] = np.where(shown, digits + ord("0"), 0)
    return text


def _compressor(out: Path, raw: io.BufferedWriter) -> AbstractContextManager[io.BufferedIOBase]:
    if out.suffix != ".gz":
        return nullcontext(raw)
    # Neither a name nor a time in the header: the same rows give the same bytes.
    return gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Generate click rows in the shape of Criteo.")
    parser.add_argument("--rows", type=int, required=True, help="how many")
    parser.add_argument("--out", type=Path, required=True, help="a .tsv or .tsv.gz file to write")
    parser.add_argument("--seed", type=int, default=0, help="what determines every byte")
    options = parser.parse_args(arguments)
    try:
        generate(options.rows, options.out, options.seed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

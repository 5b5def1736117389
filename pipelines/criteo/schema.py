"""What one Criteo example is, and how its stored values are computed from the raw ones.

A row of the Criteo display advertising data is a click label, 13 counts and 26 categories. It is
stored as one packed, little-endian record of 160 bytes, so that example i of a memory-mapped file
is at byte 160·i. Counts are stored log-transformed, categories as hash buckets. Both maps are fixed
and public: nothing in them is fitted on private rows. Time and memory are linear in the rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

NUM_INTEGERS = 13
NUM_CATEGORIES = 26
NUM_FIELDS = 1 + NUM_INTEGERS + NUM_CATEGORIES

# Table 3 of "Sparsity-Preserving Differentially Private Training of Large Embedding Models"
# (Ghazi et al., NeurIPS 2023): the vocabulary sizes of features 14 to 39.
TABLE3_VOCABULARIES: tuple[int, ...] = (
    *(1472, 577, 82741, 18940, 305, 23, 1172, 633, 3, 9090, 5918, 64300, 3207),
    *(27, 1550, 44262, 10, 5485, 2161, 3, 56473, 17, 15, 27360, 104, 12934),
)

RECORD_DTYPE = np.dtype(
    [
        ("label", "<f4"),
        ("integers", "<f4", (NUM_INTEGERS,)),
        ("categories", "<i4", (NUM_CATEGORIES,)),
    ]
)

# A category is a 32-bit number. A missing one is the first number beyond them. A count has at most
# 18 digits; a missing one is the smallest number of 64 bits.
MISSING_CATEGORY = 1 << 32
MISSING_COUNT = -(1 << 63)

# A row as it is in the file, before anything is computed from it.
RAW_DTYPE = np.dtype(
    [
        ("label", "<i8"),
        ("integers", "<i8", (NUM_INTEGERS,)),
        ("categories", "<i8", (NUM_CATEGORIES,)),
    ]
)

_MAX_VOCABULARY = 2**31 - 1
_FEATURE_SHIFT = np.uint64(33)  # a category or the missing value takes 33 bits
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def validate_vocabularies(vocabularies: Sequence[int]) -> tuple[int, ...]:
    """Returns the 26 vocabulary sizes as a tuple of ints.

    Raises:
        ValueError: If there are not 26, or one is not an integer in [1, 2**31 - 1].
    """
    if len(vocabularies) != NUM_CATEGORIES:
        raise ValueError(
            f"Expected {NUM_CATEGORIES} vocabularies, one per categorical feature, "
            f"got {len(vocabularies)}."
        )
    for feature, size in enumerate(vocabularies):
        integral = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if not integral or not 1 <= size <= _MAX_VOCABULARY:
            raise ValueError(
                f"Expected an integer vocabularies[{feature}] in [1, {_MAX_VOCABULARY}], "
                f"got vocabularies[{feature}]={size!r}."
            )
    return tuple(int(size) for size in vocabularies)


def log_transform(integers: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Returns log(1 + max(x, 0)) in float32, of the same shape.

    Counts range over six orders of magnitude, so the logarithm is taken. The few negative values of
    Criteo (-1, -2 and -3 in one feature) are codes, not counts: they map to 0, like zero and like a
    missing count.
    """
    counts = np.maximum(np.asarray(integers, np.float64), 0.0)
    return np.log1p(counts).astype(np.float32)


def mix64(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns the SplitMix64 output for each state in `keys`: a bijection that mixes 64 bits well.

    Arithmetic is modulo 2**64, so the result is the same on every machine.
    """
    mixed = keys + _GOLDEN_GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))


def category_buckets(
    categories: npt.NDArray[np.uint64], vocabularies: Sequence[int]
) -> npt.NDArray[np.int32]:
    """Hashes raw categories to embedding rows: bucket = mix64(feature·2³³ + value) mod V.

    The hash is public and fixed: a vocabulary counted on private rows would leak which categories
    occur. Different categories may have the same bucket. A missing one hashes `MISSING_CATEGORY`,
    so it has one fixed bucket per feature.

    Args:
        categories: Raw values, [rows, 26] uint64, each below 2**32 or `MISSING_CATEGORY`.
        vocabularies: The number of buckets V of each feature.

    Returns:
        Buckets in [0, V), [rows, 26].
    """
    features = np.arange(NUM_CATEGORIES, dtype=np.uint64) << _FEATURE_SHIFT
    hashes = mix64(categories | features)
    return (hashes % np.asarray(vocabularies, np.uint64)).astype(np.int32)


def model_inputs(
    integers: npt.NDArray[np.int64], categories: npt.NDArray[np.int64], vocabularies: Sequence[int]
) -> dict[str, npt.NDArray[np.float32 | np.int32]]:
    """The inputs of a model from raw counts and categories, missing ones as in `RAW_DTYPE`.

    Args:
        integers: [rows, 13] int64.
        categories: [rows, 26] int64.
        vocabularies: The number of buckets of each categorical feature.

    Returns:
        {"integers": [rows, 13] float32, "categories": [rows, 26] int32}.
    """
    return {
        "integers": log_transform(integers),
        "categories": category_buckets(categories.astype(np.uint64), vocabularies),
    }


def records_from_raw(
    raw: npt.NDArray[np.void], vocabularies: Sequence[int]
) -> npt.NDArray[np.void]:
    """Records of `RECORD_DTYPE` from rows of `RAW_DTYPE`, [rows] both."""
    records = np.empty(len(raw), RECORD_DTYPE)
    records["label"] = raw["label"]
    for name, values in model_inputs(raw["integers"], raw["categories"], vocabularies).items():
        records[name] = values
    return records


def examples_from_records(
    records: npt.NDArray[np.void],
) -> tuple[dict[str, npt.NDArray[np.float32 | np.int32]], npt.NDArray[np.float32]]:
    """Splits records into the inputs and the labels of a model.

    Returns:
        ({"integers": [rows, 13] float32, "categories": [rows, 26] int32}, labels [rows] float32),
        each a contiguous copy, so that `records` can be freed.
    """
    inputs: dict[str, npt.NDArray[np.float32 | np.int32]] = {
        "integers": records["integers"].copy(),
        "categories": records["categories"].copy(),
    }
    return inputs, records["label"].copy()


def examples_from_fields(fields: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """As `examples_from_records`, of fields that `dp_sparse.OfflineBatches` has read."""
    return {name: fields[name] for name in ("integers", "categories")}, fields["label"]

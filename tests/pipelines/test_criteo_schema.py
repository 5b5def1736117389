"""Records, transforms and the category hash."""

import re

import numpy as np
import pytest
from scipy import stats

from pipelines.criteo import schema


def splitmix64(state: int) -> int:
    """Python integers instead of uint64 arithmetic, from the published algorithm."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_record_is_packed_little_endian() -> None:
    assert schema.RECORD_DTYPE.itemsize == 4 * schema.NUM_FIELDS == 160
    record = np.zeros(1, schema.RECORD_DTYPE)
    record["label"], record["categories"][0, -1] = 1, 0x01020304
    assert record.tobytes()[:4] == b"\x00\x00\x80\x3f"
    assert record.tobytes()[-4:] == b"\x04\x03\x02\x01"


def test_table3_has_26_vocabularies() -> None:
    assert schema.validate_vocabularies(schema.TABLE3_VOCABULARIES) == schema.TABLE3_VOCABULARIES
    assert sum(schema.TABLE3_VOCABULARIES) == 338_782


@pytest.mark.parametrize("bad", [0, -1, 2**31, 2.5, True, "7", None, float("nan")])
def test_bad_vocabulary_is_named(bad: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got vocabularies[3]={bad!r}.")):
        schema.validate_vocabularies([5, 5, 5, bad, *[5] * 22])  # type: ignore[list-item]


def test_wrong_number_of_vocabularies() -> None:
    with pytest.raises(ValueError, match=r"Expected 26 vocabularies.*got 25"):
        schema.validate_vocabularies([5] * 25)


def test_log_transform() -> None:
    logs = schema.log_transform(np.array([-3, -1, 0, 1, 10, 10**18 - 1]))
    assert logs.dtype == np.float32
    np.testing.assert_allclose(logs, [0, 0, 0, np.log(2), np.log(11), 18 * np.log(10)], rtol=1e-6)


def test_mix64_is_splitmix64() -> None:
    # The first output of the published generator from seed 0 is the mix of state 0.
    assert schema.mix64(np.zeros(1, np.uint64))[0] == 0xE220A8397B1DCDAF
    states = np.array([0, 1, 2**32, 2**63, 2**64 - 1], np.uint64)
    assert schema.mix64(states).tolist() == [splitmix64(int(state)) for state in states]


def test_category_buckets_are_the_documented_hash() -> None:
    vocabularies = schema.TABLE3_VOCABULARIES
    for value in (0, 1, 0x05DB9164, 2**32 - 1, schema.MISSING_CATEGORY):
        values = np.full((1, 26), value, np.uint64)
        expected = [
            splitmix64(feature * 2**33 + value) % size for feature, size in enumerate(vocabularies)
        ]
        buckets = schema.category_buckets(values, vocabularies)
        assert buckets.dtype == np.int32
        assert buckets[0].tolist() == expected


def test_category_buckets_golden() -> None:
    """Prepared data and trained models stand on these: they must never change."""
    value = np.full((1, 26), 0x05DB9164, np.uint64)
    missing = np.full((1, 26), schema.MISSING_CATEGORY, np.uint64)
    million = [1_000_000] * 26
    assert schema.category_buckets(value, million)[0, :4].tolist() == [726352, 6160, 820729, 296414]
    assert schema.category_buckets(missing, million)[0, :4].tolist() == [56, 305595, 775146, 273489]


@pytest.mark.parametrize("step", [1, 256, 65536])
def test_category_buckets_are_uniform(step: int) -> None:
    """Structured values (counters, in any byte) spread as evenly as random ones."""
    values = np.repeat(np.arange(20_000, dtype=np.uint64)[:, None] * np.uint64(step), 26, axis=1)
    buckets = schema.category_buckets(values, [97] * 26)
    p_values = [
        stats.chisquare(np.bincount(buckets[:, feature], minlength=97)).pvalue
        for feature in range(26)
    ]
    assert min(p_values) > 1e-5
    assert stats.kstest(p_values, "uniform").pvalue > 1e-4


def test_features_hash_independently() -> None:
    values = np.repeat(np.arange(20_000, dtype=np.uint64)[:, None], 26, axis=1)
    buckets = schema.category_buckets(values, [10] * 26)
    table = np.zeros((10, 10))
    np.add.at(table, (buckets[:, 0], buckets[:, 1]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-4


def test_examples_from_records() -> None:
    records = np.zeros(3, schema.RECORD_DTYPE)
    records["label"] = [0, 1, 0]
    records["integers"][1, 2], records["categories"][2, 25] = 0.5, 7
    inputs, labels = schema.examples_from_records(records)
    assert labels.tolist() == [0, 1, 0]
    assert labels.dtype == np.float32
    assert inputs["integers"].shape == (3, 13)
    assert inputs["integers"].dtype == np.float32
    assert inputs["categories"].shape == (3, 26)
    assert inputs["categories"].dtype == np.int32
    assert inputs["integers"][1, 2] == 0.5
    assert inputs["categories"][2, 25] == 7
    assert all(part.flags.c_contiguous for part in (*inputs.values(), labels))


def test_examples_from_no_records() -> None:
    inputs, labels = schema.examples_from_records(np.zeros(0, schema.RECORD_DTYPE))
    assert inputs["categories"].shape == (0, 26)
    assert labels.shape == (0,)

"""The histogram of scores: counts as in the reference, sensitivity 1, noise as the plan pays."""

from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse.probabilities.score_histogram import (
    BINS,
    UNITS,
    ScoreHistogram,
    ScoreKind,
    Tally,
    noise_paid_by,
    release_of,
)
from tests.reference import score_histogram as reference
from tests.training_cases import assert_deviation

KINDS = (ScoreKind("binary"), ScoreKind("regression", label_range=(1.0, 5.0)))
TINY = 1e-9  # rounds to no noise

SCORES = st.one_of(
    st.floats(-20, 20), st.sampled_from([-8.0, 8.0, 0.0, 0.5, 1.0, np.inf, -np.inf, np.nan])
)
EXAMPLES = st.lists(st.tuples(SCORES, st.floats(0, 1), st.floats(0, 1e6)), max_size=30)


def histogram_of(
    examples: list[reference.Example],
    kind: ScoreKind = KINDS[0],
    cap: float = 1.0,
    noise: float = TINY,
) -> ScoreHistogram:
    tally = Tally(cap)
    scores, labels, weights = np.array(examples, float).reshape(-1, 3).T
    tally.add(scores, labels, weights, kind)
    return tally.released(noise, steps=3, paid_by="run")


@settings(max_examples=60, deadline=None)
@given(EXAMPLES, st.sampled_from(KINDS), st.floats(0.1, 10))
def test_counts_are_those_of_the_reference(
    examples: list[reference.Example], kind: ScoreKind, cap: float
) -> None:
    found = histogram_of(examples, kind, cap).cells
    np.testing.assert_array_equal(found, reference.counts(examples, kind.edges, cap))


@settings(max_examples=60, deadline=None)
@given(EXAMPLES, st.tuples(SCORES, st.floats(0, 1), st.floats(0, 1e6)))
def test_one_example_changes_the_counts_by_one_at_most(
    others: list[reference.Example], one: reference.Example
) -> None:
    """Whatever its score, its label and its weight."""
    change = histogram_of([*others, one]).counts - histogram_of(others).counts
    assert np.linalg.norm(change / UNITS) <= 1


def test_a_heavy_example_counts_as_the_cap() -> None:
    found = histogram_of([(0.2, 1.0, 1e6), (0.2, 1.0, 1.0)], cap=2.0).cells
    assert found.sum() == 1.5 and found[:, 0].sum() == 0


def test_bins_cover_all_scores_and_follow_from_the_kind_alone() -> None:
    for kind in KINDS:
        assert len(kind.edges) == BINS - 1 and len(kind.middles) == BINS
        places = np.searchsorted(kind.edges, kind.middles, side="right")
        np.testing.assert_array_equal(places, np.arange(BINS))


def test_noise_has_the_deviation_that_is_paid() -> None:
    drawn = [histogram_of([], noise=7.0).cells for _ in range(60)]
    assert_deviation(np.array(drawn), 7.0)


def test_noise_is_on_the_grid_and_new_each_time() -> None:
    one, other = (histogram_of([], noise=7.0) for _ in range(2))
    assert one.counts.dtype == np.int64 and not np.array_equal(one.counts, other.counts)
    assert one.histogram_id != other.histogram_id


def test_the_release_says_what_it_costs() -> None:
    release = release_of(12.5)
    assert release.event == dp_accounting.GaussianDpEvent(12.5)
    assert noise_paid_by([release]) == 12.5 and noise_paid_by([]) is None
    assert "34 bins" in release.name and "12.5 on each count" in release.name


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_one_is_loaded_as_it_was(kind: ScoreKind, tmp_path: Path) -> None:
    kept = histogram_of([(0.3, 0.25, 1.0)], kind)
    kept.save(tmp_path / "scores.npz")
    found = ScoreHistogram.load(tmp_path / "scores.npz")
    np.testing.assert_array_equal(found.counts, kept.counts)
    assert (found.kind, found.steps, found.paid_by) == (kind, 3, "run")
    assert (found.noise_multiplier, found.histogram_id) == (TINY, kept.histogram_id)
    with pytest.raises(ValueError, match="read-only"):
        found.counts[0, 0] = 1


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "scores.npz"
    histogram_of([]).save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="ScoreHistogram.save"):
        ScoreHistogram.load(path)
    with pytest.raises(FileNotFoundError):
        ScoreHistogram.load(tmp_path / "none.npz")


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan"), float("inf")])
def test_a_cap_must_be_a_positive_number(cap: float) -> None:
    with pytest.raises(ValueError, match="weight_cap"):
        Tally(cap)

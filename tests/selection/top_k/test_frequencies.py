"""Noisy frequencies: the noise of the histogram, its cost, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

import dp_sparse

ROWS, EXAMPLES = 5_000, 1_000
SIGMA = 0.5


def half_of_the_examples() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Each row is looked up by half of the examples; an example looks up half of the rows."""
    rng = np.random.default_rng(0)
    first = rng.permutation(ROWS)
    ids = np.stack([first[: ROWS // 2], first[ROWS // 2 :]])
    return {"items": np.tile(ids, (EXAMPLES // 2, 1))}, np.ones(EXAMPLES)


def noise_is(values: np.ndarray, deviation: float) -> bool:
    counts = values * EXAMPLES - EXAMPLES / 2
    return abs(counts.std() / deviation - 1) < 0.05 and abs(counts.mean()) < deviation / 10


def test_the_noise_is_that_of_its_source_and_rejects_others() -> None:
    table = dp_sparse.TopKTable(ROWS, max_lookups=ROWS // 2)
    source = dp_sparse.GaussianTopK(SIGMA)
    found = dp_sparse.noisy_frequencies(
        half_of_the_examples(), "items", table, source, progress=False
    )
    deviation = SIGMA * np.sqrt(ROWS // 2)
    assert noise_is(found.values, deviation)
    for factor in (2 / 3, 3 / 2):
        assert not noise_is(found.values, factor * deviation)
    counts = found.values * EXAMPLES
    np.testing.assert_allclose(counts, np.rint(counts), atol=1e-6)  # whole counts alone
    assert found.release.event == source.event(ROWS // 2, ROWS)
    assert found.costs and "histogram" in found.release.name


def test_what_is_below_its_noise_says_nothing() -> None:
    table = dp_sparse.TopKTable(1000, max_lookups=4)
    examples = {"items": np.zeros((100, 1), np.int64)}, np.ones(100)
    found = dp_sparse.noisy_frequencies(
        examples, "items", table, dp_sparse.GaussianTopK(2.0), progress=False
    )
    assert found.values.min() == pytest.approx(4 / 100)  # one deviation
    assert found.values.max() <= 1


def test_bad_arguments_are_refused() -> None:
    table = dp_sparse.TopKTable(4)
    examples = {"items": np.zeros(3, np.int64)}, np.ones(3)
    with pytest.raises(ValueError, match="Expected source to be GaussianTopK"):
        dp_sparse.noisy_frequencies(examples, "items", table, dp_sparse.GumbelTopK(3.0))
    for bad in ([0.0, 0.5], [1.5], [np.nan], [[0.5]]):
        with pytest.raises(ValueError, match=r"Expected frequencies of table 'items' in \(0, 1\]"):
            dp_sparse.RowFrequencies.public("items", bad)
    public = dp_sparse.RowFrequencies.public("items", [0.5])
    with pytest.raises(ValueError, match="got public ones"):
        _ = public.release


def test_saved_frequencies_are_paid_as_before(tmp_path: Path) -> None:
    """Noisy ones come back with the release of their histogram, public ones without."""
    noisy = dp_sparse.RowFrequencies("words", [0.5, 0.25], dp_sparse.GaussianTopK(3.0), 2)
    public = dp_sparse.RowFrequencies.public("words", [0.5, 0.25])
    for frequencies in (noisy, public):
        frequencies.save(tmp_path / "kept.npz")
        found = dp_sparse.RowFrequencies.load(tmp_path / "kept.npz")
        np.testing.assert_array_equal(found.values, frequencies.values)
        assert found.table == "words" and found.costs == frequencies.costs
    noisy.save(tmp_path / "kept.npz")
    assert dp_sparse.RowFrequencies.load(tmp_path / "kept.npz").release == noisy.release


def test_files_that_hold_no_frequencies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        dp_sparse.RowFrequencies.load(tmp_path / "none.npz")
    kept = tmp_path / "kept.npz"
    dp_sparse.RowFrequencies.public("words", [0.5, 0.25]).save(kept)
    whole = kept.read_bytes()
    np.savez(tmp_path / "other.npz", x=1)
    np.save(tmp_path / "array.npy", np.ones(3))
    others = [(tmp_path / name).read_bytes() for name in ("other.npz", "array.npy")]
    middle = len(whole) // 2
    damaged = (
        whole[:middle]
        + bytes(byte ^ 255 for byte in whole[middle : middle + 9])
        + whole[middle + 9 :]
    )
    for content in (whole[:40], damaged, b"", b"text", *others):
        kept.write_bytes(content)
        with pytest.raises(ValueError, match="that RowFrequencies.save wrote"):
            dp_sparse.RowFrequencies.load(kept)

"""The histogram that a preparation makes in the same pass: its counts, its noise, drawn once."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("apache_beam")

import dp_sparse
from pipelines.criteo.histograms import LookupCounts
from pipelines.criteo.parse import parse_lines
from pipelines.criteo.prepare import __main__ as command
from pipelines.criteo.prepare import run
from pipelines.criteo.prepare.job import HISTOGRAM, Job, new_job
from pipelines.criteo.records import PrepareError

SIZES = tuple(range(5, 31))
QUIET = 0.01  # of noise that rounds to 0
ROWS = (400, 300)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("rows")
    paths = [folder / f"day_{k}.tsv" for k in range(len(ROWS))]
    for k, path in enumerate(paths):
        lines = [b"1" + b"\t" * 13 + b"\t%x" % (n * n) * 26 + b"\n" for n in range(k, k + ROWS[k])]
        path.write_bytes(b"not a row\n" + b"".join(lines))
    return [str(path) for path in paths]


def job_of(shards: list[str], output: Path, **changes: object) -> Job:
    return new_job(
        shards,
        str(output),
        num_examples=sum(ROWS),
        batch_size=100.0,
        epochs=1.0,
        vocabularies=SIZES,
        seeded=True,
        **changes,  # type: ignore[arg-type]
    )


def counts_of(shards: list[str]) -> list[np.ndarray]:
    records = np.concatenate([parse_lines(Path(p).read_bytes(), SIZES).records for p in shards])
    return [
        np.bincount(records["categories"][:, k], minlength=size) for k, size in enumerate(SIZES)
    ]


@pytest.mark.parametrize("counted", [None, 1])
def test_it_counts_every_row_once(shards: list[str], tmp_path: Path, counted: int | None) -> None:
    made = job_of(shards, tmp_path / "out", histogram_noise=QUIET, counted=counted)
    run.prepare(made, seed=1)
    found = dp_sparse.NoisyHistogram.load(tmp_path / "out" / HISTOGRAM)
    for own, expected in zip(found.counts.values(), counts_of(shards[:counted]), strict=True):
        assert own.tolist() == expected.tolist()
    assert (found.lookups, found.noise_multiplier, found.data) == (26, QUIET, "out")
    assert not list((tmp_path / "out").glob(".work*"))


def test_its_noise_has_the_deviation(shards: list[str], tmp_path: Path) -> None:
    """σ·√26 on each count; two thirds of it would be seen."""
    run.prepare(job_of(shards, tmp_path / "out", histogram_noise=20.0), seed=1)
    found = dp_sparse.NoisyHistogram.load(tmp_path / "out" / HISTOGRAM)
    noise = np.concatenate(
        [a - b for a, b in zip(found.counts.values(), counts_of(shards), strict=True)]
    )
    deviation = 20 * np.sqrt(26)
    assert len(noise) == sum(SIZES)
    assert abs(np.std(noise) / deviation - 1) < 5 / np.sqrt(2 * len(noise)) < 1 / 3


def test_a_job_that_goes_on_draws_no_second_noise(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job_of(shards, tmp_path / "out", histogram_noise=20.0)

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("dp_sparse.offline.Manifest.write", stopped)
        with pytest.raises(KeyboardInterrupt):
            run.prepare(made, seed=1)
    drawn = (tmp_path / "out" / HISTOGRAM).read_bytes()
    run.prepare(made, seed=1)
    assert (tmp_path / "out" / HISTOGRAM).read_bytes() == drawn


def test_none_without_being_asked(shards: list[str], tmp_path: Path) -> None:
    run.prepare(job_of(shards, tmp_path / "out"), seed=1)
    assert not (tmp_path / "out" / HISTOGRAM).exists()


@pytest.mark.parametrize("noise", [0.0, -1.0, np.inf, np.nan])
def test_its_noise_is_positive(shards: list[str], tmp_path: Path, noise: float) -> None:
    with pytest.raises(PrepareError, match="histogram_noise > 0"):
        job_of(shards, tmp_path / "out", histogram_noise=noise)


def test_command_line(tmp_path: Path) -> None:
    source = tmp_path / "day.tsv"
    source.write_bytes(b"".join(b"1" + b"\t" * 13 + b"\t%x" % n * 26 + b"\n" for n in range(50)))
    arguments = ["--input", str(source), "--output", str(tmp_path / "out"), "--seed=3"]
    settings = ["--num_examples=50", "--batch_size=10", "--histogram_noise=9.5"]
    assert command.main([*arguments, *settings]) == 0
    assert dp_sparse.NoisyHistogram.load(tmp_path / "out" / HISTOGRAM).noise_multiplier == 9.5


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_few_and_many_rows_count_alike(rows: int) -> None:
    categories = np.random.default_rng(rows).integers(0, 5, (rows, 26), np.int32)
    counts = LookupCounts(SIZES)
    for part in (categories, categories[:1]):
        counts.add(part)
    begin = 0
    for k, size in enumerate(SIZES):
        expected = np.bincount([*categories[:, k], categories[0, k]], minlength=size)
        assert counts.values[begin : begin + size].tolist() == expected.tolist()
        begin += size

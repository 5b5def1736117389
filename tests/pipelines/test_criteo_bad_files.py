"""What is wrong in the middle of a file, by every way into training: nothing is lost silently."""

import gzip
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("apache_beam")
pytest.importorskip("tensorflow_datasets")

import tensorflow_datasets as tfds
from apache_beam.options.pipeline_options import PipelineOptions

from pipelines.criteo.datasets import CriteoKaggle
from pipelines.criteo.generate import generate
from pipelines.criteo.parse import parse_lines
from pipelines.criteo.prepare import run
from pipelines.criteo.prepare.job import new_job
from pipelines.criteo.raw_rows import RawRows
from pipelines.criteo.records import PrepareError, prepare
from pipelines.criteo.schema import RECORD_DTYPE, examples_from_records

SIZES = (40, 7) * 13
GOOD, BAD = 500, 200

# What becomes of the lines from the middle on.
CHANGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "a field less": ("too_few_fields", lambda line: line.rpartition(b"\t")[0]),
    "a field more": ("too_many_fields", lambda line: line + b"\t1"),
    "another separator": ("too_few_fields", lambda line: line.replace(b"\t", b",")),
    "not UTF-8": ("bad_encoding", lambda line: line + b"\xff\xfe"),
    "UTF-8 beyond ASCII": ("bad_encoding", lambda line: line + "é".encode()),
    "a zero byte": ("bad_encoding", lambda line: line.replace(b"\t", b"\0\t", 1)),
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    path = tmp_path_factory.mktemp("rows") / "rows"
    generate(GOOD + BAD, path, 3, SIZES, progress=False)
    return path.read_bytes().splitlines()


@pytest.fixture(params=CHANGES)
def changed(request: pytest.FixtureRequest, lines: list[bytes], tmp_path: Path) -> tuple[Path, str]:
    """A file whose lines change for good, and the reason that they are given."""
    reason, change = CHANGES[request.param]
    path = tmp_path / "train.txt"
    path.write_bytes(b"\n".join([*lines[:GOOD], *map(change, lines[GOOD:])]) + b"\n")
    return path, reason


def first_rows(lines: list[bytes]) -> np.ndarray:
    return parse_lines(b"\n".join(lines[:GOOD]), SIZES).records


def test_records(changed: tuple[Path, str], lines: list[bytes], tmp_path: Path) -> None:
    path, reason = changed
    made = prepare(path, tmp_path / "records", SIZES, progress=False)
    assert made.quarantined == {reason: BAD}
    assert made.records().tobytes() == first_rows(lines).tobytes()


def test_offline_batches(changed: tuple[Path, str], tmp_path: Path) -> None:
    """N is declared, so that a day whose format changes cannot pass for a shorter one."""
    path, reason = changed
    options = {"batch_size": 50.0, "epochs": 1.0, "vocabularies": SIZES, "seeded": True}
    whole = new_job([str(path)], str(tmp_path / "a"), num_examples=GOOD + BAD, **options)
    with pytest.raises(PrepareError, match=f"got {GOOD}: the sampling probability depends on it"):
        run.prepare(whole, seed=1)
    known = new_job([str(path)], str(tmp_path / "b"), num_examples=GOOD, **options)
    assert run.prepare(known, seed=1).about["quarantined"] == {reason: BAD}
    (kept,) = (tmp_path / "b" / "quarantine").iterdir()
    assert kept.read_bytes().startswith(b"%d\t%s\t" % (GOOD + 1, reason.encode()))
    assert kept.read_bytes().count(b"\n") == BAD


def test_tensorflow_datasets(changed: tuple[Path, str], tmp_path: Path) -> None:
    path, reason = changed
    builder = CriteoKaggle(data_dir=str(tmp_path / "data"))
    config = tfds.download.DownloadConfig(
        manual_dir=str(path.parent), beam_options=PipelineOptions(["--runner=DirectRunner"])
    )
    with pytest.warns(UserWarning, match=f"Malformed lines .*'{reason}': {BAD}"):
        builder.download_and_prepare(download_config=config)
    assert builder.info.splits["train"].num_examples == GOOD


def test_stream(changed: tuple[Path, str], lines: list[bytes], tmp_path: Path) -> None:
    path, reason = changed
    source = RawRows(
        [str(path)], GOOD + BAD, SIZES, examples_from_records, str(tmp_path / "quarantine")
    )
    with pytest.warns(UserWarning, match=f"Malformed lines were padding .*'{reason}': {BAD}"):
        x, y, weights = source.gather(np.arange(GOOD + BAD))
    rows = first_rows(lines)
    np.testing.assert_array_equal(x["categories"][:GOOD], rows["categories"])
    np.testing.assert_array_equal(weights, [1] * GOOD + [0] * BAD)
    assert not x["categories"][GOOD:].any() and not y[GOOD:].any()


class TestDaysOfAPreparation:
    """Days without rows stop it; their order does not matter to Poisson sampling."""

    @pytest.mark.parametrize("content", [gzip.compress(b"", mtime=0), b"\n", b"no row\nat all\n"])
    def test_a_day_without_rows(self, lines: list[bytes], tmp_path: Path, content: bytes) -> None:
        (tmp_path / "day_0").write_bytes(b"\n".join(lines))
        (tmp_path / "day_1").write_bytes(content)
        days = [str(tmp_path / f"day_{day}") for day in range(2)]
        job = new_job(
            days, str(tmp_path / "out"), num_examples=GOOD + BAD, batch_size=50.0, epochs=1.0
        )
        with pytest.raises(PrepareError, match=r"Expected rows in .*day_1, got \d lines and none"):
            run.prepare(job)
        assert not (tmp_path / "out" / "manifest.json").exists()

    def test_in_any_order(self, lines: list[bytes], tmp_path: Path) -> None:
        """Each row joins as often; which steps follows from the key and the place."""
        halves = lines[:GOOD], lines[GOOD:]
        for day, half in enumerate(halves):
            (tmp_path / f"day_{day}").write_bytes(b"\n".join(half))
        found = []
        for days in ((0, 1), (1, 0)):
            job = new_job(
                [str(tmp_path / f"day_{day}") for day in days],
                str(tmp_path / f"out{days[0]}"),
                num_examples=GOOD + BAD,
                batch_size=float(GOOD + BAD),  # q = 1: every row in every step
                epochs=2.0,
                vocabularies=SIZES,
            )
            manifest = run.prepare(job)
            assert manifest.steps == 2
            found.append(rows_of(tmp_path / f"out{days[0]}", manifest.capacity))
        assert found[0] == found[1] == sorted(found[0])
        rows = parse_lines(b"\n".join(lines), SIZES).records
        assert found[0] == sorted(2 * [row.tobytes() for row in rows])


def rows_of(folder: Path, capacity: int) -> list[bytes]:
    """The rows of all steps, sorted."""
    import tensorflow as tf

    rows: list[bytes] = []
    for path in sorted(folder.glob("steps-*")):
        for block in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            count = int(np.frombuffer(block[24:32], np.int64)[0])
            assert count <= capacity
            rows += [row.tobytes() for row in np.frombuffer(block[32:], RECORD_DTYPE)[:count]]
    return sorted(rows)


def test_no_warning_without_malformed_lines(lines: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(b"\n".join(lines))
    source = RawRows([str(tmp_path / "rows")], GOOD + BAD, SIZES, examples_from_records, "nowhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        *_, weights = source.gather(np.arange(GOOD + BAD))
    assert weights.all()

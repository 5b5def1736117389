"""A disk that gets full while rows are prepared: no half of anything, and again with more room."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

pytest.importorskip("apache_beam")
pytest.importorskip("tensorflow_datasets")

import tensorflow_datasets as tfds
from apache_beam.options.pipeline_options import PipelineOptions

from pipelines.criteo.datasets import CriteoKaggle
from pipelines.criteo.generate import generate
from pipelines.criteo.parse import parse_lines
from pipelines.criteo.prepare import run
from pipelines.criteo.prepare.job import new_job
from pipelines.criteo.records import prepare
from tests.full_disk import SmallDisk, small_disk

SIZES, ROWS = (40, 7) * 13, 6_000
ROOM = 1 << 26


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "train.txt"
    generate(ROWS, path, 3, SIZES, progress=False)
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 1 << 17) as made:
        yield made


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """What stops says that the disk is full, whoever found out."""
    with pytest.raises(
        (OSError, RuntimeError, tf.errors.OpError), match=r"No space left|RESOURCE_EXHAUSTED"
    ):
        yield


def test_records(source: Path, disk: SmallDisk) -> None:
    with no_room():
        prepare(source, disk.path / "rows", SIZES, progress=False)
    assert disk.names() == []
    disk.resize(ROOM)
    made = prepare(source, disk.path / "rows", SIZES, progress=False)
    wanted = parse_lines(source.read_bytes(), SIZES).records
    assert made.records().tobytes() == wanted.tobytes()


@pytest.mark.parametrize("size", [1 << 14, 1 << 17, 1 << 19, 1 << 20, 5 << 18])
def test_offline_batches(source: Path, disk: SmallDisk, tmp_path: Path, size: int) -> None:
    """Where it gets full differs: pairs, buckets, or the batches themselves."""
    given: dict[str, Any] = {"num_examples": ROWS, "batch_size": 500.0, "epochs": 1.0}
    given |= {"vocabularies": SIZES, "seeded": True}
    key = str(tmp_path / "key")
    disk.resize(ROOM)
    job = new_job([str(source)], str(disk.path / "out"), key_file=key, **given)
    disk.resize(size)
    with no_room():
        run.prepare(job, seed=1)
    assert "out/manifest.json" not in disk.names()
    disk.resize(ROOM)
    run.prepare(job, seed=1)
    whole = new_job([str(source)], str(tmp_path / "whole"), **given)
    run.prepare(whole, seed=1)
    for path in (tmp_path / "whole").glob("steps-*"):
        assert (disk.path / "out" / path.name).read_bytes() == path.read_bytes()
    assert {path.name for path in (tmp_path / "whole").iterdir()} == set(disk.names_of("out"))


def test_datasets(source: Path, disk: SmallDisk) -> None:
    builder = CriteoKaggle(data_dir=str(disk.path))
    options = PipelineOptions(["--runner=DirectRunner"])
    config = tfds.download.DownloadConfig(manual_dir=str(source.parent), beam_options=options)
    with no_room():
        builder.download_and_prepare(download_config=config)
    assert not Path(builder.data_path).exists()
    disk.resize(ROOM)
    builder.download_and_prepare(download_config=config)
    assert builder.info.splits.total_num_examples == ROWS

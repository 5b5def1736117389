"""The builders of tensorflow-datasets: rows as they are in the files, and which files are taken."""

import gzip
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("apache_beam")
pytest.importorskip("tensorflow_datasets")

import tensorflow_datasets as tfds
from apache_beam.options.pipeline_options import PipelineOptions

from pipelines.criteo.datasets import CriteoKaggle, CriteoTerabyte
from pipelines.criteo.days import check_order
from pipelines.criteo.generate import generate
from pipelines.criteo.parse import parse_lines, parse_raw_lines
from pipelines.criteo.records import PreparedData, PrepareError
from pipelines.criteo.schema import MISSING_CATEGORY, MISSING_COUNT, model_inputs
from pipelines.criteo.tfds_records import records_of
from tests.subprocesses import HANG, ROOT

SIZES = (40, 7) * 13
BAD = b"1\t2\n", b"\xff\xfe\n"


def day(seed: int, rows: int, path: Path) -> bytes:
    """So many made-up rows, also written to a file."""
    generate(rows, path, seed, SIZES, progress=False)
    return path.read_bytes()


def made(builder: Any, manual: Path) -> Any:
    """The builder, once its data set is there."""
    config = tfds.download.DownloadConfig(
        manual_dir=str(manual), beam_options=PipelineOptions(["--runner=DirectRunner"])
    )
    builder.download_and_prepare(download_config=config)
    return builder


def assert_rows(dataset: Any, content: bytes) -> None:
    """The examples are the well-formed rows of the text, in their order."""
    rows = parse_raw_lines(content).records
    examples = list(tfds.as_numpy(dataset))
    assert len(examples) == len(rows)
    for name, field in (("label", "label"), ("int", "integers"), ("cat", "categories")):
        np.testing.assert_array_equal([example[name] for example in examples], rows[field])


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    """Two days, one of them .gz and of several blocks, with two malformed lines in its middle."""
    folder = tmp_path_factory.mktemp("days")
    first, second = day(1, 700, folder / "day_0"), day(2, 9_000, folder / "rows")
    lines = second.splitlines(keepends=True)
    second = b"".join([*lines[:8_000], BAD[0], *lines[8_000:8_500], BAD[1], *lines[8_500:]])
    (folder / "rows").unlink()
    (folder / "day_1.gz").write_bytes(gzip.compress(second, 1))
    return folder, [first, second]


def test_days_are_splits_with_the_rows_of_their_files(
    days: tuple[Path, list[bytes]], tmp_path: Path
) -> None:
    manual, contents = days
    builder = made(CriteoTerabyte(config="first_2", data_dir=str(tmp_path)), manual)
    assert list(builder.info.splits) == ["day_0", "day_1"]
    again = tfds.builder("criteo_terabyte/first_2", data_dir=str(tmp_path))
    for name, content in zip(("day_0", "day_1"), contents, strict=True):
        assert_rows(again.as_dataset(split=name), content)
    assert again.info.metadata["day_0"]["quarantined"] == {}
    report = again.info.metadata["day_1"]
    assert report["quarantined"] == {"too_few_fields": 1, "bad_encoding": 1}
    plain = gzip.decompress((manual / "day_1.gz").read_bytes())
    assert report["sha256"] == hashlib.sha256(plain).hexdigest()
    assert report["rows"] == 9_000 == again.info.splits["day_1"].num_examples
    kept = [path.read_bytes() for path in Path(again.data_path, "quarantine").iterdir()]
    assert sorted(b"".join(kept).splitlines()) == [
        b"8001\ttoo_few_fields\t1\t2",
        b"8502\tbad_encoding\t\xff\xfe",
    ]
    assert not list(Path(again.data_path).glob(".report*"))
    again.download_and_prepare()  # nothing to do
    assert tfds.builder("criteo_terabyte/first_2", data_dir=str(tmp_path)).info.metadata == (
        again.info.metadata
    )


def test_raw_values_give_the_inputs_of_the_pipeline(
    days: tuple[Path, list[bytes]], tmp_path: Path
) -> None:
    """Hashing is a step of its own, with the results of the records."""
    manual, contents = tmp_path / "manual", days[1]
    manual.mkdir()
    (manual / "train.txt").write_bytes(contents[0])
    made(CriteoKaggle(data_dir=str(tmp_path)), manual)
    x, labels = tfds.as_numpy(
        tfds.load(
            "criteo_kaggle",
            split="train",
            data_dir=str(tmp_path),
            batch_size=-1,
            as_supervised=True,
        )
    )
    assert (x["int"] == MISSING_COUNT).any() and (x["cat"] == MISSING_CATEGORY).any()
    records = parse_lines(contents[0], SIZES).records
    inputs = model_inputs(x["int"], x["cat"], SIZES)
    np.testing.assert_array_equal(labels, records["label"])
    for name in ("integers", "categories"):
        np.testing.assert_array_equal(inputs[name], records[name])


def test_records_are_those_of_the_file(days: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    """Made once; another split or other vocabularies make others."""
    manual, contents = days
    made(CriteoTerabyte(config="first_2", data_dir=str(tmp_path)), manual)
    into = tmp_path / "rows.records"

    def records(split: str, sizes: tuple[int, ...] = SIZES) -> PreparedData:
        return records_of("criteo_terabyte/first_2", split, str(tmp_path), into, sizes)

    for split, content in zip(("day_0", "day_1"), contents, strict=True):
        found = records(split)
        np.testing.assert_array_equal(found.records(), parse_lines(content, SIZES).records)
        first = into.stat().st_mtime_ns
        assert records(split) == found and into.stat().st_mtime_ns == first
    assert records("day_1", (9,) * 26).vocabularies == (9,) * 26
    with pytest.raises(PrepareError, match=r"one of \['day_0', 'day_1'\], got 'day_7'"):
        records("day_7")
    with pytest.raises(ValueError, match="to be prepared"):
        records_of("criteo_kaggle", "train", str(tmp_path / "none"), into, SIZES)


@pytest.mark.slow
def test_the_job_trains_from_what_is_prepared(
    days: tuple[Path, list[bytes]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manual, _ = days
    made(CriteoTerabyte(config="first_2", data_dir=str(tmp_path)), manual)
    settings = {
        "data.tfds": "criteo_terabyte/first_2",
        "data.tfds_split": "day_0",
        "data.directory": str(tmp_path),
        "training.batch_size": 512,
        "report.directory": str(tmp_path / "run"),
        "report.verbose": 0,
    }
    command = [f"--config.{name}={value}" for name, value in settings.items()]
    run = [sys.executable, "-m", "pipelines.criteo", "--config=configs/criteo_sample.py"]
    done = subprocess.run([*run, *command], capture_output=True, text=True, timeout=HANG, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "run" / "report.html").read_text()
    assert "criteo_terabyte/first_2, day_0" in page
    both = subprocess.run(
        [*run, *command, "--config.data.path=x"], capture_output=True, text=True, cwd=ROOT
    )
    assert both.returncode == 1 and "Expected data.path or data.tfds" in both.stderr


def test_mock_data() -> None:
    """Without any file, as tests of a training script would have it."""
    with tfds.testing.mock_data(num_examples=3):
        for name, split in (("criteo_kaggle", "train"), ("criteo_terabyte", "day_23")):
            examples = list(tfds.as_numpy(tfds.load(name, split=split)))
            assert len(examples) == 3
            for example in examples:
                assert example["label"] in (0, 1)
                assert example["int"].shape == (13,) and example["cat"].shape == (26,)


@pytest.mark.skipif("DP_SPARSE_DATA" not in os.environ, reason="DP_SPARSE_DATA is not set")
def test_real_rows(tmp_path: Path) -> None:
    """The head of day 0 of the terabyte."""
    source = Path(os.environ["DP_SPARSE_DATA"]) / "criteo" / "terabyte_day0_head_10k.tsv.gz"
    (tmp_path / "day_0.tsv.gz").symlink_to(source)
    builder = made(CriteoTerabyte(config="first_1", data_dir=str(tmp_path)), tmp_path)
    assert builder.info.metadata["day_0"]["quarantined"] == {}
    assert_rows(builder.as_dataset(split="day_0"), gzip.decompress(source.read_bytes()))


class TestRefused:
    """Each with what to do, before anything is made."""

    def refused(self, manual: Path, config: str = "first_2") -> str:
        builder = CriteoTerabyte(config=config, data_dir=str(manual / "data"))
        with pytest.raises(Exception, match=r"day_\d") as info:
            made(builder, manual)
        assert not Path(builder.data_path).exists()
        return str(info.value)

    def test_a_day_missing(self, tmp_path: Path) -> None:
        day(1, 10, tmp_path / "day_0")
        day(3, 10, tmp_path / "day_2")
        message = self.refused(tmp_path, "first_3")
        assert "Expected day_0 to day_2" in message and "got no day_1: put the file" in message
        assert "got no day_1" in self.refused(tmp_path, "all_days")

    @pytest.mark.parametrize("content", [b"", b"\n", gzip.compress(b"", mtime=0)])
    def test_a_day_without_rows(self, tmp_path: Path, content: bytes) -> None:
        day(1, 10, tmp_path / "day_0")
        (tmp_path / "day_1").write_bytes(content)
        assert "day_1 is empty: it has no rows" in self.refused(tmp_path)

    def test_a_day_twice(self, tmp_path: Path) -> None:
        content = day(1, 10, tmp_path / "day_0")
        (tmp_path / "day_1.gz").write_bytes(gzip.compress(content))
        assert "the same rows at the beginning of" in self.refused(tmp_path)
        day(2, 10, tmp_path / "day_1.tsv")
        assert "Expected one file of day_1" in self.refused(tmp_path)

    def test_a_day_that_ends_early(self, tmp_path: Path) -> None:
        day(1, 10, tmp_path / "day_0")
        content = gzip.compress(day(2, 9_000, tmp_path / "rows"))
        (tmp_path / "day_1.gz").write_bytes(content[: len(content) // 2])
        assert "day_1.gz ends early after" in self.refused(tmp_path)
        (tmp_path / "day_1.gz").write_bytes(content[:30])
        assert "day_1.gz is damaged" in self.refused(tmp_path)

    def test_a_day_of_something_else(self, tmp_path: Path) -> None:
        day(1, 10, tmp_path / "day_0")
        (tmp_path / "day_1").write_bytes(b"no row\n" * 20)
        message = self.refused(tmp_path)
        assert "No row of day_1 is well-formed" in message or "0 for split day_1" in message


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (["a/day_0.gz", "b/day_1.tsv", "day_2"], False),
        (["day_7.tsv.gz"], False),
        (["train.txt", "day_3", "other"], False),
        (["day_1.gz", "day_0.gz"], True),
        (["day_0.gz", "day_2.gz"], True),
        (["day_0.gz", "day_0.gz"], True),
        (["day_9", "day_10", "day_12"], True),
    ],
)
def test_days_in_the_order_of_time(names: list[str], refused: bool) -> None:
    if not refused:
        return check_order(names)
    with pytest.raises(PrepareError, match="Expected days in the order of time"):
        check_order(names)

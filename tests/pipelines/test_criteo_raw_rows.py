"""Raw rows as a stream: the order is the files', whatever they hold; N is checked; they train."""

import gzip
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_sparse
from configs.criteo_sample import get_config
from dp_sparse import PrivacyError
from dp_sparse.core import translated
from pipelines.criteo import raw_rows
from pipelines.criteo.generate import generate
from pipelines.criteo.parse import parse_line
from pipelines.criteo.raw_rows import RawRows
from pipelines.criteo.records import PrepareError, prepare
from pipelines.criteo.schema import RECORD_DTYPE
from pipelines.criteo.train import train

ROOT = Path(__file__).parents[2]
SIZES = (40, 7) * 13


def row(number: int) -> bytes:
    """A line that tells which one it is; lengths differ."""
    fields = [b"%d" % (number % 2), b"%d" % number, *[b""] * 12, *[b"%x" % (number**2 % 999)] * 26]
    return b"\t".join(fields) + b"\n"


def as_bytes(records: np.ndarray) -> tuple[Any, Any]:
    """Whole records, which tell everything."""
    return records.view(np.uint8).reshape(len(records), RECORD_DTYPE.itemsize), records["label"]


def rows_of(paths: Sequence[Path], count: int, folder: Path, **options: Any) -> RawRows:
    names = [str(path) for path in paths]
    return RawRows(names, count, SIZES, as_bytes, str(folder / "quarantine"), **options)


def in_turns(files: Sequence[Sequence[bytes]], lines: int, at_once: int) -> list[bytes]:
    """The order that is promised, written out."""
    left = [list(file) for file in files]
    opened, order = [left.pop(0) for _ in range(min(at_once, len(left)))], []
    while opened:
        file = opened.pop(0)
        if not file:
            opened = ([left.pop(0)] if left else []) + opened
            continue
        order += file[:lines]
        opened.append(file[lines:])
    return order


def expected(lines: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Records and weights, line by line."""
    records, weights = np.zeros(len(lines), RECORD_DTYPE), np.zeros(len(lines), np.float32)
    for place, line in enumerate(lines):
        found = parse_line(line, SIZES)
        if isinstance(found, np.void):
            records[place], weights[place] = found, 1
    return records, weights


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    lines=st.sampled_from([3, 8, 100]),
    at_once=st.integers(1, 3),
    bad=st.sets(st.integers(0, 100)),
    batch=st.integers(1, 17),
    seed=st.integers(0, 9),
)
def test_every_line_in_its_place(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    lines: int,
    at_once: int,
    bad: set[int],
    batch: int,
    seed: int,
) -> None:
    """Whatever is malformed; from the beginning, and from any line on."""
    folder = tmp_path_factory.mktemp("rows")
    files, number = [], 0
    for index, size in enumerate(sizes):
        own = range(number, number + size)
        files.append([b"bad\n" if k in bad and k != own[0] else row(k) for k in own])
        content = b"".join(files[-1])
        content = content.removesuffix(b"\n") if index % 2 else content
        (folder / f"part{index}").write_bytes(gzip.compress(content) if seed % 2 else content)
        number += size
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setattr(raw_rows, "LINES", lines)
        source = rows_of(sorted(folder.iterdir()), number, folder, files_at_once=at_once)
        records, weights = expected(in_turns(files, lines, at_once))
        for first in (0, seed * number // 10, 0):
            parts = [
                source.gather(np.arange(begin, min(begin + batch, number)))
                for begin in range(first, number, batch)
            ]
            assert b"".join(part[0].tobytes() for part in parts) == records[first:].tobytes()
            np.testing.assert_array_equal(np.concatenate([p[2] for p in parts]), weights[first:])


class TestNeighbours:
    """One row replaced by padding moves no other: what the stream's guarantee rests on."""

    @pytest.mark.parametrize("instead", [b"\n", b"x" * 5_000 + b"\n", b"1\t\xff\n"])
    @pytest.mark.parametrize("at_once", [1, 2])
    def test_others_keep_their_batches(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instead: bytes, at_once: int
    ) -> None:
        monkeypatch.setattr(raw_rows, "LINES", 10)
        files = [[row(k) for k in range(95)], [row(k) for k in range(200, 260)]]
        changed = [[*files[0][:33], instead, *files[0][34:]], files[1]]
        got = []
        for name, contents in (("d", files), ("neighbour", changed)):
            paths = [tmp_path / f"{name}{index}" for index in range(2)]
            for path, lines in zip(paths, contents, strict=True):
                path.write_bytes(b"".join(lines))
            source = rows_of(paths, 155, tmp_path, files_at_once=at_once)
            sampling = dp_sparse.StreamSampling(155, 16)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got.append(list(sampling.batches(source).as_numpy_iterator()))
        differing = []
        for (x, _, one), (other_x, _, other) in zip(*got, strict=True):
            assert one["present"].tobytes() == other["present"].tobytes()
            differing.append(int((x != other_x).any(axis=1).sum()))
            assert (one["sample_weight"] - other["sample_weight"]).sum() == differing[-1]
        assert sorted(differing)[-2:] == [0, 1]


def test_malformed_lines_are_kept_apart_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(row(1) + b"bad\n" + row(2) + b"\xc3\xa9\n" + row(3).replace(b"\t", b"", 1))
    source = rows_of([path], 5, tmp_path)
    with pytest.warns(
        UserWarning, match="Malformed lines were padding .*'bad_encoding': 1"
    ) as found:
        _, _, weights = source.gather(np.arange(5))
    assert "'too_few_fields': 2" in str(found[0].message)
    assert weights.tolist() == [1, 0, 1, 0, 0]
    kept = b"".join(file.read_bytes() for file in (tmp_path / "quarantine").iterdir())
    assert kept.splitlines()[:2] == [b"2\ttoo_few_fields\tbad", b"4\tbad_encoding\t\xc3\xa9"]


class TestRefused:
    @pytest.mark.parametrize(
        ("off", "message"), [(1, "got 40: a file was cut"), (-1, "got 40: give the true number")]
    )
    def test_another_number_of_lines(self, tmp_path: Path, off: int, message: str) -> None:
        path = tmp_path / "rows"
        path.write_bytes(b"".join(map(row, range(40))))
        source = rows_of([path], 40 + off, tmp_path)
        with pytest.raises(PrivacyError, match=message), translated():
            list(dp_sparse.StreamSampling(40 + off, 8).batches(source))

    def test_at_random(self, tmp_path: Path) -> None:
        path = tmp_path / "rows"
        path.write_bytes(b"".join(map(row, range(40))))
        source = rows_of([path], 40, tmp_path)
        with pytest.raises(ValueError, match="Expected consecutive lines"):
            source.gather(np.array([3, 5]))

    def test_files(self, tmp_path: Path) -> None:
        content = b"".join(map(row, range(40)))
        for name in ("day_0", "day_1", "day_2"):
            (tmp_path / name).write_bytes(content + row(ord(name[-1])))
        (tmp_path / "empty").touch()
        (tmp_path / "cut.gz").write_bytes(gzip.compress(content)[:-9])
        for names, message in (
            (["day_1", "day_0"], "in the order of time"),
            (["day_0", "day_2"], "in the order of time"),
            (["day_0", "empty"], "empty is empty"),
            (["nowhere"], "No such file: .*nowhere"),
        ):
            with pytest.raises(PrepareError, match=message):
                rows_of([tmp_path / name for name in names], 41, tmp_path)
        (tmp_path / "again").write_bytes(content + row(ord("0")))
        with pytest.raises(PrepareError, match="got the same rows"):
            rows_of([tmp_path / "day_0", tmp_path / "again"], 82, tmp_path)
        with pytest.raises(PrepareError, match=r"cut\.gz ends early after"):
            rows_of([tmp_path / "cut.gz"], 40, tmp_path).gather(np.arange(40))


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two days to train on, with malformed lines, and one that is held out."""
    folder = tmp_path_factory.mktemp("days")
    for day in range(3):
        generate(700, folder / f"day_{day}.gz", day, SIZES, progress=False)
    with gzip.open(folder / "day_1.gz", "ab") as file:
        file.write(b"1\t2\n" * 3)
    return folder


def config_of(days: Path, directory: Path, **data: Any) -> Any:
    config = get_config()
    config.report.verbose = 0
    config.report.directory = str(directory)
    config.training.batch_size, config.training.epochs, config.training.evaluations = 256, 1.0, 4
    stream = f"{days}/day_0.gz,{days}/day_1.gz"
    config.data.update(
        {"stream": stream, "num_examples": 1_403, "path": f"{days}/day_2.gz", **data}
    )
    return config


@pytest.mark.parametrize("method", ["dp_adafest", pytest.param("dp_fest", marks=pytest.mark.slow)])
def test_trains(days: Path, tmp_path: Path, method: str) -> None:
    """Every line is used, with and without a pass that selects rows, and the statement is true."""
    config = config_of(days, tmp_path)
    config.method, config.selection.rows = method, 100
    data = prepare(days / "day_2.gz", tmp_path / "day_2.records", SIZES, progress=False)
    with pytest.warns(UserWarning, match="Malformed lines were padding"):
        result = train(config, data)
    assert result.steps == 6 and len(result.curve) == 4 and result.scores.shape == (700,)
    statement = result.statement.replace("\n", " ")
    assert "There is no amplification by sampling" in statement
    assert "1403 examples" in statement and "zero-out" in statement
    assert result.epsilon <= 1


def test_configs_that_are_refused(days: Path, tmp_path: Path) -> None:
    data = prepare(days / "day_2.gz", tmp_path / "day_2.records", SIZES, progress=False)
    both = config_of(days, tmp_path, offline="drawn")
    half = config_of(days, tmp_path)
    half.training.epochs = 1.5
    shuffled = config_of(days, tmp_path)
    shuffled.method = "non_private"
    for config, message in (
        (both, "got both"),
        (half, "whole passes"),
        (shuffled, "Expected a private method"),
        (config_of(days, tmp_path, num_examples=0), "Expected data.num_examples"),
        (config_of(days, tmp_path, path=f"{days}/day_0.gz"), "got the same rows"),
    ):
        with pytest.raises(ValueError, match=message):
            train(config, data)


@pytest.mark.slow
def test_the_command_on_real_rows(tmp_path: Path) -> None:
    """The head of day 0 trains, Kaggle's rows are held out."""
    if "DP_SPARSE_DATA" not in os.environ:
        pytest.skip("DP_SPARSE_DATA is not set")
    folder = Path(os.environ["DP_SPARSE_DATA"]) / "criteo"
    command = [sys.executable, "-m", "pipelines.criteo", "--config=configs/criteo_sample.py"]
    options = {
        "data.stream": folder / "terabyte_day0_head_10k.tsv.gz",
        "data.num_examples": 10_000,
        "data.path": folder / "kaggle_sample_120k.tsv.gz",
        "report.directory": tmp_path,
        "training.epochs": 1.0,
    }
    done = subprocess.run(
        [*command, *(f"--config.{name}={value}" for name, value in options.items())],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "There is no amplification by sampling" in done.stdout.replace("\n", " ")
    assert (tmp_path / "report.html").exists()

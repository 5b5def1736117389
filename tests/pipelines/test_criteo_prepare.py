"""The Beam preparation: every example in its steps, once; stopped anywhere it goes on; its key."""

import dataclasses
import gzip
import hashlib
import json
import os
import pickle
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("apache_beam")

import dp_sparse
from dp_sparse import OfflineBatches, offline
from pipelines.criteo.parse import parse_lines
from pipelines.criteo.prepare import __main__ as command
from pipelines.criteo.prepare import collect, job, run, spread
from pipelines.criteo.prepare.job import Job, new_job
from pipelines.criteo.records import PrepareError
from pipelines.criteo.schema import RECORD_DTYPE

SIZES = (7,) * 26
ROWS = (5_000, 70_000, 900)  # of each shard; the second one has two chunks
SEED = 5


def rows(shard: int, count: int) -> bytes:
    """Well-formed lines, no two alike over all shards."""
    lines = [
        b"\t".join(
            [b"01"[n % 2 : n % 2 + 1], b"%d" % n, b"%d" % shard, *[b""] * 11, *[b"%x" % n] * 26]
        )
        for n in range(count)
    ]
    return b"\n".join(lines) + b"\n"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("rows")
    paths = [folder / "day_0.tsv", folder / "day_1.gz", folder / "day_2.tsv"]
    contents = [rows(k, count) for k, count in enumerate(ROWS)]
    contents[2] = contents[2].replace(b"\n", b"\nbad line\n", 1) + b"1\t2"  # two malformed lines
    paths[0].write_bytes(contents[0])
    paths[1].write_bytes(gzip.compress(contents[1], 1))
    paths[2].write_bytes(contents[2])
    return [str(path) for path in paths]


def job_of(shards: list[str], output: Path, **changes: Any) -> Job:
    given: dict[str, Any] = {"num_examples": sum(ROWS), "batch_size": 500.0, "epochs": 0.2}
    return new_job(
        shards, str(output), **{**given, "vocabularies": SIZES, "seeded": True, **changes}
    )


def expected(made: Job) -> list[np.ndarray]:
    """The records of each step, straight from the draw."""
    draw = offline.OfflineDraw(
        SEED.to_bytes(32, "little"), made.expected_batch_size / made.num_examples, made.steps
    )
    batches: list[list[np.ndarray]] = [[] for _ in range(made.steps)]
    for shard, path in enumerate(made.inputs):
        content = Path(path).read_bytes()
        content = gzip.decompress(content) if path.endswith(".gz") else content
        records = parse_lines(content, SIZES).records
        for chunk in range(-(-len(records) // offline.CHUNK)):
            own = records[chunk * offline.CHUNK :][: offline.CHUNK]
            for place, step in zip(*draw.of_chunk(f"shard {shard}", chunk), strict=True):
                if place < len(own):
                    batches[step].append(own[place])
    return [np.array(batch, RECORD_DTYPE) for batch in batches]


def written(made: Job) -> list[np.ndarray]:
    """The records of each step, as training reads them."""
    source = OfflineBatches(made.output, lambda fields: (fields, fields["label"]))
    sampling = dp_sparse.offline_sampling(source, shared=True)
    batches = []
    for fields, _, weights in sampling.batches(source):
        count = int(weights["present"].numpy().sum())
        batch = np.zeros(count, RECORD_DTYPE)
        for name, values in fields.items():
            batch[name] = values[:count]
        batches.append(batch)
    return batches


def assert_whole(made: Job) -> None:
    for own, wanted in zip(written(made), expected(made), strict=True):
        assert own.tobytes() == wanted.tobytes()


def digest_of(folder: str) -> str:
    """Of the batches; which files, and what is in them."""
    hashed = hashlib.sha256()
    for path in sorted(Path(folder).glob("steps-*")):
        hashed.update(path.name.encode() + path.read_bytes())
    return hashed.hexdigest()


def test_every_example_is_in_its_steps_and_no_other(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many buckets and many files of pairs."""
    monkeypatch.setattr(job, "BUCKET_BYTES", 500_000)
    made = job_of(shards, tmp_path / "out")
    assert made.buckets > 3
    manifest = run.prepare(made, seed=SEED)
    assert manifest.seeded and manifest.steps == made.steps
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == [
        "quarantine"
    ]
    assert_whole(made)


def test_malformed_lines_are_kept_apart(shards: list[str], tmp_path: Path) -> None:
    made = job_of(shards, tmp_path / "out")
    manifest = run.prepare(made, seed=SEED)
    assert manifest.about["quarantined"] == {"too_few_fields": 2}
    files = list((tmp_path / "out" / "quarantine").iterdir())
    assert [file.name for file in files] == ["shard-00002.tsv"]
    lines = files[0].read_bytes().splitlines()
    assert lines == [b"2\ttoo_few_fields\tbad line", b"902\ttoo_few_fields\t1\t2"]


@pytest.mark.slow
def test_several_processes_write_the_same(shards: list[str], tmp_path: Path) -> None:
    made = job_of(shards, tmp_path / "one")
    run.prepare(made, seed=SEED)
    two = job_of(shards, tmp_path / "two")
    options = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]
    run.prepare(two, options, seed=SEED)
    assert digest_of(made.output) == digest_of(two.output)


class TestKey:
    def test_secret_while_it_is_there(
        self, shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Outside the output, for its owner alone, in no file of the job and in no pickle of it."""
        made = job_of(shards, tmp_path / "out", seeded=False)
        seen = []

        def look(given: Job, bucket: int, numbers: Any) -> int:
            seen.append(stat.S_IMODE(os.stat(given.key_file).st_mode))
            texts = [path.read_bytes() for path in Path(given.output).rglob("*") if path.is_file()]
            key = given.key()
            assert len(key) == 32 and texts
            for secret in (key, key.hex().encode()):
                assert not any(secret in text for text in texts)
                assert secret not in pickle.dumps(given) and secret not in repr(given).encode()
            return collect.collect(given, bucket, numbers)

        monkeypatch.setattr(run, "collect", look)
        manifest = run.prepare(made)
        assert seen and set(seen) == {0o600}
        assert not Path(made.key_file).exists() and not manifest.seeded

    @pytest.mark.parametrize(("seeded", "seed"), [(False, 7), (True, None)])
    def test_of_a_seed_that_the_manifest_would_not_name(
        self, shards: list[str], tmp_path: Path, seeded: bool, seed: int | None
    ) -> None:
        with pytest.raises(PrepareError, match="Expected a seed with new_job"):
            run.prepare(job_of(shards, tmp_path / "out", seeded=seeded), seed=seed)
        assert not (tmp_path / "out").exists() and not (tmp_path / "out.key").exists()

    def test_each_preparation_draws_anew(self, shards: list[str], tmp_path: Path) -> None:
        names = {
            run.prepare(job_of(shards, tmp_path / name, seeded=False)).draw_id for name in "ab"
        }
        assert len(names) == 2

    def test_not_in_the_output(self, shards: list[str], tmp_path: Path) -> None:
        with pytest.raises(PrepareError, match="Expected key_file outside the output"):
            job_of(shards, tmp_path / "out", key_file=str(tmp_path / "out" / "inside" / "key"))

    def test_of_another_preparation(self, shards: list[str], tmp_path: Path) -> None:
        (tmp_path / "out.key").write_text("00" * 32)
        with pytest.raises(PrepareError, match="a key serves one preparation"):
            run.prepare(job_of(shards, tmp_path / "out"), seed=SEED)

    def test_of_another_preparation_that_began_meanwhile(
        self, shards: list[str], tmp_path: Path
    ) -> None:
        """Both found no key at first; whose file it is stands in it."""
        key = str(tmp_path / "key")
        one, other = (job_of(shards, tmp_path / name, key_file=key) for name in "ab")
        with pytest.MonkeyPatch.context() as patched:
            stop_after(patched, 1)
            with pytest.raises(_StopError):
                run.prepare(one, seed=SEED)
        (tmp_path / "b" / ".work").mkdir(parents=True)
        begun = {"fingerprint": other.fingerprint, "draw_id": None}
        (tmp_path / "b" / ".work" / "job.json").write_text(json.dumps(begun))
        with pytest.raises(PrepareError, match="that of another preparation, which it serves"):
            run.prepare(other, seed=SEED)
        run.prepare(one, seed=SEED)  # with its own
        assert not Path(key).exists()


class _StopError(Exception):
    """Stands for a process that is gone."""


def stop_after(monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """The write after so many is the last thing that happens."""
    left = [writes]
    whole: Callable[..., None] = job.write_whole

    def stopping(path: str, content: bytes) -> None:
        if left[0] == 0:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).with_name(f".{Path(path).name}.tmp").write_bytes(content[:5])
            raise _StopError("stopped")
        left[0] -= 1
        whole(path, content)

    for module in (job, spread):
        monkeypatch.setattr(module, "write_whole", stopping)


@pytest.mark.cases(4)
@pytest.mark.parametrize("writes", range(16))
def test_what_was_stopped_goes_on(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """After each of its writes; what it did before is not done again."""
    monkeypatch.setattr(job, "BUCKET_BYTES", 500_000)
    made = job_of(shards, tmp_path / "out")
    with pytest.MonkeyPatch.context() as patched:
        stop_after(patched, writes)
        with pytest.raises(Exception, match="stopped"):
            run.prepare(made, seed=SEED)
    assert not (tmp_path / "out" / "manifest.json").exists()
    there = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("steps-*")}
    run.prepare(made, seed=SEED)
    assert_whole(made)
    finished = [path for path, when in there.items() if path.stat().st_mtime_ns == when]
    assert len(finished) >= len(there) - made.stripes


@pytest.mark.slow
def test_killed_at_random_it_ends_as_if_nothing_had_been(shards: list[str], tmp_path: Path) -> None:
    """Real processes, kill -9, until one of them ends by itself."""
    undisturbed = job_of(shards, tmp_path / "whole")
    run.prepare(undisturbed, seed=SEED)
    rng = np.random.default_rng()
    for turn in range(8):  # the last one is left alone
        process = subprocess.Popen(
            [sys.executable, "-c", _IN_A_PROCESS, *shards, str(tmp_path / "out")],
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        if turn < 7:
            time.sleep(rng.uniform(0, 1.5))
            process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
    assert process.returncode == 0
    assert not (tmp_path / "out.key").exists() and not (tmp_path / "out" / ".work").exists()
    assert digest_of(str(tmp_path / "out")) == digest_of(undisturbed.output)


_IN_A_PROCESS = f"""
import sys
from pipelines.criteo.prepare import run
from pipelines.criteo.prepare.job import new_job
job = new_job(sys.argv[1:4], sys.argv[4], num_examples={sum(ROWS)}, batch_size=500.0, epochs=0.2,
              vocabularies={SIZES}, seeded=True)
print("begun", flush=True)
run.prepare(job, seed={SEED})
"""


def test_two_at_once_do_not_meet_in_one_output(shards: list[str], tmp_path: Path) -> None:
    """Real processes; the one that comes later is told, and takes nothing from the first."""
    first = subprocess.Popen(
        [sys.executable, "-c", _IN_A_PROCESS, *shards, str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    made = job_of(shards, tmp_path / "out")
    while not Path(made.key_file).exists():
        assert first.poll() is None
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    with pytest.raises(PrepareError, match="Expected nobody else to prepare .*out, got"):
        run.prepare(made, seed=SEED)
    first.send_signal(signal.SIGCONT)
    assert first.wait() == 0
    assert run.prepare(made, seed=SEED).num_examples == sum(ROWS)
    assert_whole(made)


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_half_written(shards: list[str], tmp_path: Path) -> None:
    """No file may have more than 100 kB at first; then the same command ends."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2)\n"
    arguments = [*shards, str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    for code, ends in ((limited + _IN_A_PROCESS, False), (_IN_A_PROCESS, True)):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], env=environment, capture_output=True
        )
        assert (done.returncode == 0) == ends
        assert (tmp_path / "out" / "manifest.json").exists() == ends
    assert_whole(job_of(shards, tmp_path / "out"))


@pytest.mark.parametrize("at", ["remove", "rmtree"])
def test_stopped_while_it_cleared_up(shards: list[str], tmp_path: Path, at: str) -> None:
    made = job_of(shards, tmp_path / "out")

    def stopping(path: str) -> None:
        raise _StopError("stopped")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run.tf.io.gfile, at, stopping)
        with pytest.raises(_StopError):
            run.prepare(made, seed=SEED)
    run.prepare(made, seed=SEED)
    assert not Path(made.key_file).exists() and not (tmp_path / "out" / ".work").exists()
    assert_whole(made)


class TestRefused:
    @pytest.mark.parametrize(("off", "epochs"), [(1, 0.2), (-1, 0.2)])
    def test_another_number_of_rows(
        self, shards: list[str], tmp_path: Path, off: int, epochs: float
    ) -> None:
        made = job_of(shards, tmp_path / "out", num_examples=sum(ROWS) + off, epochs=epochs)
        with pytest.raises(PrepareError, match=f"--num_examples={sum(ROWS)}"):
            run.prepare(made, seed=SEED)
        assert not (tmp_path / "out" / "manifest.json").exists()

    def test_a_shard_twice(self, shards: list[str], tmp_path: Path) -> None:
        with pytest.raises(PrepareError, match="Expected each input once"):
            job_of([*shards, shards[0]], tmp_path / "out")
        copy = tmp_path / "copy.gz"
        copy.write_bytes(gzip.compress(Path(shards[0]).read_bytes()))
        made = job_of([*shards, str(copy)], tmp_path / "out", num_examples=sum(ROWS) + ROWS[0])
        with pytest.raises(PrepareError, match="the same rows in"):
            run.prepare(made, seed=SEED)

    def test_a_damaged_shard_names_itself_and_the_rest_is_kept(
        self, shards: list[str], tmp_path: Path
    ) -> None:
        broken = tmp_path / "broken.gz"
        content = gzip.compress(rows(9, 3_000))
        broken.write_bytes(content[: len(content) // 2])
        given = [*shards, str(broken)]
        made = job_of(given, tmp_path / "out", num_examples=sum(ROWS) + 3_000)
        with pytest.raises(PrepareError, match=r"broken\.gz ends early after"):
            run.prepare(made, seed=SEED)
        broken.write_bytes(content)
        run.prepare(made, seed=SEED)
        assert_whole(made)

    def test_missing_empty_or_no_input(self, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        for inputs, message in (
            ([], "got none"),
            ([str(tmp_path / "none.tsv")], "No such file"),
            ([str(tmp_path)], "No such file"),
            ([str(tmp_path / "empty")], "is empty"),
        ):
            with pytest.raises(PrepareError, match=message):
                job_of(inputs, tmp_path / "out")

    @pytest.mark.parametrize("left", [-job.PAIR.itemsize, 5, job.PAIR.itemsize])
    def test_a_file_of_pairs_that_was_cut(
        self, shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
    ) -> None:
        """As after a power cut; one pair that is left must not stand for all."""
        monkeypatch.setattr(job, "BUCKET_BYTES", 500_000)
        made = job_of(shards, tmp_path / "out")
        with pytest.MonkeyPatch.context() as patched:
            stop_after(patched, 10)
            with pytest.raises(Exception, match="stopped"):
                run.prepare(made, seed=SEED)
        (cut, *_) = sorted((tmp_path / "out" / ".work").glob("pairs-*"))
        os.truncate(cut, left % cut.stat().st_size)
        with pytest.raises(PrepareError, match=f"pairs in .*{cut.name}.* the file was cut"):
            run.prepare(made, seed=SEED)

    def test_a_batch_beyond_the_capacity(self, shards: list[str], tmp_path: Path) -> None:
        made = dataclasses.replace(job_of(shards, tmp_path / "out"), capacity=400)
        with pytest.raises(PrepareError, match="the preparation stops here"):
            run.prepare(made, seed=SEED)
        assert not (tmp_path / "out" / "manifest.json").exists()

    def test_a_finished_folder(self, shards: list[str], tmp_path: Path) -> None:
        made = job_of(shards[:1], tmp_path / "out", num_examples=ROWS[0])
        manifest = run.prepare(made, seed=SEED)
        again = run.prepare(made, seed=SEED)  # the same command has nothing to do
        assert again.draw_id == manifest.draw_id
        other = job_of(shards[:1], tmp_path / "out", num_examples=ROWS[0], epochs=0.3)
        with pytest.raises(PrepareError, match="which is prepared already"):
            run.prepare(other, seed=SEED)

    @pytest.mark.parametrize("change", ["numbers", "no key", "another key"])
    def test_to_go_on_with_something_else(
        self, shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
    ) -> None:
        made = job_of(shards, tmp_path / "out")
        with pytest.MonkeyPatch.context() as patched:
            stop_after(patched, 2)
            with pytest.raises(Exception, match="stopped"):
                run.prepare(made, seed=SEED)
        key = Path(made.key_file)
        if change == "numbers":
            made, message = job_of(shards, tmp_path / "out", epochs=0.3), "got others"
        elif change == "no key":
            key.unlink()
            message = "got none"
        else:
            key.write_text("11" * 32)
            message = "got another one"
        with pytest.raises(PrepareError, match=message):
            run.prepare(made, seed=SEED)


class TestCommand:
    def test_counts_prepares_and_tells(
        self, shards: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert command.main(["--count", "--input", *shards]) == 0
        assert f"well-formed rows: {sum(ROWS)}" in capsys.readouterr().out
        arguments = ["--input", *shards, "--output", str(tmp_path / "out"), "--batch_size=500"]
        given = [*arguments, f"--num_examples={sum(ROWS)}", "--epochs=0.1"]
        assert command.main([*given, "--runner=DirectRunner"]) == 0
        told = capsys.readouterr().out
        assert f"{sum(ROWS)} examples, 15 steps of 500 expected" in told
        assert "quarantined: 2 × too_few_fields" in told
        manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
        assert not manifest["seeded"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--output=x"], "Expected --num_examples"),
            (["--num_examples=5"], "Expected --output"),
            (["--num_examples=5", "--output=x"], "Expected Criteo files to prepare"),
            (["--num_examples=0", "--output=x", "--input", __file__], "num_examples"),
            (["--count"], "Expected Criteo files to count"),
            (["--count", "--input", "gs:/nowhere"], "No such file: gs:/nowhere"),
        ],
    )
    def test_what_is_missing(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert command.main(arguments) == 1
        assert message in capsys.readouterr().err

    def test_a_damaged_file_is_not_counted(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        content = gzip.compress(rows(1, 900))
        (tmp_path / "day_0.gz").write_bytes(content[: len(content) // 2])
        assert command.main(["--count", "--input", str(tmp_path / "day_0.gz")]) == 1
        assert "day_0.gz ends early after" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("more", "named"),
        [(["--epoch=3"], "--epoch"), (["--epoch", "3"], "--epoch"), (["--seed=1", "b"], "b")],
    )
    def test_an_option_that_nobody_knows(
        self,
        shards: list[str],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        more: list[str],
        named: str,
    ) -> None:
        """Beam would leave it out, and other numbers be prepared than were asked for."""
        given = ["--input", *shards, f"--output={tmp_path / 'out'}", f"--num_examples={sum(ROWS)}"]
        assert command.main([*given, *more]) == 1
        assert f"and of Apache Beam, got {named}." in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_no_room_is_told_before_a_job_begins(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 10_000_000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    sizes: dict[str, Any] = {"num_examples": sum(ROWS), "batch_size": 500, "epochs": 1.0}
    with pytest.raises(OSError, match="MB free for batches of 75,900 rows"):
        new_job(shards, f"{tmp_path}/batches", **sizes)
    (tmp_path / "batches").mkdir()  # a job that goes on has written some of it
    assert new_job(shards, f"{tmp_path}/batches", **sizes).num_examples == sum(ROWS)

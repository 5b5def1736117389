"""The commands and the example of docs/streams.md run as printed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest

pytest.importorskip("apache_beam")

import dp_sparse
from pipelines.criteo.generate import generate
from pipelines.criteo.prepare import __main__ as command
from pipelines.criteo.schema import TABLE3_VOCABULARIES, examples_from_fields
from tests.subprocesses import environment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "streams.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def click_model() -> keras.Model:
    integers = keras.Input((13,))
    categories = keras.Input((26,), dtype="int32")
    rows = keras.layers.Embedding(max(TABLE3_VOCABULARIES), 2)(categories)
    features = keras.layers.Concatenate()([keras.layers.Flatten()(rows), integers])
    inputs = {"integers": integers, "categories": categories}
    return keras.Model(inputs, keras.layers.Dense(1)(features))


def test_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for day, count in enumerate((30_000, 11_000)):
        rows = Path(f"day_{day}.gz")
        generate(count, rows, day, TABLE3_VOCABULARIES, progress=False)
    count, prepare = re.findall(r"^python -m pipelines\.criteo\.prepare (--.*)$", PAGE, re.M)
    assert command.main(shlex.split(count)) == 0
    assert "well-formed rows: 41000" in capsys.readouterr().out
    assert command.main(shlex.split(prepare.replace("=N", "=41000"))) == 0
    assert "41000 examples, 20 steps of 2048 expected" in capsys.readouterr().out
    noise, training = BLOCKS[0], BLOCKS[-1]
    names = {
        "keras": keras,
        "dp_sparse": dp_sparse,
        "examples_from_fields": examples_from_fields,
        "model": click_model(),
    }
    exec(noise, names)
    small, large = map(float, capsys.readouterr().out.split())
    assert f"prints `{small:.3f} {large:.3f}`: the stream puts {large / small:.1f} times" in PAGE
    exec(training, names)
    optimizer = names["model"].optimizer  # type: ignore[attr-defined]
    assert optimizer.steps_left == 0
    assert "The batches were drawn before training" in optimizer.plan.statement()


@pytest.mark.slow
def test_raw_files_and_batches_train_as_printed(tmp_path: Path) -> None:
    """The command of the stream, and its options for what was prepared."""
    for day in range(3):
        generate(3_000, tmp_path / f"day_{day}.gz", day, TABLE3_VOCABULARIES, progress=False)
    line = next(
        line for line in PAGE.splitlines() if line.startswith("python -m pipelines.criteo -")
    )
    (stream,) = re.findall(r"--config.data.stream=\S+", line)
    prepared = tmp_path / "prepared"
    inputs = [str(tmp_path / f"day_{day}.gz") for day in range(2)]
    options = ["--num_examples=6000", "--batch_size=2048", "--epochs=1"]
    assert command.main(["--input", *inputs, "--output", str(prepared), *options]) == 0
    assert "`--config.data.offline=prepared`" in PAGE and "`--data_service=grpc://" in PAGE
    drawn = f"--config.data.offline={prepared} --data_service=local --config.report.directory=again"
    for given, sampling in (
        (line, "There is no amplification by sampling"),
        (line.replace(stream, drawn), "The batches were drawn before training"),
    ):
        given = given.replace("=LINES", "=6000").replace("configs/", f"{ROOT}/configs/")
        done = subprocess.run(
            [sys.executable, *shlex.split(given)[1:]],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert sampling in done.stdout


def test_the_data_sets_are_made_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for day in range(2):
        generate(100, Path(f"downloads/day_{day}.gz"), day, TABLE3_VOCABULARIES, progress=False)
    names: dict[str, Any] = {}
    exec(next(block for block in BLOCKS if "tensorflow_datasets" in block), names)
    assert "'rows': 100, 'quarantined': {}" in capsys.readouterr().out
    assert names["x"]["categories"].shape == (100, 26) and names["y"].shape == (100,)

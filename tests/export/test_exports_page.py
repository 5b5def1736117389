"""The commands and the examples of docs/exports.md run as printed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import dp_sparse
from configs.criteo_sample import get_config
from pipelines.criteo import exporting
from pipelines.criteo.generate import generate
from pipelines.criteo.schema import TABLE3_VOCABULARIES
from tests.export import exported
from tests.subprocesses import ROOT, environment, run_python

PAGE = (ROOT / "docs" / "exports.md").read_text()


def test_examples_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = exported.trained(steps=0)
    x, _ = exported.examples(model)
    batches = model.optimizer.plan.sampling.batches(exported.examples(model))
    names = {"dp_sparse": dp_sparse, "model": model, "batches_of_today": batches.take(1)}
    first, plain, card, delta, applied = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(first, names)
    assert capsys.readouterr().out == f"{names['export'].digest} 0\n"
    wanted = model.predict(x, verbose=0)
    np.save("x.npy", x)
    without = (
        'import sys\nsys.modules["dp_sparse"] = None\nimport numpy as np\nx = np.load("x.npy")\n'
    )
    run_python(f"{without}{plain}\nnp.savez('found', scores, served)", packages=tmp_path)
    for found in np.load("found.npz").values():
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    exec(card, names)
    assert "| AUC on Tuesday's rows | 0.71 |" in Path("exports/day_1/README.md").read_text()
    exec(delta, names)
    assert re.search(r"embedding/vars/0 \d+ rows of 11\n", capsys.readouterr().out)
    exec(applied, names)
    assert names["export"].digest == names["delta"].digest
    assert names["export"].steps == 1


@pytest.mark.slow
def test_the_command_runs_as_printed(tmp_path: Path) -> None:
    """The job and its export, which predicts what the job's model does."""
    generate(3000, tmp_path / "FILE.tsv.gz", 1, TABLE3_VOCABULARIES, progress=False)
    (command,) = re.findall(r"`python -m (pipelines\.criteo --.*)`", PAGE)
    command = command.replace("configs/", f"{ROOT}/configs/")
    small = "--config.training.batch_size=256 --config.training.epochs=1 --config.report.verbose=0"
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(f"{command} {small}")],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("export: exports/criteo\n")
    export = dp_sparse.check_export(tmp_path / "exports" / "criteo")
    assert export.steps == 8 and export.statement in done.stdout
    plain = keras.models.load_model(export.path / "keras")
    inputs = {"integers": np.zeros((2, 13)), "categories": np.zeros((2, 26), np.int32)}
    assert np.isfinite(plain.predict(inputs, verbose=0)).all()
    served = keras.layers.TFSMLayer(str(export.path / "saved_model"), call_endpoint="serve")
    np.testing.assert_allclose(
        served(inputs), plain.predict(inputs, verbose=0), rtol=1e-4, atol=1e-6
    )


def test_a_job_that_could_not_export_is_refused_before_it_begins(tmp_path: Path) -> None:
    config = get_config()
    exporting.check(config, "", on_tpu=True)
    exporting.check(config, str(tmp_path / "new"), on_tpu=False)
    with pytest.raises(ValueError, match="Expected a path where nothing is yet, got export="):
        exporting.check(config, str(tmp_path), on_tpu=False)
    with pytest.raises(ValueError, match="embedding layer"):
        exporting.check(config, str(tmp_path / "new"), on_tpu=True)
    config.method = "non_private"
    with pytest.raises(ValueError, match="Expected a private method with export"):
        exporting.check(config, str(tmp_path / "new"), on_tpu=False)

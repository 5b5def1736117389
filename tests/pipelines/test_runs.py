"""Runs of the pipelines go on after they were killed, in real processes, and end as others do."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
import pytest

import dp_sparse
from configs.criteo_sample import get_config
from pipelines.criteo.generate import generate
from pipelines.methods import calibrated, optimizer_under
from pipelines.runs import Run, flattened
from tests.subprocesses import HANG, ROOT, environment
from tests.training_cases import click_model, plan_for

TABLES = {"a": 5, "b": 3}


def config_in(folder: Path) -> ml_collections.ConfigDict:
    config = get_config()
    config.report.directory = str(folder)
    return config


def begun(folder: Path, resume: bool = False, **changes: Any) -> Run:
    config = config_in(folder)
    config.update_from_flattened_dict(changes)
    return Run(config, resume)


def compiled(plan: dp_sparse.PrivacyPlan) -> Any:
    model = click_model()
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), "mse")
    return model


def selected() -> dp_sparse.SelectedRows:
    return dp_sparse.SelectedRows.public({"a": [1, 2], "b": [0]}, TABLES)


def refused() -> Any:
    raise AssertionError("this would spend again")


class TestDirectory:
    def begin(self, folder: Path) -> dp_sparse.PrivacyPlan:
        run = begun(folder)
        run.rows(selected)
        plan = run.plan(lambda: plan_for(8, steps=2, noise_multiplier=1.0))
        assert run.restore(compiled(plan)) == 0
        return plan

    def test_what_is_made_once(self, tmp_path: Path) -> None:
        plan = self.begin(tmp_path)
        again = begun(tmp_path, resume=True)
        assert again.plan(refused) == plan
        rows = again.rows(refused)
        assert {k: v.tolist() for k, v in rows.row_ids.items()} == {"a": [1, 2], "b": [0]}

    def test_a_run_that_is_there_is_not_begun_again(self, tmp_path: Path) -> None:
        self.begin(tmp_path)
        with pytest.raises(ValueError, match="directory without a run.*pass --resume to go on"):
            begun(tmp_path)

    def test_nor_gone_on_with_by_another_config(self, tmp_path: Path) -> None:
        self.begin(tmp_path)
        with pytest.raises(ValueError, match="began with privacy.clip_norm=1.0, got .*=2.0"):
            begun(tmp_path, resume=True, **{"privacy.clip_norm": 2.0})
        begun(tmp_path, resume=True, **{"report.verbose": 0})

    def test_lost_rows_are_not_selected_again(self, tmp_path: Path) -> None:
        self.begin(tmp_path)
        (tmp_path / "rows.npz").unlink()
        with pytest.raises(ValueError, match="rows.npz is missing, which the plan"):
            begun(tmp_path, resume=True).rows(refused)

    def test_what_a_killed_process_had_selected_goes(self, tmp_path: Path) -> None:
        """Beside what is selected anew it would tell more than one of them."""
        run = begun(tmp_path)
        (tmp_path / ".rows.npz.123.tmp").write_bytes(b"whole")
        run.rows(selected)
        assert (tmp_path / "rows.npz").exists() and not list(tmp_path.glob(".rows*"))

    def test_lost_checkpoints_are_not_begun_again(self, tmp_path: Path) -> None:
        """Their steps were published and paid: the same plan would pay for them twice."""
        self.begin(tmp_path)
        shutil.rmtree(tmp_path / "checkpoints")
        run = begun(tmp_path, resume=True)
        model = compiled(run.plan(refused))
        with pytest.raises(dp_sparse.PrivacyError, match="the checkpoints of a run that has begun"):
            run.restore(model)

    @pytest.mark.parametrize("name", ["rows.npz", "begun.json"])
    def test_a_run_that_lost_its_config_is_not_begun_again(self, tmp_path: Path, name: str) -> None:
        self.begin(tmp_path)
        others = {"rows.npz", "frequencies.npz", "begun.json", "run.json"} - {name}
        for other in others:
            (tmp_path / other).unlink(missing_ok=True)
        for resume in (False, True):
            with pytest.raises(ValueError, match=f"run.json is missing, but {name}"):
                begun(tmp_path, resume=resume)

    def test_a_start_that_failed_is_no_run(self, tmp_path: Path) -> None:
        """Nothing of the data was written, so a corrected config may begin, with its own plan."""
        begun(tmp_path).plan(lambda: plan_for(8, noise_multiplier=1.0))
        other = plan_for(8, noise_multiplier=2.0)
        assert begun(tmp_path, **{"privacy.clip_norm": 2.0}).plan(lambda: other) == other

    def test_what_is_resumed_may_begin(self, tmp_path: Path) -> None:
        plan = plan_for(8, noise_multiplier=1.0)
        assert begun(tmp_path, resume=True).plan(lambda: plan) == plan


@pytest.mark.parametrize("setting", ["privacy.clip_norm", "adafest.noise_ratio"])
def test_what_the_optimizer_refuses_has_selected_nothing(setting: str) -> None:
    config = get_config()
    config.method = "dp_adafest_plus"
    config.update_from_flattened_dict({setting: -1.0})
    sampling = dp_sparse.PoissonSampling(100, 10, 5)
    with pytest.raises(ValueError, match=rf"Expected {setting.split('.')[1]}"):
        calibrated(config, sampling, lambda plan: refused(), partial(optimizer_under, config))


def test_runs_of_many_steps_are_not_refused_before_rows_are_selected() -> None:
    """Of which a noise multiplier of 1 has no ε."""
    config = get_config()
    config.method = "dp_adafest_plus"
    sampling = dp_sparse.PoissonSampling(60, 20, 120)
    with pytest.raises(AssertionError, match="this would spend"):
        calibrated(config, sampling, lambda plan: refused(), partial(optimizer_under, config))


def test_a_window_of_a_config_ends_with_a_short_run() -> None:
    config = get_config()
    config.adafest.window = 64
    for steps, window in ((5, 5), (100, 64)):
        assert optimizer_under(config, plan_for(40, steps=steps), None).window == window


def test_configs_are_flat() -> None:
    config = ml_collections.ConfigDict({"a": 1, "b": {"c": (2, 3), "d": {"e": "x"}}})
    assert flattened(config) == {"a": 1, "b.c": (2, 3), "b.d.e": "x"}


# ---- Real processes.


def start(job: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"pipelines.{job}", *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(job: str, *arguments: str, status: int = 0) -> str:
    """What a job that ends by itself prints, or says of its error."""
    process = start(job, *arguments)
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == status, err[-3000:]
    return out if status == 0 else err


def terminated(job: str, folder: Path, *arguments: str) -> None:
    """Starts a job, and sends SIGTERM when it has published steps."""
    process = start(job, *arguments)
    published, waited = folder / "checkpoints" / "published.json", time.monotonic()
    while not published.exists() or not json.loads(published.read_text())["published"]:
        assert process.poll() is None and time.monotonic() < waited + HANG
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=HANG)
    # A job may be hit behind its fit, where nothing is left to save: a shell reports 143, too.
    assert process.returncode in ((143, -15) if job == "movielens" else (143,)), err[-3000:]


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log" / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def criteo(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    rows = tmp_path_factory.mktemp("criteo") / "rows.tsv"
    generate(3000, rows, seed=1, progress=False)
    return [
        f"--config.data.path={rows}",
        f"--config.data.prepared={rows}.records",
        "--config.training.batch_size=128",
        "--config.training.epochs=3",
        "--config.report.verbose=0",
    ]


@pytest.mark.slow
def test_criteo_goes_on_and_ends_as_an_undisturbed_run(criteo: list[str], tmp_path: Path) -> None:
    """56 steps in 8 epochs, stopped within them; with rows that were selected once."""
    arguments = [
        *criteo,
        f"--config.report.directory={tmp_path}",
        "--config.method=dp_adafest_plus",
        "--config.selection.rows=200",
        "--monitor=4",
    ]
    terminated("criteo", tmp_path, *arguments)
    before = (tmp_path / "rows.npz").read_bytes()
    stopped = json.loads((tmp_path / "checkpoints" / "published.json").read_text())["published"]
    assert 0 < stopped < 56
    assert [line["step"] for line in logged(tmp_path) if "epsilon" in line] == list(
        range(4, stopped + 1, 4)
    )
    printed = finished("criteo", *arguments, "--resume")
    assert (tmp_path / "rows.npz").read_bytes() == before
    steps = [line["step"] for line in logged(tmp_path) if "epsilon" in line]
    assert steps == list(range(4, steps[-1] + 1, 4)) and steps[-1] == 56
    plan = dp_sparse.PrivacyPlan.from_config(json.loads((tmp_path / "plan.json").read_text()))
    whole = plan.spent(56)
    assert logged(tmp_path)[-2]["epsilon"] == whole.epsilon
    assert set(logged(tmp_path)[-1]) == {"step", "validation"}
    assert "after 56 of 56 steps" in printed
    assert f"{whole.epsilon:.3f}" in printed.splitlines()[1]
    assert (tmp_path / "report.html").exists()


def in_order(folder: Path, reading: str) -> list[str]:
    """The arguments for rows that are read in their order, 3,000 of them, batches of 128."""
    stream = folder / "day_0.tsv"
    generate(3000, stream, seed=2, progress=False)
    if reading == "stream":
        return [f"--config.data.stream={stream}", "--config.data.num_examples=3000"]
    from pipelines.criteo.prepare import run
    from pipelines.criteo.prepare.job import new_job

    output = folder / "prepared"
    run.prepare(new_job([str(stream)], str(output), num_examples=3000, batch_size=128, epochs=3))
    return [f"--config.data.offline={output}"]


@pytest.mark.slow
@pytest.mark.parametrize("reading", ["stream", "offline"])
def test_criteo_goes_on_behind_the_batches_it_has_used(
    criteo: list[str], tmp_path: Path, reading: str
) -> None:
    arguments = [
        *criteo,
        *in_order(tmp_path, reading),
        f"--config.report.directory={tmp_path / 'run'}",
        "--monitor=1",
    ]
    terminated("criteo", tmp_path / "run", *arguments)
    printed = finished("criteo", *arguments, "--resume")
    text = (tmp_path / "run" / "plan.json").read_text()
    plan = dp_sparse.PrivacyPlan.from_config(json.loads(text))
    total = plan.sampling.steps
    assert total == (72 if reading == "stream" else 70)  # ceil(3000 / 128) * 3; 3 * 3000 / 128
    steps = [line["step"] for line in logged(tmp_path / "run") if "epsilon" in line]
    assert steps == list(range(1, total + 1))
    assert f"after {total} of {total} steps" in printed
    assert f"{plan.spent(total).epsilon:.3f}" in printed


@pytest.mark.slow
def test_criteo_that_is_there_is_refused_and_complete_it_is_evaluated(
    criteo: list[str], tmp_path: Path
) -> None:
    arguments = [*criteo, f"--config.report.directory={tmp_path}", "--config.training.epochs=1"]
    auc = re.compile(r"DP-AdaFEST, epsilon=1 +(0\.\d+)")
    first = finished("criteo", *arguments)
    assert "pass --resume" in finished("criteo", *arguments, status=1)
    changed = finished("criteo", *arguments, "--resume", "--config.seed=1", status=1)
    assert "began with seed=0, got seed=1" in changed
    again = finished("criteo", *arguments, "--resume")
    assert auc.search(again).group(1) == auc.search(first).group(1)  # type: ignore[union-attr]
    other = finished("criteo", *arguments, "--resume", "--config.method=non_private", status=1)
    assert "Expected a private method and tables=keras with --resume" in other


def catches_sigterm(process: subprocess.Popen[str]) -> bool:
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s*(\w+)", status, re.M)
    return caught is not None and bool(int(caught.group(1), 16) >> (signal.SIGTERM - 1) & 1)


def test_images_go_on(tmp_path: Path) -> None:
    """Stopped when training has begun, before the first checkpoint is due."""
    rng = np.random.default_rng(0)
    data = {"x_train": 600, "x_test": 50, "y_train": 600, "y_test": 50}
    arrays = {
        name: rng.integers(0, 255, (n, 28, 28)) if name[0] == "x" else rng.integers(0, 10, n)
        for name, n in data.items()
    }
    np.savez(tmp_path / "digits.npz", **{n: a.astype(np.uint8) for n, a in arrays.items()})
    arguments = [
        f"--config.data.path={tmp_path / 'digits.npz'}",
        f"--config.report.directory={tmp_path / 'run'}",
        "--config.training.batch_size=60",
        "--config.training.steps=60",
        "--config.report.verbose=0",
        "--monitor=20",
    ]
    process = start("images", *arguments)
    while process.poll() is None and not catches_sigterm(process):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=HANG)
    assert process.returncode == 143
    published = json.loads((tmp_path / "run" / "checkpoints" / "published.json").read_text())
    assert 0 < published["published"] < 60
    printed = finished("images", *arguments, "--resume")
    assert ", 60 steps in" in printed and "after 60 of 60 steps" in printed
    assert [line["step"] for line in logged(tmp_path / "run")] == [20, 40, 60]


@pytest.mark.slow
def test_images_that_are_complete_are_evaluated(tmp_path: Path) -> None:
    test_images_go_on(tmp_path)
    arguments = [
        f"--config.data.path={tmp_path / 'digits.npz'}",
        f"--config.report.directory={tmp_path / 'run'}",
        "--config.training.batch_size=60",
        "--config.training.steps=60",
    ]
    assert ", 60 steps in" in finished("images", *arguments, "--resume")
    assert "pass --resume" in finished("images", *arguments, status=1)


@pytest.mark.slow
def test_a_next_item_model_goes_on(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [
        f"{user} {(start + place) % 12 + 1}"
        for user, start in enumerate(rng.integers(0, 12, 60), 1)
        for place in range(9)
    ]
    (tmp_path / "interactions.txt").write_text("\n".join(lines) + "\n")
    folder = tmp_path / "run"
    arguments = [
        "--config=configs/movielens_small.py",
        f"--config.data.path={tmp_path / 'interactions.txt'}",
        "--config.data.num_items=12",
        "--config.data.filter_items=0",
        "--config.training.epochs=40",
        "--config.training.batch_size=20",
        "--config.training.score_every=5",
        f"--config.report.directory={folder}",
    ]
    terminated("movielens", folder, *arguments)
    counted = (folder / "frequencies.npz").read_bytes()
    assert "pass --resume" in finished("movielens", *arguments, status=1)
    printed = finished("movielens", *arguments, "--resume", "--monitor=10")
    assert (folder / "frequencies.npz").read_bytes() == counted
    assert "after 120 of 120 steps" in printed
    assert logged(folder)[-1]["step"] == 120

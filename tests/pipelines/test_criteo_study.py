"""The study of click models: every point makes a run, runs are kept, compared and told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import criteo_sample, criteo_study
from pipelines import points, resampling
from pipelines.criteo import study, study_page
from pipelines.criteo.generate import generate
from pipelines.methods import NON_PRIVATE, optimizer_under, stand_in_rows
from pipelines.scores import exact_auc, weighted_auc
from tests.training_cases import plan_for

VOCABULARIES = (40, 7) * 13
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.tsv"
    generate(1500, path, seed=1, vocabularies=VOCABULARIES, progress=False)
    return path


def small(*wanted: str) -> Any:
    """The study on small tables, of the sample's points with these names alone."""
    config = criteo_study.get_config()
    config.base.data.vocabularies = VOCABULARIES
    config.base.training.update({"batch_size": 128, "epochs": 0.4})
    own = [p for p in config.points if p["group"] == "sample" and p["name"] in wanted]
    config.points = tuple({**p, "seeds": (0,)} for p in own if p["epsilon"] == 1.0)
    return config


def run(config: Any, rows: Path, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    results = study.results_in(folder / "runs.jsonl", config)
    page = folder / "page.md"
    return study.run_all(config, {"sample": rows}, results, page, folder, 60.0), results.lines


LORA = "LoRA of rank 1 + DP-AdaFEST, λ=10"


def test_entries_of_whole_tables_and_of_lora(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run is one line, and a study that was stopped goes on."""
    monkeypatch.setattr(study, "in_own_process", lambda function, *given: function(*given))
    config = small(LORA, "frozen tables")
    status, lines = run(config, rows, tmp_path)
    assert status == 0
    found = {line["name"]: line for line in lines}
    widths = [int(2 * size**0.25) for size in VOCABULARIES]
    whole = np.dot(VOCABULARIES, widths)
    assert found["frozen tables"]["reduction"] is None and found["frozen tables"]["entries"] == 0
    lora = found[LORA]
    assert sum(widths) <= lora["entries"] <= sum(widths) + sum(VOCABULARIES)
    assert lora["reduction"] == pytest.approx(whole / lora["entries"], rel=1e-3)
    assert all(len(line["resampled"]) == resampling.RESAMPLES for line in lines)
    assert all(line["training_rows"] == 1200 and line["held_out_rows"] == 150 for line in lines)
    assert "are missing:" not in (tmp_path / "page.md").read_text()
    monkeypatch.setattr(study, "in_own_process", None)  # nothing is left to run
    assert run(config, rows, tmp_path) == (0, lines)
    config.base.privacy.clip_norm = 2.0
    with pytest.raises(ValueError, match="of these settings"):
        run(config, rows, tmp_path)


def test_a_run_that_fails_is_named(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small("DP-SGD", "DP-FEST, k=300")
    config.points = ({**config.points[0], "changes": {"method": "nothing"}},)
    assert run(config, rows, tmp_path) == (1, [])
    said = "failed: group=sample, name=DP-SGD, epsilon=1.0, seed=0: ValueError: Expected method"
    assert said in capsys.readouterr().err


def test_points_without_their_rows_are_left(rows: Path, tmp_path: Path) -> None:
    config = criteo_study.get_config()
    results = study.results_in(tmp_path / "runs.jsonl", config)
    assert study.run_all(config, {}, results, tmp_path / "page.md", tmp_path, 60.0) == 0


def test_every_point_changes_keys_that_exist_and_makes_an_optimizer() -> None:
    config, plan = criteo_study.get_config(), plan_for(8, noise_multiplier=50.0)
    runs = list(points.runs_of(config.points))
    for run, changes in runs:
        own = points.run_config(config.base, run, changes)
        assert own.seed == run["seed"]
        if own.method not in (NON_PRIVATE, "exponential"):
            optimizer = optimizer_under(own, plan, stand_in_rows(own))
            wanted = changes.get("adafest.threshold")
            assert getattr(optimizer, "threshold", None) == wanted
    assert len({json.dumps(run, sort_keys=True) for run, _ in runs}) == len(runs)
    assert {run["group"] for run, _ in runs} == {*study._ROWS}
    assert criteo_sample.get_config().data.validation_fraction == 0.0


def test_a_file_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [f"--results={tmp_path / 'r.jsonl'}", f"--page={tmp_path / 'p.md'}"]
    assert study.main([*paths, f"--sample={tmp_path / 'none.tsv'}"]) == 1
    assert "none.tsv" in capsys.readouterr().err


def test_auc_of_resampled_rows() -> None:
    rng = np.random.default_rng(0)
    labels, scores = rng.random(200) < 0.3, rng.integers(0, 20, 200)
    rows = rng.integers(0, 200, 200)
    ranks = np.unique(scores, return_inverse=True)[1]
    found = weighted_auc(labels, ranks, np.bincount(rows, minlength=200))
    assert found == pytest.approx(exact_auc(labels[rows], scores[rows]), abs=1e-12)


def line(name: str, seed: int, labels: np.ndarray, scores: np.ndarray) -> dict[str, Any]:
    auc = exact_auc(labels, scores)
    drawn = resampling.resampled_auc(labels, scores)
    own = {"name": name, "seed": seed, "auc": auc, "validation_auc": auc, "resampled": drawn}
    return {**own, "reduction": 200.0}


def test_losses_are_paired() -> None:
    """A method whose scores are DP-SGD's has a loss of exactly 0; noisier ones lose."""
    rng = np.random.default_rng(0)
    labels = (rng.random(2_000) < 0.3).astype(np.float32)
    clean = labels + rng.normal(size=2_000)
    noisy = clean + 2 * rng.normal(size=2_000)
    base = [line("DP-SGD", 0, labels, clean)]
    assert study_page.loss_of([line("DP-FEST, k=1", 0, labels, clean)], base) == (0.0, 0.0)
    worse = [line("DP-FEST, k=2", 0, labels, noisy)]
    loss, error = study_page.loss_of(worse, base)
    assert loss == base[0]["auc"] - worse[0]["auc"] and 0 < 2 * error < loss < 0.3
    reached = dict(
        (method, cells)
        for method, *cells in study_page._reached({"DP-SGD": base, "DP-FEST, k=2": worse}, base)
    )
    assert reached == {"DP-FEST": ["-"] * 4}


def test_the_error_of_a_loss_is_that_of_other_rows_and_seeds() -> None:
    """It is the deviation of the loss over sides of other rows, and of other seeds."""
    rng = np.random.default_rng(0)

    def losses(seeds: int) -> tuple[float, float]:
        labels = (rng.random(1_000) < 0.3).astype(np.float32)
        base, other = [], []
        for seed in range(seeds):
            clean = labels + rng.normal(size=1_000)
            base.append(line("DP-SGD", seed, labels, clean))
            other.append(line("x", seed, labels, clean + rng.normal(size=1_000)))
        return study_page.loss_of(other, base)

    found = [losses(1) for _ in range(60)]
    told = np.mean([error for _, error in found])
    assert told == pytest.approx(np.std([loss for loss, _ in found]), rel=0.3)
    of_four = np.mean([losses(4)[1] for _ in range(10)])
    assert of_four == pytest.approx(told / 2, rel=0.5)


def made_up(config: Any) -> list[dict[str, Any]]:
    """A line for each run of the study."""
    lines = []
    for run, changes in points.runs_of(config.points):
        auc = 0.7 + 0.001 * run["seed"]
        losses = dict.fromkeys(("log_loss", "calibrated_log_loss", "constant_log_loss"), 0.5)
        counts = {"steps": 46, "training_rows": 96_000, "held_out_rows": 12_000, "entries": 19.0}
        own = {"auc": auc, "validation_auc": auc, "resampled": [auc, auc + 0.001], **losses}
        frozen = run["name"] == "frozen tables"
        reduction = {"reduction": None if frozen else 1.0 if "DP-SGD" in run["name"] else 4e4}
        lines.append(
            {**run, **own, **counts, **reduction, "method": changes.get("method", "dp_adafest")}
        )
    return lines


def test_the_page_tells_what_is_missing(tmp_path: Path) -> None:
    config = criteo_study.get_config()
    lines = made_up(config)
    study_page.write_page(config, lines, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert LORA in page and "no gradient" in page and "0.7010 ± 0.0010" in page
    assert "are missing:" not in page and "| DP-AdaFEST+ | 40,000 |" in page
    assert all(f"({path.name})" in page for path in tmp_path.glob("*.png"))
    assert "missing: 1 (" in study_page.page_of(config, lines[:-1])


def test_the_page_in_docs_is_of_the_results(tmp_path: Path) -> None:
    config = criteo_study.get_config()
    results = study.results_in(ROOT / "docs/results/criteo_kaggle.jsonl", config)
    page = tmp_path / "criteo_kaggle.md"
    study_page.write_page(config, results.lines, page)
    assert page.read_text() == (ROOT / "docs/results/criteo_kaggle.md").read_text()
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {path.name for path in (ROOT / "docs/results").glob("criteo_*.png")}

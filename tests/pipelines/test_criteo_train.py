"""The whole job on generated and on real rows, and the AUC it reports."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from configs import criteo_sample, criteo_tpu
from pipelines.criteo.generate import generate
from pipelines.criteo.records import prepare
from pipelines.criteo.report import console_table, notes, title, write_report
from pipelines.criteo.schema import TABLE3_VOCABULARIES
from pipelines.criteo.sparsity import sparsity
from pipelines.criteo.tables import tpu_strategy
from pipelines.criteo.train import train
from pipelines.methods import METHODS
from pipelines.scores import exact_auc

ROOT = Path(__file__).parents[2]
VOCABULARIES = (40, 7) * 13


def brute_force_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    difference = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    return float(np.mean((difference > 0) + 0.5 * (difference == 0)))


@pytest.mark.parametrize("decimals", [0, 1, 6])
def test_auc_is_exact_ties_included(decimals: int) -> None:
    rng = np.random.default_rng(decimals)
    labels = (rng.random(300) < 0.3).astype(np.float32)
    scores = np.round(rng.normal(size=300) + labels, decimals)
    assert exact_auc(labels, scores) == pytest.approx(brute_force_auc(labels, scores), abs=1e-12)


@pytest.mark.parametrize("labels", [np.zeros(5), np.ones(5)])
def test_auc_of_one_class_is_refused(labels: np.ndarray) -> None:
    with pytest.raises(ValueError, match="Expected clicks and non-clicks"):
        exact_auc(labels, np.arange(5.0))


def small_config(method: str):
    config = criteo_sample.get_config()
    config.method = method
    config.report.verbose = 0
    config.training.batch_size = 128
    config.training.epochs = 1.0
    config.training.evaluations = 2
    config.selection.rows = 200
    config.exponential.rows_per_step = 50
    if method == "lazy_dp_sgd":
        config.optimizer.name = "SGD"
        config.optimizer.options = {"learning_rate": 0.1}
    return config


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("criteo")
    rows = folder / "rows.tsv"
    generate(3000, rows, seed=1, vocabularies=VOCABULARIES, progress=False)
    rows.write_bytes(rows.read_bytes() + b"1\t2\n")
    return prepare(rows, folder / "rows.records", VOCABULARIES, progress=False)


@pytest.mark.slow
def test_every_method_and_one_report(generated, tmp_path: Path) -> None:
    results = [train(small_config(method), generated) for method in METHODS]
    page = tmp_path / "report.html"
    write_report(page, results, generated, "made up")
    body = page.read_text()
    names = [title(result) for result in results]
    assert len({*names}) == len(METHODS)
    assert all(name in body for name in (*names, "Epsilon over steps", "rows noised per step"))
    assert "Malformed rows" not in body  # a count that no epsilon covers
    by_method = {result.method: result for result in results}
    assert [name for name, result in by_method.items() if result.epsilon > 1] == ["non_private"]
    whole = [name for name, result in by_method.items() if result.reduction == 1]
    assert whole == ["non_private", "dp_sgd", "lazy_dp_sgd"]
    assert by_method["dp_fest"].reduction == pytest.approx(13 * 47 / 200, rel=0.3)
    assert by_method["dp_adafest_plus"].reduction > by_method["dp_fest"].reduction
    assert by_method["exponential"].reduction == pytest.approx(13 * 47 / 50, rel=0.3)
    assert len(console_table(results).splitlines()) == 1 + len(METHODS)
    constant, *_ = notes(results)
    assert constant.startswith("A constant has log loss 0.") and constant in body
    assert [r.method for r in results if r.calibration is None] == ["non_private"]
    for result in results[1:]:
        mapped = result.calibration.score_map(result.scores)
        labels = generated.records()["label"][-len(mapped) :]
        losses = np.logaddexp(0, mapped) - labels * mapped
        assert result.calibrated_log_loss == pytest.approx(losses.mean())
        assert f"{result.calibrated_log_loss:.4f}" in body


@pytest.mark.slow
def test_rows_to_choose_by_come_before_the_held_out_ones(generated) -> None:
    config = small_config("non_private")
    config.data.validation_fraction = 0.2
    result = train(config, generated)
    assert result.steps == round(0.7 * 3000 / 128) // 2 * 2
    assert 0 < result.validation_auc < 1 and result.scores.shape == (300,)
    labels = generated.records()["label"][2700:]
    assert result.auc == pytest.approx(exact_auc(labels, result.scores))
    assert result.rate == pytest.approx(labels.mean())
    probabilities = 1 / (1 + np.exp(-result.scores.astype(float)))
    assert result.mean_prediction == pytest.approx(probabilities.mean())
    right = np.where(labels > 0, probabilities, 1 - probabilities)
    assert result.log_loss == pytest.approx(-np.log(right).mean())


def test_bad_configurations_are_refused(generated) -> None:
    with pytest.raises(ValueError, match="method='sgd'"):
        train(small_config("sgd"), generated)
    config = small_config("dp_sgd")
    config.data.test_fraction = 1.5
    with pytest.raises(ValueError, match=r"data.test_fraction < 1, got 1.5"):
        train(config, generated)
    config.data.test_fraction, config.data.validation_fraction = 0.2, 0.8
    with pytest.raises(ValueError, match=r"data.validation_fraction < 0.8, got 0.8"):
        train(config, generated)
    config = small_config("dp_sgd")
    config.model = "wide_and_deep"
    with pytest.raises(ValueError, match="or ranking with tables=layer, got model='wide"):
        train(config, generated)
    config = small_config("dp_sgd")
    config.model, config.table_weights.lora_rank = "dlrm", 1
    with pytest.raises(ValueError, match="Expected model=pctr .*'lora_rank': 1.* model='dlrm'"):
        train(config, generated)
    for method in METHODS:
        config = small_config(method)
        config.training.batch_size = 3_000
        with pytest.raises(ValueError, match="got 2,700 rows and training.batch_size=3,000"):
            train(config, generated)
    config = small_config("dp_fest")
    config.selection.source = "exponential"
    with pytest.raises(ValueError, match="selection.source to be one of"):
        train(config, generated)


@pytest.mark.parametrize("changes", [{"diagnostics": "all"}, {"points": 0}])
def test_what_a_report_refuses_has_selected_nothing(
    generated, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    def selected(*_: object, **__: object) -> None:
        raise AssertionError("this would be spent")

    monkeypatch.setattr(dp_sparse, "select_top_k", selected)
    config = small_config("dp_fest")
    with pytest.raises(AssertionError, match="spent"):
        train(config, generated)
    config.report.update(changes)
    with pytest.raises(ValueError, match=f"Expected {next(iter(changes))}"):
        train(config, generated)


def run_pipeline(
    *arguments: str, config: str = "criteo_sample", **variables: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelines.criteo", "--config", f"configs/{config}.py"]
    environment = {**os.environ, **variables}
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def auc_and_epsilon(finished: subprocess.CompletedProcess[str]) -> tuple[float, float]:
    """Those of the command's table, which has one row."""
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    (head,) = (at for at, line in enumerate(lines) if line.split()[:2] == ["run", "AUC"])
    row, begin = {}, 0
    for column in re.finditer(r"\S+( \S+)*", lines[head]):  # right-aligned, and a cell may be empty
        row[column.group()] = lines[head + 1][begin : column.end()].strip()
        begin = column.end()
    assert row["run"].startswith("DP-AdaFEST")
    return float(row["AUC"]), float(row["epsilon"])


def run_ranking(*arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {"config": "criteo_tpu", "TF_USE_LEGACY_KERAS": "1"}
    return run_pipeline("--config.model=ranking", *arguments, **variables)


def test_ranking_of_tensorflow_recommenders_trains(generated, tmp_path: Path) -> None:
    vocabularies = ",".join(map(str, VOCABULARIES))
    auc, epsilon = auc_and_epsilon(
        run_ranking(
            f"--config.data.path={generated.path.parent / 'rows.tsv'}",
            f"--config.data.vocabularies=({vocabularies})",
            f"--config.report.directory={tmp_path}",
            "--config.training.batch_size=128",
            "--config.training.epochs=0.5",
            "--config.training.evaluations=1",
        )
    )
    assert 0 < auc < 1 and epsilon <= 1.0


@pytest.mark.slow
@pytest.mark.skipif("DP_SPARSE_DATA" not in os.environ, reason="DP_SPARSE_DATA is not set")
def test_ranking_on_real_rows(tmp_path: Path) -> None:
    """pCTR's AUC, with an embedding layer or without, is about 0.70 after the same pass."""
    sample = Path(os.environ["DP_SPARSE_DATA"]) / "criteo" / "kaggle_sample_120k.tsv.gz"
    auc, epsilon = auc_and_epsilon(
        run_ranking(
            f"--config.data.path={sample}",
            f"--config.report.directory={tmp_path}",
            "--config.privacy.epsilon=8.0",
            "--config.training.epochs=1.0",
            "--config.training.evaluations=1",
        )
    )
    assert auc > 0.67 and 1.0 < epsilon <= 8.0


@pytest.mark.slow
def test_an_unknown_key_is_an_error() -> None:
    finished = run_pipeline("--config.training.batchsize=3")
    assert finished.returncode != 0 and "batchsize" in finished.stderr


@pytest.mark.slow
def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    finished = run_pipeline(
        "--config.data.path=nowhere.tsv", f"--config.report.directory={tmp_path}"
    )
    assert finished.returncode == 1
    assert finished.stderr.strip().splitlines()[-1].startswith("error: No such file: nowhere.tsv")


@pytest.mark.slow
@pytest.mark.skipif("DP_SPARSE_DATA" not in os.environ, reason="DP_SPARSE_DATA is not set")
def test_real_rows(tmp_path: Path) -> None:
    """Real clicks, privately at ε = 1: half an epoch is far better than chance."""
    sample = Path(os.environ["DP_SPARSE_DATA"]) / "criteo" / "kaggle_sample_120k.tsv.gz"
    finished = run_pipeline(
        f"--config.data.path={sample}",
        f"--config.report.directory={tmp_path}",
        "--config.training.epochs=0.5",
        "--config.training.evaluations=1",
        "--config.report.verbose=2",
    )
    auc, epsilon = auc_and_epsilon(finished)
    assert (tmp_path / "report.html").exists()
    assert auc > 0.62 and epsilon <= 1.0


@pytest.mark.slow
@pytest.mark.skipif("DP_SPARSE_DATA" not in os.environ, reason="DP_SPARSE_DATA is not set")
def test_other_models_on_real_rows(tmp_path: Path) -> None:
    """One pass with DP-AdaFEST at ε = 8: each model learns, none is far from pCTR."""
    sample = Path(os.environ["DP_SPARSE_DATA"]) / "criteo" / "kaggle_sample_120k.tsv.gz"
    data = prepare(sample, tmp_path / "rows.records", TABLE3_VOCABULARIES, progress=False)
    auc = {}
    for model in ("pctr", "pctr with a layer", "dlrm", "dcn"):
        config = (criteo_tpu if "layer" in model else criteo_sample).get_config()
        config.model, config.privacy.epsilon = model.split()[0], 8.0
        config.training.epochs, config.training.evaluations = 1.0, 1
        config.report.verbose = 0
        auc[model] = train(config, data).auc
    assert auc["pctr"] > 0.67 and min(auc.values()) > auc["pctr"] - 0.03, auc


def test_sparsity_counts_the_rows_that_batches_look_up(generated) -> None:
    """A batch of all rows looks up what is there; smaller ones are sparser."""
    whole, small = sparsity(generated, 10**6), sparsity(generated, 20)
    ids = generated.records()["categories"]
    used = [len(np.unique(column)) for column in ids.T]
    for (name, zero), rows, size in zip(whole.items(), used, VOCABULARIES, strict=False):
        assert zero == pytest.approx(1 - rows / size) and small[name] >= zero
    widths = np.array([int(2 * size**0.25) for size in VOCABULARIES])
    entries = (np.array(used) * widths).sum() / (np.array(VOCABULARIES) * widths).sum()
    assert whole["all"] == pytest.approx(1 - entries) and small["all"] > whole["all"]


def test_a_tpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(tpu: str) -> None:
        raise ValueError(f"Could not look up {tpu}.")

    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", nothing)
    with pytest.raises(ValueError, match="Expected the name of a TPU.* got tpu='here': Could not"):
        tpu_strategy("here")


def test_an_embedding_layer_serves_one_method_and_two_models(generated) -> None:
    config = small_config("dp_sgd")
    config.tables = "layer"
    with pytest.raises(ValueError, match="Expected method=dp_adafest with .*method='dp_sgd'"):
        train(config, generated)
    config.method, config.model = "dp_adafest", "dlrm"
    with pytest.raises(ValueError, match="Expected model=pctr or ranking .*model='dlrm'"):
        train(config, generated)
    config = criteo_tpu.get_config()
    config.model, config.training.batch_size = "ranking", 128
    with pytest.raises(ValueError, match="start the command again with TF_USE_LEGACY_KERAS=1"):
        train(config, generated)
    config.tables = "none"
    with pytest.raises(ValueError, match="Expected tables to be keras, or layer"):
        train(config, generated)

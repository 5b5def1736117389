"""A sweep's points run once, resume, keep their results whole, and are compared seed by seed."""

import gzip
import json
import types
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
import pytest

from configs import criteo_sample
from configs.criteo_kaggle import generated, hyperparameters, models, tradeoff
from pipelines.criteo import sweep, sweep_report
from pipelines.criteo.generate import generate
from pipelines.criteo.records import load_or_prepare
from pipelines.methods import NON_PRIVATE, optimizer_under, stand_in_rows
from pipelines.scores import exact_auc
from tests.training_cases import plan_for

VOCABULARIES = (40, 7) * 13


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.tsv"
    generate(1500, path, seed=1, vocabularies=VOCABULARIES, progress=False)
    return path


def small_sweep(rows: Path, directory: Path) -> ml_collections.ConfigDict:
    config = tradeoff.get_config()
    config.directory, config.data.path = str(directory), str(rows)
    config.base.data.vocabularies = VOCABULARIES
    config.base.training.batch_size, config.base.training.epochs = 128, 0.2
    config.points = (
        {"name": "eps1_dp_sgd", "seed": 0, "changes": _changes("dp_sgd")},
        {"name": "eps1_dp_adafest", "seed": 0, "changes": _changes("dp_adafest")},
        {"name": "eps1_wrong", "seed": 0, "changes": _changes("nothing")},
    )
    return config


def _changes(method: str) -> dict[str, Any]:
    return {"method": method, "privacy.epsilon": 1.0}


@pytest.mark.slow
def test_points_run_once_each_in_a_process_and_failures_are_named(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_sweep(rows, tmp_path)
    data = load_or_prepare(rows, tmp_path / "rows.tsv.records", VOCABULARIES)
    failed = sweep.run_all(config)
    assert len(failed) == 1 and "eps1_wrong, seed 0: ValueError: Expected method" in failed[0]
    paths = [sweep.result_path(config, point) for point in sweep.points_of(config)]
    assert [path.exists() for path in paths] == [True, True, False]
    assert len(np.load(paths[0].with_suffix(".npy"))) == 150
    written = [path.stat().st_mtime_ns for path in paths[:2]]
    config.points = config.points[:2]
    assert sweep.run_all(config) == []
    assert [path.stat().st_mtime_ns for path in paths[:2]] == written
    done = [json.loads(path.read_text()) | {"path": str(path)} for path in paths[:2]]
    sweep_report.write_report(config, data, done)
    text = (tmp_path / "results.md").read_text()
    assert "eps1_dp_adafest" in text and "wrong" not in text
    assert (tmp_path / "utility_loss_eps1.png").stat().st_size > 5_000


def test_a_point_is_named_by_what_decides_its_result(rows: Path, tmp_path: Path) -> None:
    config = small_sweep(rows, tmp_path)
    first, second = (sweep.result_path(config, p) for p in sweep.points_of(config)[:2])
    assert first != second
    config.base.report.verbose, config.workers = 1, 7
    assert sweep.result_path(config, sweep.points_of(config)[0]) == first
    config.base.training.epochs = 0.3
    assert sweep.result_path(config, sweep.points_of(config)[0]) != first
    found = sweep.result_path(config, sweep.points_of(config)[0])
    copy = tmp_path / "elsewhere" / rows.name
    copy.parent.mkdir()
    copy.write_bytes(rows.read_bytes() + b"\n")
    config.data.path = str(copy)
    assert sweep.result_path(config, sweep.points_of(config)[0]) != found
    with pytest.raises(KeyError, match="batchsize"):
        sweep.run_config(config, sweep.Point("x", 0, {"training.batchsize": 3}))
    with pytest.raises(ValueError, match=r"changes data\.vocabularies, but the points"):
        sweep.run_config(config, sweep.Point("x", 0, {"data.vocabularies": (3,)}))


def test_what_a_sweep_refuses_before_it_runs(
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(config: Any) -> str:
        monkeypatch.setattr(sweep, "_CONFIG", types.SimpleNamespace(value=config))
        assert sweep.main(["sweep"]) == 1
        return capsys.readouterr().err

    assert "got data.path=None" in refused(None)
    missing = small_sweep(tmp_path / "none.tsv", tmp_path)
    assert "none.tsv" in refused(missing)
    assert "the config of a sweep" in refused(criteo_sample.get_config())
    unsplit = small_sweep(rows, tmp_path)
    unsplit.base.data.validation_fraction = 0.0
    assert "base.data.validation_fraction > 0" in refused(unsplit)
    broken = tmp_path / "broken.tsv.gz"
    broken.write_bytes(gzip.compress(rows.read_bytes())[:200])
    assert "broken.tsv.gz" in refused(small_sweep(broken, tmp_path))


def test_auc_of_resampled_rows() -> None:
    rng = np.random.default_rng(0)
    labels, scores = rng.random(200) < 0.3, rng.integers(0, 20, 200)
    rows = rng.integers(0, 200, 200)
    found = sweep_report._auc(
        labels, np.unique(scores, return_inverse=True)[1], np.bincount(rows, minlength=200)
    )
    assert found == pytest.approx(exact_auc(labels[rows], scores[rows]), abs=1e-12)


@pytest.mark.parametrize(
    "make",
    [tradeoff.get_config, generated.get_config, hyperparameters.get_config, models.get_config],
)
def test_every_point_changes_keys_that_exist_and_makes_an_optimizer(make: Any) -> None:
    config = make()
    config.data.path = __file__  # some file
    points = sweep.points_of(config)
    plan = plan_for(8, noise_multiplier=1.0)
    for point in points:
        own = sweep.run_config(config, point)
        if own.method not in (NON_PRIVATE, "exponential"):
            optimizer = optimizer_under(own, plan, stand_in_rows(own))
            wanted = point.changes.get("adafest.threshold")
            assert getattr(optimizer, "threshold", None) == wanted
    assert len({sweep.result_path(config, point) for point in points}) == len(points)
    assert config.base.data.validation_fraction == 0.1
    assert criteo_sample.get_config().data.validation_fraction == 0.0


def result(name: str, seed: int, auc: float, reduction: float, path: Path, scores: Any) -> Any:
    np.save(path.with_suffix(".npy"), scores)
    return {
        "name": name,
        "seed": seed,
        "changes": {"privacy.epsilon": 1.0},
        "method": name.partition("_k")[0],
        "auc": auc,
        "log_loss": 0.5,
        "mean_prediction": 0.25,
        "validation_auc": auc,
        "reduction": reduction,
        "path": str(path),
    }


def test_losses_are_paired_and_intervals_hold_the_truth(tmp_path: Path) -> None:
    """A method whose scores are DP-SGD's has a loss of exactly 0; noisier ones lose."""
    rng = np.random.default_rng(0)
    labels = (rng.random(2_000) < 0.3).astype(np.float32)
    clean = labels + rng.normal(size=2_000)
    noisy = clean + 2 * rng.normal(size=2_000)
    base = {0: result("dp_sgd", 0, exact_auc(labels, clean), 1, tmp_path / "a", clean)}
    same = [result("dp_fest_k1", 0, base[0]["auc"], 200, tmp_path / "b", clean)]
    worse = [result("dp_fest_k2", 0, exact_auc(labels, noisy), 200, tmp_path / "c", noisy)]
    assert sweep_report._interval(same, base, labels) == (0.0, 0.0)
    low, high = sweep_report._interval(worse, base, labels)
    assert 0 < low < base[0]["auc"] - worse[0]["auc"] < high < 0.3
    alone = [result("dp_fest_k3", 7, 0.5, 200, tmp_path / "d", noisy)]  # no DP-SGD of its seed
    assert sweep_report._compared(alone, base, labels)[-2:] == ("-", "-")
    assert sweep_report._reductions({"x": alone}, base, "dp_fest")[1:] == ("-",) * 4
    groups = sweep_report._grouped([*base.values(), *same, *worse])
    assert sweep_report._chosen(groups, "dp_fest") == same
    assert sweep_report._reductions(groups, base, "dp_fest") == ("dp_fest", *["200.0"] * 4)


@pytest.mark.slow
def test_intervals_are_of_the_mean_over_seeds(tmp_path: Path) -> None:
    """Six seeds with one loss each, over rows so many that only the seeds matter."""
    rng = np.random.default_rng(0)
    labels = (rng.random(20_000) < 0.3).astype(np.float32)
    base, group = {}, []
    for seed, spread in enumerate((0.0, 0.0, 0.5, 0.9, 1.2, 1.2)):
        clean = labels + rng.normal(size=len(labels))
        noisy = clean + spread * rng.normal(size=len(labels))
        name = str(tmp_path / str(seed))
        base[seed] = result("dp_sgd", seed, exact_auc(labels, clean), 1, Path(name + "a"), clean)
        auc = exact_auc(labels, noisy)
        group.append(result("dp_fest", seed, auc, 200, Path(name + "b"), noisy))
    losses = sweep_report._loss(group, base)
    means = [np.mean(rng.choice(losses, 6)) for _ in range(4_000)]
    expected = np.quantile(means, [0.025, 0.975])
    found = sweep_report._interval(group, base, labels)
    np.testing.assert_allclose(found, expected, atol=0.1 * (max(losses) - min(losses)))
    single = np.quantile(rng.choice(losses, 4_000), [0.025, 0.975])
    assert np.abs(single - expected).max() > 0.1 * (max(losses) - min(losses))

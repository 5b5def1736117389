"""The study of shuffled DP-SGD: permutations are undone, the claim is broken, pages are written."""

import gzip
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from pipelines.shuffling import __main__ as command
from pipelines.shuffling import attack, study, theory, training
from pipelines.shuffling.page import page

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "results"

pytestmark = pytest.mark.filterwarnings("ignore:Theorem 6")


def test_the_attacker_undoes_the_permutation_and_breaks_the_claim() -> None:
    """Of weights that the optimizer itself released; DP-SGD's guarantee holds."""
    found = attack.audit(canaries=4000)
    assert found.claimed == 0.25 and found.units_found == 1.0
    assert 1.0 < found.bound < found.guaranteed


def test_units_that_all_look_alike_are_not_found() -> None:
    """So that the part that is found says something."""
    rng = np.random.default_rng(0)
    before = [rng.normal(size=(8, 50)), rng.normal(size=(50, 2))]
    order = rng.permutation(50)
    after = [before[0][:, order], before[1][order]]
    np.testing.assert_array_equal(order[attack.matched(before, after)], np.arange(50))
    same = [np.ones((8, 50)), np.ones((50, 2))]
    noisy = [[each + 1e-3 * rng.normal(size=each.shape) for each in same] for _ in range(2)]
    assert np.mean(order[attack.matched(*noisy)] == np.arange(50)) < 0.5


def test_sums_of_lognormal_variables() -> None:
    """F-W has the mean and the variance; S-Y and draws agree where variances are small."""
    mean, spread = theory.fenton_wilkinson(0.5, 100)
    np.testing.assert_allclose(np.exp(mean + spread**2 / 2), 100 * np.exp(0.125))
    variance = np.expm1(spread**2) * np.exp(2 * mean + spread**2)
    np.testing.assert_allclose(variance, 100 * np.expm1(0.25) * np.exp(0.25))
    found = theory.figure_2(2.0, 100, draws=2000)["quantiles"]
    for name in ("F-W", "S-Y", "LSQ", "KDE"):
        np.testing.assert_allclose(found[name], found["Monte Carlo"], atol=0.05)
    np.testing.assert_allclose(theory.schwartz_yeh(0.5, 2)[0], 0.755, atol=0.01)


def test_the_noise_of_dp_sgd_and_its_delta() -> None:
    sigma = theory.dp_sgd_sigma(0.25, 5e-6)
    assert sigma == pytest.approx(13.95, abs=0.01)
    assert theory.true_delta(0.25, sigma) == pytest.approx(5e-6, rel=1e-3)


def pair() -> keras.Model:
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((3,)), dense(8, "tanh"), dense(2)])


def test_training_without_noise_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "BATCH", 100)
    monkeypatch.setattr(training, "WARM_UP", 1)
    x = np.random.default_rng(0).normal(size=(400, 3)).astype(np.float32)
    examples = x, (x[:, 0] > 0).astype(np.int32)
    found = training.compared(pair, examples, examples, private=False)
    assert found["plain"]["loss"] == pytest.approx(found["shuffled"]["loss"], rel=1e-4)
    assert found["weights_apart"] > 0.5 and found["logits_apart"] < 1e-3


def test_data_is_read(tmp_path: Path) -> None:
    images = np.arange(2 * 28 * 28).reshape(2, 28, 28) % 256
    both = {f"{kind}_{part}": value for part in ("train", "test") for kind, value in (
        ("x", images.astype(np.uint8)), ("y", np.array([3, 4], np.uint8)))}  # fmt: skip
    np.savez(tmp_path / "mnist.npz", **both)
    (x, y), _ = training.mnist(tmp_path / "mnist.npz")
    assert x.shape == (2, 28, 28, 1) and x.max() == 1.0 and y.tolist() == [3, 4]
    for part in ("train", "dev"):
        with gzip.open(tmp_path / f"{part}.tsv.gz", "wt") as file:
            file.write('sentence\tlabel\na "good" film\t1\na bad film\t0\n')
    (words, labels), _ = training.sst2(tmp_path)
    assert words.shape == (2, training.LENGTH) and labels.tolist() == [1, 0]
    assert (words[:, 3:] == 0).all() and words[0, 0] == words[1, 0] and words[0, 2] == words[1, 2]
    assert words[0, 1] != words[1, 1] and 0 < words[:, :3].min() <= words.max() < training.WORDS


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_both_models_can_be_permuted(name: str) -> None:
    pytest.importorskip("keras_hub")
    groups = dp_sparse.shuffling.permutation_groups(getattr(training, name)())
    assert sorted(group.heads or 1 for group in groups) == [1, 1, 2, 2]


def lines() -> dict[str, Any]:
    text = (FOLDER / "shuffling.jsonl").read_text()
    return {line["point"]: line["result"] for line in map(json.loads, text.splitlines())}


def test_the_page_is_what_its_lines_say() -> None:
    assert (FOLDER / "shuffling.md").read_text() == page(lines())


def test_finished_points_are_not_computed_again(tmp_path: Path) -> None:
    results, counted = lines(), []

    def compute(name: str) -> Any:
        counted.append(name)
        return results[name]

    points = {name: lambda n=name: compute(n) for name in results}
    assert points.keys() <= study.points(tmp_path, tmp_path, dict).keys()
    for _ in range(2):
        assert study.run(points, tmp_path) == results
    assert counted == list(results)
    assert (tmp_path / "shuffling.md").read_text() == page(results)
    for name in ("figure_2", "figure_3", "figure_4"):
        assert (tmp_path / f"shuffling_{name}.png").read_bytes().startswith(b"\x89PNG")


def test_data_that_is_missing_is_said_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--mnist", str(tmp_path / "none.npz"), "--sst2", str(tmp_path), "--out", "nowhere"]
    assert command.main(given) == 1
    assert "No such file or folder" in capsys.readouterr().err

"""The study of next-item models: what it runs, in which order, and the page of what it found."""

import json
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
import pytest

from configs import amazon_study, movielens_study
from pipelines.movielens import study, study_page
from pipelines.movielens.study import Point, Results

GRID_RATES = (0.01, 0.03)


@pytest.fixture
def small(tmp_path: Path) -> ml_collections.ConfigDict:
    config = movielens_study.get_config()
    config.study.update({"batch_sizes": (1000,), "learning_rates": GRID_RATES, "seeds": (0, 1)})
    for name, file in (("results", "found.jsonl"), ("page", "found.md"), ("maps", "maps")):
        config.study[name] = str(tmp_path / file)
    return config


def result_of(point: Point) -> dict[str, Any]:
    """A made-up one: the second rate is the best, and Re-Attention the best model."""
    of_rate = 100 * point.learning_rate * (point.learning_rate <= GRID_RATES[1])
    score = 5.0 * (point.model == "re_attention") + of_rate + point.seed
    curve = {"2": [score / 2, score], "10": [score, 2 * score]}
    return {
        "ndcg": score,
        "hit": 2 * score,
        "ndcg_unseen": 1.5 * score,
        "hit_unseen": 2.5 * score,
        "popularity": {"ndcg": 0.5, "hit": 1.0, "ndcg_unseen": 0.75, "hit_unseen": 1.25},
        "curve": curve,
        "steps": 40,
        "noise_multiplier": 1.1,
        "seconds": 1234,
    }


def finished(config: ml_collections.ConfigDict, runs: int | None = None) -> Results:
    """All results, or the first ones."""
    results = Results(Path(config.study.results), config)
    for _, point in zip(range(runs or 1000), study.missing(config, results), strict=False):
        results.add(point, result_of(point))
    return results


def test_grids_come_first_and_their_best_is_compared(small: ml_collections.ConfigDict) -> None:
    points = [Point(**line["point"]) for line in finished(small).lines]
    alone = [Point(model, 8.0, 1000, rate) for model, rate in small.study.in_grid_alone]
    assert len(points) == 5 * 3 + 5 * 2 * 3 + len(alone) == len(set(points))
    assert points[-len(alone) :] == alone
    first = points[:6]
    assert {point.model for point in first} == {"re_attention", "vanilla"}
    assert all(p.held_out == "validation" and p.epsilon == 8 and p.seed == 0 for p in first)
    compared = [point for point in points if point.held_out == "test"]
    assert {point.learning_rate for point in compared} == {0.03}
    assert {(p.model, p.epsilon, p.seed) for p in compared} == {
        (model, epsilon, seed)
        for model in ("re_attention", "vanilla", "without_sharing", "gru", "lstm")
        for epsilon in (5, 8, 10)
        for seed in (0, 1)
    }
    assert points.index(Point("gru", 8.0, 1000, 0.01)) > points.index(
        Point("vanilla", 10.0, 1000, 0.03, 1, "test")
    )


@pytest.mark.parametrize(("second", "taken"), [(4.84, 1), (4.82, 0)])
def test_the_larger_rate_is_taken_of_scores_that_are_nearly_equal(
    second: float, taken: int, small: ml_collections.ConfigDict
) -> None:
    results = Results(Path(small.study.results), small)
    points = [Point("gru", 8.0, 1000, rate) for rate in (*GRID_RATES, 0.06)]
    for point, score in zip(points, (4.8807, second, 4.0), strict=True):
        results.add(point, result_of(point) | {"ndcg": score})
    assert study.best(small, "gru", results) == points[taken]


@pytest.mark.parametrize(("scores", "rates"), [((2.0, 1.0), 2), ((1, 2, 1), 3), ((1, 2, 3, 2), 4)])
def test_a_grid_grows_while_its_largest_rate_is_the_best(
    scores: tuple[float, ...], rates: int, small: ml_collections.ConfigDict
) -> None:
    results = Results(Path(small.study.results), small)
    for score in scores:
        point = next(p for p in study.missing(small, results) if p.model == "re_attention")
        assert study.best(small, "re_attention", results) is None
        results.add(point, result_of(point) | {"ndcg": score})
    grid = study.grid(small, "re_attention", results)
    assert [point.learning_rate for point in grid] == [0.01, 0.03, 0.06, 0.12][:rates]
    found = study.best(small, "re_attention", results)
    assert found == grid[int(np.argmax(scores))]


def test_it_goes_on_behind_the_last_whole_line(small: ml_collections.ConfigDict) -> None:
    finished(small, 3)
    path = Path(small.study.results)
    path.write_text(path.read_text() + '{"point": {"mod')
    again = Results(path, small)
    assert len(again.lines) == 3 and len(path.read_text().splitlines()) == 3
    rest = study.missing(small, again)
    assert next(rest) == Point("vanilla", 8.0, 1000, 0.01)


def test_runs_of_other_settings_are_not_taken_for_these(small: ml_collections.ConfigDict) -> None:
    """Such as those of another file of items; where it lies does not matter."""
    finished(small, 3)
    small.data.path, small.seed = "elsewhere", 5
    assert len(Results(Path(small.study.results), small).lines) == 3
    small.data.num_items = 12_101
    with pytest.raises(ValueError, match="found.jsonl, got 3 of others among 3: name another file"):
        Results(Path(small.study.results), small)


def test_a_point_is_a_configuration_of_the_job(small: ml_collections.ConfigDict) -> None:
    config = Point("without_sharing", 5.0, 512, 0.02, 3, "test").config(small)
    assert config.model.kind == "vanilla" and not config.model.tied and config.seed == 3
    assert config.privacy.epsilon == 5 and config.training.batch_size == 512
    assert config.optimizer.learning_rate == 0.02 and config.data.held_out == "test"
    assert Point("gru", 5.0, 512, 0.02).config(small).model.tied
    half = Point("without_sharing_half_width", 8.0, 512, 0.02).config(small).model
    assert half.width == small.model.width / 2 and not half.tied
    of_all = Point("gru_all_items", 8.0, 512, 0.02).config(small)
    assert of_all.data.filter_items == 0 < small.data.filter_items
    assert small.model.tied and small.seed == 0


def test_a_page_without_runs_says_so(small: ml_collections.ConfigDict) -> None:
    page = Path(small.study.page)
    study_page.write(small, [], [], page, Path(small.study.maps))
    assert page.read_text().count("No run has finished yet.") == 3
    assert "No ε\ncovers these choices, nor the scores" in page.read_text()
    assert not list(page.parent.glob("*.png"))


def test_the_page_has_means_spreads_and_pictures(small: ml_collections.ConfigDict) -> None:
    page, maps = Path(small.study.page), Path(small.study.maps)
    maps.mkdir()
    for epsilon in (5, 10):
        np.save(maps / f"vanilla_{epsilon}.npy", np.random.default_rng(0).random((5, 4, 4)))
    study_page.write(small, finished(small).lines, [], page, maps)
    text = page.read_text()
    scores = "8.50 ± 0.71 | 17.00 ± 1.41 | 12.75 ± 1.06 | 21.25 ± 1.77"
    row = f"| re_attention | 5 | batch 1,000, rate 0.03 | 2 | {scores} | 5.88 |"
    assert "without noise: NDCG@10 in % 0.50, HIT@10 in % 1.00, NDCG@10, unseen 0.75" in text
    assert row in text and "| lstm | 10 |" in text
    assert "At ε = 8 Re-Attention has +5.00 points of NDCG@10 in %" in text
    assert (
        "At ε = 5 the best mean NDCG@10 is 8.50 %, of re_attention. The paper's 5.88 % of "
        "Re-Attention is reached." in text
    )
    assert "has +7.50 points of NDCG@10, unseen over plain" in text and "seeds is 0.71" in text
    one = [line for line in finished(small).lines if line["point"]["seed"] == 0]
    study_page.write(small, one, [], page, maps)
    assert "deviation between seeds" not in page.read_text()  # one seed has none
    assert text.count(".png)") == 3 == len(list(page.parent.glob("found_*.png")))
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in page.parent.glob("found_*.png"))


def test_runs_of_a_setting_that_was_best_before_stand_apart(
    small: ml_collections.ConfigDict,
) -> None:
    results, page = finished(small), Path(small.study.page)
    before = Point("vanilla", 5.0, 1000, 0.01, 0, "test")
    results.add(before, result_of(before) | {"ndcg": 40.0})
    lines, replaced = study.shown(small, results)
    assert [Point(**line["point"]) for line in replaced] == [before]
    assert len(lines) == len(results.lines) - 1
    study_page.write(small, lines, replaced, page, Path(small.study.maps))
    compared, other = page.read_text().split("## Settings that were compared before")
    assert "| vanilla | 5 | batch 1,000, rate 0.03 | 2 | 3.50 ± 0.71 |" in compared
    assert "rate 0.01" not in compared.split("## The grid")[0]
    assert "| vanilla | 5 | batch 1,000, rate 0.01 | 1 | 40.00 |" in other
    study_page.write(small, lines, [], page, Path(small.study.maps))
    assert "Settings that were compared before" not in page.read_text()


def test_renyi_accounting_is_looser_than_privacy_loss_distributions() -> None:
    """σ = 1.0954642 was calibrated to ε = 8 by privacy loss distributions."""
    assert 8.0 < float(study_page.renyi_epsilon(1.0954642, 0.25, 40, 1 / 6040)) < 9.5


@pytest.mark.slow
def test_a_run_of_the_study_leaves_a_line_a_map_and_a_page(
    small: ml_collections.ConfigDict, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.data.update({"path": str(path), "num_items": 12, "length": 4, "predicted": 3})
    small.data.filter_items = 0
    small.model.update({"width": 4, "blocks": 1})
    small.training.update({"epochs": 1, "score_every": 1})
    small.study.update({"models": (("vanilla",),), "epsilons": (8.0,), "seeds": (0,)})
    small.study.update({"batch_sizes": (20,), "learning_rates": (0.01,)})
    monkeypatch.setattr(study, "_CONFIG", type("Flag", (), {"value": small}))
    monkeypatch.setattr(study, "_ONLY_PAGE", type("Flag", (), {"value": False}))
    assert study.main(["study"]) == 0
    lines = [json.loads(line) for line in Path(small.study.results).read_text().splitlines()]
    assert [line["point"]["held_out"] for line in lines] == ["validation", "test"]
    assert np.load(Path(small.study.maps) / "vanilla_8.npy").shape[1:] == (4, 4)
    assert "| vanilla | 8 |" in Path(small.study.page).read_text()
    monkeypatch.setattr(study, "run", never)
    assert study.main(["study"]) == 0  # nothing is missing


def never(config: ml_collections.ConfigDict) -> None:
    raise AssertionError(config)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 12, 40)
    lines = [f"{u} {(s + i) % 12 + 1}" for u, s in enumerate(starts) for i in range(9)]
    file = tmp_path / "interactions.txt"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_the_page_of_other_ratings(tmp_path: Path) -> None:
    config, page = amazon_study.get_config(), tmp_path / "page.md"
    names = {model for group in config.study.models for model in group}
    assert names == {*study_page.DATA_SETS[config.study.data].paper}
    study_page.write(config, [], [], page, tmp_path)
    text = page.read_text()
    assert "Amazon's ratings of video games, 29,341 users" in text and "(Table 3)" in text
    assert "--config configs/amazon_study.py" in text and "No run has finished yet" in text

"""The bag of words: each method trains it, LoRA multiplies savings, the study goes on and tells."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import glue_bag, glue_bag_study
from pipelines import points
from pipelines.glue import bag, bag_page, bag_study
from tests.pipelines.glue_files import roberta_folder, sst2_folder

COUNTS = ("steps", "training_rows", "words")


def small(folder: Path, **changes: Any) -> Any:
    config = glue_bag.get_config()
    config.model.tokenizer = str(roberta_folder(folder / "roberta"))
    config.data.path = str(sst2_folder(folder / "sst2"))
    config.data.update({"prepared": str(folder / "tokens"), "held_out": 8, "validation": 4})
    config.training.update({"batch_size": 8, "epochs": 1.0})
    config.privacy.epsilon = 8.0
    config.selection.rows = 5
    config.adafest.expected_false_rows = 2.0
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "non_private"},
        pytest.param({"method": "dp_sgd", "model.words": "frozen"}, marks=pytest.mark.slow),
        pytest.param({"method": "dp_fest"}, marks=pytest.mark.slow),
        {"method": "dp_adafest", "model.words": "lora", "model.word_rank": 2},
    ],
)
def test_a_run_judges_all_sides(changes: dict[str, Any], tmp_path: Path) -> None:
    line = bag_study.run_point(small(tmp_path, **changes))
    assert {*line["accuracy"]} == {*line["auc"]} == {"dev", "held_out", "validation"}
    assert all(0 <= value <= 1 for value in line["accuracy"].values())
    assert line["training_rows"] > 0 and line["words"] == 264
    if changes.get("model.words") == "frozen":
        assert line["reduction"] is None
    elif changes["method"] == "non_private":
        assert line["reduction"] == 1
    else:
        assert line["reduction"] > 1


def test_the_model_sums_rows_over_the_root_of_words() -> None:
    model = bag.bag_of_words(9, 4, length=3, words="trained", rank=0)
    ids, mask = np.array([[3, 5, 1], [7, 1, 1]]), np.array([[1, 1, 0], [1, 0, 0]])
    table, kernel, bias = model.get_weights()
    found = model.predict({"token_ids": ids, "padding_mask": mask}, verbose=0)
    expected = np.stack([(table[3] + table[5]) / np.sqrt(2), table[7]]) @ kernel + bias
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_lora_trains_two_thin_matrices() -> None:
    model = bag.bag_of_words(9, 4, length=3, words="lora", rank=2)
    shapes = [tuple(v.shape) for v in model.trainable_variables if "words" in v.path]
    assert sorted(shapes) == [(2, 4), (9, 2)]


@pytest.mark.parametrize(("words", "rank"), [("lora", 0), ("trained", 2), ("other", 0)])
def test_words_and_rank_fit(words: str, rank: int) -> None:
    with pytest.raises(ValueError, match=f"got model.words='{words}' and model.word_rank={rank}"):
        bag.bag_of_words(9, 4, 3, words, rank)


def test_another_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="method='sgd'"):
        bag.train(small(tmp_path, method="sgd"))


def test_every_point_changes_the_base() -> None:
    config = glue_bag_study.get_config()
    runs = list(points.runs_of(config.points))
    assert len({json.dumps(run, sort_keys=True) for run, _ in runs}) == len(runs)
    assert [run["seed"] for run, _ in runs] == sorted(run["seed"] for run, _ in runs)
    for run, changes in runs:
        own = points.run_config(config.base, run, changes)
        assert own.seed == run["seed"]
        assert round(own.training.epochs * 55_269 / own.training.batch_size) == 270


def made_up(config: Any, count: int) -> list[dict[str, Any]]:
    lines = []
    for run, _ in list(points.runs_of(config.points))[:count]:
        sides = {side: 0.7 + 0.01 * run["seed"] for side in ("dev", "held_out", "validation")}
        line = {"accuracy": sides, "auc": sides, "reduction": 40.0, "steps": 270, "words": 9}
        lines.append({**run, **line, "training_rows": 57})
    return lines


def test_the_page_tells_what_is_missing() -> None:
    config = glue_bag_study.get_config()
    everything = len(list(points.runs_of(config.points)))
    page = bag_page.page_of(config, made_up(config, everything))
    assert "are missing:" not in page and "71.0 % ± 1.0" in page and "40×" in page
    assert all(f"## {title}" in page for title in bag_page.TITLES.values())
    page = bag_page.page_of(config, made_up(config, 30))
    assert f"are missing: {everything - 30} (" in page


def test_a_study_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = glue_bag_study.get_config()
    config.points = config.points[:2]
    ran: list[int] = []

    def run(function: Any, own: Any) -> dict[str, Any]:
        ran.append(own.seed)
        if len(ran) == 2:
            raise RuntimeError("killed")
        (line, *_) = made_up(config, 1)
        return {name: line[name] for name in ("accuracy", "auc", "reduction", *COUNTS)}

    monkeypatch.setattr(bag_study, "in_own_process", run)
    results = bag_study.results_in(tmp_path / "bag.jsonl", config)
    page = tmp_path / "bag.md"
    assert bag_study.run_all(config, results, page, 60.0) == 1
    assert capsys.readouterr().err.endswith("seed=0: RuntimeError: killed\n") and len(ran) == 9
    again = bag_study.results_in(tmp_path / "bag.jsonl", config)
    assert bag_study.run_all(config, again, page, 60.0) == 0 and len(ran) == 10
    assert "are missing:" not in page.read_text()
    assert bag_study.run_all(config, again, page, 0.0) == 0
    config.base.privacy.clip_norm = 2.0
    with pytest.raises(ValueError, match="of these settings"):
        bag_study.results_in(tmp_path / "bag.jsonl", config)


def test_the_command_writes_the_page_alone(tmp_path: Path) -> None:
    page, results = tmp_path / "bag.md", tmp_path / "bag.jsonl"
    assert bag_study.main([f"--page={page}", f"--results={results}"]) == 0
    assert "are missing:" in page.read_text()
    with pytest.raises(SystemExit):
        bag_study.main(["--data=somewhere"])
    results.write_text('{"of": "others"}\n')
    assert bag_study.main([f"--page={page}", f"--results={results}"]) == 1


def test_the_page_in_docs_is_of_the_results() -> None:
    root = Path(__file__).parents[2]
    config = glue_bag_study.get_config()
    results = bag_study.results_in(root / "docs/results/bag.jsonl", config)
    written = (root / "docs/results/bag.md").read_text()
    assert written == bag_page.page_of(config, results.lines)

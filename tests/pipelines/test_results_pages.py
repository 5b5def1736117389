"""The pages in docs/results are what their commands write of the runs that stand beside them."""

import shutil
from pathlib import Path
from types import ModuleType

import pytest

from configs import amazon_study, movielens_study
from pipelines import windowed_page
from pipelines.criteo import scale
from pipelines.criteo import study as clicks
from pipelines.criteo.time_series import study as time_series
from pipelines.glue import bag_study as bag
from pipelines.glue import study as language
from pipelines.movielens import study as sequence
from pipelines.movielens import study_page as sequence_page
from pipelines.shuffling import study as shuffling

RESULTS = Path(__file__).parents[2] / "docs/results"


def by_options(name: str, written: Path) -> list[str]:
    return [f"--results={RESULTS / name}.jsonl", f"--page={written}"]


def drawn(folder: Path, name: str) -> set[str]:
    return {path.name for path in folder.glob(f"{name}_*.png")}


def test_the_page_of_language_models(tmp_path: Path) -> None:
    """Its runs are of the base that ships, too: others are refused."""
    written = tmp_path / "language.md"
    assert language.main(by_options("language", written)) == 0
    assert written.read_text() == (RESULTS / "language.md").read_text()


def test_the_page_of_the_bag_of_words(tmp_path: Path) -> None:
    written = tmp_path / "bag.md"
    assert bag.main(by_options("bag", written)) == 0
    assert written.read_text() == (RESULTS / "bag.md").read_text()


def test_the_page_of_click_models(tmp_path: Path) -> None:
    written = tmp_path / "criteo_kaggle.md"
    assert clicks.main(by_options("criteo_kaggle", written)) == 0
    assert written.read_text() == (RESULTS / "criteo_kaggle.md").read_text()
    assert drawn(tmp_path, "criteo") == drawn(RESULTS, "criteo")


def test_the_page_of_time_series(tmp_path: Path) -> None:
    written = tmp_path / "time_series.md"
    assert time_series.main(by_options("time_series", written)) == 0
    assert written.read_text() == (RESULTS / "time_series.md").read_text()
    assert drawn(tmp_path, "time_series") == drawn(RESULTS, "time_series")


def test_the_page_of_scale(tmp_path: Path) -> None:
    written = tmp_path / "scale.md"
    assert scale.main(by_options("scale", written)) == 0
    assert written.read_text() == (RESULTS / "scale.md").read_text()


def test_the_page_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bag", "criteo_kaggle", "time_series"):
        shutil.copy(RESULTS / f"{name}.jsonl", tmp_path)
    monkeypatch.setattr(windowed_page, "RESULTS", tmp_path)
    assert windowed_page.main() == 0
    for name in ("windowed_selection.md", windowed_page.PICTURE):
        assert (tmp_path / name).exists()
    written = (tmp_path / "windowed_selection.md").read_text()
    assert written == (RESULTS / "windowed_selection.md").read_text()


@pytest.mark.parametrize(
    ("name", "config"), [("sequence", movielens_study), ("amazon", amazon_study)]
)
def test_the_page_of_next_item_models(name: str, config: ModuleType, tmp_path: Path) -> None:
    """Without its attention maps: they are drawn of users' own items, which are not kept here."""
    written, study = tmp_path / f"{name}.md", config.get_config()
    lines = sequence.shown(study, sequence.Results(RESULTS / f"{name}.jsonl", study))
    sequence_page.write(study, *lines, written, tmp_path)
    runs, maps, _ = (RESULTS / f"{name}.md").read_text().partition("\n## Attention maps")
    assert maps and written.read_text() == runs


def test_the_page_and_the_pictures_of_shuffling(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "shuffling.jsonl", tmp_path)
    shuffling.run({}, tmp_path)
    assert (tmp_path / "shuffling.md").read_text() == (RESULTS / "shuffling.md").read_text()
    assert drawn(tmp_path, "shuffling") == drawn(RESULTS, "shuffling")

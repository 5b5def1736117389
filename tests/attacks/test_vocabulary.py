"""What an attacker may try on a private vocabulary, beside the plan that pays for one."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dp_sparse
from dp_sparse.core import PrivacyError
from dp_sparse.selection.top_k.noise_sources import GaussianTopK
from dp_sparse.selection.vocabulary.counting import count_values
from tests.selection.vocabulary.cases import drawn, paying_plan, without_noise

MANY = np.repeat(["Rome", "Oslo", "Bonn", "Kyiv"], [300, 200, 200, 200])  # three of one count
LOUD = 1e6  # standard noise with which every candidate is released


def everything(found: dp_sparse.PrivateVocabulary) -> bytes:
    """All that a holder of the vocabulary has, but for random names."""
    config = found.get_config()
    config["draws"] = [{**d, "paid_by": "", "draw_id": ""} for d in config["draws"]]
    stored = {name: value for name, value in vars(found).items() if name != "draws"}
    return pickle.dumps((config, stored))


def candidates(x: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> set[Any]:
    """The values that get noise at all."""
    with monkeypatch.context() as patched:
        patched.setattr(GaussianTopK, "quantiles", lambda _, levels: LOUD + 0 * levels.tail)
        found = drawn(x, **options)
    return {(name, value) for name in x for value in found[name]}


def test_places_do_not_tell_the_order_of_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where noisy counts are equal: the first example is not the first of them."""
    without_noise(monkeypatch)
    found = [drawn({"city": np.roll(MANY, shift)}) for shift in (0, 350, 550, 750)]
    assert {tuple(each["city"]) for each in found} == {("Rome", "Bonn", "Kyiv", "Oslo")}
    assert len({everything(each) for each in found}) == 1


def test_nothing_tells_of_candidates_that_were_not_released(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, capfd: Any
) -> None:
    without_noise(monkeypatch)
    rare = [f"village {i}" for i in range(500)]
    few, many = (np.concatenate([MANY, each]) for each in (np.full(500, ""), rare))
    assert everything(drawn({"city": few})) == everything(drawn({"city": many}))
    assert not recwarn.list and capfd.readouterr() == ("", "")


def test_countless_values_of_one_example_add_as_many_candidates_as_it_has_votes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The threshold's δ is that of at most m candidates of one example."""
    width, cap = 200_000, 3
    row = np.arange(width).reshape(1, width)
    others = {"item": np.zeros((2, 1), np.int64)}
    plan = paying_plan(3)
    with monkeypatch.context() as patched:
        patched.setattr(GaussianTopK, "quantiles", lambda _, levels: LOUD + 0 * levels.tail)
        found = dp_sparse.private_vocabulary(
            [others, {"item": row + 5}],
            "item",
            plan,
            max_values=cap,
            padding_value=-1,
            progress=False,
        )
    assert set(found["item"]) == {0, 5, 6, 7}


def test_padding_adds_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example of weight 0 stands in the place of one that was zeroed out."""
    x, weights = {"city": np.array(["Rome", "Rome", "a village"])}, np.array([1.0, 1.0, 0.0])
    monkeypatch.setattr(GaussianTopK, "quantiles", lambda _, levels: LOUD + 0 * levels.tail)
    found = dp_sparse.private_vocabulary((x, None, weights), "city", paying_plan(3), progress=False)
    assert found["city"] == ["Rome"]


def test_votes_of_an_example_do_not_follow_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor from its place, nor from its batch: which of its values count is its own matter."""
    long = np.array([["u", "v", "u", "w", "x"]])
    others = np.array([["x", "w", "", "", ""], ["x", "", "", "", ""]])
    alone = candidates({"c": long}, monkeypatch, max_values=2)
    assert alone == {("c", "u"), ("c", "v")}
    for place in range(3):
        rows = np.insert(others, place, long, axis=0)
        own = candidates({"c": rows}, monkeypatch, max_values=2)
        assert own == alone | {("c", "w"), ("c", "x")}


def test_the_longest_example_does_not_move_the_votes_of_the_others() -> None:
    """It decides how far `pad_sequences`, which pads in front, moves their values."""
    m, cap = 400, 3
    found = []
    for last in (("5", "9"), ("567", "9")):
        rows = [("56", "pq")] * m + [last]
        x = {
            name: np.array([list(row[c].rjust(width, "_")) for row in rows])
            for c, (name, width) in enumerate((("a", max(map(len, [*dict(rows)]))), ("b", 2)))
        }
        x = {name: np.where(column == "_", "", column) for name, column in x.items()}
        counts = count_values(
            x, ["a", "b"], cap, num_examples=m + 1, padding_value=None, progress=False
        )
        found.append(
            {
                (name, value): int(count)
                for name, column in counts.items()
                for value, count in zip(column.values, column.counts, strict=True)
            }
        )
    less, more = found
    assert sum(abs(more.get(key, 0) - less.get(key, 0)) for key in {*less, *more}) <= 2 * cap


def test_a_seed_does_not_tell_the_noise() -> None:
    counts = []
    for _ in range(2):
        np.random.seed(7)
        counts.append(drawn({"city": MANY}).noisy_counts["city"].tolist())
    assert counts[0] != counts[1]


def test_a_second_vocabulary_of_one_plan_is_refused_or_the_same() -> None:
    """The mean of many would have no noise, and each admits other values."""
    plan, x = paying_plan(len(MANY)), {"city": MANY, "town": MANY[::-1]}
    first = dp_sparse.private_vocabulary(x, "city", plan, progress=False)
    again = dp_sparse.private_vocabulary(x, "city", plan, progress=False)
    assert again is first
    for columns, cap in (("town", None), ("city", 2), (["city", "town"], None)):
        with pytest.raises(PrivacyError, match="that this plan pays for was drawn with"):
            dp_sparse.private_vocabulary(x, columns, plan, max_values=cap, progress=False)
    copy = dp_sparse.PrivacyPlan.from_config(plan.get_config())
    assert dp_sparse.private_vocabulary(x, "city", copy, progress=False) is first
    with pytest.raises(ValueError, match="with a draw that this one has"):
        first.extended(again)


def test_examples_of_another_day_are_not_those_of_the_plan_that_pays() -> None:
    with pytest.raises(ValueError, match="Expected the 899 examples of the plan that pays"):
        dp_sparse.private_vocabulary({"city": MANY}, "city", paying_plan(899), progress=False)


class TestRun:
    def run(self, folder: Path) -> dp_sparse.Run:
        return dp_sparse.Run(folder, paying_plan(len(MANY)))

    def words(self, run: dp_sparse.Run, **options: Any) -> dp_sparse.PrivateVocabulary:
        return run.private_vocabulary({"city": MANY}, "city", progress=False, **options)

    def test_it_is_drawn_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A later process finds it, and may not ask for another one."""
        found = []
        for _ in range(2):
            monkeypatch.setattr("dp_sparse.selection.vocabulary.draw._DRAWN", {})
            run = self.run(tmp_path / "run")
            found.append(everything(self.words(run)))
            with pytest.raises(PrivacyError, match="Call run.private_vocabulary"):
                dp_sparse.private_vocabulary({"city": MANY}, "city", run.plan, progress=False)
            with pytest.raises(ValueError, match="released vocabulary for .*'max_values': 1"):
                self.words(run, max_values=2)
            run.close()
        assert found[0] == found[1]
        with pytest.raises(PrivacyError, match="was closed"):
            self.words(run)

    def test_a_lost_one_is_not_drawn_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = self.run(tmp_path / "run")
        self.words(run)
        run.close()
        (tmp_path / "run" / "vocabulary.npz").unlink()
        monkeypatch.setattr("dp_sparse.selection.vocabulary.draw._DRAWN", {})
        run = self.run(tmp_path / "run")
        with pytest.raises(ValueError, match=r"vocabulary.npz is missing, which this run has"):
            self.words(run)
        run.close()

    def test_after_a_kill_it_is_known_what_was_asked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """That stands beside the vocabulary as soon as its file does."""
        run = self.run(tmp_path / "run")
        with monkeypatch.context() as patched:
            patched.setattr("dp_sparse.runs.run_folder.RunFolder.same", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                self.words(run, max_values=3)
        run.close()
        monkeypatch.setattr("dp_sparse.selection.vocabulary.draw._DRAWN", {})
        run = self.run(tmp_path / "run")
        with pytest.raises(ValueError, match="released vocabulary for .*'max_values': 3"):
            self.words(run, max_values=2)
        assert self.words(run, max_values=3).draws[-1].max_values == 3
        run.close()

    def test_that_of_another_run(self, tmp_path: Path) -> None:
        runs = [self.run(tmp_path / name) for name in ("one", "two")]
        self.words(runs[0]).save(tmp_path / "two" / "vocabulary.npz")
        with pytest.raises(ValueError, match=r"vocabulary.npz was released by another run"):
            self.words(runs[1])
        for run in runs:
            run.close()

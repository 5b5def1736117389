"""Recommendation: what is read, whom it trains on, how it ranks, a run of each kind."""

import gzip
import html
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from configs import movielens, movielens_small
from models.sequence_transformer import last_position
from pipelines.movielens import exporting, ranking, run
from pipelines.movielens.interactions import Interactions, SequenceDataError, load, read
from pipelines.movielens.users import filtered, item_set, require_filter, users_of
from pipelines.schedules import WarmUpAndDecay
from pipelines.sequences import plans
from pipelines.sequences.examples import SequenceExamples
from tests.pipelines.interaction_files import ITEMS, USERS, circles, small

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return circles(tmp_path)


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "some.txt"
    file.write_text(text)
    return file


# Reading


def test_users_in_several_pieces_and_empty_lines_are_brought_in_order(tmp_path: Path) -> None:
    found = read(written(tmp_path, "7 3\n\n2 5\n7 1\n  \n2 4\n9 9\n"))
    assert [each.tolist() for each in found.sequences()] == [[5, 4], [3, 1], [9]]
    assert (found.empty_lines, found.bad_lines, found.unsorted_users) == (2, 0, 2)


def test_a_gzip_file_reads_like_a_plain_one(path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "interactions.txt.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    np.testing.assert_array_equal(read(packed).items, read(path).items)


@pytest.mark.parametrize("line", ["7 x", "7", "7 3 5", "7 2.5", "7 99999999999999999999"])
def test_a_line_that_is_not_two_integers_is_named_or_counted(line: str, tmp_path: Path) -> None:
    file = written(tmp_path, f"7 3\n{line}\n7 4\n")
    with pytest.raises(SequenceDataError, match=rf"in line 2 of .*, got '{line}'.*quarantine"):
        read(file)
    found = read(file, quarantine=True)
    assert found.bad_lines == 1 and found.items.tolist() == [3, 4]


def test_files_without_interactions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SequenceDataError, match="No such file"):
        read(tmp_path / "nowhere.txt")
    with pytest.raises(SequenceDataError, match=r"none in 2 lines \(2 empty, 0 not"):
        read(written(tmp_path, "\n\n"))
    with pytest.raises(SequenceDataError, match=r"none in 1 lines \(0 empty, 1 not"):
        read(written(tmp_path, "a b\n"), quarantine=True)
    broken = tmp_path / "broken.gz"
    broken.write_bytes(b"not gzip")
    with pytest.raises(SequenceDataError, match="Expected lines of `user item`"):
        read(broken)


def test_one_of_path_and_tfds_is_needed(path: Path) -> None:
    for wrong in ({"path": ""}, {"tfds": "movielens/1m-ratings"}):
        config = small(path).data
        config.update(wrong)
        with pytest.raises(SequenceDataError, match="Expected either data.path or data.tfds"):
            load(config)


def test_ratings_of_tensorflow_datasets_are_sorted_by_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {
        "user_id": np.array([b"2", b"1", b"2", b"1"]),
        "movie_id": np.array([b"30", b"10", b"20", b"11"]),
        "timestamp": np.array([5, 9, 4, 1]),
    }
    asked: list[str] = []

    made = {"is_prepared": lambda: True, "as_dataset": lambda **options: columns}

    def fake(name: str, **options: Any) -> Any:
        asked.append(name)
        return SimpleNamespace(**made, data_dir="here")

    module = SimpleNamespace(builder=fake, as_numpy=lambda found: found)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    config = small(path, path="", tfds="movielens/1m-ratings").data
    found = load(config)
    assert [each.tolist() for each in found.sequences()] == [[11, 10], [20, 30]]
    assert asked == ["movielens/1m-ratings"] and found.unsorted_users == 0
    made["is_prepared"] = lambda: False
    with pytest.raises(SequenceDataError, match="prepared in here, got nothing .*`tfds build mov"):
        load(config)


def test_the_order_of_a_dataset_changes_no_user(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Datasets are shuffled by the numbers of rows, which change for all with one user less."""
    rng, rows = np.random.default_rng(0), 300
    columns = {
        "user_id": rng.integers(1, 9, rows),
        "movie_id": rng.permutation(rows),
        "timestamp": rng.integers(0, 20, rows),  # most of them several times for a user
    }
    found = []
    for order in (np.arange(rows), rng.permutation(rows)):
        read = {name: values[order] for name, values in columns.items()}
        made = SimpleNamespace(is_prepared=lambda: True, as_dataset=lambda read=read, **_: read)
        module = SimpleNamespace(builder=lambda *_, made=made, **__: made, as_numpy=lambda x: x)
        monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
        data = load(small(path, path="", tfds="movielens/1m-ratings").data)
        found.append([each.tolist() for each in data.sequences()])
    assert found[0] == found[1]


# Users


def interactions(*sequences: list[int]) -> Interactions:
    users = np.repeat(np.arange(len(sequences)), [len(each) for each in sequences])
    return Interactions(users, np.concatenate(sequences))


def test_the_last_item_judges_and_does_not_train(path: Path) -> None:
    data = interactions([1, 2, 3, 4, 5, 6, 7], [8, 9, 1, 2, 3])
    users = users_of(data, np.arange(1, ITEMS + 1), small(path).data)
    assert users.labels.tolist() == [7, 3]
    assert users.histories.tolist() == [[3, 4, 5, 6], [8, 9, 1, 2]]
    assert users.training.x.tolist() == [[2, 3, 4, 5], [0, 8, 9, 1]]
    assert users.training.y.tolist() == [[4, 5, 6], [9, 1, 2]]
    config = small(path, held_out="validation").data
    chosen = users_of(data, np.arange(1, ITEMS + 1), config)
    assert chosen.labels.tolist() == [6, 2]
    assert chosen.training.x.tolist() == [[1, 2, 3, 4], [0, 0, 8, 9]]
    assert chosen.training.y.tolist() == [[3, 4, 5], [8, 9, 1]]


def test_a_user_changes_no_other_example(path: Path) -> None:
    """What user-level privacy rests on: an example is a function of one user alone."""
    rng = np.random.default_rng(0)
    whole = [rng.integers(1, ITEMS + 3, rng.integers(1, 12)).tolist() for _ in range(30)]
    config, items = small(path).data, np.arange(1, ITEMS + 1)
    kept = [i for i, each in enumerate(whole) if sum(t <= ITEMS for t in each) >= 5]
    together = users_of(interactions(*whole), items, config).training
    without = users_of(interactions(*whole[:4], *whole[5:]), items, config).training
    left = [place for place, user in enumerate(kept) if user != 4]
    np.testing.assert_array_equal(together.x[left], without.x)
    np.testing.assert_array_equal(together.y[left], without.y)


def test_what_is_left_out_is_counted(path: Path) -> None:
    data = interactions(
        [1, 2, 3, 4, 5, 99], [1, 2, 3, 4], [9, 8, 7, 6, 5, 4], [1, 1, 1, 1, 1, 1, 1]
    )
    counts = users_of(data, np.arange(1, ITEMS + 1), small(path).data).counts
    assert counts["users"] == 4 and counts["users_dropped"] == 1
    assert counts["interactions_outside_the_item_set"] == 1
    assert counts["users_cut"] == 1 and counts["held_out_items_never_trained"] == 0
    data = interactions([1, 2, 3, 4, 11], [1, 2, 3, 4, 10])
    users = users_of(data, np.arange(1, ITEMS + 1), small(path).data)
    assert users.counts["held_out_items_never_trained"] == 2


def test_one_user_is_refused(path: Path) -> None:
    with pytest.raises(SequenceDataError, match="at least 2 users with 5 .*got 1 of 2"):
        users_of(interactions([1] * 6, [1]), np.arange(1, 5), small(path).data)
    with pytest.raises(SequenceDataError, match="held_out to be one of .*got 'train'"):
        users_of(interactions([1] * 6), np.arange(1, 5), small(path, held_out="train").data)
    with pytest.raises(ValueError, match="at least 2 examples"):
        plans.plan_of(small(path), 1)


def test_the_item_set_is_declared(path: Path, tmp_path: Path) -> None:
    file = written(tmp_path, "30\n10\n20\n")
    items = item_set(small(path, num_items=0, item_list=str(file)).data)
    assert items.tolist() == [30, 10, 20]
    data = interactions([10, 20, 30, 40, 10, 20], [30, 30, 30, 30, 10])
    found = users_of(data, items, small(path).data)
    assert found.histories.tolist() == [[2, 3, 1, 2], [1, 1, 1, 1]]
    for wrong in ({"num_items": 0}, {"item_list": str(file)}):
        with pytest.raises(SequenceDataError, match="Expected either data.num_items or"):
            item_set(small(path, **wrong).data)
    for text, told in (("1\n1\n", "Expected different items"), ("a\n", "Expected an integer")):
        file.write_text(text)
        with pytest.raises(SequenceDataError, match=told):
            item_set(small(path, num_items=0, item_list=str(file)).data)


def test_rare_items_are_filtered_by_the_noisy_counts(path: Path) -> None:
    config = small(path, filter_items=20).data
    data = interactions(*[[1, 2, 3, 1, 2, 3]] * 50, [5, 5, 5, 5, 5, 1])
    users = users_of(data, np.arange(1, 6), config)
    counted = dp_sparse.RowFrequencies(
        "items", np.array([1, 0.9, 0.8, 0.95, 0.01, 0.02]), dp_sparse.GaussianTopK(1.0), 4
    )
    fewer, left = filtered(users, counted, config)
    assert fewer.items.tolist() == [1, 2, 3] and fewer.training.num_tokens == 3
    assert left.values.tolist() == [1, 0.9, 0.8, 0.95]
    assert fewer.training.x[-1].tolist() == [0] * 4 and fewer.labels[-1] == 1
    assert fewer.counts["items_filtered_out"] == 2
    config.filter_items = 1000
    with pytest.raises(SequenceDataError, match="got none: lower"):
        filtered(users, counted, config)
    config.filter_items = 2  # = 1.0·√4, the deviation: no noisy count is below
    with pytest.raises(
        SequenceDataError, match=r"Expected data.filter_items > 2\.0, the deviation"
    ):
        require_filter(config, dp_sparse.GaussianTopK(1.0))


@pytest.mark.parametrize("held_out", ["test", "validation"])
def test_the_filter_keeps_the_users_whose_items_judge(path: Path, held_out: str) -> None:
    """Those of fewer interactions than judge and train leave, however few are asked for."""
    config = small(path, filter_items=1, min_interactions=1, held_out=held_out).data
    data = interactions([1], [1, 2, 3], [2, 3], [3, 1, 2, 1])
    users = users_of(data, np.arange(1, 4), config)
    assert len(users.labels) == len(users.training) == 2
    counted = dp_sparse.RowFrequencies("items", np.ones(4), dp_sparse.GaussianTopK(1.0), 4)
    fewer, _ = filtered(users, counted, config)  # of no item
    np.testing.assert_array_equal(fewer.training.x, users.training.x)
    np.testing.assert_array_equal(fewer.histories, users.histories)
    np.testing.assert_array_equal(fewer.labels, users.labels)


def test_the_histogram_counts_an_item_of_a_user_once() -> None:
    config = movielens_small.get_config()
    config.training.batch_size, config.privacy.epsilon = 64, 8.0
    x = np.tile(np.array([[0, 0, 3, 3, 1]], np.int32), (300, 1))
    examples = SequenceExamples(x, x, 4)
    found = plans.noisy_frequencies(config, examples)
    assert found.lookups == 5 and found.values.shape == (5,)
    scale = found.source.scale_of(5)
    assert abs(found.values[[1, 3]] * 300 - 300).max() < 6 * scale
    paid = plans.accounted(config, examples, found).plan
    assert paid.releases == (found.release,) and paid.spent(paid.sampling.steps).epsilon <= 8


def test_public_frequencies_cost_nothing(tmp_path: Path) -> None:
    file = written(tmp_path, "0.5\n0.25\n")
    found = plans.public_frequencies(file, 2)
    assert found.values.tolist() == [1, 0.5, 0.25] and not found.costs
    with pytest.raises(ValueError, match="Expected 3 lines .* got 2"):
        plans.public_frequencies(file, 3)
    for bad in (tmp_path / "none.txt", written(tmp_path, "0.5\nhalf\n")):
        with pytest.raises(ValueError, match="a number in each line of privacy.frequencies="):
            plans.public_frequencies(bad, 2)


# Ranking and the learning rate


def test_ranks_are_over_all_items_and_ties_are_last() -> None:
    logits = np.array([[9.0, 1, 3, 2], [9, 5, 5, 5], [9, 1, np.nan, 0], [0, 1, 2, 3]])
    assert ranking.ranks_of(logits, np.array([2, 1, 2, 0])).tolist() == [1, 3, 3, np.inf]


def test_items_that_a_user_had_are_left_out_but_the_held_out_one() -> None:
    logits = np.array([[9.0, 1, 3, 2], [9.0, 5, 4, 6], [9.0, 7, 8, 9], [9.0, 1, 2, 3]])
    earlier = [np.array(each, np.int32) for each in ([2, 2], [1, 3], [], [1])]
    labels = np.array([3, 1, 1, 0])
    found = ranking.without_seen(logits, earlier, labels)
    hidden = -np.inf
    expected = [[9, 1, hidden, 2], [9, 5, 4, hidden], [9, 7, 8, 9], [9, hidden, 2, 3]]
    np.testing.assert_array_equal(found, expected)
    assert ranking.ranks_of(found, labels).tolist() == [1, 1, 3, np.inf]
    assert logits[0, 2] == 3


def test_scores_of_the_ranking_by_popularity(tmp_path: Path) -> None:
    """Item 1 is in three histories, 2, 4, 5 and 6 in two places each, 3 in one."""
    sequences = {1: [1, 2, 4, 3], 2: [1, 2, 5, 6], 3: [1, 4, 5, 2], 4: [3, 6, 6, 1]}
    lines = [f"{user} {item}" for user, items in sequences.items() for item in items]
    data = small(written(tmp_path, "\n".join(lines)), min_interactions=3).data
    found = ranking.popularity_scores(users_of(load(data), item_set(data), data))
    assert found["hit"] == found["hit_unseen"] == 100
    assert found["ndcg"] == pytest.approx(25 * sum(1 / np.log2([7, 6, 6, 2])))
    assert found["ndcg_unseen"] == pytest.approx(25 * sum(1 / np.log2([4, 3, 3, 2])))


def test_metrics_are_those_of_one_relevant_item() -> None:
    found = ranking.metrics(np.array([1.0, 3.0, 10.0, 11.0, np.inf]))
    gains = [1, 0.5, 1 / np.log2(11)]
    assert found["hit"] == pytest.approx(60)
    assert found["ndcg"] == pytest.approx(100 * sum(gains) / 5)


def test_the_rate_rises_then_falls() -> None:
    rate = WarmUpAndDecay(2.0, steps=9, warm_up=0.2)
    values = [float(rate(step)) for step in range(9)]
    assert values[1] == pytest.approx(2.0) == max(values)
    np.testing.assert_allclose(np.diff(values[1:]), -0.25, rtol=1e-5)
    assert values[0] == pytest.approx(1.0) and values[-1] == pytest.approx(0.25)
    loaded = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(rate))
    assert float(loaded(4)) == values[4]
    with pytest.raises(ValueError, match="0 < warm_up < 1"):
        WarmUpAndDecay(1.0, 10, 1.0)
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="Expected a finite learning_rate > 0, got"):
            WarmUpAndDecay(rate, 10)


# Whole runs


@pytest.mark.slow
def test_a_run_without_privacy_learns_what_follows(path: Path) -> None:
    config = small(path)
    config.model.update({"kind": "vanilla", "width": 16, "dropout": 0.0})
    config.privacy.method, config.training.epochs = "none", 60
    config.optimizer.learning_rate = 0.02
    result = run.run(config)
    assert result.ndcg > 90 and result.statement.startswith("No privacy")


@pytest.mark.parametrize("kind", ["re_attention", "vanilla", "gru", "lstm"])
@pytest.mark.cases(1)
def test_a_private_run_of_each_kind(kind: str, path: Path) -> None:
    config = small(path)
    config.model.kind = kind
    result = run.run(config)
    assert sorted(result.curve) == [1, 2] and result.steps == 4
    assert 0 <= result.ndcg <= result.hit <= 100 and result.epsilon <= 8
    user, *rest = result.statement.splitlines()
    assert user.startswith("An example is one user") and "protects one example" in rest[1]
    assert "no epsilon covers them" in user  # its users' own held-out items
    assert ("frequencies of the 13 rows" in " ".join(rest)) == (kind == "re_attention")


@pytest.mark.cases(1)
def test_a_private_run_reports_all_of_itself_to_whom_it_protects(
    path: Path, tmp_path: Path
) -> None:
    config = small(path)
    config.model.kind, config.report.directory = "gru", str(tmp_path / "run")
    result = run.run(config, plans.run_of(config, resume=False, monitor=0))
    page = (tmp_path / "run" / "report.html").read_text()
    assert html.escape(result.statement) in page and "An example is one user" in page
    assert "steps were taken before" not in page and result.steps == 4


@pytest.mark.parametrize(
    ("epochs", "score_every", "curve", "steps"),
    [(10, 5, [5, 10], 2), (3, 9, [3], 1), (4, 0, [4], 1)],
)
def test_scores_are_of_equal_parts(
    epochs: int, score_every: int, curve: list[int], steps: int, path: Path
) -> None:
    config = small(path)
    config.privacy.method, config.model.kind = "none", "gru"
    config.training.update({"epochs": epochs, "batch_size": 200, "score_every": score_every})
    result = run.run(config)
    assert result.steps == steps and list(result.curve) == curve


@pytest.mark.parametrize(
    ("score_every", "message"),
    [
        (3, "score_every that divides training.epochs=10, or 0 .*score_every=3"),
        (-1, "score_every that divides training.epochs=10, or 0 .*score_every=-1"),
        (2, "Expected a step or more for each score, got 2 steps and 5 scores"),
    ],
)
def test_scores_that_cannot_be_are_refused(score_every: int, message: str, path: Path) -> None:
    config = small(path)
    config.privacy.method, config.model.kind = "none", "gru"
    config.training.update({"epochs": 10, "batch_size": 200, "score_every": score_every})
    with pytest.raises(ValueError, match=message):
        run.run(config)


@pytest.mark.slow
def test_filtered_items_and_weights_of_its_own_in_one_run(path: Path) -> None:
    config = small(path, filter_items=3)
    config.privacy.frequency_share = 0.5
    config.model.update({"tied": False, "correction": "after_softmax"})
    config.training.microbatch_size = 8
    result = run.run(config)
    assert (
        "frequencies of the 13 rows" in result.statement and "items_filtered_out" in result.counts
    )


@pytest.mark.cases(1)
def test_an_export_scores_the_items_of_the_file(path: Path, tmp_path: Path) -> None:
    """Without this package, whole histories in, by the numbers that items have in the file."""
    config = small(path, filter_items=12)
    config.privacy.frequency_share = 0.5
    config.model.kind = "vanilla"
    told: list[str] = []
    result = run.run(config, None, str(tmp_path / "export"), told.append)
    kept = result.users.items
    assert 0 < len(kept) < ITEMS and "items_filtered_out" in told[0]
    exported = keras.models.load_model(tmp_path / "export" / "keras")
    histories = [each[:-1] for each in load(config.data).sequences()]
    found = exported.predict(np.stack(histories).astype(np.int32), verbose=0)
    logits = last_position(result.model).predict(result.users.histories, verbose=0)
    assert found.shape == (USERS, ITEMS + 1)
    np.testing.assert_allclose(found[:, kept], logits[:, 1:], atol=1e-5)
    filtered_out = np.setdiff1d(np.arange(ITEMS + 1), kept)
    assert (found[:, filtered_out] == exporting.NEVER).all()
    behind = np.pad(np.stack(histories), [(0, 0), (3, 0)]).astype(np.int32)
    np.testing.assert_allclose(exported.predict(behind, verbose=0), found, atol=1e-5)
    statement = (tmp_path / "export" / "statement.txt").read_text()
    assert statement.startswith("An example is one user") and "frequencies of the" in statement
    with pytest.raises(ValueError, match="Expected a path where nothing is yet"):
        run.run(config, None, str(tmp_path / "export"))
    config.privacy.method, config.data.filter_items = "none", 0
    with pytest.raises(ValueError, match="Expected a private method with export"):
        run.run(config, None, str(tmp_path / "other"))


def test_numbers_of_a_list_are_its_lines() -> None:
    """A list may name items in any order, of which some were kept, in another order."""
    tokens = keras.Input((2,), dtype="int32")
    table = keras.layers.Embedding(3, 3, embeddings_initializer="identity")
    model = keras.Model(tokens, table(tokens)[:, -1])
    exported = exporting.with_numbers(model, np.array([20, 50]), np.array([50, 10, 20]))
    found = np.asarray(exported(np.array([[1, 2], [3, 2]])))  # items 50 and 10, then 20 and 10
    never = exporting.NEVER
    assert found.tolist() == [[never, 1, never, 0], [never, 0, never, 1]]


def test_items_outside_of_a_number_are_refused_or_counted(path: Path) -> None:
    for num_items, told in ((ITEMS - 1, f"such as item {ITEMS}: set"), (3, "such as item [0-9]+")):
        with pytest.raises(SequenceDataError, match=f"interactions with others, {told}"):
            run.run(small(path, num_items=num_items))
    config = small(path, num_items=3, quarantine=True)
    with pytest.raises(SequenceDataError, match="at least 2 users .* outside of the item set"):
        run.run(config)


@pytest.mark.parametrize("change", [{"filter_items": 3}, {"kind": "gru"}])
def test_frequencies_that_nothing_reads_are_refused(change: dict[str, Any], path: Path) -> None:
    config = small(path)
    (config.data if "filter_items" in change else config.model).update(change)
    config.privacy.frequencies = "/nowhere"
    with pytest.raises(ValueError, match="Expected privacy.frequencies='' here, got '/nowhere'"):
        run.run(config)


def test_public_frequencies_are_read_in_a_run(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "frequencies.txt"
    file.write_text("0.5\n" * ITEMS)
    config = small(path)
    config.privacy.frequencies = str(file)
    result = run.run(config)
    assert result.steps == 4 and "frequencies of" not in result.statement


def test_counts_are_of_the_items_that_are_left(path: Path) -> None:
    config = small(path, filter_items=20).data
    data = interactions(*[[1, 2, 3, 1, 2, 3, 1, 4]] * 50, [5, 5, 5, 5, 5, 1])
    users = users_of(data, np.arange(1, 6), config)
    counted = dp_sparse.RowFrequencies(
        "items", np.array([1, 0.9, 0.8, 0.95, 0.01, 0.02]), dp_sparse.GaussianTopK(1.0), 4
    )
    fewer, _ = filtered(users, counted, config)
    assert fewer.counts["held_out_items_filtered_out"] == 50 and users.counts["users_cut"] == 50
    assert fewer.counts["users_cut"] == 50 and fewer.counts["held_out_items_never_trained"] == 0


def test_bad_configurations_are_refused(path: Path) -> None:
    config = small(path)
    config.privacy.method = "none"
    config.data.filter_items = 5
    both = "got data.filter_items=5 and model.kind='re_attention': noisy counts and"
    with pytest.raises(ValueError, match=both):
        run.run(config)
    for predicted in (0, 5):
        with pytest.raises(ValueError, match=f"data.length=4, got data.predicted={predicted}"):
            run.run(small(path, predicted=predicted))
    with pytest.raises(ValueError, match="either data.num_items .*got data.num_items=-3"):
        run.run(small(path, num_items=-3))
    config = small(path)
    config.training.epochs = 0
    with pytest.raises(ValueError, match="Expected training.epochs >= 1, got training.epochs=0"):
        run.run(config)
    config = small(path)
    config.training.batch_size = 41
    with pytest.raises(ValueError, match="Expected training.batch_size <= 40, the training"):
        run.run(config)
    config = small(path)
    config.model.kind, config.optimizer.weight_decay = "gru", -1.0
    with pytest.raises(ValueError, match="Expected 0 <= optimizer.weight_decay < 1, got .*=-1"):
        run.run(config)
    config = small(path)
    config.privacy.method = "dp-sgd"
    with pytest.raises(ValueError, match="'dp_sgd' or 'none', got 'dp-sgd'"):
        run.run(config)


def test_the_small_config_is_the_large_one_with_smaller_sizes() -> None:
    large, little = movielens.get_config(), movielens_small.get_config()
    assert json.loads(large.to_json()).keys() == json.loads(little.to_json()).keys()
    assert little.data.length < large.data.length and large.data.num_items == 3416


@pytest.mark.slow
def test_the_command_prints_scores_and_the_statement(path: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pipelines.movielens",
        "--config",
        "configs/movielens_small.py",
    ]
    options = [
        f"--config.data.path={path}",
        f"--config.data.num_items={ITEMS}",
        "--config.data.filter_items=0",
        "--config.training.epochs=1",
        "--config.training.batch_size=20",
        f"--config.report.directory={tmp_path}",
    ]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "test NDCG@10" in done.stdout and "An example is one user" in done.stdout
    assert (tmp_path / "report.html").exists()
    command.append("--config.data.path=no")
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 1 and failed.stderr.strip().endswith("error: No such file: no.")


@pytest.mark.slow
@pytest.mark.skipif("DP_SPARSE_DATA" not in os.environ, reason="DP_SPARSE_DATA is not set")
def test_movielens_has_the_users_and_items_that_are_declared() -> None:
    folder = Path(os.environ["DP_SPARSE_DATA"]) / "movielens"
    config = movielens.get_config()
    config.data.path = str(folder / "ml-1m_user_item_chronological.txt.gz")
    users = users_of(load(config.data), item_set(config.data), config.data)
    assert len(users.training) == 6040 and users.counts["users_dropped"] == 0
    assert users.counts["interactions_outside_the_item_set"] == 0
    assert users.training.x.shape == (6040, 50) and users.training.x.max() == 3416

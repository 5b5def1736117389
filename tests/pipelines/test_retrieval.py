"""Retrieval on MovieLens: its examples, its recall, a run of each loss, and its page."""

from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
import pytest

import dp_sparse
from configs import retrieval as settings
from pipelines.movielens import retrieval, retrieval_study
from pipelines.movielens.interactions import SequenceDataError

RESULTS = Path(__file__).parents[2] / "docs/results"


@pytest.fixture
def small(tmp_path: Path) -> ml_collections.ConfigDict:
    """Twenty users, of whom each takes every third of nine items, in turn."""
    lines = [f"{u} {1 + (u + 3 * i) % 9}" for u in range(1, 21) for i in range(12)]
    path = tmp_path / "interactions.txt"
    path.write_text("\n".join(lines))
    config = settings.get_config()
    config.data.path, config.data.history, config.model.negatives = str(path), 3, 8
    config.training.batch_size, config.training.epochs = 64, 15.0
    config.optimizer.options.learning_rate, config.privacy.epsilon = 0.05, 500.0
    return config


def test_examples(small: ml_collections.ConfigDict) -> None:
    data = retrieval.examples_of(small.data)
    first = [1 + (1 + 3 * i) % 9 for i in range(12)]
    assert data.histories[:4].tolist() == [[0, 0, 0], [0, 0, 2], [0, 2, 5], [2, 5, 8]]
    assert data.items[:11].tolist() == first[:11] == data.earlier[0].tolist()
    assert data.queries[0].tolist() == first[8:11] and data.answers[0] == first[11]
    assert len(data.items) == 20 * 11 and data.num_items == 9
    small.data.users = 0.1
    assert len(retrieval.examples_of(small.data).answers) == 2


def test_recall_by_loops(small: ml_collections.ConfigDict) -> None:
    rng = np.random.default_rng(0)
    items, users = 150, 40
    earlier = [rng.choice(np.arange(1, items + 1), 9, replace=False) for _ in range(users)]
    answers = rng.integers(1, items + 1, users)
    data = retrieval.Examples(
        np.zeros((1, 3), np.int32), np.zeros(1, np.int32), np.zeros((users, 3), np.int32),
        answers, earlier, items,
    )  # fmt: skip
    scores = rng.normal(size=(users, items + 1))
    found = {10: 0, 100: 0}
    for user in range(users):
        others = [
            item
            for item in range(1, items + 1)
            if item == answers[user] or item not in earlier[user]
        ]
        rank = sorted(others, key=lambda item: -scores[user, item]).index(answers[user]) + 1
        found = {k: count + (rank <= k) for k, count in found.items()}
    expected = {str(k): round(100 * count / users, 3) for k, count in found.items()}
    assert retrieval.recalls(scores, data) == expected


@pytest.mark.parametrize(
    ("method", "loss"),
    [
        ("dp_adafest", "sampled"),
        ("dp_sgd", "full"),
        ("non_private", "in_batch"),
        ("non_private", "sampled"),
    ],
)
def test_runs_learn(
    small: ml_collections.ConfigDict, method: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next item follows from the last one; a seventh of the answers is first by chance."""
    monkeypatch.setattr(retrieval, "CUTOFFS", (1,))
    small.method, small.model.loss = method, loss
    if method == "non_private":
        small.training.batch_size = 16
    found: dict[str, Any] = retrieval.train(small)
    assert found["examples"] == 220 and found["users"] == 20
    assert found["recall"]["1"] > 60
    assert (found["rows"] is None) == (method != "dp_adafest")


def test_in_batch_negatives_are_refused_under_privacy(small: ml_collections.ConfigDict) -> None:
    small.model.loss = "in_batch"
    with pytest.raises(dp_sparse.PrivacyError, match="SampledSoftmax"):
        retrieval.train(small)


def test_what_is_wrong_is_said(small: ml_collections.ConfigDict, tmp_path: Path) -> None:
    small.model.loss = "other"
    with pytest.raises(ValueError, match="model.loss among.*'other'"):
        retrieval.train(small)
    Path(small.data.path).write_text("1 5\n2 6\n")
    with pytest.raises(SequenceDataError, match="two items"):
        retrieval.train(small)


def test_the_page(tmp_path: Path) -> None:
    written = tmp_path / "retrieval.md"
    arguments = [f"--results={RESULTS / 'retrieval.jsonl'}", f"--page={written}"]
    assert retrieval_study.main(arguments) == 0
    assert written.read_text() == (RESULTS / "retrieval.md").read_text()

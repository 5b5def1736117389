"""The examples of docs/data.md run as printed."""

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse

PAGE = Path(__file__).parents[3] / "docs" / "data.md"
N = 4000
OF_TWO_DAYS = ["Rome", "Oslo", "Bonn"], ["Oslo", "Kyiv", "Rome"]


def x_of(cities: list[str]) -> dict[str, np.ndarray]:
    """One example in ten has no tag; one has a city and tags of its own."""
    tags = np.tile(["red", "", "blue"], (N, 1))
    tags[::10] = ""
    x = {"city": np.repeat(cities, [2000, 1500, 500]), "tags": tags}
    x["city"][7], x["tags"][8] = "a village", ["a", "b", "c"]
    return x


def test_a_private_vocabulary_and_the_next_days(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dp_sparse.selection.vocabulary.draw.release_noise", lambda *_: 12.0)
    section = PAGE.read_text().partition("\n## A private vocabulary")[2]
    today, next_day = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[:2]
    sampling = dp_sparse.StreamSampling(N, N)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(4.0, 1e-4), sampling)
    names: dict[str, Any] = {"dp_sparse": dp_sparse, "keras": keras, "plan": plan}
    names |= {"tuesday": plan, "x": x_of(OF_TWO_DAYS[0]), "y": np.zeros(N)}
    names |= {"x_of_tuesday": x_of(OF_TWO_DAYS[1]), "y_of_tuesday": np.zeros(N)}
    exec(today, names)
    found = names["found"]
    assert found["city"] == OF_TWO_DAYS[0] and sorted(found["tags"]) == ["blue", "red"]
    ids = names["cities"](np.array(["Rome", "Bonn", "a village"]))
    assert names["table"](ids).shape == (3, 16) and ids.numpy().tolist() == [1, 3, 0]
    exec(next_day, names)
    assert names["found"]["city"] == ["Rome", "Oslo", "Bonn", "Kyiv"]
    with pytest.raises(dp_sparse.PrivacyError, match="got columns="):
        dp_sparse.private_vocabulary(names["x"], "city", names["plan"])

"""The measure itself: an honest step has 1, one that mixes has more, kept state is infinite."""

from typing import Any

import keras
import numpy as np
import pytest

from dp_sparse.core.errors import PrivacyError
from dp_sparse.guards import Isolation
from tests.attacks.counting import Counter, poisson, stream
from tests.attacks.entries import MEASURED, REFUSED, REFUSED_OR_MEASURED
from tests.attacks.measuring import Refusal, Released, attacking, without, zeroed
from tests.attacks.mixing_batch import FORWARD
from tests.attacks.mixing_positions import texts
from tests.attacks.towers import numbers, problem
from tests.attacks.ways import WAYS, Problem, Trainee, measured


def released(
    sums: list[float], contributions: dict[int, float] | None = None, state: float = 0.0
) -> Released:
    return Released(np.array(sums), {"state": np.array(state)}, contributions or {})


def test_the_distance_is_that_of_sums_map_and_state() -> None:
    whole = released([3.0, 4.0], {1: 1.0, 2: 0.5})
    assert whole.distance(whole) == 0
    assert whole.distance(released([0.0, 0.0], {1: 1.0, 2: 0.5})) == 5
    assert whole.distance(released([3.0, 4.0], {2: 0.5, 7: 2.0})) == pytest.approx(5**0.5)
    assert whole.distance(released([3.0, 4.0], whole.contributions, 1e-9)) == np.inf
    assert whole.distance(released([np.nan, 4.0], whole.contributions)) == np.inf


def test_neighbours() -> None:
    data = {"x": np.arange(1, 4)}
    np.testing.assert_array_equal(without(data, 0)["x"], [2, 3, 0])
    np.testing.assert_array_equal(zeroed(data, 1)["x"], [1, 0, 3])


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("way", ["graph", "one", "stream"])
def test_a_clipped_example_has_1(way: str) -> None:
    assert measured(problem())(WAYS[way]) == pytest.approx(1, abs=1e-3)


@pytest.mark.usefixtures("no_noise")
def test_a_small_gradient_has_less() -> None:
    tiny = Problem(problem().model, numbers(outlier=1.0), clip_norm=1e4)
    assert 0 < measured(tiny)(WAYS["graph"]) < 0.1


@pytest.mark.cases(2)
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("mixing", ["stopped mean", "roll", "the first example"])
def test_a_mixing_model_has_more_where_nothing_checks(
    mixing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Isolation, "coupled", lambda *_, **__: None)
    assert measured(problem(before=FORWARD[mixing]))(WAYS["graph"]) > 1.1


@pytest.mark.usefixtures("no_noise")
def test_the_map_is_seen() -> None:
    """An example's map has norm C1 in whatever many rows."""
    trainee = Trainee(Problem(pooled, texts), WAYS["graph"])
    whole, other = trainee.on(), trainee.on(0)
    norms = [np.linalg.norm([*each.contributions.values()]) for each in (whole, other)]
    assert norms == pytest.approx([6**0.5, 5**0.5])  # no two examples have a row in common


def pooled() -> keras.Model:
    ids = keras.Input((8,), dtype="int32")
    rows = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(48, 3)(ids))
    return keras.Model(ids, keras.layers.Dense(1)(rows))


def test_uses_are_counted(no_noise: None) -> None:
    counter = Counter.on(WAYS["graph"], poisson())
    counter.fit(counter.batches(), steps_per_epoch=3)
    np.testing.assert_allclose(counter.terms, 3, rtol=1e-5)
    once = Counter.on(WAYS["graph"], stream(2))
    once.fit(once.batches(), steps_per_epoch=3)
    np.testing.assert_allclose(once.terms, [1, 1, 1, 1, 1, 1, 0, 0], rtol=1e-5)
    assert once.sensitivity == pytest.approx(1)


def refusal(error: Exception, late: bool = False) -> Refusal:
    return Refusal(error, late)


@pytest.mark.parametrize(
    ("expected", "outcome", "good"),
    [
        (MEASURED, 1.0005, True),
        (MEASURED, 1.01, False),
        (MEASURED, refusal(PrivacyError("no")), False),
        (REFUSED, refusal(PrivacyError("no")), True),
        (REFUSED, refusal(PrivacyError("no"), late=True), False),
        (REFUSED, refusal(ValueError("Expected a, got b.")), True),
        (REFUSED, refusal(ValueError("shapes differ")), False),
        (REFUSED, 0.5, False),
        (REFUSED.matching("batch"), refusal(PrivacyError("no")), False),
        (REFUSED_OR_MEASURED, 1.0, True),
        (REFUSED_OR_MEASURED, 2.0, False),
    ],
)
def test_what_is_right(expected: Any, outcome: Any, good: bool) -> None:
    assert (expected.problem(outcome) is None) == good


@pytest.mark.parametrize("moves", [True, False])
def test_a_refusal_after_an_update_is_late(moves: bool) -> None:
    model = pooled()

    def attack() -> None:
        with attacking(model):
            if moves:
                model.trainable_variables[0].assign_add(np.ones((48, 3), np.float32))
            raise PrivacyError("no")

    with pytest.raises(Refusal) as caught:
        attack()
    assert caught.value.late is moves

"""Which examples are taken together, and which of them are compared."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse.guards import rebatching

PRESENT = st.lists(st.booleans(), min_size=1, max_size=40).filter(any)
SEEDS = st.integers(0, 2**31 - 1)
some = settings(max_examples=50, deadline=None)


def places_in_order(present: list[bool], seed: int) -> np.ndarray:
    return rebatching.order(np.asarray(present, np.float32), seed)


def of_the_data(
    present: list[bool],
    seed: int = 0,
    random: bool = False,
    looser: float = 1.0,
    halves: tuple[bool, ...] = (False, True),
) -> list[rebatching.Rebatching]:
    """The halves, a few and one alone."""
    places = places_in_order(present, seed)
    there = np.asarray(present, np.float32)
    return [*rebatching.of_the_data(places, there, random, looser, halves)]


def of_other_values(present: list[bool], seed: int = 0) -> list[rebatching.Rebatching]:
    places = places_in_order(present, seed)
    return [*rebatching.of_other_values(places, np.asarray(present, np.float32), True)]


@some
@given(present=PRESENT, seed=SEEDS)
def test_the_first_that_is_there_leads_and_padding_ends(present: list[bool], seed: int) -> None:
    order, count = places_in_order(present, seed), sum(present)
    assert sorted(order) == list(range(len(present))) and order[0] == present.index(True)
    assert all(present[place] for place in order[:count])


@some
@given(present=PRESENT, seed=SEEDS)
def test_a_whole_check_compares_one_half_and_then_the_other(present: list[bool], seed: int) -> None:
    """So every example that is there is compared once, while the others are replaced."""
    halves = of_the_data(present, seed)[:2]
    compared = [half.compared for half in halves]
    np.testing.assert_array_equal(compared[0].astype(int) + compared[1], present)
    assert abs(int(compared[0].sum()) - int(compared[1].sum())) <= 1
    for half, kept in zip(halves, compared, strict=True):
        places, own = half.places, np.arange(len(present))
        np.testing.assert_array_equal(places[kept], own[kept])
        replaced = np.asarray(present) & ~kept
        assert set(places[replaced]) <= set(own[kept]) or not kept.any()
        np.testing.assert_array_equal(places[~np.asarray(present)], own[~np.asarray(present)])


@some
@given(present=PRESENT, seed=SEEDS, random=st.booleans())
def test_a_few_in_another_order_and_one_of_them_twice(
    present: list[bool], seed: int, random: bool
) -> None:
    """With random layers the first places keep their masks, the one that comes again has none."""
    found = of_the_data(present, seed, random)[2]
    places, few = found.places, max(1, min(32, len(present) // 2))
    first = np.arange(few) if random else places_in_order(present, seed)[:few][::-1]
    np.testing.assert_array_equal(places, [*first, first[0]])
    compared = np.asarray(present)[places]
    compared[-1] &= not random
    np.testing.assert_array_equal(found.compared, compared)
    assert found.least == (2 if compared.sum() > 8 else 1)


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("present", [[True, True], [False, True, True]])
def test_one_alone(present: list[bool], random: bool) -> None:
    """It is compared unless its place, and so its mask, is another one."""
    found = of_the_data(present, random=random)[3]
    np.testing.assert_array_equal(found.places, [present.index(True)])
    np.testing.assert_array_equal(found.compared, [present[0] or not random])


OTHERS = [
    ([np.nan] * 3, [2, -3, 0]),
    ([3e4, -4e4, 1e4], [127, -128, 127]),
    ([-3e4, 4e4, -1e4], [-128, 127, -128]),
    ([0, 0, 0], [0, 0, 0]),
    ([np.inf] * 3, [2, -3, 0]),
]


@pytest.mark.parametrize("number", range(len(OTHERS)))
@pytest.mark.parametrize("seed", range(3))
def test_others_beside_a_half_hold_what_no_example_holds(number: int, seed: int) -> None:
    """Nothing moves, padding keeps its numbers, and integers stay within their dtype."""
    present = [True, False, True, True, True]
    found = of_other_values(present, seed)[number]
    np.testing.assert_array_equal(found.places, np.arange(5))
    others = np.asarray(present) & ~found.compared
    assert others.sum() == 2 and not found.compared[1]
    own = np.tile([2, -3, 0], (5, 1))
    batch = own.astype(np.float32), own.astype(np.int8)
    for made, altered in zip(
        rebatching.taken(batch, (True, True), found), OTHERS[number], strict=True
    ):
        np.testing.assert_array_equal(made, np.where(others[:, None], altered, own))
    np.testing.assert_array_equal(batch[0], own)  # the batch itself is as it was


def test_nothing_but_finite_values_where_nan_is_not_taken() -> None:
    present = np.ones(4, np.float32)
    finite = rebatching.of_other_values(np.arange(4), present, False)
    assert [found.value for found in finite] == [1e4, -1e4, 0.0]


def test_every_example_is_compared_beside_extreme_ones() -> None:
    """One half beside numbers of one sign, the other beside those of the other."""
    larger, opposite = of_other_values([True] * 6)[1:3]
    assert np.all(larger.compared ^ opposite.compared)


def test_large_integers_end_at_the_limits_of_their_dtype() -> None:
    larger = of_other_values([True, True])[1]
    made = rebatching.taken(np.asarray([2**62, 2**62]), True, larger)
    assert set(made) == {2**62, 2**63 - 2**10}


def test_only_alterable_leaves_change() -> None:
    ones = {"price": np.ones([4, 2, 3], np.float16), "weight": np.ones([4])}
    batch = {**ones, "id": np.arange(4), "word": np.asarray([b"a"] * 4, object)}
    found = of_other_values([True] * 4)[0]
    alterable = {"price": True, "weight": False, "id": False, "word": False}
    taken = rebatching.taken(batch, alterable, found)
    lost = np.isnan(taken["price"].reshape(4, -1))
    np.testing.assert_array_equal(lost.all(1), ~found.compared)
    np.testing.assert_array_equal(lost.any(1), ~found.compared)
    for name in ("weight", "id", "word"):
        np.testing.assert_array_equal(taken[name], batch[name])


def test_holes_leave_something_of_each_example() -> None:
    """Also where it has one input and one label."""
    batch = np.ones([6, 1]), np.ones([6, 1]), np.ones([6, 5])
    x, y, ages = rebatching.with_holes(batch, (True, True, False))
    holes = np.isnan(np.hstack([x, y]))
    assert holes.any(0).all() and not holes.all(1).any() and holes[0, 0]
    np.testing.assert_array_equal(ages, batch[2])


def test_the_tolerance_of_each_batch() -> None:
    same, other, alone = 2.0**-16, 2.0**-6, 2.0**-3
    found = [each.tolerance for each in of_the_data([True] * 40)]
    assert found == [same, same, other, alone]
    assert {each.tolerance for each in of_other_values([True] * 40)} == {same}
    looser = [each.tolerance for each in of_the_data([True] * 40, looser=4.0)]
    assert looser == [same, same, 4 * other, 4 * alone]
    assert of_the_data([True, True])[2].tolerance == other
    assert of_the_data([True])[2].tolerance == other
    assert of_the_data([True, False], random=True)[2].tolerance == alone

"""Which examples the isolation checks take together, and which of them are compared."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse.clipping import companies

PRESENT = st.lists(st.booleans(), min_size=1, max_size=40).filter(any)
SEEDS = st.integers(0, 2**31 - 1)
some = settings(max_examples=50, deadline=None)


def places_in_order(present: list[bool], seed: int) -> np.ndarray:
    return companies.order(np.asarray(present, np.float32), seed).numpy()


def company(number: int, present: list[bool], seed: int, **flags: bool) -> companies.Company:
    return companies.company(
        number,
        places_in_order(present, seed),
        np.asarray(present, np.float32),
        flags.get("first_stays", False),
        flags.get("random", False),
        1.0,
    )


@some
@given(present=PRESENT, seed=SEEDS)
def test_the_first_that_is_there_leads_and_padding_ends(present: list[bool], seed: int) -> None:
    order, count = places_in_order(present, seed), sum(present)
    assert sorted(order) == list(range(len(present))) and order[0] == present.index(True)
    assert all(present[place] for place in order[:count])


@some
@given(present=PRESENT, seed=SEEDS, first_stays=st.booleans())
def test_the_first_check_compares_one_half_and_then_the_other(
    present: list[bool], seed: int, first_stays: bool
) -> None:
    """So every example that is there is compared once, while the others are replaced."""
    halves = [company(number, present, seed, first_stays=first_stays) for number in (0, 1)]
    compared = [half.compared.numpy() for half in halves]
    np.testing.assert_array_equal(compared[0].astype(int) + compared[1], present)
    assert abs(int(compared[0].sum()) - int(compared[1].sum())) <= 1
    for half, kept in zip(halves, compared, strict=True):
        places, own = half.places.numpy(), np.arange(len(present))
        np.testing.assert_array_equal(places[kept], own[kept])
        replaced = np.asarray(present) & ~kept
        assert set(places[replaced]) <= set(own[kept]) or not kept.any()
        np.testing.assert_array_equal(places[~np.asarray(present)], own[~np.asarray(present)])


@some
@given(present=PRESENT, seed=SEEDS)
def test_which_half_comes_first_changes_from_check_to_check(present: list[bool], seed: int) -> None:
    one, other = (
        company(1, present, seed, first_stays=first).compared.numpy() for first in (True, False)
    )
    np.testing.assert_array_equal(one.astype(int) + other, present)


@some
@given(present=PRESENT, seed=SEEDS, random=st.booleans())
def test_a_few_in_another_order_and_one_of_them_twice(
    present: list[bool], seed: int, random: bool
) -> None:
    """With random layers the first places keep their masks, the one that comes again has none."""
    found = company(2, present, seed, random=random)
    places, few = found.places.numpy(), max(1, min(32, len(present) // 2))
    first = np.arange(few) if random else places_in_order(present, seed)[:few][::-1]
    np.testing.assert_array_equal(places, [*first, first[0]])
    compared = np.asarray(present)[places]
    compared[-1] &= not random
    np.testing.assert_array_equal(found.compared, compared)
    assert int(found.least) == (2 if compared.sum() > 8 else 1)


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("present", [[True, True], [False, True, True]])
def test_one_alone(present: list[bool], random: bool) -> None:
    """It is compared unless its place, and so its mask, is another one."""
    found = company(3, present, 0, random=random)
    np.testing.assert_array_equal(found.places, [present.index(True)])
    np.testing.assert_array_equal(found.compared, [present[0] or not random])


OTHERS = {
    companies.NOT_A_NUMBER: ([np.nan] * 3, [2, -3, 0]),
    companies.INFINITE: ([np.inf] * 3, [2, -3, 0]),
    companies.EXTREME: ([3e4, -4e4, 1e4], [127, -128, 127]),
    companies.OPPOSITE: ([-3e4, 4e4, -1e4], [-128, 127, -128]),
    companies.ZERO: ([0, 0, 0], [0, 0, 0]),
}


@pytest.mark.parametrize("number", OTHERS)
@pytest.mark.parametrize("seed", range(3))
def test_others_beside_a_half_hold_what_no_example_holds(number: int, seed: int) -> None:
    """Nothing moves, padding keeps its numbers, and integers stay within their dtype."""
    present = [True, False, True, True, True]
    found = company(number, present, seed)
    np.testing.assert_array_equal(found.places, np.arange(5))
    others = np.asarray(present) & ~found.compared.numpy()
    assert others.sum() == 2 and not found.compared.numpy()[1]
    own = np.tile([2, -3, 0], (5, 1))
    batch = tf.constant(own, tf.float32), tf.constant(own, tf.int8)
    for made, altered in zip(
        companies.taken(batch, (True, True), found), OTHERS[number], strict=True
    ):
        np.testing.assert_array_equal(made, np.where(others[:, None], altered, own))


def test_every_example_is_compared_beside_extreme_ones() -> None:
    """One half beside numbers of one sign, the other beside those of the other."""
    halves = [company(n, [True] * 6, 0) for n in (companies.EXTREME, companies.OPPOSITE)]
    assert np.all(halves[0].compared.numpy() ^ halves[1].compared.numpy())


def test_large_integers_end_at_the_limits_of_their_dtype() -> None:
    found = company(companies.EXTREME, [True, True], 0)
    made = companies.taken(tf.constant([2**62, 2**62], tf.int64), True, found)
    assert set(made.numpy()) == {2**62, 2**63 - 2**10}


def test_only_alterable_leaves_change() -> None:
    batch = {"price": tf.ones([4, 2, 3], tf.float16), "weight": tf.ones([4]), "id": tf.range(4)}
    found = company(companies.NOT_A_NUMBER, [True] * 4, 0)
    alterable = {"price": True, "weight": False, "id": False}
    taken = companies.taken(batch, alterable, found)
    lost = np.isnan(taken["price"].numpy().reshape(4, -1))
    np.testing.assert_array_equal(lost.all(1), ~found.compared.numpy())
    np.testing.assert_array_equal(lost.any(1), ~found.compared.numpy())
    for name in ("weight", "id"):
        np.testing.assert_array_equal(taken[name], batch[name])


def test_holes_leave_something_of_each_example() -> None:
    """Also where it has one input and one label."""
    batch = tf.ones([6, 1]), tf.ones([6, 1]), tf.ones([6, 5])
    x, y, ages = companies.with_holes(batch, (True, True, False))
    holes = np.isnan(np.hstack([x, y]))
    assert holes.any(0).all() and not holes.all(1).any() and holes[0, 0]
    np.testing.assert_array_equal(ages, batch[2])


def test_the_tolerance_of_each_company() -> None:
    present = [True] * 40
    found = [float(company(number, present, 0).tolerance) for number in range(9)]
    same, other, alone = companies._SAME_SHAPE, companies._OTHER_SHAPE, companies._ALONE
    assert found == [same, same, other, alone] + [same] * 5
    assert float(company(2, [True, True], 0).tolerance) == other
    assert float(company(2, [True], 0).tolerance) == other
    assert float(company(2, [True, False], 0, random=True).tolerance) == alone

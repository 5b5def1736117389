"""The sum of a window's maps, and which rows survive it, against dense vectors over all rows."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse import noise
from dp_sparse.optimizers import window
from dp_sparse.optimizers.window import Selection, SelectionWindow
from tests.reference import windowed_selection as reference
from tests.reference.distributions import SIGNIFICANCE, binomial

UNIT = 0.25
LONGEST_AT_ONCE = 31  # windows that ended before: the next one is the longest


class Driven:
    """A window that is given maps, step by step."""

    def __init__(
        self,
        longest: int,
        rows: int,
        threshold: float,
        deviation: float,
        steps_per_round: int = 1,
        ended: int = 0,
    ) -> None:
        self.window = SelectionWindow(longest)
        self.offsets = np.array([0, rows])
        self.window.start([np.zeros(0, np.int64)], self.offsets, ended)
        self.key, self.step, self._per_round = noise.NoiseKey(), 0, steps_per_round
        by = Selection(self.offsets, UNIT, threshold, deviation)
        integers = tf.TensorSpec([None], tf.int64)

        @tf.function(input_signature=[integers, integers, tf.TensorSpec([], tf.int64)])
        def add(row_ids: tf.Tensor, units: tf.Tensor, now: tf.Tensor) -> None:
            self.window.add(row_ids, units, now, self.key.next_draw(), by)

        self._add = add

    def take(self, units: dict[int, int]) -> None:
        """One step more, whose map has these units."""
        rows, values = (np.array([*each], np.int64) for each in (units.keys(), units.values()))
        self._add(rows, values, self.step // self._per_round)
        self.step += 1

    @property
    def survivors(self) -> np.ndarray:
        return self.window.survivors(self.offsets)[0]

    @property
    def sum(self) -> dict[int, int]:
        """The units of each row so far."""
        progress = self.window._progress.numpy()
        found = self.window._sum_so_far(progress[window._MERGED], progress[window._FILLED])
        return {
            int(row): int(units)
            for row, units in zip(*(each.numpy() for each in found), strict=True)
        }


maps = st.lists(
    st.dictionaries(st.integers(0, 19), st.integers(0, 9), max_size=8), min_size=1, max_size=20
)


@settings(max_examples=8, deadline=None)
@given(maps, st.integers(1, 9), st.integers(1, 6), st.integers(1, 4))
def test_survivors_are_those_of_dense_vectors(
    steps: list[dict[int, int]], longest: int, steps_per_round: int, room: int
) -> None:
    """With nearly no noise, whatever is merged when."""
    threshold, tiny = 1.013, 1e-9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "_LEAST_ROOM", room)
        driven = Driven(longest, 20, threshold, tiny, steps_per_round)
        found = [driven.survivors]
        for units in steps:
            driven.take(units)
            found.append(driven.survivors)
    dense = [np.array([UNIT * units.get(row, 0) for row in range(20)]) for units in steps]
    expected = reference.rows_of_steps(
        dense, longest, threshold, tiny, lambda _: np.zeros(20), steps_per_round
    )
    for own, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own, np.flatnonzero(right))


def test_the_sum_is_exact_and_gone_when_its_window_ends() -> None:
    driven = Driven(4, 100, 1e6, 1.0, ended=LONGEST_AT_ONCE)
    for step in range(3):
        driven.take({1: 2**40, 50 + step: 7})
    assert driven.sum == {1: 3 * 2**40, 50: 7, 51: 7, 52: 7}
    driven.take({})
    assert driven.sum == {}
    driven.take({3: 1})
    assert driven.sum == {3: 1}


def test_memory_follows_the_rows_that_were_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as much again at most, however often they are looked up and however large the table."""
    monkeypatch.setattr(window, "_LEAST_ROOM", 1)
    driven = Driven(1000, 10**9, 1e6, 1.0, ended=LONGEST_AT_ONCE)
    rng = np.random.default_rng(0)
    seen: set[int] = set()
    for _ in range(60):
        rows = rng.integers(0, 300, 40) * 1_000_003
        seen.update(rows.tolist())
        driven.take({int(row): 1 for row in rows})
    own = driven.window
    held = own._sum_ids.numpy().size + own._new_ids.numpy().size
    assert held <= 1.5 * len(seen) + 40


@pytest.mark.parametrize("length", [1, 10, 100])
def test_survivors_have_the_right_frequency(length: int) -> None:
    """And none of: noise of one map, noise of deviation n·s, a map of the window before."""
    rows, looked_up, threshold, deviation = 40_000, 10_000, 2.0, 1.5
    driven = Driven(length, rows, threshold, deviation, ended=LONGEST_AT_ONCE)
    before = int(np.sqrt(length) * deviation / UNIT)  # a deviation of the noise
    for units in [*[0] * (length - 1), before, *[2] * length]:
        driven.take(dict.fromkeys(range(looked_up), units))
    found, total = driven.survivors, UNIT * 2 * length
    true = np.count_nonzero(found < looked_up)
    zero = reference.survival_probability(0.0, threshold, deviation, length)
    assert binomial(len(found) - true, rows - looked_up, zero) > SIGNIFICANCE
    right = reference.survival_probability(total, threshold, deviation, length)
    assert binomial(true, looked_up, right) > SIGNIFICANCE
    at = np.sqrt(length) * threshold
    wrong = {
        "a map of the window before": reference.survival_probability(
            total + UNIT * before, threshold, deviation, length
        )
    }
    if length > 1:
        wrong["noise of one map"] = reference.survival_probability(total, at, deviation, 1)
        wrong["n for √n"] = reference.survival_probability(total, at, length * deviation, 1)
    for what, chance in wrong.items():
        assert binomial(true, looked_up, chance) < SIGNIFICANCE, what


def test_a_pass_counts_as_one_round() -> None:
    """A window that touches two passes has the noise of two maps, and one within a pass of one."""
    for length, steps_per_round, first, rounds in ((6, 6, 0, 1), (6, 4, 0, 2), (6, 4, 3, 3)):
        driven = Driven(length, 10_000, 1.0, 1.0, steps_per_round, ended=LONGEST_AT_ONCE)
        driven.step = first
        for _ in range(length):
            driven.take(dict.fromkeys(range(5_000), 2))
        chance = reference.survival_probability(UNIT * 2 * length, 1.0, 1.0, rounds)
        assert reference.rounds(first, length, steps_per_round) == rounds
        assert binomial(np.count_nonzero(driven.survivors < 5_000), 5_000, chance) > SIGNIFICANCE
        other = reference.survival_probability(UNIT * 2 * length, 1.0, 1.0, rounds + 1)
        assert binomial(np.count_nonzero(driven.survivors < 5_000), 5_000, other) < SIGNIFICANCE


def test_another_key_begins_a_new_window() -> None:
    """As after a restore, in the child of a fork, and for a key that workers share."""
    driven = Driven(4, 10, 1.0, 1e-9, ended=LONGEST_AT_ONCE)
    driven.window.start([np.array([2, 7])], driven.offsets, LONGEST_AT_ONCE)
    driven.take({1: 100})
    driven.take({1: 100})
    driven.key.refresh(2)
    for _ in range(3):
        driven.take({3: 1})
        np.testing.assert_array_equal(driven.survivors, [2, 7])
    assert driven.sum == {3: 3}
    driven.take({3: 9})
    np.testing.assert_array_equal(driven.survivors, [3])


def test_the_history_says_what_stayed() -> None:
    driven = Driven(2, 10, 1.0, 1e-9)
    for units in ({1: 8, 2: 8}, {2: 8, 5: 8}, {9: 1}, {}, {}):
        driven.take(units)
    np.testing.assert_array_equal(driven.window.history, [[1, 2, 0], [2, 2, 1], [2, 0, 0]])
    assert driven.window.windows_ended == 3


def test_rows_for_which_there_is_room_are_drawn_evenly() -> None:
    """Two of six rows stay, each as often; all three stay where there is room for five."""
    offsets = np.array([0, 10, 20])
    rows = tf.constant([0, 2, 3, 5, 8, 9, 11, 15, 19], tf.int64)
    key, draws = noise.NoiseKey(), 600

    @tf.function
    def stay() -> tf.Tensor:
        return window._at_most(rows, offsets, (2, 5), key.next_draw())

    found = [stay().numpy() for _ in range(draws)]
    assert all(len(each) == 5 and np.all(np.diff(each) > 0) for each in found)
    assert all(each[2:].tolist() == [11, 15, 19] for each in found)
    times = np.unique(np.concatenate([each[:2] for each in found]), return_counts=True)
    assert times[0].tolist() == [0, 2, 3, 5, 8, 9]
    assert min(binomial(int(count), draws, 2 / 6) for count in times[1]) > SIGNIFICANCE

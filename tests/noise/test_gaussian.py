"""Noise: its distribution, its tails, both execution paths; no value used twice, no key leaked."""

import concurrent.futures
import copy
import pickle
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from dp_sparse import noise
from dp_sparse.noise import gaussian
from dp_sparse.noise.gaussian import normal_quantile
from tests.reference.distributions import SIGNIFICANCE, binomial
from tests.subprocesses import in_fork

LARGE = 100_000
SIGMA = 1.7


def row_noise(count: int, sigma: float) -> np.ndarray:
    """The graph path: rows, of a count that changes from step to step."""
    return sigma * noise.normal(noise.NoiseKey().next_draw(), noise.Purpose.ROWS, count).numpy()


def dense_noise(count: int, sigma: float) -> np.ndarray:
    """The XLA path: tensors of static shape."""
    draw = noise.NoiseKey().next_draw()
    return noise.noisy_mean(tf.zeros([count]), sigma, 1.0, draw, noise.Purpose.DENSE).numpy()


def transform(bits: np.ndarray) -> np.ndarray:
    """What becomes of 64 random bits."""
    compiled = tf.function(gaussian._standard_normal, jit_compile=True, autograph=False)
    return compiled(tf.constant(bits, tf.uint64)).numpy()


# ----------------------------------------------------------------------------------- distribution


@pytest.mark.parametrize("sample", [row_noise, dense_noise])
def test_noise_is_normal(sample: Callable[[int, float], np.ndarray]) -> None:
    values = sample(LARGE, SIGMA)
    assert stats.kstest(values, stats.norm(scale=SIGMA).cdf).pvalue > SIGNIFICANCE
    assert stats.kstest(np.abs(values), stats.halfnorm(scale=SIGMA).cdf).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("wrong", [2 / 3, 3 / 2])
@pytest.mark.parametrize("sample", [row_noise, dense_noise])
def test_the_test_rejects_another_deviation(
    sample: Callable[[int, float], np.ndarray], wrong: float
) -> None:
    values = sample(LARGE, SIGMA * wrong)
    assert stats.kstest(values, stats.norm(scale=SIGMA).cdf).pvalue < SIGNIFICANCE


def test_noise_is_independent_across_positions_and_draws() -> None:
    key = noise.NoiseKey()
    first, second = (noise.normal(key.next_draw(), 0, LARGE).numpy() for _ in range(2))
    for left, right in [(first, second), (first[:-1], first[1:]), (first[:-2], first[2:])]:
        assert stats.pearsonr(left, right).pvalue > SIGNIFICANCE
        assert stats.pearsonr(np.abs(left), np.abs(right)).pvalue > SIGNIFICANCE


def test_noisy_mean_adds_noise_then_divides() -> None:
    draw = noise.NoiseKey().next_draw()
    total = tf.random.stateless_normal([30, 40], [1, 2])
    unit = noise.normal(draw, 5, 30 * 40).numpy().reshape(30, 40)
    got = noise.noisy_mean(total, 3.0, 7.0, draw, 5).numpy()
    step = noise.grid_step(3.0)
    expected = np.round((total.numpy().astype(np.float64) + 3.0 * unit) / step) * step / 7.0
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [[], [0, 4], [1], [3, 1, 5]])
def test_noisy_mean_keeps_the_shape(shape: list[int]) -> None:
    mean = noise.noisy_mean(tf.zeros(shape), 1.0, 2.0, noise.NoiseKey().next_draw(), 3)
    assert mean.shape == shape
    assert mean.dtype == tf.float32


@pytest.mark.parametrize(
    "shapes",
    [
        [[3, 4], [], [2]],
        [[2**14], [5], [130, 130], [0, 7], [2**13, 2]],
        [[2**14 - 1], [2**14]],
        [[600, 2], [700]],
    ],
)
def test_means_of_many_take_each_value_of_a_stream_once(shapes: list[list[int]]) -> None:
    """Small tensors lie end to end in the stream of the first; large ones have their own."""
    draw = noise.NoiseKey().next_draw()
    totals = [tf.random.stateless_normal(shape, [3, len(shape)]) for shape in shapes]
    totals[-1] = tf.cast(totals[-1], tf.float64)
    means = noise.noisy_means(totals, 3.0, 7.0, draw, 5)
    sizes = [int(np.prod(shape)) for shape in shapes]
    small = [index for index, size in enumerate(sizes) if size < 2**14]
    stream = noise.normal(draw, 5 + small[0], sum(sizes[index] for index in small)).numpy()
    units = dict(
        zip(small, np.split(stream, np.cumsum([sizes[i] for i in small])[:-1]), strict=True)
    )
    step = noise.grid_step(3.0)
    for index, (mean, total) in enumerate(zip(means, totals, strict=True)):
        unit = units.get(index)
        if unit is None:
            unit = noise.normal(draw, 5 + index, sizes[index]).numpy()
        noisy = np.asarray(total, np.float64) + 3.0 * unit.reshape(total.shape)
        assert mean.dtype == tf.float32
        np.testing.assert_allclose(mean, np.round(noisy / step) * step / 7.0, rtol=1e-6)


def test_means_of_nothing() -> None:
    assert noise.noisy_means([], 1.0, 2.0, noise.NoiseKey().next_draw(), 5) == []


# ------------------------------------------------------------------------------------------ tails


def test_transform_is_the_inverse_of_the_normal_distribution() -> None:
    """At every distance from the end of the tail; TensorFlow's own sampler ends at 5.68 σ."""
    steps = np.unique(np.logspace(0, np.log10(2.0**62.9), 400).astype(np.uint64)) - np.uint64(1)
    quantile = stats.norm.isf((steps.astype(np.float64) + 0.5) * 2.0**-64)
    upper, lower = transform(steps), transform(steps | np.uint64(2**63))
    np.testing.assert_allclose(upper, quantile, rtol=3e-11, atol=1e-15)
    np.testing.assert_array_equal(lower, -upper)
    assert np.all(np.diff(upper) <= 0)
    assert upper[0] == pytest.approx(9.1553, abs=1e-4)


def test_every_pattern_of_bits_gives_a_finite_value() -> None:
    powers = np.uint64(1) << np.arange(64, dtype=np.uint64)
    bits = np.concatenate([powers, ~powers, powers - np.uint64(1), ~(powers - np.uint64(1))])
    values = transform(bits)
    assert np.all(np.isfinite(values))
    assert values.max() == -values.min() == pytest.approx(9.1553, abs=1e-4)


@pytest.mark.parametrize("deviations", [4.0, 7.0, 8.0, noise.REACH])
def test_the_bits_reach_every_point_of_the_grid(deviations: float) -> None:
    """Ten values of 64 bits or more for each point, as far out as noise ever comes."""
    first = np.uint64(stats.norm.sf(deviations) * 2.0**64)
    following = transform(first + np.arange(1000, dtype=np.uint64))
    assert following[0] == pytest.approx(deviations, rel=1e-5)
    assert np.max(np.abs(np.diff(following))) < noise.grid_step(1.0) / 10


def test_tails_hold_as_many_values_as_they_should() -> None:
    """16 million values: 109 expected beyond 4.5 σ, 9 beyond 5 σ; a shorter tail shows none."""
    count, beyond = 4_000_000, {4.5: 0, 5.0: 0}
    for _ in range(4):
        values = np.abs(dense_noise(count, 1.0))
        beyond = {limit: found + np.sum(values > limit) for limit, found in beyond.items()}
    for limit, found in beyond.items():
        assert binomial(found, 4 * count, 2 * stats.norm.sf(limit)) > SIGNIFICANCE
    assert binomial(0, 4 * count, 2 * stats.norm.sf(4.5)) < SIGNIFICANCE


# ------------------------------------------------------------------------- streams and both paths


@pytest.mark.cases(5)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 64, 1023, 20_001, 2**15, 2**15 + 1])
def test_noise_is_the_same_whether_the_size_is_known_or_not(count: int) -> None:
    """Blocks of one stream, or the stream at once."""
    draw = noise.NoiseKey().next_draw()
    total = tf.random.stateless_normal([count], [1, 2])

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def of_unknown_size(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return (
            noise.normal(draw, 4, tf.size(values)),
            noise.noisy_mean(values, 1.0, 3.0, draw, 4),
        )

    known = noise.noisy_mean(total, 1.0, 3.0, draw, 4).numpy()
    normals, unknown = (value.numpy() for value in of_unknown_size(total))
    np.testing.assert_array_equal(known, unknown)
    step = noise.grid_step(1.0)
    expected = np.round((total.numpy().astype(np.float64) + normals) / step) * step / 3.0
    np.testing.assert_allclose(known, expected, rtol=1e-6)


def test_tensors_of_unknown_size_keep_their_shape() -> None:
    key = noise.NoiseKey()

    @tf.function(input_signature=[tf.TensorSpec([None, 5])])
    def noisy(total: tf.Tensor) -> tf.Tensor:
        return noise.noisy_mean(total, 1.0, 2.0, key.next_draw(), 3)

    for rows in (0, 1, 7000):
        assert noisy(tf.zeros([rows, 5])).shape == (rows, 5)


@pytest.mark.parametrize("deviation", [0.3, 1.0, 5.7, 1e-5, 1e6])
def test_released_values_lie_on_one_grid_whatever_the_sum(deviation: float) -> None:
    """The low bits of a released sum do not tell which sum it came from."""
    step = noise.grid_step(deviation)
    assert deviation * 2**-10 < step <= deviation * 2**-9
    for total in (0.0, deviation, deviation / 3):
        draw = noise.NoiseKey().next_draw()
        released = noise.noisy_mean(tf.fill([5000], total), deviation, 1.0, draw, 4).numpy()
        multiples = released.astype(np.float64) / step
        np.testing.assert_array_equal(multiples, np.round(multiples))
        assert len(np.unique(multiples)) > 1000


def test_same_key_draw_and_purpose_give_the_same_values() -> None:
    key, number = tf.constant([2**63 + 5], tf.uint64), tf.constant(9, tf.int64)
    first, second = (
        noise.normal(noise.Draw(key, number, tf.constant(0, tf.uint64)), 1, 100).numpy()
        for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)
    other_key = noise.normal(noise.Draw(key + 1, number, tf.constant(0, tf.uint64)), 1, 100).numpy()
    other_draw = noise.normal(
        noise.Draw(key, number + 1, tf.constant(0, tf.uint64)), 1, 100
    ).numpy()
    other_purpose = noise.normal(noise.Draw(key, number, tf.constant(0, tf.uint64)), 2, 100).numpy()
    for other in (other_key, other_draw, other_purpose):
        assert not np.any(first == other)


def test_a_longer_stream_begins_with_the_shorter_one() -> None:
    draw = noise.NoiseKey().next_draw()
    long = noise.uniform(draw, 1, 1001).numpy()
    for count in (1, 2, 3, 500):
        np.testing.assert_array_equal(noise.uniform(draw, 1, count).numpy(), long[:count])


def test_streams_do_not_overlap() -> None:
    """A repetition among 8·10⁴ values of 53 bits has a chance of 4·10⁻⁷ unless streams overlap."""
    key = tf.constant([17], tf.uint64)
    numbers = [1, 2, 255, 2**23, 2**24, 2**32, 2**32 + 1, 2**38]
    purposes = [0, 1, 2, 3, 4, 300, 2**24 - 1]
    values = [
        noise.uniform(
            noise.Draw(key, tf.constant(number, tf.int64), tf.constant(0, tf.uint64)), purpose, 1500
        ).numpy()
        for number in numbers
        for purpose in purposes
    ]
    assert len(np.unique(values)) == np.size(values)


def test_counters_are_injective() -> None:
    """(draw, purpose) is the high word of the counter, the position in a stream the low word."""
    key = tf.constant([17], tf.uint64)
    counters = {
        tuple(
            noise.Draw(key, tf.constant(number, tf.int64), tf.constant(0, tf.uint64))
            .counter(purpose)
            .numpy()
        )
        for number in (0, 1, 2**16, 2**24, 2**38, 2**39 - 1)
        for purpose in (0, 1, 2, 3, 2**16, 2**24 - 1)
    }
    assert len(counters) == 36
    assert {low for low, _ in counters} == {0}


# --------------------------------------------------------------------------------------- uniforms


def test_uniforms_lie_on_the_grid() -> None:
    """(k + ½)·2⁻⁵³: never 0 and never 1, though values above ½ round to the next float64."""
    values = noise.uniform(noise.NoiseKey().next_draw(), 1, LARGE).numpy()
    assert values.dtype == np.float64
    assert values.min() > 0
    small = values[values < 0.5] * 2.0**53 - 0.5
    np.testing.assert_array_equal(small, np.floor(small))
    assert np.any(small % 2 == 1) and np.any(small % 2 == 0)
    assert stats.kstest(values, "uniform").pvalue > SIGNIFICANCE


def test_extreme_uniforms(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = tf.constant([0, 2**11 - 1, 2**11, 2**64 - 1], tf.uint64)
    monkeypatch.setattr(gaussian, "_bits", lambda *_: bits)
    values = noise.uniform(noise.NoiseKey().next_draw(), 1, 4).numpy()
    np.testing.assert_array_equal(values[:3], [2.0**-54, 2.0**-54, 3 * 2.0**-54])
    assert 1 - 2.0**-52 < values[3] <= 1


@pytest.mark.parametrize("offset", [2, 4, 100, 998])
def test_uniforms_from_an_offset_continue_the_stream(offset: int) -> None:
    draw = noise.NoiseKey().next_draw()
    whole = noise.uniform(draw, 1, 1000).numpy()
    rest = noise.uniform(draw, 1, 1000 - offset, tf.constant(offset, tf.int64)).numpy()
    np.testing.assert_array_equal(rest, whole[offset:])


# -------------------------------------------------------------------------------------------- key


def key_value(key: noise.NoiseKey) -> int:
    return int(key.next_draw().key.numpy()[0])


def test_copies_get_keys_of_their_own() -> None:
    key = noise.NoiseKey()
    copies = [copy.deepcopy(key), copy.copy(key), pickle.loads(pickle.dumps(key))]
    values = [key_value(each) for each in (key, *copies)]
    assert len(set(values)) == 4
    assert str(values[0]).encode() not in pickle.dumps(key)
    assert values[0].to_bytes(8, "little") not in pickle.dumps(key)


def test_keys_use_all_64_bits() -> None:
    values = np.array([key_value(noise.NoiseKey()) for _ in range(64)], np.uint64)
    assert len(set(values.tolist())) == 64
    ones = np.unpackbits(values.view(np.uint8).reshape(64, 8), axis=1).sum(0)  # of 64 keys
    assert np.all((ones > 0) & (ones < 64))


def test_refresh_changes_the_key_and_goes_on_counting() -> None:
    key = noise.NoiseKey()
    before, number = key_value(key), int(key._draws.numpy())
    key.refresh(0)
    assert key_value(key) != before
    assert int(key._draws.numpy()) == number + 1


def test_the_child_of_a_fork_draws_other_noise() -> None:
    """Also in a graph that was traced before it, and after the key was replaced."""
    key = noise.NoiseKey()
    in_graph = tf.function(lambda: (key.next_draw().key, key.next_draw().offset))
    in_graph()
    key.refresh(0)

    def words() -> bytes:
        return key.words().numpy()[:, :2].tobytes()

    before = words()
    assert in_fork(words) != before
    assert in_fork(words) not in (before, in_fork(words))
    assert words() == before  # the parent goes on with its own
    key.renew_in_memory()
    after = [np.frombuffer(words(), np.uint64)[place] for place in (0, 1)]
    assert [np.ravel(word)[0] for word in in_graph()] == after


def test_no_draw_number_comes_twice() -> None:
    key = noise.NoiseKey()

    def eager() -> tf.Tensor:
        return key.next_draw().number

    in_graph = tf.function(eager)
    numbers = [int(f()) for f in (eager, in_graph, in_graph, eager, in_graph)]
    assert numbers == [0, 1, 2, 3, 4]


def test_two_draws_of_one_graph_differ() -> None:
    key = noise.NoiseKey()

    @tf.function
    def both() -> tuple[tf.Tensor, tf.Tensor]:
        return noise.normal(key.next_draw(), 0, 50), noise.normal(key.next_draw(), 0, 50)

    values = np.stack([*both(), *both()])
    assert len(np.unique(values)) == values.size


def constants(graph: tf.Graph) -> list[np.ndarray]:
    """The value of every Const node of a graph and of the functions that it calls."""
    definition = graph.as_graph_def(add_shapes=False)
    nodes = [*definition.node, *[n for f in definition.library.function for n in f.node_def]]
    return [tf.make_ndarray(node.attr["value"].tensor) for node in nodes if node.op == "Const"]


def test_the_key_is_no_constant_of_the_graph() -> None:
    key = noise.NoiseKey()

    @tf.function
    def step(total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        draw = key.next_draw()
        return noise.noisy_mean(total, 1.0, 1.0, draw, 3), noise.normal(draw, 2, tf.size(total))

    concrete = step.get_concrete_function(tf.TensorSpec([8], tf.float32))
    secret = key_value(key).to_bytes(8, "little")
    found = constants(concrete.graph)
    assert len(found) > 3
    assert not any(secret in constant.tobytes() for constant in found if constant.dtype != object)
    assert secret not in concrete.graph.as_graph_def().SerializeToString()

    captured = tf.constant(np.frombuffer(secret, np.uint64))
    leaky = tf.function(lambda: tf.identity(tf.constant(captured.numpy()))).get_concrete_function()
    assert any(secret in constant.tobytes() for constant in constants(leaky.graph))


def test_a_refreshed_key_reaches_a_traced_graph() -> None:
    key = noise.NoiseKey()
    step = tf.function(lambda: key.next_draw().key)
    before = int(step()[0])
    key.refresh(0)
    assert int(step()[0]) not in (before, 0)


class Owner(tf.Module):
    """A trackable object that holds a key beside a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(1.0)
        self.noise_key = noise.NoiseKey()


class OwnerLayer(keras.layers.Layer):
    """The same as a Keras layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.add_weight(shape=[])
        self.noise_key = noise.NoiseKey()


@pytest.mark.parametrize("owner_class", [Owner, OwnerLayer])
def test_checkpoints_do_not_hold_the_key(owner_class: type, tmp_path: object) -> None:
    owner = owner_class()
    secret = key_value(owner.noise_key).to_bytes(8, "little")
    prefix = tf.train.Checkpoint(owner=owner).write(f"{tmp_path}/checkpoint")
    names = [name for name, _ in tf.train.list_variables(prefix)]
    assert any("weight" in name for name in names)
    assert not any("noise" in name or "draws" in name for name in names)
    values = [tf.train.load_variable(prefix, name) for name in names]
    assert not any(secret in value.tobytes() for value in values if isinstance(value, np.ndarray))


def test_restoring_a_checkpoint_does_not_set_draws_back(tmp_path: object) -> None:
    owner = Owner()
    checkpoint = tf.train.Checkpoint(owner=owner)
    prefix = checkpoint.write(f"{tmp_path}/checkpoint")
    first = noise.normal(owner.noise_key.next_draw(), 0, 20).numpy()
    checkpoint.read(prefix)
    assert not np.any(first == noise.normal(owner.noise_key.next_draw(), 0, 20).numpy())


def test_the_self_check_passes_and_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    noise.self_check()
    with monkeypatch.context() as patched:
        patched.setattr(gaussian, "normal_quantile", lambda v: (1 + 1e-9) * normal_quantile(v))
        with pytest.raises(RuntimeError, match=r"computes normal noise wrongly"):
            noise.self_check()
    monkeypatch.setattr(gaussian, "_ROUNDS", 9)
    with pytest.raises(RuntimeError, match=r"computes random bits wrongly"):
        noise.self_check()


@pytest.mark.cases(1)
@pytest.mark.parametrize("in_graph", [True, False])
def test_two_threads_never_have_one_draw(in_graph: bool) -> None:
    key = noise.NoiseKey()
    count = lambda: key.next_draw().number  # noqa: E731
    draw = tf.function(count, autograph=False) if in_graph else count
    draw()
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        numbers = [int(n) for n in threads.map(lambda _: draw(), range(4000))]
    assert len(set(numbers)) == 4000

"""What the functions of a dataset may do on the way to training, and what is refused by name."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import dp_sparse
from dp_sparse.core import PrivacyError
from dp_sparse.sampling import check_batches

SIZE = 6
DATA = np.arange(SIZE, dtype=np.float32)[:, None], np.zeros(SIZE, np.int32)

Change = Callable[[tf.data.Dataset], tf.data.Dataset]


@pytest.fixture(autouse=True)
def known_seed() -> Iterator[None]:
    """The first line of every tutorial; the seed that was there before comes back."""
    before = context.context()._seed
    tf.random.set_seed(42)
    yield
    context.context()._seed = before


def batches() -> tf.data.Dataset:
    return dp_sparse.PoissonSampling(SIZE, SIZE, steps=3).batches(DATA)


def on_x(change: Callable[[Any], Any]) -> Change:
    return lambda made: made.map(lambda x, y, weights: (change(x), y, weights))


def noisy(x: Any) -> Any:
    return x + tf.random.normal(tf.shape(x))


def of_a_loop(x: Any) -> Any:
    return tf.while_loop(lambda i, _: i < 1, lambda i, x: (i + 1, noisy(x)), (0, x))[1]


def by_counter(made: tf.data.Dataset) -> tf.data.Dataset:
    both = tf.data.Dataset.zip(made, tf.data.Dataset.counter(dtype=tf.int32))
    return both.map(lambda b, i: (b[0] + tf.random.stateless_normal([SIZE, 1], [i, 0]), *b[1:]))


def by_random_dataset(made: tf.data.Dataset) -> tf.data.Dataset:
    return tf.data.Dataset.zip(made, tf.data.Dataset.random(seed=3)).map(lambda b, i: b)


def beside_a_captured_one(made: tf.data.Dataset) -> tf.data.Dataset:
    other = tf.data.Dataset.range(1).map(lambda i: noisy(tf.zeros([1])))
    return made.flat_map(lambda *batch: other.map(lambda _: batch))


def kept_in_a_variable(made: tf.data.Dataset) -> tf.data.Dataset:
    kept = tf.Variable(0.0)
    return on_x(lambda x: x + kept.assign_add(tf.reduce_sum(x)))(made)


def first(one: Any, other: Any) -> Any:
    del other
    return one


FLIP = keras.layers.RandomFlip(seed=3)
GENERATOR = tf.random.Generator.from_seed(3)

REFUSED: dict[str, tuple[str, Change]] = {
    "tf.random": ("RandomStandardNormal in Map", on_x(noisy)),
    "tf.random in a loop": ("RandomStandardNormal in Map", on_x(of_a_loop)),
    "a Keras layer": ("random numbers", on_x(lambda x: FLIP(x[:, :, None, None], training=True))),
    "tf.random.Generator": ("RngReadAndSkip", on_x(lambda x: x + GENERATOR.normal([SIZE, 1]))),
    "keras.random": ("Stateless", on_x(lambda x: x + keras.random.normal([SIZE, 1], seed=3))),
    "a constant": ("Stateless", on_x(lambda x: x * tf.random.stateless_uniform([SIZE, 1], [1, 2]))),
    "a counter": ("Stateless", by_counter),
    "Dataset.random": ("Dataset.random", by_random_dataset),
    "a captured dataset": ("RandomStandardNormal in FlatMap", beside_a_captured_one),
    "Python": ("PyFunc", on_x(lambda x: tf.numpy_function(lambda a: a, [x], tf.float32))),
    "a generator": (
        "PyFunc",
        lambda made: tf.data.Dataset.from_generator(
            lambda: iter(made), output_signature=made.element_spec
        ),
    ),
    "a variable": ("AssignAddVariableOp", kept_in_a_variable),
    "a filter": ("Filter", lambda made: made.filter(lambda x, y, w: x[0, 0] > 0)),
    "a scan": ("Scan", lambda made: made.scan(0.0, lambda old, batch: (old, batch))),
    "two passes": (
        "several",
        lambda made: tf.data.Dataset.zip(made, batches()).map(first),
    ),
    "chosen by content": (
        "several",
        lambda made: tf.data.Dataset.choose_from_datasets(
            [made, made.prefetch(1)], made.map(lambda x, y, w: tf.cast(x[0, 0] > 0, tf.int64))
        ),
    ),
    "numbers of tracing": ("Map", on_x(lambda x: x + np.random.normal(size=(SIZE, 1)))),
    "places": ("Map", on_x(lambda x: x + tf.range(SIZE, dtype=tf.float32)[:, None])),
    "the mean": ("Map", on_x(lambda x: x - tf.reduce_mean(x))),
    "MixUp": ("Map", on_x(lambda x: (x + x[::-1]) / 2)),
}


HONEST: dict[str, Change] = {
    "scaled": on_x(lambda x: 2 * x),
    "a product": on_x(lambda x: tf.matmul(x, tf.fill([1, 300], 0.1))),
    "a lookup": on_x(lambda x: LOOKUP(tf.strings.as_string(x, precision=0))),
    "parsed": on_x(lambda x: tf.strings.to_number(tf.strings.as_string(x))),
    "standardised": on_x(lambda x: tf.image.per_image_standardization(x[:, :, None, None])),
    "numbered": lambda made: made.enumerate().map(lambda i, batch: batch),
    "taken": lambda made: made.take(2).prefetch(2).cache().repeat(1),
    "in another structure": lambda made: made.map(lambda x, y, w: ({"x": x}, y, w)),
}
LOOKUP = keras.layers.StringLookup(vocabulary=["0", "1"])


@pytest.mark.parametrize("name", REFUSED)
def test_refused_behind_the_sampler(name: str) -> None:
    words, change = REFUSED[name]
    with pytest.raises(PrivacyError, match=f"^Expected .*{words}"):
        check_batches(change(batches()))


@pytest.mark.parametrize("name", HONEST)
def test_allowed_behind_the_sampler(name: str) -> None:
    check_batches(HONEST[name](batches()))


@pytest.mark.parametrize(("program", "own"), [(None, 3), (0, None), (0, 0)])
def test_one_seed_of_two_is_enough(program: int | None, own: int | None) -> None:
    context.context()._seed = None
    if program is not None:
        tf.random.set_seed(program)
    with pytest.raises(PrivacyError, match="^Expected .*RandomUniform in Map"):
        check_batches(on_x(lambda x: x * tf.random.uniform([SIZE, 1], seed=own))(batches()))


def test_entropy_is_allowed() -> None:
    context.context()._seed = None
    check_batches(on_x(noisy)(batches()))

    def seeded_by_entropy(x: Any) -> Any:
        seed = tf.random.uniform([2], maxval=2**31 - 1, dtype=tf.int32)
        return x + tf.random.stateless_normal([SIZE, 1], seed)

    check_batches(on_x(seeded_by_entropy)(batches()))


class TestSources:
    """Datasets of examples, for both samplers."""

    stream = dp_sparse.StreamSampling(SIZE, 2)
    poisson = dp_sparse.PoissonSampling(SIZE, SIZE, steps=1)

    @pytest.mark.parametrize("sampling", [stream, poisson])
    def test_random_numbers_of_a_known_seed(self, sampling: Any) -> None:
        source = tf.data.Dataset.from_tensor_slices(DATA).map(lambda x, y: (noisy(x), y))
        with pytest.raises(PrivacyError, match="RandomStandardNormal"):
            sampling.batches(source)

    def test_order_and_generators_are_the_streams_own(self) -> None:
        def generate() -> Iterator[Any]:
            yield from zip(*DATA, strict=True)

        signature = tf.data.Dataset.from_tensor_slices(DATA).element_spec
        source = tf.data.Dataset.from_generator(generate, output_signature=signature)
        source = source.map(lambda x, y: (2 * x, y)).shuffle(SIZE)
        assert sum(1 for _ in self.stream.batches(source)) == 3

    def test_two_sources_in_turn(self) -> None:
        parts = [tf.data.Dataset.from_tensor_slices(DATA).shard(2, i) for i in range(2)]
        both = tf.data.Dataset.sample_from_datasets(parts)
        assert sum(1 for _ in self.stream.batches(both)) == 3


def test_fit_reads_before_a_step_is_paid() -> None:
    plan = dp_sparse.PrivacyPlan(
        dp_sparse.PrivacyBudget(1.0, 1e-3), dp_sparse.PoissonSampling(SIZE, SIZE, steps=2)
    ).calibrate()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
    made = plan.sampling.batches(DATA)
    with pytest.raises(PrivacyError, match="RandomStandardNormal"):
        model.fit(on_x(noisy)(made), verbose=0)
    assert int(model.optimizer.steps_spent) == 0


def unseeded(shape: Any) -> tf.Tensor:
    """0 or 1 of TensorFlow's own entropy, though a seed is set."""
    return tf.raw_ops.RandomUniformInt(shape=shape, minval=0, maxval=2, seed=0, seed2=0)


def by_batches(change: Callable[[Any], Any]) -> Change:
    return lambda made: made.batch(2).map(lambda x, y: (change(x), y)).unbatch()


def with_the_mean_so_far(made: tf.data.Dataset) -> tf.data.Dataset:
    return made.scan(tf.zeros([1]), lambda total, one: (total + one[0], (total, one[1])))


def with_the_one_before(made: tf.data.Dataset) -> tf.data.Dataset:
    before = made.take(1).concatenate(made)
    return tf.data.Dataset.zip(made, before).map(lambda one, other: (one[0] - other[0], one[1]))


MIXING_SOURCES: dict[str, Change] = {
    "a state": with_the_mean_so_far,
    "neighbours": with_the_one_before,
    "MixUp": by_batches(lambda x: x + tf.roll(x, 1, 0)),
    "standardised": by_batches(lambda x: x - tf.reduce_mean(x, 0)),
    "standardised by whole batches": lambda made: (
        made.batch(3, drop_remainder=True).map(lambda x, y: (x - tf.reduce_mean(x, 0), y)).unbatch()
    ),
    "all at once": lambda made: (
        tf.data.Dataset.from_tensors(DATA).map(lambda x, y: (x - tf.reduce_mean(x, 0), y)).unbatch()
    ),
    "MixUp by entropy": by_batches(lambda x: x + tf.gather(x, unseeded(tf.shape(x)[:1]))),
    "grouped": lambda made: made.group_by_window(
        lambda x, y: tf.cast(x[0] > 1, tf.int64), lambda key, group: group.batch(2), window_size=2
    ).unbatch(),
}
HONEST_SOURCES: dict[str, Change] = {
    "scaled by batches": by_batches(lambda x: 2 * x),
    "parts of one dataset": lambda made: tf.data.Dataset.zip(
        made.map(lambda x, y: x), made.map(lambda x, y: y).prefetch(1)
    ),
    "noisy by entropy": by_batches(lambda x: x + tf.cast(unseeded(tf.shape(x)), tf.float32)),
    "parts of one dataset, moved alike": lambda made: tf.data.Dataset.zip(
        made.map(lambda x, y: x).batch(2).take(3),
        made.map(lambda x, y: y).batch(2).take(3),
    ).unbatch(),
    "shuffled": lambda made: made.shuffle(4).map(lambda x, y: (2 * x, y)),
    "numbered": lambda made: made.enumerate().map(lambda i, one: one),
}


def of_a_stream(change: Change) -> tf.data.Dataset:
    source = change(tf.data.Dataset.from_tensor_slices(DATA))
    shaped = source.map(lambda x, y: (tf.ensure_shape(x, [1]), y))
    return dp_sparse.StreamSampling(num_examples=SIZE, batch_size=2).batches(shaped)


@pytest.mark.parametrize("name", MIXING_SOURCES)
def test_a_stream_of_examples_that_are_mixed_is_refused(name: str) -> None:
    with pytest.raises(PrivacyError, match="other examples|whatever else"):
        of_a_stream(MIXING_SOURCES[name])


@pytest.mark.parametrize("name", HONEST_SOURCES)
def test_a_stream_of_examples_by_themselves_is_read(name: str) -> None:
    assert len(list(of_a_stream(HONEST_SOURCES[name]))) == SIZE // 2

"""Streams: each example once a pass and in order, whole passes only, and no amplification."""

import math
from typing import Any

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

from dp_sparse.core.errors import PrivacyError, translated
from dp_sparse.sampling.base import BatchPart, Sampling
from dp_sparse.sampling.batch import OWN_ORDER, Marker
from dp_sparse.sampling.stream import StreamSampling

N, BATCH = 22, 8


def numbers(count: int = N) -> tf.data.Dataset:
    """Examples whose feature is their number."""
    values = np.arange(count)
    return tf.data.Dataset.from_tensor_slices((values, values % 2))


def unsized(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same examples of which nobody knows how many there are."""
    return dataset.filter(lambda *_: True)


def sampler(**changes: Any) -> StreamSampling:
    return StreamSampling(**{"num_examples": N, "batch_size": BATCH} | changes)


def members(batch: Any) -> list[int]:
    x, _, weights = batch
    return x.numpy()[weights["present"].numpy() > 0].tolist()


def joined(batches: list[Any]) -> list[int]:
    return [member for batch in batches for member in members(batch)]


def marks(dataset: tf.data.Dataset) -> list[Marker]:
    return [Marker(*weights["marker"].numpy()[0, :3].tolist()) for _, _, weights in dataset]


EXPECTED = [list(range(8)), list(range(8, 16)), list(range(16, 22))]


def test_every_example_comes_once_and_in_order() -> None:
    assert [members(batch) for batch in sampler().batches(numbers())] == EXPECTED


def test_every_pass_is_the_same() -> None:
    sampling = sampler(passes=3)
    assert sampling.steps == 9
    batches = sampling.batches(numbers())
    assert int(batches.cardinality()) == 9
    assert [members(batch) for batch in batches] == EXPECTED * 3


@pytest.mark.parametrize("batch_size", [1, 11, 22, 100])
def test_batch_sizes(batch_size: int) -> None:
    sampling = sampler(batch_size=batch_size, passes=2)
    batches = list(sampling.batches(numbers()))
    assert len(batches) == sampling.steps == 2 * math.ceil(N / batch_size)
    assert sampling.batch_capacity == sampling.expected_batch_size == batch_size
    assert joined(batches) == list(range(N)) * 2
    assert all(weights["present"].shape == [batch_size] for _, _, weights in batches)


def test_the_last_batch_is_padded() -> None:
    values = np.arange(N)
    features = {"id": values + 7, "vector": np.ones((N, 2, 3), np.float32)}
    source = tf.data.Dataset.from_tensor_slices((features, values % 2, np.full(N, 2.5, np.float32)))
    batches = list(sampler().batches(source))
    x, y, weights = batches[-1]
    np.testing.assert_array_equal(weights["present"], [1, 1, 1, 1, 1, 1, 0, 0])
    np.testing.assert_array_equal(weights["sample_weight"], [2.5] * 6 + [0] * 2)
    np.testing.assert_array_equal(x["id"], [*range(23, 29), 0, 0])
    assert x["vector"].shape == [8, 2, 3] and not np.any(x["vector"][6:])
    np.testing.assert_array_equal(y[6:], [0, 0])
    spec = sampler().batches(source).element_spec
    assert all(leaf.shape.is_fully_defined() for leaf in tf.nest.flatten(spec))


def test_without_weights_every_example_weighs_one() -> None:
    *_, (_, _, weights) = sampler().batches(numbers())
    np.testing.assert_array_equal(weights["sample_weight"], weights["present"])


def test_features_of_text() -> None:
    words = np.array([f"v{i}" for i in range(N)])
    source = tf.data.Dataset.from_tensor_slices((words, np.zeros(N)))
    *_, (x, _, _) = sampler().batches(source)
    assert x.numpy().tolist() == [b"v%d" % i for i in range(16, 22)] + [b"", b""]


def arrays() -> tuple[np.ndarray, np.ndarray]:
    values = np.arange(N)
    return values, values % 2


@pytest.mark.parametrize("passes", [1, 3])
def test_a_resumed_run_goes_on(passes: int) -> None:
    sampling = sampler(passes=passes)
    whole = list(sampling.batches(numbers()))
    for first_step in range(sampling.steps):
        rest = sampling.batches(arrays(), first_step=first_step)
        assert int(rest.cardinality()) == sampling.steps - first_step
        assert [members(batch) for batch in rest] == [members(b) for b in whole[first_step:]]
        assert [mark.position for mark in marks(rest)] == list(range(first_step, sampling.steps))


def test_batches_of_arrays_and_of_a_dataset_are_the_same() -> None:
    for values in ((np.arange(N), np.ones(N)), (*arrays(), np.full(N, 2.5))):
        dataset = tf.data.Dataset.from_tensor_slices(values)
        pairs = zip(sampler().batches(values), sampler().batches(dataset), strict=True)
        for one, other in pairs:
            flat = [
                tf.nest.flatten((x, y, w["sample_weight"], w["present"]))
                for x, y, w in (one, other)
            ]
            for left, right in zip(*flat, strict=True):
                np.testing.assert_array_equal(left, right)
                assert left.dtype == right.dtype and left.shape == right.shape


@pytest.mark.parametrize("first_step", range(9))
def test_a_dataset_goes_on_with_a_whole_pass(first_step: int) -> None:
    sampling, begins = sampler(passes=3), -(-first_step // 3) * 3
    if begins == first_step:
        rest = sampling.batches(numbers(), first_step=first_step)
    elif begins == sampling.steps:
        message = f"after {first_step} of 9 no pass is left.*Arrays and a dp_sparse.RecordFile"
        with pytest.raises(PrivacyError, match=message):
            sampling.batches(numbers(), first_step=first_step)
        return
    else:
        with pytest.warns(UserWarning, match=f"steps {first_step} to {begins - 1} of 9 are given"):
            rest = sampling.batches(numbers(), first_step=first_step)
    assert int(rest.cardinality()) == 9 - begins
    assert [mark.position for mark in marks(rest)] == list(range(begins, 9))
    assert [members(batch) for batch in rest] == EXPECTED * ((9 - begins) // 3)


@pytest.mark.parametrize("first_step", [-1, 6, 100])
def test_a_step_outside_the_run_is_refused(first_step: int) -> None:
    with pytest.raises(ValueError, match=f"0 <= first_step < 6, got first_step={first_step}"):
        sampler(passes=2).batches(numbers(), first_step=first_step)


def test_marks() -> None:
    sampling = sampler(passes=2)
    first, second = marks(sampling.batches(numbers())), marks(sampling.batches(numbers()))
    assert [mark.position for mark in first] == list(range(6))
    assert {mark.fingerprint for mark in first + second} == {sampling.fingerprint}
    nonces = {mark.nonce for mark in first}, {mark.nonce for mark in second}
    assert len(nonces[0]) == len(nonces[1]) == 1 and nonces[0] != nonces[1]
    assert min(*nonces[0], *nonces[1]) > 0


def test_one_dataset_read_twice_shows_it() -> None:
    """Arrays are the same again, and so are the marks; a dataset may be in another order."""
    same, other = sampler(passes=2).batches(arrays()), sampler(passes=2).batches(numbers())
    assert marks(same) == marks(same)
    assert {mark.nonce for mark in marks(same)} == {OWN_ORDER}
    readings = [{mark.nonce for mark in marks(part)} for part in (other, other, other.take(1))]
    assert len(set.union(*readings)) == 3 and all(len(nonces) == 1 for nonces in readings)
    assert len({mark.nonce for mark in marks(other.repeat(2))}) == 2


@pytest.mark.parametrize("count", [0, 1, 7, 8, 16, 21])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_short_pass_is_refused(count: int, passes: int) -> None:
    """Also for whole batches: the next pass would use its examples early."""
    batches = sampler(passes=passes).batches(unsized(numbers(count)))
    message = f"Expected num_examples={N} examples in each pass of the stream, but batch"
    with pytest.raises(PrivacyError, match=message), translated():
        list(batches)


def test_batches_before_the_gap_are_whole() -> None:
    seen = []
    with pytest.raises(PrivacyError, match="batch 1 holds 4"), translated():
        seen.extend(members(batch) for batch in sampler().batches(unsized(numbers(12))))
    assert seen in ([], EXPECTED[:1])  # what came before the failure, if it was read at all


@pytest.mark.parametrize("count", [0, 21, 23, 1000])
def test_a_source_of_another_size_is_refused(count: int) -> None:
    values = np.arange(count)
    for source in (numbers(count), (values, values)):
        with pytest.raises(
            ValueError, match=f"Expected a data source of num_examples={N}.*got {count}"
        ):
            sampler().batches(source)


def test_a_source_without_end_is_refused() -> None:
    """Shuffled, it gives some examples twice within a pass, and leaves others out."""
    for endless in (numbers().repeat(), numbers().repeat().shuffle(N)):
        with pytest.raises(ValueError, match=f"ends after num_examples={N} .*Leave repeat.. out"):
            sampler(passes=2).batches(endless)


@pytest.mark.parametrize("batch_size", [1, 5, 8, 11, 22, 30])
@pytest.mark.parametrize("source", ["one more", "endless"])
def test_a_pass_that_does_not_end_is_refused(source: str, batch_size: int) -> None:
    """Before its last batch is trained on, also if that is full."""
    given = {"one more": numbers(N + 1), "endless": numbers().repeat().shuffle(N)}[source]
    sampling, seen = sampler(batch_size=batch_size), []
    with pytest.raises(PrivacyError, match=f"end after num_examples={N} .*got more"), translated():
        seen.extend(1 for _ in sampling.batches(unsized(given)))
    assert len(seen) < sampling.steps


def test_several_workers_do_not_read_a_dataset_each() -> None:
    """One that shuffles would give a worker examples that the other had in another batch."""
    workers = [BatchPart(*ends, 1, 2) for ends in ((0, 5), (5, 8))]
    for part in workers:
        with pytest.raises(PrivacyError, match="Expected arrays .* as the stream of several work"):
            sampler().batches_of(numbers(), part, first_step=0)
    parts = (sampler().batches_of(arrays(), part, first_step=1) for part in workers)
    assert [members(one) + members(other) for one, other in zip(*parts, strict=True)] == EXPECTED[
        1:
    ]


def test_batches_of_a_sampler_are_no_source() -> None:
    with pytest.raises(ValueError, match="Expected examples, got batches of a sampler"):
        sampler().batches(sampler().batches(numbers()))


def test_a_source_without_random_access() -> None:
    def generate() -> Any:
        yield from ((i, i % 2) for i in range(N))

    spec = tf.TensorSpec([], tf.int64)
    source = tf.data.Dataset.from_generator(generate, output_signature=(spec, spec))
    assert [members(batch) for batch in sampler().batches(source)] == EXPECTED


def test_a_shuffled_source_is_still_once_a_pass() -> None:
    batches = list(sampler(passes=2).batches(numbers().shuffle(N)))
    for one_pass in (batches[:3], batches[3:]):
        assert sorted(joined(one_pass)) == list(range(N))


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_bad_sample_weights_are_refused(weight: float) -> None:
    """As under Poisson sampling: a negative or NaN weight would silently become padding."""
    weights = np.ones(N, np.float32)
    weights[3] = weight
    values = np.arange(N)
    source = tf.data.Dataset.from_tensor_slices((values, values % 2, weights))
    with pytest.raises(ValueError, match="Expected sample weights >= 0"), translated():
        list(sampler().batches(source))


def test_whole_numbers_as_sample_weights() -> None:
    """As under Poisson sampling: they become float32."""
    values = np.arange(N)
    source = tf.data.Dataset.from_tensor_slices((values, values % 2, 1 + values % 3))
    *_, (_, _, weights) = sampler().batches(source)
    assert weights["sample_weight"].dtype == tf.float32
    np.testing.assert_array_equal(weights["sample_weight"], [2, 3, 1, 2, 3, 1, 0, 0])


def test_bad_sample_weights_of_a_second_output_are_shown() -> None:
    values, ones = np.arange(N), np.ones(N, np.float32)
    source = tf.data.Dataset.from_tensor_slices((values, values % 2, {"a": ones, "b": -7 * ones}))
    with pytest.raises(ValueError, match="Expected sample weights >= 0.*-7"), translated():
        list(sampler().batches(source))


@pytest.mark.parametrize("source", [[1, 2], None, np.arange(N)])
def test_other_sources_are_refused(source: Any) -> None:
    with pytest.raises(ValueError, match=r"Expected \(x, y\) or \(x, y, sample_weight\) arrays"):
        sampler().batches(source)


@pytest.mark.parametrize("arity", [1, 4])
def test_examples_of_another_form_are_refused(arity: int) -> None:
    source = tf.data.Dataset.from_tensor_slices((np.arange(N),) * arity)
    with pytest.raises(ValueError, match=r"Expected examples \(x, y\)"):
        sampler().batches(source)


@pytest.mark.parametrize("name", ["num_examples", "batch_size", "passes"])
@pytest.mark.parametrize("value", [0, -1, 2.5, math.nan, math.inf, "5", None, True])
def test_bad_numbers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"Expected {name}.*got {name}="):
        sampler(**{name: value})


@pytest.mark.parametrize("cast", [np.int64, np.int32, float])
def test_numbers_of_other_types(cast: type) -> None:
    sampling = sampler(num_examples=cast(N), batch_size=cast(BATCH), passes=cast(1))
    assert sampling.fingerprint == sampler().fingerprint
    assert [members(batch) for batch in sampling.batches(numbers())] == EXPECTED


def test_configuration_round_trip() -> None:
    sampling = sampler(passes=4)
    again = Sampling.from_config(sampling.get_config())
    assert again == sampling and again.fingerprint == sampling.fingerprint
    assert sampling.fingerprint != sampler().fingerprint


def test_event() -> None:
    """One Gaussian for each pass begun: no example is in two batches of a pass."""
    gaussian, sampling = dp_accounting.GaussianDpEvent(2.0), sampler(passes=3)
    for steps, passes in [(1, 1), (3, 1), (4, 2), (7, 3), (9, 3)]:
        event = sampling.event(gaussian, steps)
        assert event == dp_accounting.SelfComposedDpEvent(gaussian, passes)
    assert sampling.steps_per_pass == 3
    assert sampling.overflow_delta(1.0, 9) == 0
    assert "zero-out" in sampling.neighbouring and "no amplification" in sampling.description

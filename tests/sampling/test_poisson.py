"""Poisson sampling: sizes, inclusions, gaps, capacity and its δ, and what a batch holds."""

import dataclasses
import math
from typing import Any

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from dp_sparse.core.errors import PrivacyError, translated
from dp_sparse.sampling.base import Sampling
from dp_sparse.sampling.batch import SEEDED, Marker
from dp_sparse.sampling.poisson import PoissonSampling
from tests.reference.distributions import SIGNIFICANCE, binomial, chi_square, largest_correlation_z
from tests.reference.sampling import GAPS, overflow_delta, poisson_indices

N, BATCH = 400, 20
FEATURES = np.arange(N)
LABELS = np.arange(N) % 2


def sampler(**changes: Any) -> PoissonSampling:
    return PoissonSampling(
        **{"num_examples": N, "expected_batch_size": BATCH, "steps": 5} | changes
    )


def generator() -> np.random.Generator:
    return np.random.default_rng()


def sizes(dataset: tf.data.Dataset) -> np.ndarray:
    return np.array([int(weights["present"].numpy().sum()) for _, _, weights in dataset])


def members(batch: Any) -> list[int]:
    """The examples of a batch whose feature is their number."""
    x, _, weights = batch
    return x.numpy()[weights["present"].numpy() > 0].tolist()


# ------------------------------------------------------------------------------------ distribution


def test_sizes_are_binomial() -> None:
    """As the training step sees them; fixed batches and another probability are told apart."""
    steps = 1500
    found = sizes(sampler(steps=steps).batches((FEATURES, LABELS)))
    assert len(found) == steps
    assert chi_square(found, stats.binom(N, BATCH / N)) > SIGNIFICANCE
    assert chi_square(found, stats.binom(N, 1.1 * BATCH / N)) < SIGNIFICANCE
    fixed = np.full(steps, BATCH)
    assert chi_square(fixed, stats.binom(N, BATCH / N)) < SIGNIFICANCE
    shuffled = np.concatenate([np.full(steps - 15, BATCH), np.full(15, BATCH // 2)])
    assert chi_square(shuffled, stats.binom(N, BATCH / N)) < SIGNIFICANCE


@pytest.mark.parametrize(("num_examples", "batch"), [(2, 1), (50, 0.3), (60, 57.5), (10**7, 9.0)])
def test_sizes_of_any_probability(num_examples: int, batch: float) -> None:
    sampling, rng = sampler(num_examples=num_examples, expected_batch_size=batch), generator()
    found = [len(sampling.draw(rng)) for _ in range(4000)]
    assert chi_square(found, stats.binom(num_examples, batch / num_examples)) > SIGNIFICANCE


def test_inclusions_are_independent() -> None:
    num_examples, probability, draws = 12, 0.3, 20_000
    sampling = sampler(num_examples=num_examples, expected_batch_size=probability * num_examples)
    rng = generator()
    included = np.zeros((draws, num_examples))
    for row in included:
        row[sampling.draw(rng)] = 1
    for example in range(num_examples):
        assert binomial(included[:, example].sum(), draws, probability) > SIGNIFICANCE
        lagged = stats.pearsonr(included[:-1, example], included[1:, example])
        assert lagged.pvalue > SIGNIFICANCE
    limit = stats.norm.isf(SIGNIFICANCE / num_examples**2)
    assert largest_correlation_z(included) < limit
    without_replacement = np.argsort(rng.random((draws, num_examples)), axis=1) < 4
    assert largest_correlation_z(without_replacement) > limit


def test_agrees_with_one_coin_for_each_example() -> None:
    sampling, rng = sampler(), generator()
    found = np.concatenate([sampling.draw(rng) for _ in range(2000)])
    coins = np.concatenate([poisson_indices(rng, N, BATCH / N) for _ in range(2000)])
    assert stats.ks_2samp(found, coins).pvalue > SIGNIFICANCE


def test_draws_are_sorted_unique_and_in_range() -> None:
    rng = generator()
    for batch in (0.01, 1.0, 200.0, 399.9):
        for _ in range(50):
            found = sampler(expected_batch_size=batch).draw(rng)
            assert np.all(np.diff(found) > 0)
            assert not len(found) or (found[0] >= 0 and found[-1] < N)


def test_probability_one_takes_everything() -> None:
    np.testing.assert_array_equal(sampler(expected_batch_size=N).draw(generator()), FEATURES)


class OneUniform:
    """Stands for a generator whose uniforms are all the same."""

    def __init__(self, uniform: float) -> None:
        self.grid_point = round(uniform * 2**53 - 0.5)

    def integers(self, low: int, high: int, count: int, dtype: type) -> np.ndarray:
        assert (low, high, dtype) == (0, 2**53, np.int64)
        return np.full(count, self.grid_point)


@pytest.mark.parametrize(("probability", "gaps"), GAPS)
def test_gaps(probability: float, gaps: dict[float, int]) -> None:
    num_examples = 2_000_000_000 if probability < 1e-6 else 3_000_000 if probability < 0.1 else 500
    sampling = sampler(
        num_examples=num_examples, expected_batch_size=probability * num_examples, capacity=1
    )
    for uniform, gap in gaps.items():
        found = sampling.draw(OneUniform(uniform))
        np.testing.assert_array_equal(found, np.arange(gap - 1, num_examples, gap))


# ------------------------------------------------------------------------------- capacity and δ


@pytest.mark.parametrize(
    ("num_examples", "batch", "steps", "capacity"),
    [(67_349, 1024, 198, 1321), (45_840_617, 2048, 22_384, 2523)],
)
def test_default_capacity(num_examples: int, batch: int, steps: int, capacity: int) -> None:
    """The smallest with T·(1 + e²⁰)·P[Bin(N, q) > capacity] ≤ 1e-3/N: numbers from derivation."""
    sampling = PoissonSampling(num_examples, batch, steps)
    assert sampling.capacity == sampling.batch_capacity == capacity
    assert overflow_delta(num_examples, batch, steps, capacity, 20.0) <= 1e-3 / num_examples
    assert overflow_delta(num_examples, batch, steps, capacity - 1, 20.0) > 1e-3 / num_examples


@pytest.mark.parametrize("batch", [0.5, 20, 399, 400])
def test_default_capacity_of_small_runs(batch: float) -> None:
    capacity = sampler(expected_batch_size=batch).batch_capacity
    assert 1 <= capacity <= N
    assert overflow_delta(N, batch, 5, capacity, 20.0) <= 1e-3 / N


@pytest.mark.parametrize(
    ("capacity", "delta"),
    [(1088, 16.134698174901676), (1216, 1.394721546920999e-06), (1280, 2.6537891514463447e-12)],
)
def test_overflow_delta(capacity: int, delta: float) -> None:
    """Numbers from derivation, for SST-2 at ε = 1."""
    sampling = PoissonSampling(67_349, 1024, 198, capacity)
    assert sampling.overflow_delta(1.0, 198) == pytest.approx(delta, rel=1e-6)
    expected = overflow_delta(67_349, 1024, 50, capacity, 3.0)
    assert sampling.overflow_delta(3.0, 50) == pytest.approx(expected, rel=1e-12)
    assert sampling.overflow_delta(1.0, 0) == 0


def test_overflow_delta_of_any_epsilon() -> None:
    assert sampler(capacity=N).overflow_delta(1e9, 5) == 0
    assert sampler(capacity=21).overflow_delta(1e9, 5) > 1


def test_an_overflow_stops_the_run() -> None:
    batches = sampler(capacity=BATCH, steps=200).batches((FEATURES, LABELS))
    with pytest.raises(PrivacyError, match="at most capacity=20 examples"), translated():
        list(batches)


def test_an_overflow_never_truncates() -> None:
    batches = iter(sampler(capacity=BATCH, steps=200).batches((FEATURES, LABELS), seed=1))
    seen = []
    with pytest.raises(Exception, match="at most capacity=20 examples in a batch, got 2[1-9]"):
        seen.extend(int(weights["present"].numpy().sum()) for _, _, weights in batches)
    everything = sampler(capacity=N, steps=200).batches((FEATURES, LABELS), seed=1)
    sizes_without_limit = sizes(everything)
    first_overflow = int(np.argmax(sizes_without_limit > BATCH))
    assert seen == sizes_without_limit[: len(seen)].tolist()
    assert len(seen) <= first_overflow


# ----------------------------------------------------------------------------------------- batches


def test_a_batch_is_padded_to_the_capacity() -> None:
    weights = np.linspace(0.5, 1.5, N)
    features = {"id": FEATURES + 7, "vector": np.ones((N, 3), np.float32)}
    sampling = sampler(capacity=90)
    for index, (x, y, found) in enumerate(sampling.batches((features, LABELS, weights))):
        present = found["present"].numpy()
        count = int(present.sum())
        np.testing.assert_array_equal(present, np.arange(90) < count)
        ids = x["id"].numpy()[:count] - 7
        assert np.all(np.diff(ids) > 0)
        np.testing.assert_array_equal(y.numpy()[:count], LABELS[ids])
        np.testing.assert_allclose(found["sample_weight"].numpy()[:count], weights[ids])
        assert x["vector"].shape == (90, 3) and found["sample_weight"].dtype == tf.float32
        for leaf in (x["id"], x["vector"], y, found["sample_weight"]):
            assert leaf.shape[0] == 90 and not np.any(leaf.numpy()[count:])
        mark = Marker(*found["marker"].numpy()[0, :3])
        np.testing.assert_array_equal(found["marker"], mark.of_examples(90))
        assert mark.fingerprint == sampling.fingerprint and mark.position == index


def test_an_empty_batch_is_a_batch() -> None:
    found = sampler(expected_batch_size=1e-9, steps=3, capacity=4).batches((FEATURES, LABELS))
    batches = list(found)
    assert len(batches) == 3
    for x, _, weights in batches:
        np.testing.assert_array_equal(x, np.zeros(4))
        np.testing.assert_array_equal(weights["present"], np.zeros(4))
        np.testing.assert_array_equal(weights["sample_weight"], np.zeros(4))


def test_number_of_batches() -> None:
    found = sampler(steps=7).batches((FEATURES, LABELS))
    assert int(found.cardinality()) == 7
    assert len(list(found)) == 7


@pytest.mark.parametrize(
    ("epochs", "steps"), [(1, 10), (2.5, 25), (0.01, 1), (np.float64(0.36), 4)]
)
def test_steps_follow_from_epochs(epochs: float, steps: int) -> None:
    found = PoissonSampling(1000, 100, epochs=epochs)
    assert found == PoissonSampling(1000, 100, steps=steps)
    assert PoissonSampling.from_config(found.get_config()) == found
    assert dataclasses.replace(found, num_examples=2000).steps == steps


def test_either_steps_or_epochs() -> None:
    with pytest.raises(ValueError, match="got both, steps=3 and epochs=2"):
        PoissonSampling(1000, 100, steps=3, epochs=2)
    with pytest.raises(ValueError, match="or epochs= in its place, got steps=0"):
        PoissonSampling(1000, 100)
    for wrong in (0, -1, math.nan, math.inf, "2"):
        with pytest.raises(ValueError, match="epochs"):
            PoissonSampling(1000, 100, epochs=wrong)  # type: ignore[arg-type]


def test_every_pass_is_fresh() -> None:
    """One dataset read twice, and two datasets: other batches, and a nonce of their own."""
    first = sampler().batches((FEATURES, LABELS))
    second = sampler().batches((FEATURES, LABELS))
    passes = [list(first), list(first), list(second)]
    drawn = [[members(batch) for batch in batches] for batches in passes]
    assert drawn[0] != drawn[1] and drawn[0] != drawn[2] and drawn[1] != drawn[2]
    assert len({str(batch) for batches in drawn for batch in batches}) == 15
    marks = [
        [Marker(*weights["marker"].numpy()[0, :3]) for _, _, weights in each] for each in passes
    ]
    nonces = [{mark.nonce for mark in each} for each in marks]
    assert all(len(each) == 1 and min(each) > 0 for each in nonces)
    assert len(set.union(*nonces)) == 3
    assert all([mark.position for mark in each] == [0, 1, 2, 3, 4] for each in marks)


def test_a_seed_repeats_and_is_marked() -> None:
    passes = [list(sampler().batches((FEATURES, LABELS), seed=3)) for _ in range(2)]
    assert [members(b) for b in passes[0]] == [members(b) for b in passes[1]]
    assert all(set(weights["marker"].numpy()[:, 1]) == {SEEDED} for _, _, weights in passes[0])
    other = list(sampler().batches((FEATURES, LABELS), seed=4))
    assert [members(b) for b in other] != [members(b) for b in passes[0]]


def test_features_of_text() -> None:
    """Arrays of str and of bytes: padding is the empty string."""
    words = [f"v{i}" for i in range(N)]
    as_bytes = np.array([word.encode() for word in words], object)
    for features in (np.array(words), as_bytes):
        x, _, weights = next(iter(sampler().batches((features, LABELS))))
        count = int(weights["present"].numpy().sum())
        assert all(word.startswith(b"v") for word in x.numpy()[:count])
        assert all(word == b"" for word in x.numpy()[count:])


@pytest.mark.parametrize("num_examples", [N - 1, N + 1, 1])
def test_another_number_of_examples_is_refused(num_examples: int) -> None:
    sampling = sampler(num_examples=num_examples, expected_batch_size=1)
    with pytest.raises(ValueError, match=f"num_examples={num_examples} examples, got {N}"):
        sampling.batches((FEATURES, LABELS))


# ----------------------------------------------------------------------------------------- weights


def test_class_weights_multiply_sample_weights() -> None:
    sample_weight = np.linspace(1, 2, N)
    source = (FEATURES, LABELS, sample_weight)
    for x, y, weights in sampler().batches(source, class_weight={0: 0.5, 1: 3.0}):
        count = int(weights["present"].numpy().sum())
        factor = np.where(y.numpy()[:count] == 1, 3.0, 0.5)
        expected = factor * sample_weight[x.numpy()[:count]]
        np.testing.assert_allclose(weights["sample_weight"].numpy()[:count], expected, rtol=1e-6)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_bad_sample_weights_are_refused(weight: float) -> None:
    weights = np.ones(N)
    weights[::2] = weight
    batches = sampler(expected_batch_size=200).batches((FEATURES, LABELS, weights))
    message = f"Expected sample weights >= 0 and finite, got {weight}"
    with pytest.raises(ValueError, match=message), translated():
        list(batches)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_bad_class_weights_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"), translated():
        list(
            sampler(expected_batch_size=200).batches(
                (FEATURES, LABELS), class_weight={0: 1.0, 1: weight}
            )
        )


def test_a_label_without_class_weight_is_refused() -> None:
    batches = sampler(expected_batch_size=200).batches((FEATURES, LABELS), class_weight={0: 1.0})
    with pytest.raises(ValueError, match="Expected a class_weight for every label"), translated():
        list(batches)


# ------------------------------------------------------------------------- configuration and event


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in ("num_examples", "expected_batch_size", "steps", "capacity")
        for value in (0, -1, math.nan, math.inf, -math.inf, "5", True)
    ]
    + [(name, 2.5) for name in ("num_examples", "steps", "capacity")]
    + [(name, None) for name in ("num_examples", "expected_batch_size", "steps")],
)
def test_bad_numbers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"Expected {name}.*got {name}="):
        sampler(**{name: value})


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="expected_batch_size <= num_examples=400"):
        sampler(expected_batch_size=401)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_examples": np.int64(N), "steps": np.int32(5), "capacity": np.int64(90)},
        {"num_examples": float(N), "steps": 5.0, "capacity": 90.0},
        {"expected_batch_size": np.float32(BATCH), "capacity": 90},
    ],
)
def test_numbers_of_other_types(changes: dict[str, Any]) -> None:
    """Sizes come from NumPy and from arithmetic: they work, and name the same sampler."""
    sampling = sampler(**changes)
    assert sampling.fingerprint == sampler(capacity=90).fingerprint
    assert len(list(sampling.batches((FEATURES, LABELS)))) == 5


def test_configuration_round_trip() -> None:
    for sampling in (sampler(), sampler(capacity=77, expected_batch_size=19.5)):
        again = Sampling.from_config(sampling.get_config())
        assert again == sampling and again.fingerprint == sampling.fingerprint


def test_configurations_have_fingerprints_of_their_own() -> None:
    changes = [
        {},
        {"steps": 6},
        {"capacity": 99},
        {"expected_batch_size": 21},
        {"num_examples": 401},
    ]
    assert len({sampler(**change).fingerprint for change in changes}) == 5


def test_event() -> None:
    gaussian = dp_accounting.GaussianDpEvent(1.3)
    subsampled = dp_accounting.PoissonSampledDpEvent(BATCH / N, gaussian)
    assert sampler().event(gaussian, 3) == dp_accounting.SelfComposedDpEvent(subsampled, 3)
    whole = sampler(expected_batch_size=N).event(gaussian, 3)
    assert whole == dp_accounting.SelfComposedDpEvent(gaussian, 3)
    assert sampler().steps_per_pass is None
    assert "add or remove" in sampler().neighbouring

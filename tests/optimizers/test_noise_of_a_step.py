"""The noise of a step: as large as the plan says, and no value of it used twice.

A row's update is (signal + noise) in one number, so two tables with the same noise, or two steps,
tell the difference of their signals; and whoever noises by 0.9 σ states an ε that is not true.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import noise
from dp_sparse.clipping import Amounts, zero_sums
from dp_sparse.step import forward_backward
from tests.optimizers.observed_steps import (
    CLIP,
    METHODS,
    RATE,
    SIGMA,
    SIZE,
    Run,
    cases,
    data,
    expected_loss,
    run,
)
from tests.training_cases import plan_for

LARGE = 20_000  # values that tell 5 % of σ at five standard errors, and the right σ from itself


def chosen(change: np.ndarray) -> np.ndarray:
    """The values of the rows that changed, in the order of the rows."""
    return change[np.any(change != 0, axis=1)].ravel() if change.ndim > 1 else change.ravel()


def relative_deviation(values: np.ndarray) -> tuple[float, float]:
    """Of values whose deviation must be 1: how far it is from it, and how far it may be."""
    return abs(float(np.sqrt(np.mean(values**2))) - 1), 5 / np.sqrt(2 * values.size)


def strongest_correlation(sequences: list[np.ndarray]) -> float:
    """The largest |z| of any two, over all shifts of one against the other; of one but for 0."""
    length = 2 ** int(np.ceil(np.log2(2 * max(values.size for values in sequences))))
    unit = [values / np.sqrt(np.mean(values**2)) for values in sequences]
    spectra = [np.fft.rfft(values, length) for values in unit]
    ones = {v.size: np.fft.rfft(np.ones(v.size), length) for v in sequences}
    largest = 0.0
    for left, right in itertools.combinations_with_replacement(range(len(sequences)), 2):
        sizes = [sequences[index].size for index in (left, right)]
        overlaps = np.fft.irfft(np.conj(ones[sizes[0]]) * ones[sizes[1]], length)
        products = np.fft.irfft(np.conj(spectra[left]) * spectra[right], length)
        z = np.abs(products) / np.sqrt(np.maximum(overlaps, 1.0))
        z[overlaps < 1000] = 0
        largest = max(largest, float(z[left == right :].max()))
    return largest


def of_lookups(found: Run, sigma: float) -> list[list[np.ndarray]]:
    """Noise of the rows that were looked up, of each table and step, in the orders of a stream.

    Other rows may have theirs from elsewhere, and stand between them.
    """
    first_seen: list[np.ndarray] = []
    by_number: list[np.ndarray] = []
    for step in range(len(found.weights) - 1):
        for table, ids in zip(found.noise(step, sigma)[:2], data()[0].T, strict=True):
            rows, places = np.unique(ids, return_index=True)
            by_number.append(chosen(table[rows]))
            first_seen.append(chosen(table[rows[np.argsort(places)]]))
    return [by_number, first_seen]


def wrong_with(found: Run, sigma: float) -> set[str]:
    """What of σ of every large variable, correlations of any two in any step, and the loss."""
    steps = range(len(found.weights) - 1)
    noises = [[chosen(each) for each in found.noise(step, sigma)] for step in steps]
    large = [values for of_step in noises for values in of_step if values.size >= LARGE]
    assert len(large) == 4 * len(steps)  # two tables, two kernels
    deviations = [relative_deviation(values) for values in large]
    assert max(allowed for _, allowed in deviations) < 0.026
    checks = {
        "deviation": any(off > allowed for off, allowed in deviations),
        "correlation": max(map(strongest_correlation, [large, *of_lookups(found, sigma)])) > 7,
        "loss": abs(found.losses[0] / expected_loss(found.weights[0], data()) - 1) > 1e-4,
    }
    return {name for name, wrong in checks.items() if wrong}


def cases_of_which_one_is_quick() -> list[Any]:
    """Of tables and dense layers, on the way that most take, in each run of the tests."""
    slow = [pytest.param(*case.values, id=case.id, marks=pytest.mark.slow) for case in cases()]
    quick = [case for case in cases() if case.id == "fest-graph"]
    return quick + [case for case in slow if case.id != "fest-graph"]


@pytest.mark.parametrize(("method", "way"), cases_of_which_one_is_quick())
def test_noise(method: str, way: str) -> None:
    assert not wrong_with(run(method, way, steps=2), METHODS[method].sigma)


# ------------------------------------------------------------------- faults that must be noticed

MEAN, MEANS, NORMAL = noise.noisy_mean, noise.noisy_means, noise.normal


def tables_alike(patched: pytest.MonkeyPatch) -> None:
    """The stream of rows begun anew for the second table."""

    def mean(total: tf.Tensor, *given: Any) -> tf.Tensor:
        half = tf.size(total) // 2 if given[-1] == noise.Purpose.ROWS else tf.size(total)
        return tf.concat([MEAN(total[:half], *given), MEAN(total[half:], *given)], 0)

    def normal(draw: noise.Draw, purpose: int, count: tf.Tensor) -> tf.Tensor:
        half = (count + 1) // 2 if purpose == noise.Purpose.ROWS else count
        return tf.tile(NORMAL(draw, purpose, half), [2])[:count]

    patched.setattr(noise, "noisy_mean", mean)
    patched.setattr(noise, "normal", normal)


def rows_too_quiet(patched: pytest.MonkeyPatch) -> None:
    def factor(purpose: int) -> float:
        return 0.9 if purpose == noise.Purpose.ROWS else 1.0

    def mean(total: tf.Tensor, deviation: Any, *given: Any) -> tf.Tensor:
        return MEAN(total, factor(given[-1]) * deviation, *given)

    patched.setattr(noise, "noisy_mean", mean)
    patched.setattr(noise, "normal", lambda d, p, count: factor(p) * NORMAL(d, p, count))


def dense_too_quiet(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(noise, "noisy_means", lambda t, deviation, *g: MEANS(t, 0.95 * deviation, *g))


def dense_alike(patched: pytest.MonkeyPatch) -> None:
    each = lambda totals, *given: [MEANS([total], *given)[0] for total in totals]  # noqa: E731
    patched.setattr(noise, "noisy_means", each)


def rows_as_dense(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(noise, "noisy_mean", lambda t, d, b, draw, _: MEAN(t, d, b, draw, 6))


def steps_alike(patched: pytest.MonkeyPatch) -> None:
    def draw(key: noise.NoiseKey) -> noise.Draw:
        return noise.Draw(key._key + 0, tf.constant(1, tf.int64), key._offset[0])

    patched.setattr(noise.NoiseKey, "next_draw", draw)


def map_for_free(patched: pytest.MonkeyPatch) -> None:
    """σ in place of σ2."""
    sigma = property(lambda optimizer: optimizer.noise_multiplier)
    patched.setattr(dp_sparse.DPAdaFESTOptimizer, "gradient_noise_multiplier", sigma)


def noise_once_a_part(patched: pytest.MonkeyPatch) -> None:
    plus = Amounts.plus

    def noisy(own: Amounts, other: Amounts) -> Amounts:
        both = plus(own, other)
        more = [t + CLIP * SIGMA * tf.random.normal(t.shape, dtype=t.dtype) for t in both.dense]
        return both._replace(dense=more)

    patched.setattr(Amounts, "plus", noisy)


def penalty_in_each_loss(patched: pytest.MonkeyPatch) -> None:
    losses = forward_backward.per_example_losses

    def of(model: Any, *given: Any) -> Any:
        total, of_outputs = losses(model, *given)
        return total + tf.add_n(model.losses), of_outputs

    patched.setattr(forward_backward, "per_example_losses", of)


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


FAULTS = [
    (tables_alike, "correlation", "fest", "graph"),
    (rows_too_quiet, "deviation", "fest", "graph"),
    (dense_alike, "correlation", "dpsgd", "graph"),
    (map_for_free, "deviation", "adafest", "graph"),
    (noise_once_a_part, "deviation", "dpsgd", "microbatches"),
    (penalty_in_each_loss, "loss", "fest", "graph"),
    slow(rows_as_dense, "correlation", "fest", "graph"),
    slow(steps_alike, "correlation", "fest", "graph"),
    slow(dense_too_quiet, "deviation", "dpsgd", "graph"),
    slow(map_for_free, "deviation", "adafest_plus", "graph"),
    *(
        slow(fault, found, method, way)
        for method, way in [
            ("lazy", "graph"),
            ("lazy", "xla"),
            ("adafest", "train_tables"),
            ("adafest", "xla"),
            ("adafest", "mirrored"),
            ("adafest", "microbatches"),
        ]
        for fault, found in ((tables_alike, "correlation"), (rows_too_quiet, "deviation"))
    ),
    *(
        slow(fault, found, "adafest", way)
        for way in ("xla", "mirrored", "microbatches")
        for fault, found in ((map_for_free, "deviation"), (penalty_in_each_loss, "loss"))
    ),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("fault", "found", "method", "way"), FAULTS)
def test_a_fault_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None],
    found: str,
    method: str,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    assert wrong_with(run(method, way, steps=2), METHODS[method].sigma) == {found}


# ------------------------------------------------- noise that comes later, and that of the count


def catching_up() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What two steps without a flush add to each table's rows of the second batch.

    Returns:
        Rows that the first batch did not look up, and all in the order in which they are settled.
    """
    ids, y = data()
    found = run("lazy", "graph", steps=2, epochs=1, batches=[(ids % 500, y), (ids, y)])
    later, settled = [], []
    for index in range(2):
        change = found.weights[1][index].astype(np.float64) - found.weights[0][index]
        change *= SIZE / (RATE * CLIP * SIGMA * np.sqrt(2))
        rows, places = np.unique(ids[:, index], return_index=True)
        later.append(change[rows[rows >= 500]].ravel())
        settled.append(change[rows[np.argsort(places)]].ravel())
    return later, settled


def too_quiet(draw: noise.Draw, purpose: int, count: tf.Tensor) -> tf.Tensor:
    return (0.9 if purpose >= noise.Purpose.DELAYED else 1.0) * NORMAL(draw, purpose, count)


def of_one_stream(draw: noise.Draw, purpose: int, count: tf.Tensor) -> tf.Tensor:
    return NORMAL(draw, min(purpose, noise.Purpose.DELAYED), count)


@pytest.mark.parametrize(
    ("normal", "right"), [(NORMAL, True), (too_quiet, False), (of_one_stream, False)]
)
def test_noise_that_was_delayed(normal: Any, right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is settled before rows are read, which then get that of their own step."""
    monkeypatch.setattr(noise, "normal", normal)
    later, settled = catching_up()
    assert min(values.size for values in later) > LARGE / 2
    deviations = [relative_deviation(values) for values in later]
    enough = all(off < allowed for off, allowed in deviations)
    assert (enough and strongest_correlation(settled) < 7) == right


@pytest.mark.cases(2)
@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (0.95, False), (1.05, False)])
def test_noise_of_the_quantile_count(factor: float, right: bool) -> None:
    """Of 20,000 steps; ½·σ of the count, over B, times the learning rate of C."""
    plan, style = plan_for(10, noise_multiplier=2.0), dp_sparse.QuantileClipping(noise_ratio=1.5)
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan, CLIP, clipping=style)
    optimizer.use_noise_key(tf.constant([123, 456], tf.int64))
    moving = optimizer._moving_clip_norm
    moving._deviation *= factor

    def change_of_c(_: Any) -> tf.Tensor:
        moving._variable.assign(CLIP)
        draw = optimizer._account.noise_key.next_draw()
        moving.move(optimizer.release(zero_sums([], [], []), draw).unclipped)
        return tf.math.log(moving.value() / CLIP)

    steps = tf.function(
        lambda: tf.map_fn(
            change_of_c, tf.range(LARGE), fn_output_signature=tf.float64, parallel_iterations=1
        ),
        autograph=False,
    )
    shares = steps().numpy() / -style.learning_rate - (0.5 - style.target_quantile)
    off, allowed = relative_deviation(shares * 10 / (0.5 * 2.0 * 1.5))
    assert (off < allowed) == right

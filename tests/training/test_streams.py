"""Streams in all ways to train: no example is used more often than passes have begun."""

import dataclasses
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import PrivacyError, distribution
from tests.training_cases import plan_for

N, BATCH = 24, 6
A_PASS = N // BATCH
pytestmark = pytest.mark.usefixtures("no_noise")


def stream_plan(passes: int) -> dp_sparse.PrivacyPlan:
    sampling = dp_sparse.StreamSampling(num_examples=N, batch_size=BATCH, passes=passes)
    return dataclasses.replace(plan_for(N), sampling=sampling)


def counting_model(plan: dp_sparse.PrivacyPlan, **compiled: Any) -> keras.Model:
    """Each use of example i moves row i of its table by -1/BATCH."""
    ids = keras.Input((1,), dtype="int32")
    rows = keras.layers.Embedding(N, 1, embeddings_initializer="zeros")(ids)
    model = keras.Model(ids, keras.layers.Flatten()(rows))
    optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1.0), plan, clip_norm=1.0)
    model.compile(optimizer, lambda y, outputs: keras.ops.mean(outputs, -1), **compiled)
    return model


def terms(model: keras.Model) -> np.ndarray:
    """How often each example was used."""
    return np.rint(-BATCH * np.array(model.weights[0])[:, 0]).astype(int)


def arrays() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(N)[:, np.newaxis], np.zeros(N, np.float32)


def shuffled() -> tf.data.Dataset:
    """Another order each time it is read."""
    return tf.data.Dataset.from_tensor_slices(arrays()).shuffle(N, reshuffle_each_iteration=True)


def assert_paid(model: keras.Model) -> None:
    """As many passes as the statement counts, of which no example had more."""
    passes_begun = -(-int(model.optimizer.steps_spent) // A_PASS)
    assert terms(model).sum() > 0
    assert terms(model).max() <= passes_begun


def fit(model: keras.Model, batches: Any, steps: int | None = None, **arguments: Any) -> None:
    model.fit(batches, steps_per_epoch=steps, verbose=0, **arguments)


def test_one_iterator_over_several_epochs() -> None:
    plan = stream_plan(3)
    model = counting_model(plan)
    fit(model, plan.sampling.batches(shuffled()), steps=2, epochs=6)
    np.testing.assert_array_equal(terms(model), 3)


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore:.*given up:UserWarning")
@pytest.mark.parametrize("taken", [1, 2, 3, 4])
def test_fit_again_with_a_source_that_shuffles(taken: int) -> None:
    plan = stream_plan(3)
    model = counting_model(plan)
    fit(model, plan.sampling.batches(shuffled()), steps=taken)
    fit(model, plan.sampling.batches(shuffled(), first_step=taken))
    assert int(model.optimizer.steps_spent) == plan.sampling.steps
    assert terms(model).sum() == BATCH * (taken + 2 * A_PASS)
    assert_paid(model)


@pytest.mark.filterwarnings("ignore:.*given up:UserWarning")
def test_a_pass_given_up_is_counted_as_spent() -> None:
    plan = stream_plan(3)
    model = counting_model(plan)
    fit(model, plan.sampling.batches(shuffled()), steps=2)
    fit(model, plan.sampling.batches(shuffled(), first_step=2), steps=1)
    assert int(model.optimizer.steps_spent) == A_PASS + 1
    fit(model, plan.sampling.batches(shuffled(), first_step=A_PASS + 1), steps=1)
    assert int(model.optimizer.steps_spent) == 2 * A_PASS + 1
    assert_paid(model)


def test_arrays_go_on_within_a_pass() -> None:
    plan = stream_plan(2)
    model = counting_model(plan)
    for first, steps in [(0, 3), (3, 2), (5, 3)]:
        fit(model, plan.sampling.batches(arrays(), first_step=first), steps=steps)
    np.testing.assert_array_equal(terms(model), 2)
    assert int(model.optimizer.steps_spent) == plan.sampling.steps


def refused(model: keras.Model, batches: tf.data.Dataset, message: str) -> None:
    before = terms(model), int(model.optimizer.steps_spent)
    with pytest.raises(PrivacyError, match=message):
        fit(model, batches)
    np.testing.assert_array_equal(terms(model), before[0])
    assert int(model.optimizer.steps_spent) == before[1]


@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, 2])
def test_one_dataset_read_twice(passes: int) -> None:
    """`take` and `skip` of the same batches: each fit reads the source in an order of its own."""
    plan = stream_plan(passes)
    model = counting_model(plan)
    batches = plan.sampling.batches(shuffled())
    fit(model, batches.take(2))
    goes_on = r"first_step=4\)" if passes == 2 else "no pass is left"
    refused(model, batches.skip(2), f"from a new one.*{goes_on}")
    refused(model, batches, "Expected batch 2 of the stream, got batch 0")
    assert_paid(model)


def test_repeated_batches() -> None:
    plan = stream_plan(2)
    model = counting_model(plan)
    with pytest.raises(PrivacyError, match="Expected batch 2 of the stream, got batch 0"):
        fit(model, plan.sampling.batches(shuffled()).take(2).repeat(), steps=4)
    assert_paid(model)


def test_cached_batches_go_on_in_their_own_order() -> None:
    """A cache keeps the order of one reading, and its marks."""
    plan = stream_plan(1)
    model = counting_model(plan)
    batches = plan.sampling.batches(shuffled()).cache()
    assert len(list(batches)) == A_PASS
    fit(model, batches.take(2))
    fit(model, batches.skip(2))
    np.testing.assert_array_equal(terms(model), 1)


@pytest.mark.slow
def test_one_iterator_by_hand() -> None:
    plan = stream_plan(1)
    model = counting_model(plan)
    first, second = (iter(plan.sampling.batches(shuffled())) for _ in range(2))

    def train(iterator: Any) -> None:
        x, y, weights = next(iterator)
        model.train_on_batch(x, y, weights)

    train(first)
    train(first)
    for message in ("batch 2 of the stream, got batch 0", "got batch 1", "no pass is left"):
        with pytest.raises(PrivacyError, match=message):
            train(second)
    train(first)
    np.testing.assert_array_equal(np.sort(terms(model)), np.repeat([0, 1], [BATCH, 3 * BATCH]))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["dataset, arrays", "arrays, dataset"])
def test_another_kind_of_source_within_a_pass(order: str) -> None:
    plan = stream_plan(2)
    model, sampling = counting_model(plan), plan.sampling
    sources = {"dataset": shuffled(), "arrays": arrays()}
    first, second = (sources[name] for name in order.split(", "))
    fit(model, sampling.batches(first), steps=2)
    if order == "dataset, arrays":
        refused(model, sampling.batches(second, first_step=2), r"from a new one.*first_step=4\)")
    else:
        refused(model, sampling.batches(second).skip(2), r"from a new one.*first_step=4\)")
    fit(model, sampling.batches(second, first_step=4))
    np.testing.assert_array_less(terms(model), 3)
    assert int(model.optimizer.steps_spent) == sampling.steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dataset", "arrays"])
def test_a_new_process(kind: str, tmp_path: pathlib.Path, new_process: Any) -> None:
    """Which order the pass had is saved with the steps."""
    plan = stream_plan(2)
    model, sampling = counting_model(plan), plan.sampling
    fit(model, sampling.batches(shuffled() if kind == "dataset" else arrays()), steps=2)
    model.save_weights(tmp_path / "run.weights.h5")
    new_process()
    again = counting_model(plan)
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "run.weights.h5")
    refused(again, sampling.batches(shuffled()).skip(2), "from a new one")
    if kind == "arrays":
        fit(again, sampling.batches(arrays(), first_step=2))
        np.testing.assert_array_equal(terms(again), 2)
        return
    refused(again, sampling.batches(arrays(), first_step=2), "from a new one")
    with pytest.warns(UserWarning, match="steps 2 to 3 of 8 are given up"):
        fit(again, sampling.batches(shuffled(), first_step=2))
    assert terms(again).sum() == BATCH * (2 + A_PASS)
    assert_paid(again)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dataset", "arrays"])
def test_train_twice(kind: str) -> None:
    plan = stream_plan(2)
    model = counting_model(plan)
    source = shuffled() if kind == "dataset" else arrays()
    distribution.train(model, source, steps_per_epoch=2)
    if kind == "arrays":
        distribution.train(model, source)
        np.testing.assert_array_equal(terms(model), 2)
        return
    with pytest.warns(UserWarning, match="steps 2 to 3 of 8 are given up"):
        distribution.train(model, source)
    assert int(model.optimizer.steps_spent) == plan.sampling.steps
    assert terms(model).sum() == BATCH * (2 + A_PASS)
    assert_paid(model)


def test_train_twice_in_the_last_pass() -> None:
    plan = stream_plan(1)
    model = counting_model(plan)
    distribution.train(model, shuffled(), steps_per_epoch=2)
    with pytest.raises(PrivacyError, match="no pass is left"):
        distribution.train(model, shuffled())
    assert_paid(model)


def test_train_for_as_many_steps_as_are_left() -> None:
    """Those of a pass given up are not among them."""
    plan = stream_plan(2)
    model = counting_model(plan)
    distribution.train(model, shuffled(), steps_per_epoch=2)
    with (
        pytest.warns(UserWarning, match="given up"),
        pytest.raises(ValueError, match="Expected at most 4 steps"),
    ):
        distribution.train(model, shuffled(), steps_per_epoch=5)


@pytest.mark.slow
def test_batches_left_out_are_refused() -> None:
    """Also whole passes: a filter may look at what they hold."""
    plan = stream_plan(3)
    model = counting_model(plan)
    fit(model, plan.sampling.batches(shuffled()), steps=1)
    late = plan.sampling.batches(shuffled(), first_step=2 * A_PASS)
    refused(model, late, "Expected batch 1 of the stream, got batch 8")
    refused(model, plan.sampling.batches(arrays(), first_step=6), "got batch 6")


@pytest.mark.slow
def test_under_xla_and_several_steps_an_execution() -> None:
    plan = stream_plan(2)
    model = counting_model(plan, jit_compile=True, steps_per_execution=2)
    fit(model, plan.sampling.batches(shuffled()), steps=2)
    refused(model, plan.sampling.batches(shuffled()).skip(2), "from a new one")
    with pytest.warns(UserWarning, match="given up"):
        fit(model, plan.sampling.batches(shuffled(), first_step=2))
    assert terms(model).sum() == BATCH * (2 + A_PASS)
    assert_paid(model)

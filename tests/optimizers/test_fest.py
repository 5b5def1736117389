"""DP-FEST and DP-AdaFEST+: rows selected beforehand, exact steps on them, and what is refused."""

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
from scipy import stats

import dp_sparse
from tests.reference import clipping as brute
from tests.reference import step as numpy_step
from tests.training_cases import (
    BINARY,
    VOCABULARIES,
    click_model,
    clicks,
    fit_on,
    marked_dataset,
    plan_for,
    weights_of,
)


def tables_of(model: keras.Model) -> dict[str, int]:
    layers = [layer for layer in model.layers if isinstance(layer, keras.layers.Embedding)]
    return {layer.name: layer.input_dim for layer in layers}


def public_rows(model: keras.Model, *row_ids: Any) -> dp_sparse.SelectedRows:
    tables = tables_of(model)
    return dp_sparse.SelectedRows.public(dict(zip(tables, row_ids, strict=True)), tables)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("row_ids", [([1, 4, 9], [0, 6]), ([], [3]), ([], []), (range(11), [2])])
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_a_noise_free_step_is_clip_of_the_selected_rows(
    row_ids: Any, microbatch_size: int | None
) -> None:
    """Rows that were not selected are zeroed before clipping."""
    x, y = clicks(8, VOCABULARIES)
    model, plan = click_model(VOCABULARIES), plan_for(8)
    rows = public_rows(model, *row_ids)
    gradients = brute.example_gradients(model, brute.keras_loss(BINARY), x, y[:, None])
    for example in gradients:
        for table, selected in zip(example, row_ids, strict=False):
            table[np.setdiff1d(np.arange(len(table)), selected).astype(int)] = 0
    clip_norm = float(np.median(brute.norms(gradients)))
    expected = weights_of(model)
    mean = numpy_step.dpsgd_mean_gradient(gradients, clip_norm, 8, np.ones(8))
    numpy_step.SGD(0.5).apply(expected, mean)
    optimizer = dp_sparse.DPFESTOptimizer(
        keras.optimizers.SGD(0.5), plan, clip_norm, rows, microbatch_size=microbatch_size
    )
    fit_on(model, optimizer, plan, x, y)
    for found, wanted in zip(weights_of(model), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_every_selected_row_is_noised_and_no_other() -> None:
    """On a batch of padding alone: the noise has the plan's deviation, and companions reject."""
    model = click_model((400, 300), width=16)
    plan = plan_for(100, expected_batch_size=10, capacity=4, noise_multiplier=1.5)
    selected = np.arange(0, 400, 2), np.arange(150)
    rows = public_rows(model, *selected)
    optimizer = dp_sparse.DPFESTOptimizer(keras.optimizers.SGD(1.0), plan, 0.7, rows)
    before = weights_of(model)
    fit_on(model, optimizer, plan, *clicks(4, (400, 300)), present=[0, 0, 0, 0])
    deviation = 0.7 * 1.5 / 10
    for new, old, chosen in zip(weights_of(model), before, selected, strict=False):
        moved = np.any(new != old, axis=1)
        np.testing.assert_array_equal(np.flatnonzero(moved), chosen)
        noise = (new - old)[chosen].ravel()
        assert stats.kstest(noise, stats.norm(0, deviation).cdf).pvalue > 1e-5
        for wrong in (2 / 3, 3 / 2):
            assert stats.kstest(noise, stats.norm(0, wrong * deviation).cdf).pvalue < 1e-9


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("threshold", [0.3, 0.8, 1.2])
def test_adafest_plus_is_adafest_on_the_selected_rows(threshold: float) -> None:
    """Rows that were not selected count neither in the map nor in the clip."""
    x, y = clicks(9, VOCABULARIES, seed=3)
    model, plan = click_model(VOCABULARIES), plan_for(9)
    chosen = [1, 2, 5, 10], [0, 3]
    gradients = brute.example_gradients(model, brute.keras_loss(BINARY), x, y[:, None])
    lookups = [[[i for i in [row] if i in c] for row, c in zip(e, chosen, strict=True)] for e in x]
    settings = numpy_step.AdaFEST(0.1, 1.0, threshold, 9)
    mean, survivors = numpy_step.adafest_mean_gradient(
        settings, gradients, lookups, [0, 1], np.ones(9)
    )
    expected = weights_of(model)
    numpy_step.SGD(0.5).apply(expected, mean)
    rows = public_rows(model, *chosen)
    optimizer = dp_sparse.DPAdaFESTOptimizer(
        keras.optimizers.SGD(0.5), plan, 0.1, threshold=threshold, rows=rows
    )
    fit_on(model, optimizer, plan, x, y)
    for found, wanted in zip(weights_of(model), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    assert optimizer.diagnostics.rows.numpy().tolist() == [int(s.sum()) for s in survivors]


def test_adafest_plus_has_false_rows_among_the_selected_only() -> None:
    model = click_model((4000, 3000), width=2)
    plan = plan_for(100, expected_batch_size=10, capacity=4, noise_multiplier=1.0)
    selected = np.arange(0, 4000, 4), np.arange(7, 3000, 3)
    optimizer = dp_sparse.DPAdaFESTOptimizer(
        "sgd", plan, 1.0, expected_false_rows=50, rows=public_rows(model, *selected)
    )
    model.compile(optimizer=optimizer, loss=BINARY)
    x, y = clicks(4, (4000, 3000))
    before = weights_of(model)
    model.fit(marked_dataset(plan, x, y, present=[0, 0, 0, 0], steps=40), verbose=0)
    for new, old, chosen in zip(weights_of(model), before, selected, strict=False):
        touched = np.flatnonzero(np.any(new != old, axis=1))
        assert len(touched) > 100
        assert np.all(np.isin(touched, chosen))
    drawn = optimizer.diagnostics.rows.numpy().sum()
    assert stats.binomtest(int(drawn), 40 * 1998, 50 / 1998).pvalue > 1e-6


OPTIMIZERS: dict[str, Any] = {
    "fest": dp_sparse.DPFESTOptimizer,
    "adafest_plus": lambda optimizer, plan, clip_norm, rows, **fields: dp_sparse.DPAdaFESTOptimizer(
        optimizer, plan, clip_norm, rows=rows, **fields
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_saved_with_its_rows_and_trains_on(kind: str, tmp_path: pathlib.Path) -> None:
    x, y = clicks(40, VOCABULARIES)
    model, plan = click_model(VOCABULARIES), plan_for(40, steps=4)
    rows = public_rows(model, [1, 5], [2])
    model.compile(optimizer=OPTIMIZERS[kind]("adagrad", plan, 1.0, rows), loss=BINARY)
    model.fit(plan.sampling.batches((x, y)), steps_per_epoch=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert {name: ids.tolist() for name, ids in loaded.optimizer.rows.row_ids.items()} == {
        name: ids.tolist() for name, ids in rows.row_ids.items()
    }
    before = weights_of(loaded)
    loaded.fit(plan.sampling.batches((x, y)), steps_per_epoch=2, verbose=0)
    table, other = (new != old for new, old in zip(weights_of(loaded)[:2], before, strict=False))
    assert set(np.flatnonzero(np.any(table, axis=1))) <= {1, 5}
    assert set(np.flatnonzero(np.any(other, axis=1))) <= {2}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_rows_that_the_plan_does_not_pay_for_are_refused(kind: str) -> None:
    model = click_model(VOCABULARIES)
    x, _ = clicks(40, VOCABULARIES)
    by_table = dict(zip(tables_of(model), x.T, strict=True))
    source = dp_sparse.GaussianTopK(noise_multiplier=5.0)
    rows = dp_sparse.select_top_k((by_table, x[:, 0]), tables_of(model), 4, source, progress=False)
    sampling = dp_sparse.StreamSampling(num_examples=40, batch_size=10)
    unpaid = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-3), sampling)
    with pytest.raises(dp_sparse.PrivacyError, match=r"releases=\(rows\.release,\)"):
        OPTIMIZERS[kind]("sgd", unpaid.calibrate(), 1.0, rows)
    same_price = dp_sparse.Release("histogram of cities", rows.event)
    wrong = dp_sparse.PrivacyPlan(unpaid.budget, sampling, releases=(same_price,)).calibrate()
    with pytest.raises(dp_sparse.PrivacyError, match="does not pay for rows"):
        OPTIMIZERS[kind]("sgd", wrong, 1.0, rows)
    paid = dp_sparse.PrivacyPlan(unpaid.budget, sampling, releases=(rows.release,)).calibrate()
    assert OPTIMIZERS[kind]("sgd", paid, 1.0, rows).rows is rows
    assert paid.noise_multiplier > unpaid.calibrate().noise_multiplier


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_rows_for_another_model_are_refused(kind: str) -> None:
    model, plan = click_model(VOCABULARIES), plan_for(8)
    other = dp_sparse.SelectedRows.public({"words": [1, 2]}, {"words": 11})
    model.compile(optimizer=OPTIMIZERS[kind]("sgd", plan, 1.0, other), loss=BINARY)
    with pytest.raises(ValueError, match=r"embedding tables .*embedding.*got rows for .*words"):
        model.fit(marked_dataset(plan, *clicks(8, VOCABULARIES)), verbose=0)


@pytest.mark.parametrize("bad", [None, [1, 2], {"a": [1]}])
def test_what_are_no_rows(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"Expected rows from dp_sparse\.select_top_k"):
        dp_sparse.DPFESTOptimizer("sgd", plan_for(8), 1.0, bad)

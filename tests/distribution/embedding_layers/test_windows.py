"""Windows of selection where rows are chosen in the input pipeline, ahead of their steps."""

import dataclasses
import itertools
import secrets
from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from dp_sparse import distribution
from dp_sparse.distribution import epochs
from dp_sparse.distribution.embedding_layers.host_step import HostStep
from dp_sparse.optimizers import window as windows
from tests.distribution.embedding_layers import two_tables
from tests.reference import adafest
from tests.reference import windowed_selection as reference
from tests.training_cases import plan_for

BATCH, THRESHOLD, LONGEST = 5, 0.75, 4
PATHS = ("shared", "bag")  # in the order of their first feature
OFFSETS = np.cumsum([0, *(two_tables.ROWS[path] for path in PATHS)])


def parts(passes: int = 3, **settings: Any) -> tuple[Any, distribution.PrivateTables, Any]:
    """A model whose batches are the source's rows in their order; all noise is tiny."""
    sampling = dp_sparse.StreamSampling(
        num_examples=two_tables.SIZE, batch_size=BATCH, passes=passes
    )
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(3.0, 1e-3), sampling)
    plan = dataclasses.replace(plan, noise_multiplier=1e-3, plan_id=secrets.token_hex(16))
    settings = {"threshold": THRESHOLD, "window": LONGEST, **settings}
    optimizer = dp_sparse.DPAdaFESTOptimizer(keras.optimizers.SGD(0.5), plan, 1.0, **settings)
    tables = two_tables.private_tables(optimizer)
    layer = two_tables.E.TPUEmbeddingForServing(tables.feature_config, None)
    return two_tables.compiled_model(optimizer), tables, layer


def changed_rows(
    model: keras.Model, tables: distribution.PrivateTables, layer: Any, steps: int
) -> list[list[int]]:
    """The rows that each of the next steps changed, numbered through over the tables."""

    def values() -> np.ndarray:
        by_name = {table.name: value.numpy() for table, value in layer.embedding_tables.items()}
        return np.concatenate([by_name[path] for path in PATHS])

    seen = [values()]
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_: seen.append(values()))
    distribution.train_tables(
        model, tables, layer, two_tables.data(), steps_per_epoch=steps, callbacks=[note]
    )
    return [np.flatnonzero(np.any(a != b, 1)).tolist() for a, b in itertools.pairwise(seen)]


def map_of(first: int) -> np.ndarray:
    """The clipped map of the batch that begins with this row, dense."""
    x, _ = two_tables.data()
    examples = [
        [[x["left"][i], x["right"][i]], x["words"][i][used[i]].tolist()]
        for used in ((x["words"] >= 0) & (x["word_weights"] > 0),)
        for i in range(first, first + BATCH)
    ]
    return adafest.contribution_map(examples, [two_tables.ROWS[path] for path in PATHS], 1.0)


@pytest.mark.slow
def test_steps_train_survivors_and_a_later_call_goes_on_with_them() -> None:
    """Six steps, whose windows have 1, 2 and 3 of 4 steps; then five, of a whole one and a new."""
    model, tables, layer = parts()
    found = [changed_rows(model, tables, layer, steps) for steps in (6, 5)]
    maps = [map_of(step * BATCH % two_tables.SIZE) for step in range(11)]
    nothing, per_pass = np.zeros(OFFSETS[-1]), two_tables.SIZE // BATCH
    first = reference.rows_of_steps(
        maps[:6], LONGEST, THRESHOLD, 1e-9, lambda _: nothing, per_pass
    )[:-1]
    scale = np.sqrt(reference.rounds(6, LONGEST, per_pass))
    whole = np.sum(maps[6:10], axis=0) >= scale * THRESHOLD
    second = [first[-1]] * 4 + [whole]
    assert found == [[np.flatnonzero(rows).tolist() for rows in each] for each in (first, second)]
    assert len({*map(tuple, itertools.chain(*found))}) > 3
    optimizer = model.optimizer
    kept = np.concatenate([own + o for own, o in zip(optimizer.survivors, OFFSETS, strict=False)])
    assert kept.tolist() == np.flatnonzero(whole).tolist()
    assert optimizer.windows[:, 0].tolist() == [1, 2, 4]
    assert optimizer.windows[:, 1].tolist() == [np.sum(first[1]), np.sum(first[3]), np.sum(whole)]


@pytest.mark.parametrize(("stream", "rounds"), [(False, 3), (True, 2)])
def test_rounds_are_counted_by_the_steps_of_the_run(stream: bool, rounds: int) -> None:
    """From step 3 on: three batches of a stream with four steps a pass touch two passes."""
    model, tables, _ = parts(window=8)
    if not stream:
        plan = plan_for(two_tables.SIZE, steps=20)
        optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0, window=8)
        tables = two_tables.private_tables(optimizer)
        model = two_tables.compiled_model(optimizer)
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    window = optimizer.new_window([table.capacity for table in tables.tables])
    window.start([np.zeros(0, np.int64)] * 2, OFFSETS, ended=5)  # of 8 steps from now on
    sampling = optimizer.plan.sampling
    batches = sampling.batches_of(
        two_tables.data(), epochs.whole_batch(sampling, 3), first_step=3, class_weight=None
    )
    for _ in batches.map(HostStep(tables, 3, window)).take(3):
        pass
    assert window._progress.numpy()[[windows._STEPS, windows._ROUNDS]].tolist() == [3, rounds]


@pytest.mark.slow
def test_more_survivors_than_there_is_room_for() -> None:
    """All 64 rows of eight batches survive: 32 of them stay, 8 lookups and 24 false rows."""
    ids, labels = np.arange(64), np.ones(64, np.float32)
    sampling = dp_sparse.StreamSampling(num_examples=64, batch_size=8, passes=3)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(3.0, 1e-3), sampling)
    plan = dataclasses.replace(plan, noise_multiplier=1e-3, plan_id=secrets.token_hex(16))
    optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0, threshold=0.3, window=8)
    table = two_tables.E.TableConfig(64, 2, name="items")
    config = {"item": two_tables.E.FeatureConfig(table, name="item")}
    tables = distribution.PrivateTables(config, optimizer)
    layer = two_tables.E.TPUEmbeddingForServing(tables.feature_config, None)
    item = keras.Input((2,), name="item")
    model = keras.Model({"item": item}, keras.layers.Dense(1)(item))
    model.compile(optimizer, "mse")
    distribution.train_tables(model, tables, layer, ({"item": ids}, labels))
    assert optimizer.windows[:3].tolist() == [[1, 8, 0], [2, 16, 0], [4, 32, 0]]
    assert optimizer.windows[3, :2].tolist() == [8, tables.tables[0].capacity] == [8, 32]
    (rows,) = optimizer.survivors
    assert len(rows) == len({*rows.tolist()}) == 32 and np.all(np.diff(rows) > 0)


def test_there_is_room_for_first_rows() -> None:
    """Of other rows that a window begins with, those that fit are drawn at random."""
    item = two_tables.E.FeatureConfig(two_tables.E.TableConfig(500, 2, name="items"), name="item")
    first = dp_sparse.SelectedRows.public({"items": range(300)}, {"items": 500})
    plan = plan_for(two_tables.SIZE, steps=20)
    optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0, window=8, first_rows=first)
    (table,) = distribution.PrivateTables({"item": item}, optimizer).tables
    assert 300 <= table.capacity < 320
    looked_up = keras.Input((2,), name="item")
    model = keras.Model({"item": looked_up}, keras.layers.Dense(1)(looked_up))
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    (rows,) = optimizer.new_window([table.capacity]).survivors(np.array([0, 500]))
    assert rows.tolist() == list(range(300))
    (fewer,) = optimizer.new_window([100]).survivors(np.array([0, 500]))
    assert len({*fewer.tolist()}) == 100 and np.all(np.diff(fewer) > 0) and fewer.max() < 300


def test_first_rows_train_until_the_first_window_ends() -> None:
    """A table that they leave out has none. A call as short as a window begins it anew."""
    first = dp_sparse.SelectedRows.public(
        {"shared": [3, 39]}, {"shared": two_tables.ROWS["shared"]}
    )
    model, tables, layer = parts(threshold=1e9, first_rows=first)
    assert changed_rows(model, tables, layer, 3) == [[3, 39], [], []]
    assert model.optimizer.windows_ended == 1
    with pytest.warns(UserWarning, match="ended no window: the next one has 2 steps"):
        assert changed_rows(model, tables, layer, 2) == [[], []]

"""DPAdaFESTOptimizer(window=...): which rows a step trains, in every way of training."""

import contextlib
import itertools
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse.sampling.batch import new_nonce
from tests.reference import adafest
from tests.reference import windowed_selection as reference
from tests.replicas import strategy_of
from tests.training_cases import VOCABULARIES, click_model, marked, marked_dataset, plan_for

STEPS, SIZE, THRESHOLD = 9, 8, 1.1
OFFSETS = np.array([0, *np.cumsum(VOCABULARIES)])
IDS = np.random.default_rng(0).integers(0, 4, [STEPS, SIZE, 2])


def batches(plan: dp_sparse.PrivacyPlan, ids: np.ndarray = IDS) -> tf.data.Dataset:
    """These batches, under markers of their own; labels are 1."""
    nonce = new_nonce(None)
    made = [
        marked(plan, own.astype(np.int32), np.ones(len(own), np.float32), index=i, nonce=nonce)
        for i, own in enumerate(ids)
    ]
    stacked = tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *made)
    return tf.data.Dataset.from_tensor_slices(stacked)


def compiled(
    scope: Any = contextlib.nullcontext, jit_compile: bool = False, **settings: Any
) -> tuple[keras.Model, dp_sparse.PrivacyPlan]:
    plan = plan_for(SIZE)
    with scope():
        model = click_model()
        settings = {"threshold": THRESHOLD, **settings}
        optimizer = dp_sparse.DPAdaFESTOptimizer(keras.optimizers.SGD(1.0), plan, 1.0, **settings)
        model.compile(optimizer, "binary_crossentropy", jit_compile=jit_compile)
    return model, plan


def tables_of(model: keras.Model) -> np.ndarray:
    return np.concatenate([np.array(table) for table in model.optimizer.tables])


def trained(model: keras.Model, dataset: tf.data.Dataset, steps: int = STEPS) -> list[list[int]]:
    """The rows that each step changed, numbered through over the tables."""
    values = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if not values:
                values.append([np.array(layer.embeddings) for layer in layers])

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            values.append([np.array(layer.embeddings) for layer in layers])

    layers = [each for each in model.layers if isinstance(each, keras.layers.Embedding)]
    model.fit(dataset, steps_per_epoch=1, epochs=steps, callbacks=[Watch()], verbose=0)
    whole = [np.concatenate(each) for each in values]
    return [np.flatnonzero(np.any(a != b, axis=1)).tolist() for a, b in itertools.pairwise(whole)]


def expected(
    longest: int, ids: np.ndarray = IDS, first: np.ndarray | None = None, among: Any = None
) -> list[list[int]]:
    """The same by dense vectors, without noise, and the rows of a step more."""
    rows = int(OFFSETS[-1])
    kept = np.ones(rows, bool) if among is None else among
    maps = []
    for batch in ids:
        examples = [
            [[i] if kept[o + i] else [] for i, o in zip(ex, OFFSETS, strict=False)] for ex in batch
        ]
        maps.append(adafest.contribution_map(examples, VOCABULARIES, 1.0))
    zeros = np.zeros(rows)
    chosen = reference.rows_of_steps(maps, longest, THRESHOLD, 1e-6, lambda _: zeros, first=first)
    return [np.flatnonzero(each & kept).tolist() for each in chosen]


WAYS: dict[str, dict[str, Any]] = {
    "graph": {},
    "micro-batches": {"microbatch_size": 3},
    "XLA": {"jit_compile": True},
    "replicas": {"scope": lambda: strategy_of(2).scope()},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_trains_the_survivors_of_the_window_before(way: str) -> None:
    model, plan = compiled(window=4, **WAYS[way])
    found = trained(model, batches(plan))
    assert found == expected(4)[:-1]
    assert len({*map(tuple, found)}) > 2


@pytest.mark.parametrize("way", ["graph", "XLA", "replicas"])
def test_rows_restrict_what_survives_and_first_rows_begin(way: str) -> None:
    plan = plan_for(SIZE)
    with WAYS[way].get("scope", contextlib.nullcontext)():
        model = click_model()
        names = [each.name for each in model.layers if isinstance(each, keras.layers.Embedding)]
        sizes = dict(zip(names, VOCABULARIES, strict=True))
        some = {names[0]: [0, 2, 9], names[1]: [1, 3]}
        rows = dp_sparse.SelectedRows.public(some, sizes)
        first = dp_sparse.SelectedRows.public({names[0]: [2, 5], names[1]: [3]}, sizes)
        chosen = {"threshold": THRESHOLD, "window": 4, "rows": rows, "first_rows": first}
        optimizer = dp_sparse.DPAdaFESTOptimizer(keras.optimizers.SGD(1.0), plan, 1.0, **chosen)
        model.compile(optimizer, "binary_crossentropy", jit_compile=way == "XLA")
    among, begin = np.zeros(18, bool), np.zeros(18, bool)
    among[[0, 2, 9, 12, 14]], begin[[2, 14]] = True, True
    found, right = trained(model, batches(plan)), expected(4, first=begin, among=among)
    moved = [rows for rows in right[0] if rows in {2, 14}]
    assert found == [moved, *right[1:-1]]
    survivors = [own + offset for own, offset in zip(optimizer.survivors, OFFSETS, strict=False)]
    assert np.concatenate(survivors).tolist() == right[-1]


def test_a_resumed_run_keeps_survivors_and_begins_a_new_window(tmp_path: Path) -> None:
    """The file holds the survivors, and nothing of the maps since then."""
    model, plan = compiled(window=4)
    assert trained(model, batches(plan), steps=6) == expected(4)[:6]
    path = tmp_path / "run.weights.h5"
    model.save_weights(path)
    before = [own.tolist() for own in model.optimizer.survivors]
    with h5py.File(path) as file:
        stored = {name: np.array(values) for name, values in file["optimizer/vars"].items()}
    assert stored["survivors"].tolist() == [row for own in before for row in own]
    assert stored["sizes_of_survivors"].tolist() == [2, *map(len, before)]
    assert len(stored) == len(model.optimizer.variables) + 2
    saved = tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
    lists = [name for name, shape in tf.train.list_variables(saved) if len(shape) == 1]
    assert not [name for name in lists if "window" in name or "survivors" in name]

    model.load_weights(path)
    rest = np.concatenate([IDS[6:], IDS])
    found = trained(model, batches(plan, rest), steps=6)
    maps = expected(4, np.concatenate([IDS[:3], rest]))  # step 3 begins the third window: 4 steps
    assert found == [expected(4)[3]] * 4 + [maps[7]] * 2


def test_a_checkpoint_of_tensorflow_has_no_survivors(tmp_path: Path) -> None:
    """Windows begin as at first: with one step, and no rows."""
    model, plan = compiled(window=4)
    trained(model, batches(plan), steps=6)
    saved = tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
    other, _ = compiled(window=4)
    other.optimizer.build(other.trainable_variables)
    tf.train.Checkpoint(model=other).restore(saved).assert_existing_objects_matched()
    assert int(other.optimizer.steps_spent) == 6 and other.optimizer.windows_ended == 0
    found = trained(other, batches(plan, IDS[6:]), steps=3)
    assert found == expected(4, IDS[6:])[:3]


def test_a_window_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    for before, after in ((4, 2), (4, 1), (1, 4)):
        model, plan = compiled(window=before)
        trained(model, batches(plan), steps=3)
        model.save_weights(tmp_path / "run.weights.h5")
        found = model.optimizer.survivors
        optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0, threshold=1.1, window=after)
        model.compile(optimizer, "binary_crossentropy")
        optimizer.build(model.trainable_variables)
        model.load_weights(tmp_path / "run.weights.h5")
        if before > 1 and after > 1:
            for one, two in zip(found, optimizer.survivors, strict=True):
                np.testing.assert_array_equal(one, two)
        trained(model, batches(plan, IDS[3:]), steps=2)


def test_the_next_optimizer_of_a_model_takes_the_survivors() -> None:
    """As from one period of a stream to the next; without the maps of the window that was open."""
    model, plan = compiled(window=4)
    trained(model, batches(plan), steps=5)
    previous = model.optimizer
    optimizer = dp_sparse.DPAdaFESTOptimizer(
        keras.optimizers.SGD(1.0), plan_for(SIZE), 1.0, threshold=THRESHOLD, window=2
    )
    model.compile(optimizer, "binary_crossentropy")
    optimizer.take_slots(previous)
    found = trained(model, batches(optimizer.plan, IDS[5:]), steps=4)
    assert found[:2] == [expected(4)[3]] * 2
    assert found[2:] == [expected(2, np.concatenate([IDS[:1], IDS[5:]]))[3]] * 2


def test_a_refused_step_is_not_in_the_sum() -> None:
    """Its rows are chosen before the last part of its batch shows a bad label."""
    plan = plan_for(SIZE)
    ids = keras.Input((1,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(11, 3)(ids))
    model = keras.Model(ids, keras.layers.Dense(3, "softmax")(rows))
    optimizer = dp_sparse.DPAdaFESTOptimizer(
        "sgd", plan, 1.0, threshold=THRESHOLD, window=4, microbatch_size=1
    )
    model.compile(optimizer, "sparse_categorical_crossentropy")

    def batch(last_label: int) -> tf.data.Dataset:
        labels = np.array([0] * (SIZE - 1) + [last_label], np.int32)
        return marked_dataset(plan, IDS[0, :, :1].astype(np.int32), labels)

    for _ in range(4):
        model.fit(batch(1), verbose=0)
    before = optimizer._window._progress.numpy()
    assert before[0] == 1
    with pytest.raises(dp_sparse.BadExampleError):
        model.fit(batch(7), verbose=0)
    np.testing.assert_array_equal(optimizer._window._progress.numpy(), before)


def test_a_schedule_cannot_read_the_sum() -> None:
    sums = []

    class Reads(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            return 0.1 * tf.cast(tf.reduce_sum(sums[0].read_value()), tf.float32)

        def get_config(self) -> dict[str, Any]:
            return {}

    plan, model = plan_for(SIZE), click_model()
    optimizer = dp_sparse.DPAdaFESTOptimizer(
        keras.optimizers.SGD(Reads()), plan, 1.0, threshold=THRESHOLD, window=4
    )
    sums.append(optimizer._window._new_units)
    model.compile(optimizer, "binary_crossentropy")
    with pytest.raises(dp_sparse.PrivacyError, match="a statistic of training without noise"):
        trained(model, batches(plan), steps=1)


def test_settings_survive_a_config() -> None:
    sizes = dict(zip("ab", VOCABULARIES, strict=True))
    first = dp_sparse.SelectedRows.public({"a": [1], "b": []}, sizes)
    own = dp_sparse.DPAdaFESTOptimizer("sgd", plan_for(8), 1.0, window=7, first_rows=first)
    config = own.get_config()
    again = dp_sparse.DPAdaFESTOptimizer.from_config(config)
    assert again.window == 7
    assert again.first_rows.row_ids["a"].tolist() == [1]
    del config["window"], config["first_rows"]  # as they were before there were windows
    assert dp_sparse.DPAdaFESTOptimizer.from_config(config).window == 1


@pytest.mark.parametrize("bad", [0, -3, 1.5, "4", None])
def test_a_window_is_a_positive_integer(bad: Any) -> None:
    with pytest.raises(ValueError, match="window"):
        dp_sparse.DPAdaFESTOptimizer("sgd", plan_for(8), 1.0, window=bad)


def test_a_window_ends_within_the_run() -> None:
    with pytest.raises(ValueError, match="Expected window <= 100, the steps of the run, got"):
        dp_sparse.DPAdaFESTOptimizer("sgd", plan_for(8), 1.0, window=101)


def test_first_rows_belong_to_a_window() -> None:
    first = dp_sparse.SelectedRows.public({"a": [1]}, {"a": 4})
    with pytest.raises(ValueError, match="Expected first_rows with a window, got window=1"):
        dp_sparse.DPAdaFESTOptimizer("sgd", plan_for(8), 1.0, first_rows=first)


def test_rows_that_were_checked_stay() -> None:
    own = dp_sparse.DPAdaFESTOptimizer("sgd", plan_for(8), 1.0, window=4)
    for name in ("rows", "first_rows"):
        with pytest.raises(AttributeError):
            setattr(own, name, dp_sparse.SelectedRows.public({"a": [1]}, {"a": 4}))
    with pytest.raises(ValueError, match=r"Expected first_rows from .* got list\.$"):
        dp_sparse.DPAdaFESTOptimizer("sgd", plan_for(8), 1.0, window=4, first_rows=[1])


def test_first_rows_are_paid_for() -> None:
    examples = {"a": np.arange(8) % 4}, np.zeros(8)
    source = dp_sparse.GaussianTopK(noise_multiplier=5.0)
    rows = dp_sparse.select_top_k(examples, {"a": 4}, 2, source, progress=False)
    with pytest.raises(dp_sparse.PrivacyError, match="does not pay for first_rows"):
        dp_sparse.DPAdaFESTOptimizer("sgd", plan_for(8), 1.0, window=4, first_rows=rows)

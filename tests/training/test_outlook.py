"""`check_model` says of a compiled model what noise and settings let expect."""

import dataclasses
import secrets
from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from dp_sparse import PoissonSampling, PrivacyBudget, PrivacyPlan

SGD, ADAM, ADAGRAD = (getattr(keras.optimizers, name) for name in ("SGD", "Adam", "Adagrad"))


def plan(batch: float = 2048, steps: int = 1000, sigma: float = 1.0) -> PrivacyPlan:
    sampling = PoissonSampling(1_000_000, batch, steps)
    given = PrivacyPlan(PrivacyBudget(1.0, 1e-6), sampling, noise_multiplier=sigma)
    return dataclasses.replace(given, plan_id=secrets.token_hex(16))


def model(rows: int = 1000) -> keras.Model:
    keras.utils.set_random_seed(0)
    ids = keras.Input((), dtype="int32")
    values = keras.layers.Embedding(rows, 8, name="users")(ids)
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Dense(16)(values)))


def said(
    optimizer: keras.optimizers.Optimizer,
    given: PrivacyPlan,
    name: str = "DPSGDOptimizer",
    rows: int = 1000,
    clip_norm: float = 1.0,
    **options: Any,
) -> str:
    trained = model(rows)
    private = getattr(dp_sparse, name)(optimizer, given, clip_norm=clip_norm, **options)
    trained.compile(private, "mse")
    found = dp_sparse.check_model(trained)
    assert found.ok and all(f"! {line}" in str(found) for line in found.warnings)
    return "\n".join(found.warnings)


def test_nothing_to_say_of_settings_that_suit() -> None:
    assert said(ADAM(0.003), plan()) == ""
    assert said(ADAGRAD(0.05), plan(8192), "DPAdaFESTOptimizer", noise_ratio=1.0) == ""


def test_too_much_noise_for_the_model() -> None:
    assert "will drown in the noise" in said(ADAM(0.003), plan(sigma=2000.0))
    assert "drown" in said(SGD(0.01), plan(sigma=2000.0), "LazyDPSGDOptimizer")


def test_small_batches() -> None:
    assert "Batches of 64 are small" in said(ADAM(0.003), plan(64, 20_000))


def test_tables_that_will_hardly_train() -> None:
    text = said(ADAGRAD(0.05), plan(2048, sigma=50.0), "DPAdaFESTOptimizer", rows=100_000)
    assert "Of users fewer than 20% of the lookups will train" in text
    threshold = {"threshold": 1e6, "noise_ratio": 1.0}
    text = said(ADAGRAD(0.05), plan(8192), "DPAdaFESTOptimizer", **threshold)
    assert "Of users fewer than 20%" in text


def test_rows_of_which_each_has_few_lookups() -> None:
    """√T·B·f/(σ√d) of a row, as for a table of users who are in the data some times each."""
    given = plan(2048, 1000, sigma=1.0)
    rows = int(np.sqrt(1000) * 2048 / np.sqrt(8) / 10)  # of each of which the signal is 10
    for share, told in ((0.98, False), (1.02, True)):  # the noisy count of clipping takes 0.5 %
        count = int(share * rows)
        even = {"users": np.full(count, 1 / count)}
        found = dp_sparse.recommend(model(count), given, None, even).warnings
        assert any("Only 0% of an example's lookups" in line for line in found) == told


def test_rare_rows_that_few_examples_look_up_are_not_told() -> None:
    """By Zipf's law most lookups are of frequent rows, however many rare ones there are."""
    assert "lookups" not in said(ADAM(0.003), plan(), rows=100_000)
    assert "most of users, will learn hardly" in said(ADAM(0.003), plan(sigma=300.0), rows=6000)
    text = said(ADAGRAD(0.05), plan(sigma=300.0), "DPAdaFESTOptimizer", rows=6000, noise_ratio=1.0)
    assert "will learn hardly" in text


def test_one_table_of_rare_rows_beside_others_that_learn_is_not_told() -> None:
    """Of the study's clicks some tables hardly learned, and the models did."""
    user, items = keras.Input((), dtype="int32"), keras.Input((3,), dtype="int32")
    values = keras.layers.Embedding(100_000, 8, name="users")(user)
    of_items = keras.layers.Flatten()(keras.layers.Embedding(10, 8, name="items")(items))
    both = keras.Model(
        [user, items], keras.layers.Dense(1)(keras.ops.concatenate([values, of_items], 1))
    )
    even = {"users": np.full(100_000, 1e-5)}
    assert dp_sparse.recommend(both, plan(), None, even).warnings == []


@pytest.mark.parametrize(
    ("optimizer", "clip_norm", "warns"),
    [
        (ADAM(0.003), 1.0, False),
        (ADAM(0.1), 1.0, True),
        (ADAM(0.1), 0.001, True),  # whose steps do not depend on the clip norm
        (SGD(1.0), 1.0, False),
        (SGD(300.0), 1.0, True),
        (SGD(300.0), 0.001, False),
        (ADAM(keras.optimizers.schedules.ExponentialDecay(0.03, 10, 0.9)), 1.0, False),
        (ADAM(keras.optimizers.schedules.ExponentialDecay(0.1, 1000, 0.9)), 1.0, True),
        (keras.optimizers.RMSprop(1.0), 1.0, False),  # of which no rule is known
    ],
)
def test_learning_rates_at_which_noise_wins(
    optimizer: keras.optimizers.Optimizer, clip_norm: float, warns: bool
) -> None:
    """Against √T·rate for Adam and √T·rate·C·σ/B for SGD, which is 0.015 a unit of its rate."""
    text = said(optimizer, plan(), clip_norm=clip_norm)
    assert ("noise alone moves each dense weight" in text) == warns


def test_the_walk_is_the_one_that_noise_makes() -> None:
    text = said(SGD(300.0), plan())
    expected = 300 * np.sqrt(1000) / 2048
    assert f"by some {expected:.2g} in 1000 steps" in text


def test_tables_of_few_rows() -> None:
    """Of which the optimizer, too, takes half of the rows as the most false ones."""
    assert isinstance(said(ADAGRAD(0.05), plan(), "DPAdaFESTOptimizer", rows=10), str)
    said(ADAGRAD(0.05), plan(), "DPAdaFESTOptimizer", rows=20, expected_false_rows=30)


def test_kernels_that_begin_at_zero_are_not_compared() -> None:
    trained = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "relu", True, "zeros")])
    trained.compile(dp_sparse.DPSGDOptimizer(SGD(300.0), plan(), clip_norm=1.0), "mse")
    assert not any("learning rate" in line for line in dp_sparse.check_model(trained).warnings)


def test_other_models_have_no_outlook() -> None:
    trained = model()
    assert dp_sparse.check_model(trained).warnings == []
    trained.compile("sgd", "mse")
    assert dp_sparse.check_model(trained).warnings == []


def test_what_recommend_says_has_no_more_warnings_than_it_gives() -> None:
    given = plan()
    trained = model()
    advice = dp_sparse.recommend(trained, given)
    trained.compile(advice.optimizer(), "mse")
    assert dp_sparse.check_model(trained).warnings == advice.warnings == []


@pytest.mark.slow
def test_a_table_that_two_layers_hold_is_found_alike_before_and_in_training() -> None:
    first, second = (keras.layers.Embedding(10, 2, name=name) for name in ("first", "second"))
    first.build()
    second._embeddings = first._embeddings
    second.built = True
    ids = keras.Input((), dtype="int32")
    trained = keras.Model(ids, keras.layers.Dense(1)(first(ids) + second(ids)))
    examples = np.arange(8), np.ones(8)
    assert dp_sparse.check_model(trained, examples).ok
    given = dataclasses.replace(plan(8, 2), sampling=PoissonSampling(8, 8, 2))
    trained.compile(dp_sparse.DPAdaFESTOptimizer("sgd", given, clip_norm=1.0), "mse")
    trained.fit(given.sampling.batches(examples), verbose=0)
    assert [table.path for table in trained.optimizer.tables] == ["first/embeddings"]


def clip_norm_line(clip_norm: float, y: Any, **options: Any) -> list[str]:
    """What `check_model` says of the clip norm, of examples whose gradients have norms near 0.6."""
    trained, x = model(), np.arange(64, dtype=np.int32)
    private = dp_sparse.DPSGDOptimizer(ADAM(0.003), plan(), clip_norm, **options)
    trained.compile(private, keras.losses.BinaryCrossentropy(from_logits=True))
    found = dp_sparse.check_model(trained, x if y is None else (x, y))
    assert found.ok and found.compared
    return [line for line in found.warnings if "clip_norm" in line]


def test_a_clip_norm_that_binds_for_nearly_all_of_a_batch() -> None:
    y = np.arange(64, dtype=np.float32) % 2
    (line,) = clip_norm_line(0.05, y)
    assert line.startswith("clip_norm=0.05 clips 100% of the examples of this batch")
    assert "predicted probabilities may be far" in line and "No epsilon covers this line" in line
    assert clip_norm_line(3.0, y) == []
    assert clip_norm_line(0.05, None) == []
    for style in (dp_sparse.AutomaticClipping(), dp_sparse.QuantileClipping(0.9)):
        assert clip_norm_line(0.05, y, clipping=style) == []
    assert len(clip_norm_line(0.05, y, clipping=dp_sparse.PerLayerClipping())) == 1

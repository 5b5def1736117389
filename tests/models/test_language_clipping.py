"""Language models with LoRA are clipped exactly, and no example contributes a row for padding."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import clipping
from dp_sparse.clipping.gradient_terms import Rows
from models import roberta_lora
from models.roberta_lora import text_classifier, word_table
from tests.clipping.brute_force import assert_as_brute_force
from tests.models import language
from tests.models.language import KINDS, ROWS
from tests.reference import clipping as brute
from tests.reference import step as numpy_step
from tests.training_cases import marked_dataset, plan_for, weights_of

WORD_CHOICES = [("trained", None), ("frozen", None), ("lora", 2)]


def classifier(
    kind: str = "roberta", seed: int = 0, layers: int = 2, **options: Any
) -> roberta_lora.TextClassifier:
    """With LoRA that has learnt something, so that its first matrices have gradients."""
    chosen = {"classes": 3, "rank": 2, "dropout": 0.0, **options}
    model = text_classifier(language.backbone(kind, seed, layers=layers), **chosen)
    rng = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign(variable + 0.3 * rng.normal(size=variable.shape))
    return model


@pytest.mark.cases(3)
@pytest.mark.parametrize("pooling", roberta_lora.POOLING)
@pytest.mark.parametrize(("words", "word_rank"), WORD_CHOICES)
@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_sums_are_those_of_brute_force(
    kind: str, words: str, word_rank: int | None, pooling: str
) -> None:
    """The reference's backward pass goes through padding, too: it adds nothing there."""
    model = classifier(kind, words=words, word_rank=word_rank, pooling=pooling)
    assert_as_brute_force(model, language.batch(kind, 6), tolerance=2e-5, padding=1)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_every_trainable_variable_is_recorded_and_nothing_else(kind: str) -> None:
    model = classifier(kind)
    terms = recorded(model, language.batch(kind))
    assert {v.path for v, _ in terms} == {v.path for v in model.trainable_variables}
    assert len({v.path for v, _ in terms}) == len(terms)
    assert [v for v, term in terms if isinstance(term, Rows)] == [word_table(model)._embeddings]


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_padding_is_not_looked_up(kind: str) -> None:
    model, x = classifier(kind), language.batch(kind)
    (rows,) = [term for _, term in recorded(model, x) if isinstance(term, Rows)]
    pad = 0 if kind == "bert" else 1
    assert pad in x["token_ids"] and pad not in rows.row_ids.numpy()
    for ids, own, mask in zip(rows.row_ids.numpy(), x["token_ids"], x["padding_mask"], strict=True):
        assert set(ids) == set(own[mask > 0])
    assert not np.any(rows.cotangents.numpy()[x["padding_mask"] == 0])


def recorded(model: keras.Model, x: dict[str, np.ndarray]) -> list[tuple[keras.Variable, Any]]:
    tensors = {name: tf.constant(values) for name, values in x.items()}
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        found = clipping.record(model, tensors, tape, batch_capacity=5)
        total = tf.reduce_sum(found.outputs**2)
    return found.terms(tape.gradient(total, found.targets))


SIZE, CLIP_NORM, RATE = 8, 0.5, 0.5
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
CHOSEN = [0, 2, 3, 5, 7, 11, 13, 17, 19]  # with BERT's padding, without RoBERTa's


def optimizer_for(
    name: str, plan: dp_sparse.PrivacyPlan, model: keras.Model, microbatch_size: int | None
) -> keras.optimizers.Optimizer:
    sgd, table = keras.optimizers.SGD(RATE), word_table(model)
    rows = dp_sparse.SelectedRows.public({table.name: CHOSEN}, {table.name: ROWS})
    if name == "dpsgd":
        return dp_sparse.DPSGDOptimizer(sgd, plan, CLIP_NORM, microbatch_size=microbatch_size)
    if name == "fest":
        return dp_sparse.DPFESTOptimizer(
            sgd, plan, CLIP_NORM, rows, microbatch_size=microbatch_size
        )
    chosen = {"rows": rows} if name == "adafest_plus" else {}
    return dp_sparse.DPAdaFESTOptimizer(
        sgd, plan, CLIP_NORM, threshold=0.9, microbatch_size=microbatch_size, **chosen
    )


def expected_weights(
    name: str, model: keras.Model, x: dict[str, np.ndarray], y: np.ndarray, present: np.ndarray
) -> list[np.ndarray]:
    """One step of NumPy on stock Keras' gradients of one example each."""
    gradients = brute.example_gradients(model, brute.keras_loss(SPARSE), x, y)
    trained = [id(v) for v in model.trainable_variables]
    number = trained.index(id(word_table(model)._embeddings))
    selected = range(ROWS) if name in ("dpsgd", "adafest") else CHOSEN
    for example in gradients:
        example[number][np.setdiff1d(np.arange(ROWS), selected)] = 0
    if name in ("dpsgd", "fest"):
        mean = numpy_step.dpsgd_mean_gradient(gradients, CLIP_NORM, SIZE, present)
    else:
        pairs = zip(x["token_ids"], x["padding_mask"], strict=True)
        words = [sorted(set(ids[mask > 0]) & set(selected)) for ids, mask in pairs]
        settings = numpy_step.AdaFEST(CLIP_NORM, 1.0, 0.9, SIZE)
        mean, (survivors,) = numpy_step.adafest_mean_gradient(
            settings, gradients, [[each] for each in words], [number], present
        )
        assert 0 < survivors.sum() < len(selected)
    weights = weights_of(model)
    numpy_step.SGD(RATE).apply(weights, mean)
    return weights


@pytest.mark.cases(2)
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("microbatch_size", [None, 3])
@pytest.mark.parametrize("words", ["trained", "lora"])
@pytest.mark.parametrize("name", ["dpsgd", "fest", "adafest", "adafest_plus"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_noise_is_that_of_numpy(
    kind: str, name: str, words: str, microbatch_size: int | None
) -> None:
    model = classifier(kind, 0, 1, words=words, word_rank=2 if words == "lora" else None)
    x, plan = language.batch(kind, SIZE + 2), plan_for(SIZE, capacity=SIZE + 2)
    y = np.random.default_rng(3).integers(0, 3, (SIZE + 2, 1))
    present = np.array([1.0] * SIZE + [0.0] * 2)
    expected = expected_weights(name, model, x, y, present)
    model.compile(optimizer_for(name, plan, model, microbatch_size), SPARSE)
    model.fit(marked_dataset(plan, x, y, present=present), verbose=0)
    for variable, found, wanted in zip(
        model.trainable_variables, weights_of(model), expected, strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6, err_msg=variable.path)


@pytest.mark.cases(1)
@pytest.mark.parametrize("words", ["trained", "lora"])
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_what_was_saved_trains_on_privately(tmp_path: Path, kind: str, words: str) -> None:
    """With every trained variable moved, by the same noise multiplier, and no other."""
    model = classifier(kind, 0, 1, words=words, word_rank=2 if words == "lora" else None)
    x, y = language.batch(kind, SIZE), np.zeros((SIZE, 1), np.int64)
    plan = plan_for(SIZE, steps=2, noise_multiplier=1.0)
    model.compile(optimizer_for("dpsgd", plan, model, None), SPARSE)
    batches = marked_dataset(plan, x, y, steps=2)
    model.fit(batches.take(1), verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.plan.noise_multiplier == 1.0 and again.optimizer.steps_left == 1
    before = {v.path: np.array(v) for v in again.weights}
    again.fit(batches.skip(1), verbose=0)
    moved = {v.path for v in again.weights if not np.array_equal(v, before[v.path])}
    assert moved == {v.path for v in model.trainable_variables}

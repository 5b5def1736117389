"""Next-item models: causal, blind to padding, clipped exactly, and each as it is configured."""

import dataclasses

import keras
import numpy as np
import pytest

import dp_sparse
from dp_sparse import layers
from models.sequence_transformer import (
    KINDS,
    Encoder,
    attention_maps,
    last_position,
    sequence_model,
)
from tests.clipping.brute_force import assert_as_brute_force

ITEMS, LENGTH = 7, 5
NOISY = layers.EffectiveErrors(0.01, np.linspace(0, 2, ITEMS + 1))


def encoder(kind: str, **options: object) -> Encoder:
    errors = NOISY if kind == "re_attention" else None
    sizes = {"width": 4, "heads": 1 if kind in ("gru", "lstm") else 2, "dropout": 0.0}
    return Encoder(ITEMS, LENGTH, kind, **{**sizes, "errors": errors, **options})


def sequences(count: int, seed: int = 0) -> np.ndarray:
    """Items behind padding of different lengths."""
    rng = np.random.default_rng(seed)
    found = rng.integers(1, ITEMS + 1, (count, LENGTH)).astype(np.int32)
    found[np.arange(LENGTH) < rng.integers(0, LENGTH, (count, 1))] = 0
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_later_items_do_not_reach_earlier_positions(kind: str) -> None:
    keras.utils.set_random_seed(0)
    model, x = sequence_model(encoder(kind), LENGTH), sequences(3)
    changed = x.copy()
    changed[:, 3] = changed[:, 3] % ITEMS + 1
    before, after = model(x).numpy(), model(changed).numpy()
    assert before.shape == (3, LENGTH, ITEMS + 1)
    np.testing.assert_allclose(before[:, :3], after[:, :3], rtol=0, atol=1e-7)
    assert np.abs(before[:, 3:] - after[:, 3:]).max() > 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_positions_predict(kind: str) -> None:
    keras.utils.set_random_seed(0)
    model, x = sequence_model(encoder(kind), 2), sequences(3)
    logits = model(x).numpy()
    assert logits.shape == (3, 2, ITEMS + 1)
    np.testing.assert_allclose(last_position(model)(x), logits[:, -1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["re_attention", "vanilla"])
def test_nobody_attends_to_padding_or_to_what_comes_later(kind: str) -> None:
    model, x = sequence_model(encoder(kind), 1), np.array([[0, 0, 3, 5, 2]], np.int32)
    maps = attention_maps(model)(x)
    assert len(maps) == 2
    for scores in maps:
        scores = np.asarray(scores)
        assert scores.shape == (1, 2, LENGTH, LENGTH)
        np.testing.assert_allclose(scores[:, :, 2:].sum(axis=-1), 1, rtol=1e-5)
        assert np.abs(scores[..., 2:, :2]).max() < 1e-6
        assert np.abs(np.triu(scores[0, 0, 2:, 2:], 1)).max() < 1e-6


def test_without_errors_re_attention_is_plain_attention() -> None:
    quiet = layers.EffectiveErrors(0.0, np.zeros(ITEMS + 1))
    ours = sequence_model(encoder("re_attention", errors=quiet), 2)
    theirs = sequence_model(encoder("vanilla"), 2)
    for own, other in zip(ours.trainable_weights, theirs.trainable_weights, strict=True):
        own.assign(other)
    x = sequences(3)
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    loud = sequence_model(encoder("re_attention"), 2)
    for own, other in zip(loud.trainable_weights, theirs.trainable_weights, strict=True):
        own.assign(other)
    assert np.abs(loud(x) - theirs(x)).max() > 1e-4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.cases(3)
def test_clipping_is_exact(kind: str, tied: bool) -> None:
    keras.utils.set_random_seed(0)
    model = sequence_model(encoder(kind, tied=tied), 3)
    assert_as_brute_force(model, sequences(5), tolerance=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_the_output_layer_is_the_table_or_has_weights_of_its_own(tied: bool) -> None:
    sizes = [
        int(np.prod(w.shape))
        for w in sequence_model(encoder("vanilla", tied=tied), 1).trainable_weights
    ]
    assert sizes.count((ITEMS + 1) * 4) == (1 if tied else 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.cases(1)
def test_check_model_finds_no_problem(kind: str) -> None:
    model = sequence_model(encoder(kind, dropout=0.2), 2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    model.compile("sgd", loss)
    x = sequences(6)
    check = dp_sparse.check_model(model, (x, x[:, -2:]))
    assert not check.problems, str(check)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="kind to be one of .*, got kind='mamba'"):
        Encoder(ITEMS, LENGTH, "mamba")
    with pytest.raises(ValueError, match="Expected errors for Re-Attention"):
        Encoder(ITEMS, LENGTH)
    with pytest.raises(ValueError, match="Expected errors for Re-Attention"):
        dataclasses.replace(encoder("gru"), errors=NOISY)
    for predicted in (0, LENGTH + 1):
        with pytest.raises(ValueError, match=f"got predicted={predicted}"):
            sequence_model(encoder("gru"), predicted)


@pytest.mark.parametrize("sizes", [{"heads": 3}, {"heads": 0}, {"blocks": 0}, {"width": 0}])
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="of which heads are a divisor, got"):
        Encoder(ITEMS, 4, kind="vanilla", **{"width": 8, **sizes})


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_heads_of_models_without_attention_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"heads=1 for kind='{kind}', which has no attention"):
        Encoder(ITEMS, 4, kind, heads=2)

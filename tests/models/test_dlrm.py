"""DLRM and DCN: shapes, exact clipping, and a private step under XLA as in graph mode."""

from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from models.dlrm import dcn, dlrm
from models.pctr import embedding_width
from tests.clipping.brute_force import assert_as_brute_force
from tests.training_cases import plan_for, weights_of

VOCABULARIES = (11, 7, 5)
SMALL: dict[str, Any] = {
    "dlrm": lambda: dlrm(VOCABULARIES, 4, width=3, bottom=(6,), top=(5,)),
    "dcn": lambda: dcn(VOCABULARIES, 4, crosses=2, hidden=(5,)),
    "dcn_low_rank": lambda: dcn(VOCABULARIES, 4, crosses=3, rank=2, hidden=(5,)),
}


def rows(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, size, count) for size in VOCABULARIES]
    return {
        "integers": rng.normal(size=(count, 4)).astype(np.float32),
        "categories": np.stack(ids, 1).astype(np.int32),
    }


def test_dots_of_every_pair_enter_the_logit() -> None:
    model = dlrm(VOCABULARIES, 4, width=3, bottom=(6,), top=(5,))
    tables = [layer for layer in model.layers if isinstance(layer, keras.layers.Embedding)]
    assert [table.name for table in tables] == ["category_5", "category_6", "category_7"]
    assert {table.output_dim for table in tables} == {3}
    assert model.get_layer("features").output.shape == (None, 3 + 4 * 3 // 2)
    assert model(rows(6)).shape == (6, 1)


def test_crosses_keep_the_width_of_the_features() -> None:
    model = dcn(VOCABULARIES, 4, crosses=2, hidden=(5,))
    width = 4 + sum(embedding_width(size) for size in VOCABULARIES)
    assert model.get_layer("cross_2").output.shape == (None, width)
    assert model(rows(6)).shape == (6, 1)


def test_a_cross_multiplies() -> None:
    """With one cross and no ReLU the logit is quadratic in the integers."""
    keras.utils.set_random_seed(1)
    model, x = dcn(VOCABULARIES, 4, crosses=1, hidden=()), rows(1)
    logits = []
    for factor in (0.0, 1.0, 2.0):
        scaled = dict(x, integers=x["integers"] * factor)
        logits.append(float(keras.ops.squeeze(model(scaled))))
    assert abs(logits[2] - 2 * logits[1] + logits[0]) > 1e-3, logits


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("padding", [0, 2])
def test_clipping_is_exact(name: str, padding: int) -> None:
    assert_as_brute_force(SMALL[name](), rows(7), weighted=True, padding=padding)


@pytest.mark.slow
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("name", ["dlrm", "dcn"])
def test_under_xla_as_in_graph_mode(name: str) -> None:
    x, y = rows(8), np.random.default_rng(1).integers(0, 2, 8).astype(np.float32)
    found = []
    for jit_compile in (False, True):
        keras.utils.set_random_seed(0)
        model, plan = SMALL[name](), plan_for(8, steps=2)
        optimizer = dp_sparse.DPAdaFESTOptimizer("adagrad", plan, 0.5, threshold=1.2)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=jit_compile)
        model.fit(plan.sampling.batches((x, y)), verbose=0)
        found.append(weights_of(model))
    for left, right in zip(*found, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)

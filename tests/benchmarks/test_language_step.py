"""All steps are timed with both tables, and those without privacy train the same weights."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks import harness, language_step
from models.roberta_lora import word_table


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"layers": 1, "heads": 2, "width": 4, "inner_width": 4}
    monkeypatch.setattr(language_step, "SIZES", sizes)
    monkeypatch.setattr(language_step, "BATCH", 4)
    monkeypatch.setattr(language_step, "LENGTH", 3)
    monkeypatch.setattr(language_step, "VOCABULARIES", {"50k": 50, "250k": 90})
    monkeypatch.setattr(language_step, "QUICK_ROUNDS", 1)


@pytest.mark.slow
def test_the_quick_run_has_every_metric(
    quick_run: Callable[..., tuple[list[str], dict[str, float]]],
) -> None:
    lines, metrics = quick_run(language_step)
    kinds = "step_over_nonprivate", "dpsgd_table_over_adafest_table"
    assert metrics.keys() == {f"{kind}_{size}" for kind in kinds for size in ("50k", "250k")}
    cells = [[float(cell.replace(",", "")) for cell in line.split()] for line in lines[1:]]
    for size, own in zip(("50k", "250k"), cells, strict=True):
        _, private, plain, _, step, adafest, dpsgd, share = own
        assert step == pytest.approx(private / plain, rel=2e-3)
        assert metrics[f"step_over_nonprivate_{size}"] == pytest.approx(step, rel=2e-3)
        assert share == pytest.approx(dpsgd / adafest, rel=2e-3)
        assert metrics[f"dpsgd_table_over_adafest_table_{size}"] == pytest.approx(share, rel=2e-3)


@pytest.mark.parametrize("make", [language_step.non_private_step, language_step.stock_step])
def test_steps_without_privacy_train_the_dense_weights_and_the_rows_looked_up(
    make: Callable[[int], Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[keras.Model] = []
    classifier = language_step.classifier

    def kept(vocabulary: int) -> keras.Model:
        models.append(classifier(vocabulary))
        for variable in models[0].trainable_variables:
            variable.assign(tf.random.stateless_normal(variable.shape, [0, 1]))
        return models[0]

    monkeypatch.setattr(language_step, "classifier", kept)
    step = make(50)
    before = {variable.path: np.array(variable) for variable in models[0].trainable_variables}
    harness.finish(step())
    table = word_table(models[0])._embeddings
    for variable in models[0].trainable_variables:
        changed = np.array(variable) != before[variable.path]
        if variable is not table:
            assert changed.any(), variable.path
    looked_up = np.unique(language_step.examples(50, 4)[0]["token_ids"])
    rows = np.flatnonzero(np.any(np.array(table) != before[table.path], axis=1))
    np.testing.assert_array_equal(rows, looked_up)


def test_ranks_follow_zipfs_law() -> None:
    x, y = language_step.examples(1_000, 5_000)
    ids = x["token_ids"]
    assert ids.min() == 0 and ids.max() < 1_000 and x["padding_mask"].all()
    assert set(np.unique(y)) == {0, 1}
    for rank in (10, 100):  # as many up to 10 as from there to 100
        assert np.mean(ids < rank) == pytest.approx(np.log(rank + 1) / np.log(1_000), abs=0.02)

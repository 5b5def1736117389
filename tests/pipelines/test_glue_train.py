"""Runs of the language pipeline: what they report, what is refused before training."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras_hub
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from configs import glue_qnli, glue_qqp, glue_sst2, glue_sst2_minilm, xnli
from models.pretrained import load_backbone
from models.roberta_lora import text_classifier, word_table
from pipelines.glue import words
from pipelines.glue.reading import Sentences
from pipelines.glue.records import Tokens, encoded, record_dtype
from pipelines.glue.settings import optimizer_for
from pipelines.glue.tasks import TASKS, GlueDataError
from pipelines.glue.tokens import load_tokenizer, tokenizer_of
from pipelines.glue.train import accuracy, train
from pipelines.runs import Run, flattened
from tests.models import language
from tests.pipelines.glue_files import (
    bert_folder,
    model_folder,
    roberta_folder,
    small,
    sst2_folder,
    written,
)
from tests.subprocesses import HANG

ROOT = Path(__file__).parents[2]


def qnli_folder(folder: Path) -> Path:
    lines = [f"{n}\twhat is {n} ?\ta fine {'film' if n % 2 else 'mess'}" for n in range(40)]
    for name in ("train", "dev"):
        rows = [f"{x}\t{'not_' * (n % 2)}entailment" for n, x in enumerate(lines)]
        text = "index\tquestion\tsentence\tlabel\n" + "\n".join(rows) + "\n"
        written(folder / f"{name}.tsv", text)
    return folder


# Runs


def command(config: Any, *arguments: str, status: int = 0) -> str:
    """What the job prints for this config, or says of its error."""
    default, own = flattened(glue_sst2.get_config()), flattened(config)
    changed = [f"--config.{name}={own[name]}" for name in own if own[name] != default[name]]
    process = subprocess.run(
        [sys.executable, "-m", "pipelines.glue", *changed, *arguments],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert process.returncode == status, process.stderr[-3000:]
    return process.stdout if status == 0 else process.stderr


def test_a_private_run_reports_and_goes_on_from_its_end(tmp_path: Path) -> None:
    sst2_folder(tmp_path)
    config = small(tmp_path, **{"data.held_out": 9, "data.validation": 5})
    export = tmp_path / "export"
    printed = command(config, "--monitor=1", f"--export={export}")
    assert f"export: {export}" in printed
    assert "accuracy dev " in printed and "held_out " in printed and "validation " in printed
    assert "Two datasets are neighbours if" in printed and "gradient size reduction" in printed
    assert "An example is one row" in printed and "Which rows train" in printed
    assert "No epsilon covers accuracies, nor the rows that they are of." in printed
    assert (tmp_path / "run" / "report.html").is_file()
    assert not [*(tmp_path / "run").rglob("*.records")] and [*tmp_path.rglob("*.records")]
    found = train(config, Run(config, resume=True))
    assert_predicts(export, found.model, tmp_path)
    assert math.isnan(found.ms_per_step)  # no step was left
    assert found.epsilon == pytest.approx(3.0, rel=1e-3)
    for name, value in found.accuracy.items():
        assert f"{name} {100 * value:.2f} %" in printed
    assert f"{found.steps} steps of" in printed
    told = re.search(r"changes ([\d.,]+), .*reduction ([\d.,]+)x", printed).groups()
    entries, reduction = (float(number.replace(",", "")) for number in told)
    rows = load_tokenizer(tmp_path / "roberta").size
    assert 1 < reduction == pytest.approx(rows * 8 / entries, rel=0.05)
    assert math.isnan(found.entries) and math.isnan(found.reduction)


def assert_predicts(export: Path, model: Any, folder: Path) -> None:
    """The export predicts on strings, as the model does on their tokens."""
    texts = ["a fine film 3", "no mess", "what a dull joy , and a very long sentence indeed"]
    sentences = Sentences((texts,), np.zeros(3, np.int8), {})
    found, _ = encoded(sentences, load_tokenizer(folder / "roberta"), 12, "", False)
    x, _ = Tokens(found, {}).all()
    served = tf.saved_model.load(str(export / "saved_model"))  # its functions do not keep it
    logits = served.serve(tf.constant(texts))
    np.testing.assert_allclose(logits, model.predict_on_batch(x), rtol=1e-3, atol=1e-4)
    stated = (export / "statement.txt").read_text()
    assert "Two datasets are neighbours if" in stated and "one row of the training file" in stated
    assert "Which rows train, and how many, counts as public." in stated


KILLED = """
import os, sys
from pathlib import Path
import keras
from pipelines.glue.train import train
from pipelines.runs import Run
from tests.pipelines.glue_files import small

class Killed(Run):
    def callbacks(self):
        def die(batch, logs):
            if int(self.model.optimizer.iterations.numpy()) == 3:
                os._exit(9)
        return [*super().callbacks(), keras.callbacks.LambdaCallback(on_train_batch_end=die)]

    def restore(self, model):
        self.model = model
        return super().restore(model)

config = small(Path(sys.argv[1]), method=sys.argv[2])
train(config, Killed(config, resume=False))
"""


@pytest.mark.parametrize("method", [pytest.param("dp_adafest", marks=pytest.mark.slow), "dp_fest"])
def test_a_run_goes_on_in_the_middle(method: str, tmp_path: Path) -> None:
    """Four steps, two of them in each epoch: the third one is lost, and nobody has seen it."""
    sst2_folder(tmp_path)
    config = small(tmp_path, method=method)
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), method], cwd=ROOT, check=False, timeout=HANG
    )
    assert process.returncode == 9
    folder = tmp_path / "run"
    published = json.loads((folder / "checkpoints" / "published.json").read_text())["published"]
    before = {path.name: path.read_bytes() for path in folder.glob("*.npz")}
    assert published == 2 and len(before) == (method == "dp_fest")
    text = command(config, "--resume")
    assert "after 4 of 4 steps" in text and "; 4 steps of " in text
    assert "step 4: accuracy" in text and "step 2: accuracy" not in text
    assert {path.name: path.read_bytes() for path in folder.glob("*.npz")} == before
    assert "gradient size reduction nan" not in text
    (folder / "checkpoints" / "step-000000004.weights.h5").unlink()
    with pytest.warns(UserWarning, match="step-000000004.weights.h5 is left out"):
        found = train(config, Run(config, resume=True))
    assert int(found.model.optimizer.iterations.numpy()) == 2  # its weights; spent are all
    assert found.steps == 4 and "after 4 of 4 steps" in found.statement


def test_without_privacy_all_steps_are_taken(tmp_path: Path) -> None:
    """As many as its learning rates are made for: 7 of 8, which seven evaluations do not divide."""
    sst2_folder(tmp_path)
    changes = {"method": "non_private", "training.epochs": 2.0, "training.evaluations": 7}
    found = train(small(tmp_path, "bert", **changes))
    assert found.steps == 7 and [step for step, _ in found.curve] == [*range(1, 8)]


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    config = small(tmp_path, method="non_private")
    message = "error: Expected a private method with --resume or --monitor"
    assert message in command(config, "--resume", status=1)


def test_judging_leaves_out_the_padding_that_all_examples_have() -> None:
    """Each example is judged once, with all of its own tokens."""
    rng = np.random.default_rng(0)
    records = np.zeros(600, record_dtype(12))
    records["length"] = rng.integers(2, 13, len(records))
    records["label"] = rng.integers(0, 2, len(records))
    records["tokens"] = np.where(np.arange(12) < records["length"][:, np.newaxis], 7, 1)
    sizes: list[tuple[int, ...]] = []

    def logits(x: dict[str, np.ndarray]) -> np.ndarray:
        sizes.append(x["token_ids"].shape)
        assert x["padding_mask"].shape == sizes[-1] and x["padding_mask"][:, -1].any()
        assert ((x["token_ids"] == 7) == x["padding_mask"]).all()
        return np.eye(2)[x["padding_mask"].sum(1) % 2]

    model = SimpleNamespace(predict_on_batch=logits)
    expected = np.mean(records["length"] % 2 == records["label"])
    assert accuracy(model, Tokens(records, {})) == pytest.approx(expected)
    assert sum(rows for rows, _ in sizes) == 600 and sizes[0][1] < 12


def test_without_privacy_the_made_up_task_is_learned(tmp_path: Path) -> None:
    """Tokens, classes and predictions belong together, or nothing could be learned."""
    sst2_folder(tmp_path)
    changes = {"method": "non_private", "training.epochs": 100.0}
    config = small(tmp_path, "bert", **changes, **{"optimizer.learning_rate": 0.02})
    found = train(config)
    assert found.accuracy["dev"] >= 0.75
    assert math.isinf(found.epsilon) and "No guarantee" in found.statement
    assert found.reduction == 1.0 and found.entries == load_tokenizer(tmp_path / "bert").size * 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "trained", "entries"),
    [
        ("dp_sgd", "trained", "all"),
        ("dp_sgd", "frozen", 0),
        ("dp_sgd", "lora", "lora"),
        ("dp_fest", "trained", 10 * 8),
        ("dp_fest", "lora", 10 * 3 + 3 * 8),
        ("dp_adafest_plus", "trained", None),
        ("non_private", "lora", "lora"),
    ],
)
def test_every_method_trains_pairs(method: str, trained: str, entries: Any, tmp_path: Path) -> None:
    qnli_folder(tmp_path)
    changes = {"task": "qnli", "method": method, "model.words": trained, "selection.rows": 10}
    config = small(tmp_path, "bert", **changes, **{"model.word_rank": 3 * (trained == "lora")})
    found = train(config)
    rows = load_tokenizer(tmp_path / "bert").size
    wanted = {"all": rows * 8, "lora": rows * 3 + 3 * 8}.get(entries, entries)
    if wanted is None:
        assert 0 < found.entries < 10 * 8
    else:
        assert found.entries == wanted
    assert set(found.accuracy) == {"dev"} and np.isfinite(found.accuracy["dev"])


def pairs_folder(folder: Path, task: str) -> Path:
    """Made-up lines in the files and columns of a task, with each of its labels."""
    labels = [*TASKS[task].labels]
    for columns in TASKS[task].splits.values():
        lines = [
            f"what is {n} ?\ta fine {'film' if n % 2 else 'mess'}\t{labels[n % len(labels)]}"
            for n in range(40)
        ]
        header = "\t".join([*columns.texts, columns.label])
        written(folder / columns.file, "\n".join([header, *lines]) + "\n")
    return folder


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("job", "kind"), [(glue_qnli, "roberta"), (glue_qqp, "roberta"), (xnli, "xlm-roberta")]
)
def test_the_jobs_on_pairs_train_and_export(job: Any, kind: str, tmp_path: Path) -> None:
    """Under their own settings, but for sizes; the files are made up, the weights random."""
    own = job.get_config()
    pairs_folder(tmp_path, own.task)
    changes = {"task": own.task, "privacy.epsilon": own.privacy.epsilon, "method": own.method}
    config = small(tmp_path, kind, **changes)
    found = train(config, Run(config, resume=False), str(tmp_path / "export"))
    assert found.steps == 2 and found.epsilon <= own.privacy.epsilon
    classes = TASKS[own.task].classes
    texts = [tf.constant(["what is no"]), tf.constant(["a fine film"])]
    served = tf.saved_model.load(str(tmp_path / "export" / "saved_model"))
    assert np.asarray(served.serve(texts)).shape == (1, classes)


def test_minilm_trains_for_some_steps(tmp_path: Path) -> None:
    """The real weights under the settings of their job, on rows that are there everywhere."""
    sst2_folder(tmp_path, rows=300)
    config = glue_sst2_minilm.get_config()
    config.data.path, config.report.directory = str(tmp_path), str(tmp_path / "run")
    config.training.update({"batch_size": 100, "epochs": 1.0, "evaluations": 1})
    config.report.verbose = 0
    found = train(config)
    assert found.steps == 3 and found.epsilon <= config.privacy.epsilon
    assert 0 < found.entries < 30_522 * 384 and 0.2 < found.accuracy["dev"] < 1


def test_weight_decay_leaves_the_word_table_out(tmp_path: Path) -> None:
    """It would move all rows of a table of which a step may change some."""
    backbone = load_backbone(str(model_folder(tmp_path, "bert")), max_length=8)
    model = text_classifier(backbone, classes=2, rank=2)
    config = glue_sst2.get_config()
    optimizer = optimizer_for(config, "optimizer", 10, model)
    optimizer.build(model.trainable_variables)
    table = word_table(model).embeddings
    decays = {v.path: optimizer._use_weight_decay(v) for v in model.trainable_variables}
    assert not decays.pop(table.path) and decays and all(decays.values())


# Refusals, all of them before training


@pytest.fixture
def refuses(tmp_path: Path) -> Any:
    sst2_folder(tmp_path)

    def check(match: str, error: type[Exception] = ValueError, **changes: Any) -> None:
        config = small(tmp_path, **{k.replace("__", "."): v for k, v in changes.items()})
        with pytest.raises(error, match=match):
            train(config)

    return check


def test_settings_that_cannot_be_used_are_refused(refuses: Any) -> None:
    refuses("Expected method to be one of", method="lazy_dp_sgd")
    for method in ("dp_fest", "dp_adafest"):
        refuses(
            "model.words that trains .*Use method='dp_sgd'", method=method, model__words="frozen"
        )
    refuses("Expected training.batch_size >= 1, got training.batch_size=0", training__batch_size=0)
    refuses("Expected training.batch_size <= 60, the training rows", training__batch_size=61)
    refuses("Expected training.evaluations >= 1", training__evaluations=0)
    refuses("training.microbatch_size >= 0, .*=-1", training__microbatch_size=-1)
    refuses("Expected words to be one of .*'all'", model__words="all")
    refuses("Expected word_rank >= 1 with words='lora'", model__words="lora")
    refuses("Expected rank >= 1, got rank=0", model__rank=0)
    refuses("Expected pooling to be one of", model__pooling="last")
    for epochs in (0.0, -1.0, float("nan"), float("inf")):
        refuses("Expected a finite training.epochs > 0, got", training__epochs=epochs)
    for of in ("optimizer", "table_optimizer"):
        refuses(f"Expected {of}.name to be an optimizer .*='Adamm'", **{f"{of}__name": "Adamm"})
        changes = {f"{of}__name": "Adam", f"{of}__options": {"x": 1}}
        refuses(f"Expected {of}.options that Adam has", **changes)
    refuses("Expected optimizer.name to be an optimizer", optimizer__name="")
    refuses("Expected data.held_out >= 0, got data.held_out=-5", GlueDataError, data__held_out=-5)
    refuses("Expected data.judge to be one of .'dev',.", GlueDataError, data__judge="held_out")
    refuses("Expected task to be one of", GlueDataError, task="cola")
    refuses("Expected 0 < selection.rows < 264", method="dp_fest", selection__rows=264)
    refuses("source to be one of .*'public'", method="dp_fest", selection__source="zipf")
    refuses("Expected selection.counts, a folder", method="dp_fest", selection__source="public")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"report.diagnostics": "all"}, "Expected diagnostics"),
        ({"table_optimizer.name": "SGD", "table_optimizer.options": {"momentum": 0.9}}, "momentum"),
        ({"privacy.clip_norm": -1.0}, "Expected clip_norm"),
    ],
)
def test_what_is_refused_before_training_has_selected_nothing(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def selected(*_: object, **__: object) -> None:
        raise AssertionError("this would be spent")

    monkeypatch.setattr(dp_sparse, "select_top_k", selected)
    sst2_folder(tmp_path)
    with pytest.raises(ValueError, match=message):
        train(small(tmp_path, method="dp_fest", **changes))


def test_a_sequence_longer_than_the_position_table_is_refused(refuses: Any) -> None:
    refuses("Expected 1 <= max_length <= 16, the table of positions", data__length=17)


def test_a_source_that_is_nowhere_is_refused_with_the_offline_ways(refuses: Any) -> None:
    refuses("or a preset of keras-hub .*config.json", model__source="no_such_preset")
    refuses("Expected .*got ''.*config.json", model__source="")


def test_a_tokenizer_of_another_model_is_refused(refuses: Any, tmp_path: Path) -> None:
    other = bert_folder(tmp_path / "other")
    refuses("got one of 264: the tokenizer and the weights", model__tokenizer=str(other))
    refuses("a preset of keras-hub that can be", model__tokenizer=str(tmp_path))


def test_rows_of_pairs_are_not_held_out(tmp_path: Path) -> None:
    qnli_folder(tmp_path)
    config = small(tmp_path, "bert", **{"task": "qnli", "data.held_out": 5})
    with pytest.raises(GlueDataError, match="data.validation=0 for task='qnli', got 5 and 0: rows"):
        train(config)


def test_lines_left_out_are_counted(tmp_path: Path) -> None:
    sst2_folder(tmp_path)
    with (tmp_path / "train.tsv").open("a") as file:
        file.write(" \t1\n")
    config = small(tmp_path, **{"method": "non_private", "data.quarantine": True})
    assert train(config).counts["train: empty sentence"] == 1
    config.data.quarantine = False
    with pytest.raises(GlueDataError, match="Expected a sentence in line 62"):
        train(config)


def test_exports_that_cannot_be_are_refused_before_training(tmp_path: Path) -> None:
    sst2_folder(tmp_path)
    config = small(tmp_path)
    with pytest.raises(ValueError, match="Expected a path where nothing is yet"):
        train(config, export=str(tmp_path))
    config.method = "non_private"
    with pytest.raises(ValueError, match="Expected a private method with export"):
        train(config, export=str(tmp_path / "export"))


# Rows selected before training


def records(*rows: list[int], length: int = 4, padding: int = 1) -> Tokens:
    found = np.zeros(len(rows), record_dtype(length))
    found["tokens"] = padding
    for record, row in zip(found, rows, strict=True):
        record["tokens"][: len(row)] = row
        record["length"] = len(row)
    return Tokens(found, {})


def selecting(source: str, rows: int, counts: str = "") -> Any:
    config = glue_sst2_minilm.get_config()
    config.selection.update({"source": source, "rows": rows, "counts": counts, "share": 0.5})
    return config


def test_padding_counts_for_no_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def calibrated(plan: Any, tables: Any, rows: int, source: Any, share: float) -> Any:
        asked.append((rows, source, share))
        return SimpleNamespace(source=source(1.0))

    monkeypatch.setattr(dp_sparse, "calibrate_top_k", calibrated)
    tokenizer = load_tokenizer(roberta_folder(tmp_path))
    training = records(*([[0, 5, 2]] * 2000), [0, 6, 2])
    rows = words.selected_rows(
        selecting("gaussian", 3), "words", tokenizer.size, training, tokenizer, None
    )
    assert asked == [(3, dp_sparse.GaussianTopK, 0.5)]
    assert rows.row_ids["words"].tolist() == [0, 2, 5] and rows.costs


def authors(folder: Path) -> str:
    """RoBERTa's files with the tokens `film`, ` film` and ` a`, from rare to frequent."""
    tokens = ["film", "Ġfilm", "Ġa", *"filmaĠ", "fi", "lm"]
    merges = ["f i", "l m", "fi lm", "Ġ film", "Ġ a"]
    written(folder / "encoder.json", json.dumps({name: n for n, name in enumerate(tokens)}))
    written(folder / "vocab.bpe", "#version: 0.2\n" + "\n".join(merges) + "\n")
    written(folder / "dict.txt", "2 90\n1 50\n0 7\n" + "".join(f"{n} 0\n" for n in range(3, 11)))
    return str(folder)


def test_public_counts_select_rows_at_no_cost(tmp_path: Path) -> None:
    folder = authors(tmp_path)
    theirs = load_tokenizer(folder)
    counts = words.public_counts(folder, theirs)
    assert counts[4:7].tolist() == [90, 50, 7]
    assert counts[[0, 2]].tolist() == [91, 91] and counts[1] == 0  # <s> and </s>, never <pad>
    rows = words.selected_rows(
        selecting("public", 3, folder), "words", theirs.size, records([0]), theirs, None
    )
    assert rows.row_ids["words"].tolist() == [0, 2, 4] and not rows.costs
    most = selecting("public", theirs.size - 1, folder)
    rows = words.selected_rows(most, "words", theirs.size, records([0]), theirs, None)
    assert theirs.padding_id not in rows.row_ids["words"]


@pytest.mark.slow
def test_a_run_whose_rows_are_public(tmp_path: Path) -> None:
    sst2_folder(tmp_path)
    changes = {"method": "dp_fest", "selection.source": "public", "selection.rows": 2}
    config = small(tmp_path, **changes, **{"selection.counts": authors(tmp_path / "authors")})
    found = train(config)
    assert found.steps == 4 and found.entries == 2 * 8 and "selected" not in found.statement


def test_public_counts_go_to_the_words_of_another_tokenizer(tmp_path: Path) -> None:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "film", "##film", "joy"]
    written(tmp_path / "bert" / "vocab.txt", "\n".join(names) + "\n")
    counts = words.public_counts(authors(tmp_path / "authors"), load_tokenizer(tmp_path / "bert"))
    assert counts.tolist() == [0, 0, 91, 91, 0, 90, 50, 7, 0]


# Presets


def test_the_tokenizer_of_a_preset_is_that_of_its_folder(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "roberta", "roberta")
    vocabulary = json.loads((folder / "vocab.json").read_text())
    merges = (folder / "merges.txt").read_text().splitlines()[1:]
    preset = tmp_path / "preset"
    language.backbone("roberta").save_to_preset(str(preset))
    keras_hub.models.RobertaTokenizer(vocabulary, merges).save_to_preset(str(preset))
    found = tokenizer_of(str(preset))
    assert found.tokenizer.encode("a film", "fine").ids == (
        load_tokenizer(folder).tokenizer.encode("a film", "fine").ids
    )
    assert found.padding_id == 1


def test_xlm_robertas_tokenizer_is_that_of_its_sentence_pieces(tmp_path: Path) -> None:
    """Of a folder, of a preset, and as keras-hub has it."""
    folder = model_folder(tmp_path / "xlm-roberta", "xlm-roberta")
    theirs = keras_hub.models.XLMRobertaTokenizer((folder / "sentencepiece.bpe.model").read_bytes())
    preset = tmp_path / "preset"
    language.backbone("xlm-roberta").save_to_preset(str(preset))
    theirs.save_to_preset(str(preset))
    texts = ["a film", "what is no  fine joy ?", "The dull\tmess"]
    for source in (folder, preset):
        found = tokenizer_of(str(source))
        assert found.padding_id == 1 and found.size == theirs.vocabulary_size()
        for text in texts:
            ids = found.tokenizer.encode(text).ids
            assert (ids[0], ids[-1]) == (0, 2) and ids[1:-1] == np.asarray(theirs(text)).tolist()
        pair = found.tokenizer.encode("a", "film").ids
        assert [pair[0], pair[-1]] == [0, 2] and pair.count(2) == 3

"""The trained model as plain Keras and TensorFlow read it: from strings to logits, LoRA merged.

Whether a run can end with an export is found out before it begins.
"""

from pathlib import Path
from typing import Any

import keras_hub
import ml_collections

from models.pretrained import Backbone
from models.roberta_lora import TextClassifier
from models.text_export import export_text_classifier, preprocessor_of
from pipelines.glue.tasks import TRAIN, Task
from pipelines.glue.tokens import TextTokenizer
from pipelines.methods import NON_PRIVATE

_SENTENCE_PIECE = "sentencepiece.bpe.model"


def tokenizer_to_export(
    config: ml_collections.ConfigDict,
    path: str,
    source: str,
    tokenizer: TextTokenizer,
    backbone: Backbone,
) -> Any:
    """The tokenizer for an export to `path`; XLM-R's is read anew, for a graph.

    Args:
        config: Of the run.
        path: Where the export goes.
        source: Where the weights are from.
        tokenizer: That of training.
        backbone: Of the model.

    Raises:
        ValueError: There is something at `path`, the config trains without privacy, or the
            tokenizer has no equal in a graph.
    """
    if Path(path).exists():
        raise ValueError(f"Expected a path where nothing is yet, got export={path!r}.")
    if config.method == NON_PRIVATE:
        raise ValueError(
            "Expected a private method with export, which carries a statement of privacy, got "
            f"method={config.method!r}."
        )
    pieces = Path(source).expanduser() / _SENTENCE_PIECE
    found = tokenizer.tokenizer
    if pieces.is_file():
        found = keras_hub.models.XLMRobertaTokenizer(proto=str(pieces))
    preprocessor_of(backbone, found, config.data.length)
    return found


def export(
    config: ml_collections.ConfigDict, task: Task, model: TextClassifier, path: str, tokenizer: Any
) -> None:
    """Writes the export, with the statement beside it."""
    texts = len(task.splits[TRAIN].texts)
    export_text_classifier(model, path, tokenizer, length=config.data.length, texts=texts)

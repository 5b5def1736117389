"""The trained model as plain Keras and TensorFlow read it: from strings to logits, LoRA merged.

Whether a run can end with an export is found out before it begins.
"""

import ml_collections

from models.pretrained import Backbone
from models.roberta_lora import TextClassifier
from models.text_export import export_text_classifier, preprocessor_of
from pipelines.exports import require_free, require_private
from pipelines.glue.data import protected
from pipelines.glue.tasks import TRAIN, Task
from pipelines.glue.tokens import TextTokenizer


def check(
    config: ml_collections.ConfigDict, path: str, tokenizer: TextTokenizer, backbone: Backbone
) -> None:
    """Refuses what would be found out only after training; nothing for an empty path.

    Raises:
        ValueError: There is something at `path`, the config trains without privacy, or the
            tokenizer has no equal in a graph.
    """
    if path:
        require_free(path)
        require_private(config.method)
        preprocessor_of(backbone, tokenizer.tokenizer, config.data.length)


def export(
    config: ml_collections.ConfigDict,
    task: Task,
    model: TextClassifier,
    path: str,
    tokenizer: TextTokenizer,
) -> None:
    """Writes the export, with the statement beside it."""
    texts, length = len(task.splits[TRAIN].texts), config.data.length
    note = protected(config)
    export_text_classifier(model, path, tokenizer.tokenizer, length=length, texts=texts, note=note)

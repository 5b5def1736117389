"""Small language models: random backbones, batches for them, and folders as Transformers write."""

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
from safetensors.numpy import save_file

from models import pretrained

KINDS = ("bert", "roberta", "xlm-roberta")
ROWS, LENGTH, WIDTH, HEADS = 23, 7, 8, 2


def backbone(kind: str = "roberta", seed: int = 0, **sizes: Any) -> pretrained.Backbone:
    """Random, with weights as large as those of trained ones, and no dropout."""
    keras.utils.set_random_seed(seed)
    of = {"vocabulary": ROWS, "layers": 2, "heads": HEADS, "width": WIDTH, "inner_width": 12}
    made = pretrained.random_backbone(
        kind, **{**of, "max_length": LENGTH + 2, "dropout": 0.0, **sizes}
    )
    rng = np.random.default_rng(seed)
    for variable in made.weights:
        variable.assign(variable + 0.4 * rng.normal(size=variable.shape))
    return made


def batch(kind: str, count: int = 5, seed: int = 0, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Sequences of different lengths; padding has the id that the model has for it."""
    rng = np.random.default_rng(seed)
    mask = np.arange(length) < rng.integers(2, length + 1, (count, 1))
    mask[0] = True
    ids = np.where(mask, rng.integers(2, ROWS, (count, length)), 0 if kind == "bert" else 1)
    found = {"token_ids": ids, "padding_mask": mask}
    if kind == "bert":
        found["segment_ids"] = (np.arange(length) > 2) & mask
    return {name: values.astype(np.int32) for name, values in found.items()}


def tensors(kind: str, seed: int = 0, layers: int = 2) -> dict[str, np.ndarray]:
    """Random weights under the names of Transformers, float32."""
    rng, unused = np.random.default_rng(seed), 0 if kind == "bert" else 2
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (ROWS, WIDTH),
        "embeddings.position_embeddings.weight": (LENGTH + 2 + unused, WIDTH),
    }
    shapes |= _norm("embeddings.LayerNorm")
    types = 2 if kind == "bert" else 1
    shapes["embeddings.token_type_embeddings.weight"] = (types, WIDTH)
    if kind == "bert":
        shapes |= _linear("pooler.dense", WIDTH, WIDTH)
    for number in range(layers):
        at = f"encoder.layer.{number}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= _linear(f"{at}.attention.{name}", WIDTH, WIDTH)
        shapes |= _norm(f"{at}.attention.output.LayerNorm") | _norm(f"{at}.output.LayerNorm")
        shapes |= _linear(f"{at}.intermediate.dense", 12, WIDTH)
        shapes |= _linear(f"{at}.output.dense", WIDTH, 12)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def config(kind: str, layers: int = 2) -> dict[str, Any]:
    """`config.json` of those tensors."""
    return {
        "model_type": kind,
        "vocab_size": ROWS,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "hidden_size": WIDTH,
        "intermediate_size": 12,
        "max_position_embeddings": LENGTH + 2 + (0 if kind == "bert" else 2),
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12 if kind == "bert" else 1e-5,
    }


def write_folder(folder: Path, kind: str, weights: dict[str, np.ndarray], prefix: str = "") -> Path:
    """A model's folder; the tokenizer of BERT or RoBERTa has words w0, w1 and so on."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(kind)))
    save_file(
        {f"{prefix}{name}": each for name, each in weights.items()}, folder / "model.safetensors"
    )
    tokens = [f"w{number}" for number in range(ROWS)]
    if kind == "bert":
        (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    else:
        (folder / "vocab.json").write_text(json.dumps(dict(zip(tokens, range(ROWS), strict=True))))
        (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


def _norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}


def _linear(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

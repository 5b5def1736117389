"""Folders of Hugging Face's Transformers with BERT, RoBERTa or XLM-R, read into keras-hub.

Everything that can be wrong is found before the first weight is read: missing files, another type
of model, a configuration that keras-hub's backbone does not compute, tensors that are missing or of
another shape, a tokenizer of another vocabulary.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np
from safetensors import SafetensorError, safe_open

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_SIZES = (
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A type of model.

    Attributes:
        name: Of keras-hub's class of backbones.
        tokenizer_files: What a folder must hold of its tokenizer.
        unused_positions: First rows of the table of positions that no token has.
        layer_norm_epsilon: That of keras-hub's backbone, for which `config.json` must ask.
    """

    name: str
    tokenizer_files: tuple[str, ...]
    unused_positions: int
    layer_norm_epsilon: float

    def backbone(self) -> Any:
        """The class."""
        return getattr(keras_hub.models, self.name)


KINDS = {
    "bert": Kind("BertBackbone", ("vocab.txt",), 0, 1e-12),
    "roberta": Kind("RobertaBackbone", ("vocab.json", "merges.txt"), 2, 1e-5),
    "xlm-roberta": Kind("XLMRobertaBackbone", ("sentencepiece.bpe.model",), 2, 1e-5),
}


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of the file, without its prefix, and the variable that it becomes.

    One that is `added` goes to what the variable has already, and a file may lack it.
    """

    name: str
    variable: keras.Variable
    shape: tuple[int, ...]
    arranged: Callable[[np.ndarray], np.ndarray]
    added: bool = False


def kind_of(model_type: Any, where: str) -> Kind:
    """The kind of this name.

    Raises:
        ValueError: There is none.
    """
    if model_type not in KINDS:
        raise ValueError(f"Expected {where} to be one of {', '.join(KINDS)}, got {model_type!r}.")
    return KINDS[model_type]


def is_of_keras_hub(folder: Path) -> bool:
    """Whether keras-hub wrote the folder, by `save_to_preset`."""
    return (folder / CONFIG).is_file() and "registered_name" in _json(folder / CONFIG)


def load(folder: Path, dropout: float) -> Any:
    """The backbone of a folder, with its weights.

    Args:
        folder: Its path.
        dropout: Of embeddings, attention and the layers inside.

    Raises:
        ValueError: As the head of this module says.
    """
    config, kind = read_config(folder)
    require_tokenizer(folder, config, kind)
    backbone = kind.backbone()(
        vocabulary_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        hidden_dim=config["hidden_size"],
        intermediate_dim=config["intermediate_size"],
        dropout=dropout,
        max_sequence_length=config["max_position_embeddings"] - kind.unused_positions,
    )
    _assign(folder / WEIGHTS, list(_tensors(backbone, kind, config.get("type_vocab_size", 1))))
    return backbone


def read_config(folder: Path) -> tuple[dict[str, Any], Kind]:
    """`config.json`, and the kind of model.

    Raises:
        ValueError: Files are missing, or it asks for what keras-hub's backbone does not compute.
    """
    _require_files(folder, (CONFIG,))
    config = _json(folder / CONFIG)
    kind = kind_of(config.get("model_type"), f"model_type in {folder / CONFIG}")
    _require_files(folder, (WEIGHTS, *kind.tokenizer_files))
    for name in _SIZES:
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise ValueError(
                f"Expected a whole number {name} >= 1 in {folder / CONFIG}, got "
                f"{config.get(name)!r}: copy the file from the model's page."
            )
    computed = {
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "layer_norm_eps": kind.layer_norm_epsilon,
    }
    for name, value in computed.items():
        if config.get(name, value) != value:
            raise ValueError(
                f"Expected {name}={value!r} in {folder / CONFIG}, which is what keras-hub's "
                f"{kind.name} computes, got {config[name]!r}: use another model."
            )
    return config, kind


def require_tokenizer(folder: Path, config: dict[str, Any], kind: Kind) -> None:
    """Checks that the tokenizer's tokens are the rows of the word table.

    Raises:
        ValueError: It has another number of tokens, as `is_table_of` says.
    """
    rows, tokens = config["vocab_size"], _count_tokens(folder, kind)
    if not is_table_of(rows, tokens):
        raise ValueError(
            f"Expected a tokenizer of {rows} tokens in {folder}, as vocab_size in {CONFIG} says, "
            f"got {tokens} in {kind.tokenizer_files[0]}: take both from the same model."
        )


def is_table_of(rows: int, tokens: int) -> bool:
    """Whether a word table may be that of so many tokens.

    Some tables have rows without a token, up to a multiple of 64 or 128.
    """
    return rows == tokens or (rows % 64 == 0 and tokens < rows < tokens + 128)


def words_of(path: Path) -> list[str]:
    """The tokens of BERT's `vocab.txt`, a line each; no other character ends a line."""
    return path.read_text(encoding="utf-8").rstrip("\n").split("\n")


def _count_tokens(folder: Path, kind: Kind) -> int:
    """One more than the largest id."""
    path = folder / kind.tokenizer_files[0]
    if path.suffix == ".txt":
        return len(words_of(path))
    if path.suffix == ".json":
        return max(_whole_numbers(path)) + 1
    return keras_hub.models.XLMRobertaTokenizer(proto=str(path)).vocabulary_size()


def _whole_numbers(path: Path) -> list[int]:
    ids = [*_json(path).values()]
    wrong = next((each for each in ids if type(each) is not int), None)
    if wrong is not None:
        raise ValueError(f"Expected whole numbers of tokens in {path}, got {wrong!r}.")
    return ids


def _require_files(folder: Path, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"Expected {', '.join(names)} in {folder}, got a folder without {', '.join(missing)}: "
            "copy them from the model's page, or let its owner's save_pretrained write them."
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"Expected JSON in {path}, got {error}.") from None
    if not isinstance(found, dict) or not found:
        raise ValueError(
            f"Expected an object with something in it in {path}, got {str(found)[:40]!r}: copy the "
            "file from the model's page."
        )
    return found


def _tensors(backbone: Any, kind: Kind, token_types: int) -> Iterator[_Tensor]:
    """Every weight of a backbone, by the name that Transformers gives it.

    RoBERTa and XLM-R add one row, that of token type 0, to every token; keras-hub's backbones have
    no such table, and get it with their positions.
    """
    words = "embeddings.word_embeddings.weight"
    yield _same(words, backbone.token_embedding.embeddings)
    where = getattr(backbone, "embeddings", backbone)  # RoBERTa's layer of words and positions
    positions = where.position_embedding.position_embeddings
    skipped = kind.unused_positions
    shape = (positions.shape[0] + skipped, positions.shape[1])
    yield _Tensor("embeddings.position_embeddings.weight", positions, shape, lambda x: x[skipped:])
    types = "embeddings.token_type_embeddings.weight"
    if kind.name != "BertBackbone":
        yield _Tensor(types, positions, (token_types, shape[1]), lambda x: x[:1], added=True)
    else:
        yield _same(types, backbone.segment_embedding.embeddings)
        yield from _dense("pooler.dense", backbone.pooled_dense)
    yield from _norm("embeddings.LayerNorm", backbone.embeddings_layer_norm)
    for number, layer in enumerate(backbone.transformer_layers):
        yield from _transformer_layer(f"encoder.layer.{number}", layer)


def _transformer_layer(at: str, layer: Any) -> Iterator[_Tensor]:
    attention = layer._self_attention_layer
    yield from _dense(f"{at}.attention.self.query", attention.query_dense)
    yield from _dense(f"{at}.attention.self.key", attention.key_dense)
    yield from _dense(f"{at}.attention.self.value", attention.value_dense)
    yield from _dense(f"{at}.attention.output.dense", attention.output_dense)
    yield from _norm(f"{at}.attention.output.LayerNorm", layer._self_attention_layer_norm)
    yield from _dense(f"{at}.intermediate.dense", layer._feedforward_intermediate_dense)
    yield from _dense(f"{at}.output.dense", layer._feedforward_output_dense)
    yield from _norm(f"{at}.output.LayerNorm", layer._feedforward_layer_norm)


def _same(name: str, variable: keras.Variable) -> _Tensor:
    return _Tensor(name, variable, tuple(variable.shape), lambda x: x)


def _dense(name: str, layer: Any) -> Iterator[_Tensor]:
    """Transformers keep a matrix as `[out, in]`, and do not divide it into heads."""
    kernel, bias = layer.kernel, layer.bias
    outputs = int(np.prod(bias.shape))
    inputs = int(np.prod(kernel.shape)) // outputs
    yield _Tensor(f"{name}.weight", kernel, (outputs, inputs), lambda x: x.T.reshape(kernel.shape))
    yield _Tensor(f"{name}.bias", bias, (outputs,), lambda x: x.reshape(bias.shape))


def _norm(name: str, layer: Any) -> Iterator[_Tensor]:
    yield _same(f"{name}.weight", layer.gamma)
    yield _same(f"{name}.bias", layer.beta)


def _assign(path: Path, tensors: list[_Tensor]) -> None:
    try:
        with safe_open(path, framework="numpy") as file:
            names = _names_in(path, list(file.keys()), tensors)
            tensors = [tensor for tensor in tensors if tensor.name in names]
            for tensor in tensors:
                found = tuple(file.get_slice(names[tensor.name]).get_shape())
                if found != tensor.shape:
                    raise ValueError(
                        f"Expected {names[tensor.name]} of shape {tensor.shape} in {path}, as "
                        f"{CONFIG} says, got {found}: take both from the same model."
                    )
            for tensor in tensors:
                values = file.get_tensor(names[tensor.name]).astype(np.float32)
                before = tensor.variable if tensor.added else 0.0
                tensor.variable.assign(before + tensor.arranged(values))
    except (SafetensorError, TypeError) as error:  # a damaged file; bfloat16, which NumPy lacks
        raise ValueError(
            f"Expected float32 or float16 tensors in {path}, got {error}: save them anew."
        ) from None


def _names_in(path: Path, names: list[str], tensors: list[_Tensor]) -> dict[str, str]:
    """The name in the file of each tensor: maybe with a prefix, or as BERT's first files had it."""
    first = tensors[0].name
    prefix = next((name.removesuffix(first) for name in names if name.endswith(first)), "")
    old = {f"{prefix}{tensor.name}": f"{prefix}{_as_before(tensor.name)}" for tensor in tensors}
    found = {name: name if name in names else old[name] for name in old}
    absent = {tensor.name for tensor in tensors if found[f"{prefix}{tensor.name}"] not in names}
    missing = [f"{prefix}{each.name}" for each in tensors if each.name in absent and not each.added]
    if missing:
        raise ValueError(
            f"Expected {len(tensors)} tensors in {path}, got a file without {', '.join(missing)}: "
            "use the weights of the model that config.json describes."
        )
    return {t.name: found[f"{prefix}{t.name}"] for t in tensors if t.name not in absent}


def _as_before(name: str) -> str:
    """Of a layer normalisation the name that TensorFlow's BERT gave it."""
    if "LayerNorm" not in name:
        return name
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"
    )

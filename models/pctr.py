"""The pCTR model of Ghazi et al., NeurIPS 2023, D.1.1.

Embedded categories and log-transformed integers, four layers of 598 ReLU, one logit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras


def embedding_width(vocabulary: int) -> int:
    """int(2·V^0.25), the paper's rule for V buckets."""
    return int(2 * vocabulary**0.25)


def pctr(
    vocabularies: Sequence[int],
    num_integers: int = 13,
    hidden: Sequence[int] = (598, 598, 598, 598),
    embeddings_initializer: str = "uniform",
    lora_rank: int = 0,
    trains_tables: bool = True,
) -> keras.Model:
    """The click model.

    Args:
        vocabularies: Buckets of each categorical feature; the paper's are in its Table 3.
        num_integers: Integer features, already log-transformed.
        hidden: Widths of the ReLU layers.
        embeddings_initializer: Of the tables, as in Keras.
        lora_rank: Of LoRA on each table, which is frozen then; 0 for none.
        trains_tables: Whether tables, or LoRA on them, train.

    Returns:
        A model from {"integers": float `[batch, num_integers]`, "categories": int `[batch,
        features]`} to one logit, `[batch, 1]`.
    """
    integers = keras.Input((num_integers,), name="integers")
    categories = keras.Input((len(vocabularies),), dtype="int32", name="categories")
    tables = [
        keras.layers.Embedding(
            size,
            embedding_width(size),
            embeddings_initializer=embeddings_initializer,
            lora_rank=lora_rank or None,
            name=f"category_{index + num_integers + 1}",
        )
        for index, size in enumerate(vocabularies)
    ]
    for table in tables:
        table.trainable = trains_tables
    embedded = [table(categories[:, index]) for index, table in enumerate(tables)]
    logit = _logit([integers, *embedded], hidden)
    return keras.Model({"integers": integers, "categories": categories}, logit, name="pctr")


def pctr_over_rows(
    widths: Mapping[str, int],
    num_integers: int = 13,
    hidden: Sequence[int] = (598, 598, 598, 598),
) -> keras.Model:
    """The click model without its tables; its inputs are looked-up rows.

    Args:
        widths: The width of each categorical feature's rows.
        num_integers: As `pctr`.
        hidden: As `pctr`.

    Returns:
        A model from {"integers": float `[batch, num_integers]`} and each feature's rows, float
        `[batch, width]`, to one logit, `[batch, 1]`.
    """
    integers = keras.Input((num_integers,), name="integers")
    rows = {name: keras.Input((width,), name=name) for name, width in widths.items()}
    return keras.Model(
        {"integers": integers, **rows}, _logit([integers, *rows.values()], hidden), name="pctr"
    )


def _logit(features: list[Any], hidden: Sequence[int]) -> Any:
    values = keras.layers.Concatenate(name="features")(features)
    for index, width in enumerate(hidden):
        values = keras.layers.Dense(width, activation="relu", name=f"hidden_{index + 1}")(values)
    return keras.layers.Dense(1, name="logit")(values)

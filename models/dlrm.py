"""Click models that multiply features with each other, made of keras-rs' layers.

DLRM: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
Systems", 2019 (arXiv:1906.00091), 2.1. The integers pass an MLP that ends in the width of the
tables; the logit comes from all dot products of two features, beside that MLP's output.

DCN-v2: Wang et al., "DCN V2", WWW 2021 (arXiv:2008.13535), 2.2 to 2.4, stacked: cross layers
`x' = x0 * (W x + b) + x`, then an MLP. Integers, logarithms up to ten or so, are scaled to about 1
first: their products would grow from cross to cross, which a fixed clip norm pays for.
"""

from collections.abc import Sequence

import keras
import keras_rs

from models.pctr import embedding_width


def dlrm(
    vocabularies: Sequence[int],
    num_integers: int = 13,
    width: int = 16,
    bottom: Sequence[int] = (512, 256, 64),
    top: Sequence[int] = (512, 256),
    embeddings_initializer: str = "uniform",
) -> keras.Model:
    """The dot-interaction model; widths as in the authors' script for Criteo-Kaggle.

    Args:
        vocabularies: Buckets of each categorical feature.
        num_integers: Integer features, already log-transformed.
        width: The width of every table, and of the bottom MLP's output.
        bottom: Widths of the ReLU layers before that output.
        top: Widths of the ReLU layers after the interaction.
        embeddings_initializer: Of the tables, as in Keras.

    Returns:
        A model from {"integers": float `[batch, num_integers]`, "categories": int `[batch,
        features]`} to one logit, `[batch, 1]`.
    """
    inputs = _inputs(len(vocabularies), num_integers)
    widths = [width] * len(vocabularies)
    embedded = _embedded(inputs, vocabularies, widths, embeddings_initializer)
    dense = _mlp(inputs["integers"], [*bottom, width], "bottom")
    dots = keras_rs.layers.DotInteraction(name="dots")([dense, *embedded])
    values = keras.layers.Concatenate(name="features")([dense, dots])
    return _click_model(inputs, _mlp(values, top, "top"), "dlrm")


def dcn(
    vocabularies: Sequence[int],
    num_integers: int = 13,
    crosses: int = 3,
    rank: int | None = None,
    hidden: Sequence[int] = (512, 256),
    embeddings_initializer: str = "uniform",
) -> keras.Model:
    """The cross model, stacked; tables have pCTR's widths.

    Args:
        vocabularies: Buckets of each categorical feature.
        num_integers: Integer features, already log-transformed.
        crosses: Cross layers; the l-th multiplies up to l + 1 features.
        rank: The rank of each cross layer's matrix; None for full rank.
        hidden: Widths of the ReLU layers.
        embeddings_initializer: Of the tables, as in Keras.

    Returns:
        As `dlrm`.
    """
    inputs = _inputs(len(vocabularies), num_integers)
    widths = [embedding_width(size) for size in vocabularies]
    embedded = _embedded(inputs, vocabularies, widths, embeddings_initializer)
    integers = keras.layers.Rescaling(0.1, name="scaled")(inputs["integers"])
    first = values = keras.layers.Concatenate(name="features")([integers, *embedded])
    for index in range(crosses):
        cross = keras_rs.layers.FeatureCross(rank, name=f"cross_{index + 1}")
        values = cross(first, values)
    return _click_model(inputs, _mlp(values, hidden, "hidden"), "dcn")


def _inputs(features: int, num_integers: int) -> dict[str, keras.KerasTensor]:
    return {
        "integers": keras.Input((num_integers,), name="integers"),
        "categories": keras.Input((features,), dtype="int32", name="categories"),
    }


def _embedded(
    inputs: dict[str, keras.KerasTensor],
    vocabularies: Sequence[int],
    widths: Sequence[int],
    initializer: str,
) -> list[keras.KerasTensor]:
    """Each feature's row, `[batch, width]`; the tables have pCTR's names."""
    first = inputs["integers"].shape[1] + 1
    tables = [
        keras.layers.Embedding(
            size, width, embeddings_initializer=initializer, name=f"category_{first + index}"
        )
        for index, (size, width) in enumerate(zip(vocabularies, widths, strict=True))
    ]
    return [table(inputs["categories"][:, index]) for index, table in enumerate(tables)]


def _mlp(values: keras.KerasTensor, widths: Sequence[int], name: str) -> keras.KerasTensor:
    for index, width in enumerate(widths):
        values = keras.layers.Dense(width, activation="relu", name=f"{name}_{index + 1}")(values)
    return values


def _click_model(
    inputs: dict[str, keras.KerasTensor], values: keras.KerasTensor, name: str
) -> keras.Model:
    return keras.Model(inputs, keras.layers.Dense(1, name="logit")(values), name=name)

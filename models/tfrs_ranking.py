"""TensorFlow Recommenders' Ranking on clicks: DLRM's stacks around its own embedding layer.

TensorFlow Recommenders is written in legacy Keras, which a process must ask for before TensorFlow
is imported.
"""

import os
from typing import Any

WIDTH = 16  # of all rows: their products are taken


def over_tables(feature_config: Any) -> Any:
    """The model, whose bottom stack ends with `WIDTH` values and whose top stack with one logit.

    Args:
        feature_config: The embedding layer's, with the private optimizer's update in it.

    Raises:
        ValueError: This process has no legacy Keras.
    """
    if os.environ.get("TF_USE_LEGACY_KERAS") not in ("1", "true", "True"):
        raise ValueError(
            "Expected legacy Keras, in which TensorFlow Recommenders is written: start the "
            "command again with TF_USE_LEGACY_KERAS=1 before it."
        )
    import tensorflow_recommenders as tfrs

    mlp = tfrs.layers.blocks.MLP
    return tfrs.experimental.models.Ranking(
        tfrs.layers.embedding.TPUEmbedding(feature_config, None),
        bottom_stack=mlp([512, 256, 64, WIDTH], final_activation="relu"),
        top_stack=mlp([512, 256, 1]),
    )

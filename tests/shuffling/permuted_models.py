"""Models with units and heads that can be permuted, and what they compute."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

Make = Callable[..., keras.Model]  # of a rate of dropout, 0 by default


def mlp(dropout: float = 0.0) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(12, "tanh", bias_initializer="random_normal"),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(9),
            keras.layers.Activation("relu"),
            keras.layers.Dense(1),
        ]
    )


def normalised(dropout: float = 0.0) -> keras.Model:
    """Scale and offset belong to units, and must go with them."""
    inputs = keras.Input((3, 6))
    norm = keras.layers.LayerNormalization(
        gamma_initializer="random_normal", beta_initializer="random_normal"
    )
    hidden = norm(keras.layers.Dense(16, "tanh", bias_initializer="random_normal")(inputs))
    hidden = keras.layers.Dropout(dropout)(keras.layers.ReLU()(hidden))
    return keras.Model(inputs, keras.layers.Dense(2)(hidden))


def attention(dropout: float = 0.0) -> keras.Model:
    inputs = keras.Input((4, 8))
    layer = keras.layers.MultiHeadAttention(
        3, 5, value_dim=4, dropout=dropout, bias_initializer="random_normal"
    )
    mixed = keras.layers.LayerNormalization()(inputs + layer(inputs, inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(mixed)))


def tokens(backbone: Any, name: str) -> keras.Model:
    """A head on a backbone that takes token ids."""
    ids = keras.Input((5,), dtype="int32")
    given = {"token_ids": ids, "padding_mask": keras.ops.ones_like(ids)}
    if name == "bert":
        given["segment_ids"] = keras.ops.zeros_like(ids)
    output = backbone(given)
    output = output["sequence_output"] if isinstance(output, dict) else output
    return keras.Model(ids, keras.layers.Dense(1)(output[:, 0]))


def of_hub(name: str) -> Make:
    def make(dropout: float = 0.0) -> keras.Model:
        models = pytest.importorskip("keras_hub").models
        small = {"vocabulary_size": 20, "num_layers": 2, "num_heads": 2, "hidden_dim": 8}
        small |= {"intermediate_dim": 12, "max_sequence_length": 5, "dropout": dropout}
        kinds = {
            "bert": models.BertBackbone,
            "roberta": models.RobertaBackbone,
            "gpt2": models.GPT2Backbone,
        }
        return tokens(kinds[name](**small), name)

    return make


def vit(dropout: float = 0.0) -> keras.Model:
    backbone = pytest.importorskip("keras_hub").models.ViTBackbone(
        image_shape=(8, 8, 3), patch_size=(4, 4), num_layers=2, num_heads=2, hidden_dim=8,
        mlp_dim=12, dropout_rate=dropout, attention_dropout=dropout, layer_norm_epsilon=1e-5,
    )  # fmt: skip
    image = keras.Input((8, 8, 3))
    return keras.Model(image, keras.layers.Dense(1)(backbone(image)[:, 0]))


MODELS: dict[str, tuple[Make, int]] = {  # and how many groups there are
    "mlp": (mlp, 2),
    "normalised": (normalised, 1),
    "attention": (attention, 1),
    "bert": (of_hub("bert"), 4),
    "roberta": (of_hub("roberta"), 4),
    "gpt2": (of_hub("gpt2"), 4),
    "vit": (vit, 4),
}


def data_for(model: keras.Model, count: int = 8) -> Any:
    rng = np.random.default_rng(3)
    shape = (count, *model.inputs[0].shape[1:])
    if "int" in model.inputs[0].dtype:
        return rng.integers(1, 20, shape).astype(np.int32)
    return rng.normal(size=shape).astype(np.float32)


def outputs_and_gradients(model: keras.Model, x: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    with tf.GradientTape() as tape:
        outputs = model(x)
        loss = tf.reduce_sum(tf.square(outputs))
    variables = [v.value for v in model.trainable_variables]
    found = tape.gradient(loss, variables)
    return outputs.numpy(), [
        np.zeros(v.shape) if g is None else tf.convert_to_tensor(g).numpy()
        for v, g in zip(variables, found, strict=True)
    ]

"""LoRA of Hu et al. (2022): a frozen projection plus a product of two thin matrices, one pair each.

A projection from width d to d gets A `[d, r]` and B `[r, d]`, which are 2·d·r trainable numbers.
Keras' own LoRA of `EinsumDense` differs: for a projection to h heads of size k, it has A
`[d, h, r]`, one for each head, and one B `[r, k]` that all heads share: d·h·r + r·k numbers,
h/2 times as many where d is large. Here it is the form of the paper.

B is 0 at first, so that the layer begins as its base. The product has no further scale (the paper's
α equals r).
"""

from typing import Any

import keras
import numpy as np

_PACKAGE = "dp_sparse_models"


def _inner_initializer() -> keras.initializers.Initializer:
    """Uniform between ±1/√(width of the input), as in the authors' code."""
    return keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")


@keras.saving.register_keras_serializable(package=_PACKAGE)
class LowRankProjection(keras.layers.Layer):
    """A projection to heads, frozen, plus x·A·B.

    Args:
        base: The `EinsumDense` of an attention layer, built, from `[batch, length, width]` to
            `[batch, length, heads, size]`. It is frozen.
        rank: Columns of A.
        **kwargs: As every Keras layer.
    """

    def __init__(self, base: keras.layers.EinsumDense, rank: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        base.trainable = False
        _, self._heads, self._size = base.kernel.shape
        self.base = base
        self.down = keras.layers.Dense(
            rank,
            use_bias=False,
            kernel_initializer=_inner_initializer(),
            dtype=self.dtype_policy,
            name="down",
        )
        self.up = keras.layers.EinsumDense(
            "blr,rhk->blhk",
            (None, self._heads, self._size),
            kernel_initializer="zeros",
            dtype=self.dtype_policy,
            name="up",
        )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """A and B."""
        self.down.build(input_shape)
        self.up.build((*input_shape[:-1], self.down.units))
        self.built = True

    def call(self, inputs: Any) -> Any:
        """The projection, `[batch, length, heads, size]`."""
        return self.base(inputs) + self.up(self.down(inputs))

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """That of the base."""
        return self.base.compute_output_shape(input_shape)

    def merged_kernel(self) -> np.ndarray:
        """The kernel of one projection that gives the same, `[width, heads, size]`."""
        product = np.einsum("dr,rhk->dhk", _value(self.down.kernel), _value(self.up.kernel))
        return _value(self.base.kernel) + product


@keras.saving.register_keras_serializable(package=_PACKAGE)
class LowRankWords(keras.layers.Layer):
    """A table of words, frozen, plus the rows of A times B.

    A `[rows, rank]` is a table of lookups itself, B `[rank, width]` a matrix.

    Args:
        base: The table, an `Embedding` or a `ReversibleEmbedding`, built. It is frozen.
        rank: Columns of A.
        **kwargs: As every Keras layer.
    """

    def __init__(self, base: keras.layers.Embedding, rank: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        base.trainable = False
        self.base = base
        self.down = keras.layers.Embedding(
            base.input_dim,
            rank,
            embeddings_initializer=_inner_initializer(),
            dtype=self.dtype_policy,
            name="down",
        )
        self.up = keras.layers.Dense(
            base.output_dim,
            use_bias=False,
            kernel_initializer="zeros",
            dtype=self.dtype_policy,
            name="up",
        )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """A and B."""
        self.down.build(input_shape)
        self.up.build((*input_shape, self.down.output_dim))
        self.built = True

    def call(self, inputs: Any) -> Any:
        """From ids `[batch, length]` to `[batch, length, width]`."""
        return self.base(inputs) + self.up(self.down(inputs))

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """One axis more, the width."""
        return (*input_shape, self.base.output_dim)

    def merged_table(self) -> np.ndarray:
        """The table that gives the same rows, `[rows, width]`."""
        return _value(self.base.embeddings) + _value(self.down.embeddings) @ _value(self.up.kernel)


def add_to_attention(attention: keras.layers.MultiHeadAttention, rank: int, prefix: str) -> None:
    """Puts LoRA on the query and the value of a built attention layer, in place.

    Args:
        attention: The layer.
        rank: Of each of them.
        prefix: Begins the new layers' names, since Keras numbers no layers inside others.
    """
    attention._tracker.unlock()  # a built layer takes no others
    for kind in ("query", "value"):
        base, name = getattr(attention, f"_{kind}_dense"), f"{prefix}_{kind}_lora"
        projection = LowRankProjection(base, rank, dtype=attention.dtype_policy, name=name)
        projection.build((None, None, base.kernel.shape[0]))
        setattr(attention, f"_{kind}_dense", projection)
    attention._tracker.lock()


def _value(variable: keras.Variable) -> np.ndarray:
    return keras.ops.convert_to_numpy(variable)

"""The audited copy of a model: the model and, beside it, a probe on which canaries act.

The probe is one layer with a weight for each coordinate, and an output of its own. A canary is an
example whose loss is that weight, times a large number: its gradient is clipped to C, and lies on
one coordinate (a Dirac canary; Nasr et al., USENIX Security 2023). The examples' own outputs do not
count for it, and the probe's do not for the other examples.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse import clipping
from dp_sparse.core import validate

_FAR = 1e6  # times C: the norm of a canary's gradient before clipping


@dataclasses.dataclass(frozen=True)
class Probe:
    """A layer beside a model.

    Attributes:
        coordinates: How many.
        rows: Whether they are rows of a table, which canaries look up, or of a dense weight.
    """

    coordinates: int
    rows: bool

    def beside(self, model: keras.Model, x: Any) -> keras.Model:
        """The audited copy, which shares the model's variables.

        Args:
            model: With one output.
            x: Examples as the model takes them.

        Raises:
            ValueError: The model has several outputs.
        """
        inputs = tf.nest.map_structure(_input_like, clipping.named_inputs(model, x))
        output = model(inputs)
        if tf.nest.is_nested(output):
            raise ValueError(
                f"Expected a model of one output, got {model.name} with "
                f"{len(tf.nest.flatten(output))}: audit it without the others."
            )
        canary = keras.Input((1,), dtype="int32", name="canary")
        return keras.Model((inputs, canary), {"model": output, "probe": self._value(canary)})

    def _value(self, canary: Any) -> Any:
        """The weight of a canary's coordinate, `[batch, 1]`; 0 is no canary."""
        if self.rows:
            table = keras.layers.Embedding(
                self.coordinates + 1, 1, "zeros", mask_zero=True, name="probe"
            )
            return keras.ops.cast(table(canary)[:, :, 0], "float32")
        hot = keras.ops.one_hot(canary[:, 0] - 1, self.coordinates)
        return keras.layers.Dense(
            1, use_bias=False, kernel_initializer="zeros", dtype="float32", name="probe"
        )(hot)

    def weights(self, copy: keras.Model) -> np.ndarray:
        """Of all coordinates, float64 `[coordinates]`."""
        (weight,) = copy.get_layer("probe").trainable_variables
        return weight.numpy().astype(np.float64)[int(self.rows) :, 0]

    def examples(self, x: Any, y: Any, weight: np.ndarray, clip_norm: float) -> Any:
        """`(x, y, sample_weight)` of examples that are no canaries."""
        count = len(weight)
        return self._filled(
            x, y, {"model": weight, "probe": np.zeros(count)}, np.zeros(count), clip_norm
        )

    def canaries(
        self, x: Any, y: Any, coordinates: np.ndarray, present: np.ndarray, clip_norm: float
    ) -> Any:
        """The same of canaries; those that are not present act on nothing and look nothing up.

        Args:
            x: One example as the model takes it, which fills the model's inputs.
            y: Its label.
            coordinates: int64 `[canaries]`.
            present: bool `[canaries]`.
            clip_norm: C.
        """
        x, y = (
            tf.nest.map_structure(lambda leaf: np.repeat(leaf[:1], len(present), axis=0), nest)
            for nest in (x, y)
        )
        weights = {"model": np.zeros(len(present)), "probe": present.astype(float)}
        return self._filled(x, y, weights, np.where(present, coordinates + 1, 0), clip_norm)

    def _filled(self, x: Any, y: Any, weights: Any, ids: np.ndarray, clip_norm: float) -> Any:
        far = np.full((len(ids), 1), _FAR * validate.positive("clip_norm", clip_norm), np.float32)
        x = x, ids.astype(np.int32)[:, np.newaxis]
        weights = tf.nest.map_structure(lambda leaf: np.asarray(leaf, np.float32), weights)
        return x, {"model": y, "probe": far}, weights


def probe_loss(far: Any, value: Any) -> Any:
    """−far·value: descent makes a canary's weight grow."""
    return -(far * value)[:, 0]


def _input_like(leaf: Any) -> Any:
    leaf = np.asarray(leaf)
    dtype = "string" if leaf.dtype.kind in "OSU" else leaf.dtype.name
    return keras.Input(leaf.shape[1:], dtype=dtype)

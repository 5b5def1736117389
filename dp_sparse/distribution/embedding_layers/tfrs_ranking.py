"""`tfrs.experimental.models.Ranking`, trained privately through its own variables.

Ranking is a model of legacy Keras, whose train step would apply raw gradients. Here its stacks run
inside a Keras 3 model. While they run, each of their Dense layers is replaced by a Keras 3 layer
with the same variables. So Ranking itself is trained, and can be served as before.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.core import UnsupportedLayerError, replaced_call
from dp_sparse.distribution.embedding_layers.private_tables import PrivateTables

Parts = tuple[Any, Any, Any]  # the stacks: bottom, interaction, top


class RankingModel(keras.Model):
    """The Keras 3 model of a Ranking: a click probability `[batch, 1]` from activations.

    Its inputs are `dense_features`, float32 `[batch, num_dense]`, and the activations of each
    feature, `[batch, width]`. Compile it with a loss of Keras 3, train it with `train_tables`, and
    save or serve the Ranking.

    Args:
        ranking: A `tfrs.experimental.models.Ranking` whose embedding layer was made with
            `tables.feature_config`. Its stacks may have Dense layers, and layers without variables
            and without randomness.
        tables: The private tables.
        num_dense: How many dense features there are.

    Raises:
        UnsupportedLayerError: A stack has other variables, randomness, regularisers or constraints;
            the message names the layer.

    ### Formal Guarantees
    Every variable that is read belongs to such a Keras 3 Dense layer, whose gradient is clipped as
    usual. Other variables are refused when the model is made. Ranking's own `fit` is not private.
    """

    def __init__(self, ranking: Any, tables: PrivateTables, num_dense: int) -> None:
        super().__init__(name="ranking")
        self._names = sorted(
            feature.name for feature in tables.features
        )  # in the order in which Ranking flattens them
        self._concatenates = bool(ranking._concat_dense)
        parts: Parts = ranking._bottom_stack, ranking._feature_interaction, ranking._top_stack
        # In a function, so that Keras 3 does not track layers of another Keras.
        self._parts: Callable[[], Parts] = lambda: parts
        widths = {f.name: table.width for table in tables.tables for f in table.features}
        examples = {name: tf.zeros([2, widths[name]]) for name in self._names}
        self._run({"dense_features": tf.zeros([2, num_dense]), **examples})  # creates variables
        denses = list(_denses(parts))
        self._twins = [_twin(layer, index) for index, layer in enumerate(denses)]
        self._denses: Callable[[], list[Any]] = lambda: denses
        self.built = True

    def call(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        """The click probability."""
        with contextlib.ExitStack() as stack:
            for layer, twin in zip(self._denses(), self._twins, strict=True):
                stack.enter_context(replaced_call(layer, _calling(twin)))
            return self._run(inputs)

    def _run(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        bottom, interaction, top = self._parts()
        dense = bottom(inputs["dense_features"])
        values = interaction([*(inputs[name] for name in self._names), dense])
        return top(tf.concat([dense, values], axis=1) if self._concatenates else values)


def _denses(parts: Parts) -> Iterator[Any]:
    """The Dense layers of the stacks, each once; refuses anything else to train."""
    seen: set[int] = set()
    known: set[int] = set()
    for part in parts:
        for layer in part._flatten_layers():
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            if type(layer).__name__ == "Dense":
                _refuse_options(layer)
                known |= {id(variable) for variable in layer.variables}
                yield layer
            elif hasattr(layer, "_random_generator"):
                raise UnsupportedLayerError(
                    f"{layer.name}: draws random numbers that are not secret. Leave it out."
                )
    others = [v.name for part in parts for v in part.variables if id(v) not in known]
    if others:
        raise UnsupportedLayerError(
            f"Expected stacks with the variables of Dense layers alone, got {others}: build them "
            "of tf.keras.layers.Dense, tfrs.layers.blocks.MLP or "
            "tfrs.layers.feature_interaction.Cross."
        )


def _refuse_options(layer: Any) -> None:
    for option in ("regularizer", "constraint"):
        for of in (f"kernel_{option}", f"bias_{option}", f"activity_{option}"):
            if getattr(layer, of, None) is not None:
                raise UnsupportedLayerError(f"{layer.name}: has a {of}. Leave it out.")
    if not layer.trainable or str(layer.compute_dtype) != "float32":
        raise UnsupportedLayerError(
            f"{layer.name}: expected trainable and float32, got trainable={layer.trainable} and "
            f"{layer.compute_dtype}."
        )


def _twin(layer: Any, index: int) -> keras.layers.Dense:
    """A Keras 3 Dense that holds the legacy layer's own variables."""
    twin = keras.layers.Dense(
        layer.units, activation=layer.activation, use_bias=layer.use_bias, name=f"dense_{index}"
    )
    twin.build((None, int(layer.kernel.shape[0])))
    twin._kernel._value = layer.kernel
    if layer.use_bias:
        twin.bias._value = layer.bias
    return twin


def _calling(twin: keras.layers.Dense) -> Callable[[tf.Tensor], tf.Tensor]:
    """A function, since a legacy layer would track a layer that it is given."""
    return lambda inputs: twin(inputs)

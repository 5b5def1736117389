"""The variable guard: it refuses what a forward pass may not do with variables."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from dp_sparse.clipping.coverage import embedding_tables, own_variables
from dp_sparse.clipping.detached import reads_detached
from dp_sparse.clipping.graph_guard import own_operations
from dp_sparse.clipping.rules import Rule, covers_inner_layers
from dp_sparse.clipping.unnoised import metric_variables
from dp_sparse.clipping.zero_weights import filled_weights
from dp_sparse.core import UnsupportedLayerError

Seeds: TypeAlias = Callable[[int, str], tf.Tensor]  # of a number in the pass and a dtype, `[2]`


class VariableGuard(keras.StatelessScope):
    """Sees each read and write of a Keras variable in a forward pass, and lets no write happen."""

    def __init__(self, model: keras.Model, seeds: Seeds | None) -> None:
        super().__init__(collect_losses=True)
        self.covers_all = False  # True while a rule runs that also records the layers inside
        self._seeds = seeds
        self._trainable = {id(variable) for variable in model.trainable_variables}
        self._of_metrics = {id(variable) for variable in metric_variables(model)}
        self._covered: dict[int, keras.Variable] = {}
        self._written: list[str] = []
        self._seeds_drawn = 0
        self._filled = filled_weights(model, embedding_tables(model))
        self._outside: list[str] = []
        self._statistics: list[str] = []

    @contextlib.contextmanager
    def inside(self, layer: keras.layers.Layer, rule: Rule) -> Iterator[list[keras.Variable]]:
        """Allows reading the variables that the layer's rule records, while its call runs.

        Gives them, and those of the calls that it is in.
        """
        before = self._covered, self.covers_all
        covers_all = covers_inner_layers(rule)
        own = layer.variables if covers_all else own_variables(layer)
        self._covered, self.covers_all = before[0] | {id(v): v for v in own}, covers_all
        try:
            yield [*self._covered.values()]
        finally:
            self._covered, self.covers_all = before

    def get_current_value(self, variable: keras.Variable) -> Any:
        """The value of a variable that Keras reads; a seed generator gets a new secret state."""
        if self._seeds is not None and _is_seed(variable):
            with own_operations():
                return self._seeds(self._seeds_drawn, variable.dtype)
        recorded = id(variable) in self._covered or reads_detached()
        if id(variable) in self._trainable and not recorded:
            self._outside.append(variable.path)
        if id(variable) in self._of_metrics:
            self._statistics.append(variable.path)
        if id(variable) in self._filled:
            return self._filled[id(variable)]()
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Notes an assignment, which Keras reports here."""
        super().add_update(update)
        if _is_seed(update[0]):
            self._seeds_drawn += 1
        else:
            self._written.append(update[0].path)

    def seeds_drawn(self) -> int:
        """How many random seeds the pass has drawn so far."""
        return self._seeds_drawn

    def refuse(self) -> None:
        """Raises UnsupportedLayerError if the pass did what cannot be clipped."""
        problems = [
            (
                self._outside,
                "read outside the layer that owns it; call the layer instead of using its variable",
            ),
            (
                self._written,
                "written in the forward pass; running statistics are not private. Remove the "
                "layer's statistics",
            ),
            (
                self._statistics,
                "a metric's variable, which is not private, read in the forward pass. Leave it out",
            ),
            (
                ["add_loss"] if self.losses else [],
                "a loss over the whole batch; put it into loss= of compile",
            ),
        ]
        lines = [
            f"- {path}: {problem}." for paths, problem in problems for path in dict.fromkeys(paths)
        ]
        if lines:
            raise UnsupportedLayerError("Cannot train privately:\n" + "\n".join(lines))


def _is_seed(variable: keras.Variable) -> bool:
    return variable.path.endswith("seed_generator_state")

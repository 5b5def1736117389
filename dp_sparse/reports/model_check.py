"""Whether a model can be trained privately, and by which rules, before any training.

Given a batch, the checks of isolation that training makes on its first batches are made here, too.
"""

import dataclasses
import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse import clipping
from dp_sparse.clipping import AutomaticClipping, QuantileClipping
from dp_sparse.core import PrivacyError, UnsupportedLayerError, translated, validate
from dp_sparse.guards import COUPLED
from dp_sparse.optimizers import PrivateOptimizer
from dp_sparse.reports.preflight_warnings import BIASED, warnings_before
from dp_sparse.sampling import Examples
from dp_sparse.step import (
    arrays,
    examples_of,
    has_own_loss,
    isolation_of,
    measure,
    recorded_pass,
    refuse_wrapped,
    replaced_methods,
    same_seeds,
    signature_of,
    terms_of_pass,
)

_NEARLY_ALL = 0.9  # of a batch's examples


@dataclasses.dataclass(frozen=True)
class ModelCheck:
    """What `check_model` found; `print` shows it.

    Attributes:
        rules: For each trainable variable, in the model's order, its path and the rule that clips
            it ("none" where no layer that can be recorded owns it).
        problems: Why the model cannot be trained privately, each with its fix; empty if it can.
        traced: Whether a pass was traced, too; without one, what only shows in a call (variables
            read elsewhere, statistics written, losses added, outputs without a gradient) is not
            known.
        compared: Whether examples of a batch were compared, alone and in other batches; without
            that, it is not known whether the model mixes them.
        warnings: What the optimizer of a compiled model lets expect of training, where that is bad:
            too much noise for the model, too few lookups that train, a learning rate at which noise
            wins. From shapes, noise and settings alone, but for one that is made of the batch where
            the clip norm clips nearly all of it: no epsilon covers that one, and it says so. Empty
            if there is nothing to say, or if a problem was found. For inputs of any length give a
            batch.

    Examples:
        >>> import dp_sparse, keras
        >>> norm = keras.layers.BatchNormalization(name="norm")
        >>> layers = [keras.Input((3,)), norm, keras.layers.Dense(1)]
        >>> model = keras.Sequential(layers, name="clicks")
        >>> found = dp_sparse.check_model(model)
        >>> found.ok, found.compared
        (False, False)
        >>> found.problems[0]
        'clicks/norm (BatchNormalization): mixes the examples of a batch. Use ...'
    """

    rules: dict[str, str]
    problems: list[str]
    traced: bool
    compared: bool = False
    warnings: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No problem was found."""
        return not self.problems

    def __str__(self) -> str:
        width = max([len(path) for path in self.rules], default=0)
        lines = [f"{path.ljust(width)}  {rule}" for path, rule in self.rules.items()]
        if self.problems:
            lines += ["", "Cannot train privately:", *(f"- {line}" for line in self.problems)]
        elif not self.traced:
            lines += ["", "Nothing was traced: give a batch."]
        elif not self.compared:
            lines += ["", "Not known whether examples mix: give a batch of them, (x, y)."]
        if self.warnings:
            lines += ["", *(f"! {line}" for line in self.warnings)]
        return "\n".join(lines)


def check_model(model: keras.Model, batch: Any = None, batch_size: int = 2048) -> ModelCheck:
    """Lists every trainable variable with its rule, and every problem with its fix.

    Traces one forward and one backward pass, and with a `batch` runs some more, to see whether what
    is recorded of an example depends on its batch, as the first batches of training do. No weight
    changes. Of a model compiled with a private optimizer it also says what to expect of training.

    Args:
        model: Any Keras model.
        batch: A batch of examples `(x, y)` or `(x, y, sample_weight)`, or of inputs x alone, each
            `[batch, ...]`; a batch of a sampler will do. With y, a compiled model's loss is checked
            with it. Needed for a model that is not functional.
        batch_size: The largest batch that training would see, for the fallback's memory budget.

    Raises:
        ValueError: No model, or one without weights yet and no `batch` to build it with; a
            `batch_size` that is no whole number above 0; a batch without examples, or whose parts
            have not as many; x without an input of the model.
        BadExampleError: The batch has an id or a label out of range.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> ids, table = keras.Input((), dtype="int32"), keras.layers.Embedding(10, 2, name="users")
        >>> score = keras.layers.Dense(1, name="score")
        >>> model = keras.Sequential([ids, table, score], name="clicks")
        >>> model.compile(loss="mse")
        >>> print(dp_sparse.check_model(model, (np.arange(8), np.ones(8))))
        clicks/users/embeddings  embedding
        clicks/score/kernel      dense
        clicks/score/bias        dense
    """
    validate.of_keras_3("a model", model)
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"Expected a keras.Model, got {model!r}: put the layer into keras.Sequential([...])."
        )
    batch_size = validate.positive_integer("batch_size", batch_size)
    examples = None if batch is None else examples_of(model, batch)
    if examples is not None:
        with translated():
            refuse_wrapped(model, examples)
    if not model.built:
        if examples is None:
            raise ValueError(
                f"Expected a built model or a batch, got {model.name} without weights: "
                "pass a batch of its inputs."
            )
        model(examples.x)
    specs = signature_of(model, None if examples is None else examples.x)
    found = clipping.find_rules(model)
    rules = _rules(model, found)
    problems = [
        *replaced_methods(model, getattr(model, "loss", None)),
        *found.problems,
        *_of_variables(model, rules),
    ]
    if not problems and specs is not None:
        problems = _of_a_pass(model, specs, batch_size)
    compared = examples is not None and not problems
    if examples is not None and not problems:
        problems = _of_a_batch(model, examples, batch_size)
    optimizer = getattr(model, "optimizer", None)
    warnings: list[str] = []
    if isinstance(optimizer, PrivateOptimizer) and not problems and specs is not None:
        warnings = warnings_before(model, optimizer, batch)
        if examples is not None:
            warnings += _of_clip_norm(model, optimizer, examples, batch_size)
    return ModelCheck(rules, problems, specs is not None, compared, warnings)


def _rules(model: keras.Model, found: clipping.LayerRules) -> dict[str, str]:
    owners = {id(v): rule for layer, rule in found.taps for v in layer.trainable_variables}
    return {
        variable.path: _label(owners.get(id(variable))) for variable in model.trainable_variables
    }


def _label(rule: Any) -> str:
    return "none" if rule is None else clipping.name_of_rule(rule)


def _of_variables(model: keras.Model, rules: dict[str, str]) -> list[str]:
    if not rules:
        return [
            f"{model.name} has no trainable variables. Set trainable=True where it shall train."
        ]
    return [
        f"{path}: belongs to no layer whose calls can be recorded. Make it a weight of a layer."
        for path, rule in rules.items()
        if rule == "none"
    ]


def _of_a_pass(model: keras.Model, specs: Any, batch_size: int) -> list[str]:
    def norms(x: Any) -> None:
        for _, term in terms_of_pass(model, x, batch_size):
            term.squared_norms()

    try:
        tf.function(norms, autograph=False).get_concrete_function(specs)
    except UnsupportedLayerError as error:
        return _sentences(str(error))
    return []


def _of_a_batch(model: keras.Model, examples: Examples, batch_size: int) -> list[str]:
    """What the checks of isolation say of a batch."""
    if model._compile_loss is None and not has_own_loss(model):
        examples = examples._replace(y=())
    compiles = getattr(model, "jit_compile", False) is True
    isolation = isolation_of(model, batch_size, own_size=compiles)
    try:
        with translated():
            measure(model, examples, batch_size)
            found = isolation.coupled(*arrays(examples, trimmed=False), seed=0, whole=True)
    except PrivacyError as error:
        return [str(error)]
    except UnsupportedLayerError as error:
        return _sentences(str(error))
    return [] if found is None else [COUPLED.format(found)]


def _of_clip_norm(
    model: keras.Model, optimizer: PrivateOptimizer, examples: Examples, batch_size: int
) -> list[str]:
    """Whether clipping binds for nearly all of the batch's examples, with the weights as they are.

    Without labels or a loss nothing is said, nor of styles that scale every gradient, or whose clip
    norm follows the gradients.
    """
    style, clip_norm = optimizer.clipping, optimizer.clip_norm
    compiled = tf.nest.flatten(examples.y) and model._compile_loss is not None
    if not (compiled or has_own_loss(model)) or isinstance(
        style, AutomaticClipping | QuantileClipping
    ):
        return []

    def norms(examples: Examples) -> tuple[tf.Tensor, tf.Tensor]:
        terms, losses, _ = recorded_pass(model, batch_size)(examples, same_seeds)
        found = clipping.scaled(terms, clip_norm, losses, tf.ones_like(losses), style)
        return tf.sqrt(found.squared_norms), found.clipped

    sizes, clipped = tf.function(norms, autograph=False)(examples)
    share = float(np.mean(clipped))
    if share < _NEARLY_ALL:
        return []
    return [
        f"clip_norm={clip_norm:g} clips {share:.0%} of the examples of this batch, whose gradients "
        f"have a median norm of {float(np.median(sizes)):.2g}: {BIASED}. Raise clip_norm if they "
        "are used. (No epsilon covers this line: it is of the batch that you gave.)"
    ]


def _sentences(message: str) -> list[str]:
    """The problems of an error, without what Keras wraps around one raised inside a call."""
    if message.startswith("Exception encountered"):
        message = re.sub(r"\x1b\[\d+m", "", message.split("\n\n")[1])
    lines = message.splitlines()
    return [line.removeprefix("- ") for line in lines if line != "Cannot train privately:"]

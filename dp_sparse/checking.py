"""Whether a model can be trained privately, and by which rules, before any training."""

import dataclasses
import re
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping, validate
from dp_sparse.errors import UnsupportedLayerError


@dataclasses.dataclass(frozen=True)
class ModelCheck:
    """What `check_model` found; `print` shows it.

    Attributes:
        rules: For each trainable variable, in the model's order, its path and the rule that clips
            it ("none" where no layer that can be recorded owns it).
        problems: Why the model cannot be trained privately, each with its mend; empty if it can.
        traced: Whether a pass was traced, too; without one, what only shows in a call (variables
            read elsewhere, statistics written, losses added, outputs without a gradient) is not
            known.
    """

    rules: dict[str, str]
    problems: list[str]
    traced: bool

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
            lines += ["", "Nothing was traced: give x, a batch of the model's inputs."]
        return "\n".join(lines)


def check_model(model: keras.Model, x: Any = None, batch_size: int = 2048) -> ModelCheck:
    """Lists every trainable variable with its rule, and every problem with its mend.

    Traces one forward and one backward pass, of `x` if given, else of the inputs that the model was
    built with; nothing is computed and no weight changes. Losses and optimizers are not looked at.

    Args:
        model: Any Keras model.
        x: A batch of its inputs, each `[batch, ...]`; needed for a model that is not functional.
        batch_size: The largest batch that training would see, for the fallback's memory budget.

    Raises:
        ValueError: No model, or one without weights yet and no `x` to build it with; a `batch_size`
            that is no whole number above 0.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"Expected a keras.Model, got {model!r}: put the layer into keras.Sequential([...])."
        )
    batch_size = validate.positive_integer("batch_size", batch_size)
    if not model.built and x is None:
        raise ValueError(
            f"Expected a built model or x, got {model.name} without weights: "
            "pass x, a batch of its inputs."
        )
    specs = _specs(model, x)
    if not model.built:
        model(x)
    survey = clipping.survey(model)
    rules = _rules(model, survey)
    problems = [*survey.problems, *_of_variables(model, rules)]
    if not problems and specs is not None:
        problems = _of_a_pass(model, specs, batch_size)
    return ModelCheck(rules, problems, specs is not None)


def _rules(model: keras.Model, survey: clipping.Survey) -> dict[str, str]:
    owners = {id(v): rule for layer, rule in survey.taps for v in layer.trainable_variables}
    return {
        variable.path: _label(owners.get(id(variable))) for variable in model.trainable_variables
    }


def _label(rule: Any) -> str:
    if rule is None:
        return "none"
    return rule.__module__.rpartition(".")[2].replace("_", " ")


def _specs(model: keras.Model, x: Any) -> Any:
    """The signature of a batch of unknown size, or None if nothing tells it."""
    if x is not None:
        given = tf.nest.map_structure(tf.convert_to_tensor, x)
        return tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), given)
    functional = getattr(model, "_functional", None) or model  # what a Sequential is inside
    inputs = getattr(functional, "_inputs_struct", None)
    if inputs is None:
        return None
    return tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), inputs)


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
    def forward_and_backward(x: Any) -> None:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            recording = clipping.record(model, x, tape, batch_size)
            outputs = tf.nest.flatten(recording.outputs)
            sums = [tf.reduce_sum(tf.cast(o, tf.float32)) for o in outputs if o.dtype.is_floating]
            total = tf.add_n(sums) if sums else tf.zeros([])
        for _, use in recording.uses(tape.gradient(total, recording.targets)):
            use.squared_norms()

    try:
        tf.function(forward_and_backward, autograph=False).get_concrete_function(specs)
    except UnsupportedLayerError as error:
        return _sentences(str(error))
    return []


def _sentences(message: str) -> list[str]:
    """The problems of an error, without what Keras wraps around one raised inside a call."""
    if message.startswith("Exception encountered"):
        message = re.sub(r"\x1b\[\d+m", "", message.split("\n\n")[1])
    lines = message.splitlines()
    return [line.removeprefix("- ") for line in lines if line != "Cannot train privately:"]

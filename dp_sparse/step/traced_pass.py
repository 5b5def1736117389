"""A pass over a model that is traced to learn of it, and the examples or shapes that it takes.

Shapes tell how large a model's tables are, and how many rows an example looks up.
"""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse import clipping
from dp_sparse.sampling import Examples, is_sampled, text_tensors, weights_of_outputs
from dp_sparse.step.own_loss import has_own_loss


def examples_of(model: keras.Model, batch: Any) -> Examples:
    """The examples of what the user calls a batch; a sampler's has no padding left.

    A functional model's x has its inputs alone; y is () where there are no labels.

    Raises:
        ValueError: It is empty, or its parts differ in their number of examples, or x lacks an
            input of the model.
    """
    if is_sampled(batch):
        x, y, weights = batch
        there = np.asarray(weights["present"]) > 0
        batch = tf.nest.map_structure(lambda leaf: leaf[there], (x, y, weights["sample_weight"]))
    x, y, weights = (*batch, None, None)[:3] if isinstance(batch, tuple) else (batch, None, None)
    x, y = text_tensors(clipping.named_inputs(model, x), "x"), text_tensors(y, "y")
    x = tf.nest.map_structure(tf.convert_to_tensor, x)
    y = () if y is None else tf.nest.map_structure(tf.convert_to_tensor, y)
    size = _size((x, y, weights))
    ones = tf.ones([size])
    weights = ones if weights is None else weights_of_outputs(y, weights, ones)
    weights = tf.nest.map_structure(lambda w: tf.cast(w, tf.float32), weights)
    return Examples(x, y, weights, ones)


def _size(batch: Any) -> int:
    """How many examples a batch has.

    Raises:
        ValueError: None, or not everywhere as many.
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    shapes = [tuple(np.shape(leaf)) for leaf in leaves]
    sizes = {shape[:1] for shape in shapes}
    if len(sizes) != 1 or sizes == {()}:
        raise ValueError(
            f"Expected batch to be (x, y), arrays of as many examples each, got shapes {shapes}: "
            "give each the examples on its first axis."
        )
    if sizes == {(0,)}:
        raise ValueError("Expected a batch with examples, got an empty one.")
    return int(shapes[0][0])


def signature_of(model: keras.Model, x: Any) -> Any:
    """The signature of inputs x of an unknown number of examples, or None if nothing tells it."""
    if x is not None:
        given = tf.nest.map_structure(tf.convert_to_tensor, x)
        return tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), given)
    functional = getattr(model, "_functional", None) or model  # what a Sequential is inside
    inputs = getattr(functional, "_inputs_struct", None)
    if inputs is None:
        return None
    return tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), inputs)


def terms_of_pass(model: keras.Model, x: Any, batch_size: int = 1) -> clipping.Terms:
    """What clipping reads of one forward and one backward pass, from the sum of all outputs.

    Raises:
        UnsupportedLayerError: A layer whose per-example gradients cannot be had.
    """
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        shared = uniforms_by(same_seeds)
        recording = clipping.record(model, x, tape, batch_size, same_seeds, shared_uniforms=shared)
        outputs = tf.nest.flatten(recording.outputs)
        sums = [tf.reduce_sum(tf.cast(o, tf.float32)) for o in outputs if o.dtype.is_floating]
        total = tf.add_n(sums) if sums else tf.zeros([])
    with clipping.guarded():
        return recording.terms(tape.gradient(total, recording.targets))


def values_of_outputs(model: keras.Model, x: Any) -> int | None:
    """How many values the model gives an example, over all outputs; None if shapes do not tell.

    Args:
        model: A built model.
        x: The signature of its inputs.
    """
    traced = tf.function(lambda x: model(x), autograph=False).get_concrete_function(x)
    shapes = [leaf.shape[1:] for leaf in tf.nest.flatten(traced.structured_outputs)]
    counts = [shape.num_elements() for shape in shapes]
    return None if None in counts else sum(counts)


def same_seeds(number: int, dtype: str) -> tf.Tensor:
    """The same masks in each pass."""
    return tf.constant([number, 1], dtype)


def uniforms_by(seeds: clipping.Seeds) -> clipping.SharedUniforms:
    """The numbers of layers that draw for all examples alike, in a pass with these seeds."""

    def uniforms(number: int, count: int) -> tf.Tensor:
        seed = seeds(-1 - number, "int32")
        return tf.random.stateless_uniform([count], seed, dtype=tf.float64)

    return uniforms


def inputs_of(model: keras.Model, batch: Any) -> Any:
    """The signature of a model's inputs; builds the model from the batch if it is not built.

    Raises:
        ValueError: The inputs are not known.
    """
    x = None if batch is None else examples_of(model, batch).x
    if x is not None and not model.built:
        model(x)
    specs = signature_of(model, x)
    if specs is None:
        raise ValueError(
            f"Expected a model whose inputs are known, or a batch of them, got {model.name} alone: "
            "call recommend(model, plan, batch)."
        )
    return specs


def lookups_of(model: keras.Model, specs: Any) -> dict[int, int]:
    """Lookups of an example in each table, by the table's id: from a traced pass.

    Tables that the pass does not look up are left out; a loss of the model's own is taken to look
    one row up in each of these.

    Args:
        model: A model.
        specs: As `inputs_of`.

    Raises:
        ValueError: Their number is not known.
    """
    found: dict[int, int] = {}

    def trace(x: Any) -> None:
        for variable, term in terms_of_pass(model, x):
            if isinstance(term, clipping.Rows):
                if term.row_ids.shape[1] is None:
                    raise ValueError(
                        f"Expected lookups of {variable.path} of known number, got inputs of any "
                        "length: call recommend(model, plan, batch)."
                    )
                found[id(variable)] = term.row_ids.shape[1]

    tf.function(trace, autograph=False).get_concrete_function(specs)
    if has_own_loss(model):
        return {**{id(table): 1 for table in clipping.embedding_tables(model)}, **found}
    return found


def tables_by_name(
    tables: list[keras.Variable], lookups: dict[int, int], frequencies: Mapping[str, Any]
) -> dict[str, Any]:
    """As `plan.explain` takes them, by the names of layers; by paths where layers share a name.

    A table that is not in `lookups` has none.
    """
    names = [table.path.split("/")[-2] for table in tables]
    found = {
        name if names.count(name) == 1 else table.path: (
            int(table.shape[0]),
            lookups.get(id(table), 0),
        )
        for name, table in zip(names, tables, strict=True)
    }
    unknown = [name for name in frequencies if name not in found]
    if unknown:
        raise ValueError(
            f"Expected frequencies of the model's tables {sorted(found)}, got some of {unknown}."
        )
    for name, given in frequencies.items():
        if np.shape(given) != (found[name][0],):
            raise ValueError(
                f"Expected frequencies[{name!r}] of shape ({found[name][0]},), one of each row, "
                f"got shape {np.shape(given)}."
            )
    return {**found, **frequencies}

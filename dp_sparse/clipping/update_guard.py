"""The update guard: it refuses an update that uses more of its batch than the noisy means.

Schedules, regularizers, constraints and optimizers are code of users, and run beside tensors that
no noise covers yet. The graph of an update shows what each of its operations was computed from.
This costs time when a step is traced, and none when it runs.

### Formal Guarantees
What is traced inside `update_from` depends on the batch only through `allowed`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from dp_sparse.clipping.graph_guard import PYTHON, READS, readings, reason
from dp_sparse.clipping.graph_reading import handles_of, origin_of
from dp_sparse.clipping.unnoised import unnoised_variables
from dp_sparse.core import PrivacyError, graphs


@contextlib.contextmanager
def update_from(allowed: Sequence[tf.Tensor]) -> Iterator[list[tf.Tensor]]:
    """Checks the update that is traced inside: of the batch it may use `allowed` and nothing else.

    It may use neither tensors of the step that Python code kept, nor statistics of training without
    noise. `allowed` are the noisy means: whoever follows the graph back from them is refused, too.
    What is computed inside and used elsewhere is checked if it is put into the list that it gives.

    Raises:
        PrivacyError: With all else that a schedule, regularizer, constraint or optimizer uses.
    """
    graph = tf.compat.v1.get_default_graph()
    start = 0 if tf.executing_eagerly() else len(graph.get_operations())
    # Kept by the graph: replicas are traced in turns, and may use what is allowed to the others.
    every: set[Any] = getattr(graph, "_dp_sparse_allowed", set())
    graph._dp_sparse_allowed = every
    every.update(tensor.ref() for tensor in allowed if tf.is_symbolic_tensor(tensor))
    leaving: list[tf.Tensor] = []
    yield leaving
    if tf.executing_eagerly():
        return
    made = graph.get_operations()[start:]
    lines = readings(made) + _python(made) + _foreign(made, every, leaving)
    if lines:
        raise PrivacyError(
            "The update uses what no noise covers. Leave metrics and tensors of layers and losses "
            "out of schedules, regularizers, constraints and optimizers:\n"
            + "\n".join(dict.fromkeys(lines))
        )


def _python(operations: Sequence[tf.Operation], caller: str = "") -> list[str]:
    """A line for each operation that runs Python code, also in functions that they call."""
    lines: list[str] = []
    for op in operations:
        name = caller or op.name
        lines += [f"- {name} ({op.type}): {reason(op)}."] if PYTHON.fullmatch(op.type) else []
        for function in graphs.called(op):
            if function is not None:
                lines += _python(function.graph.get_operations(), name)
    return lines


def _foreign(
    operations: Sequence[tf.Operation], allowed: set[Any], leaving: Sequence[tf.Tensor]
) -> list[str]:
    """A line for each tensor of the step that is used and may not be; constants and weights may.

    It is used by an operation with effects, or in what is `leaving`.
    """
    made, ends_at = set(operations), {ref.deref().op for ref in allowed}
    unnoised = handles_of(unnoised_variables())
    ends = lambda op: op in ends_at or (op not in made and op.op_def.is_stateful)  # noqa: E731

    def is_data(op: tf.Operation) -> bool:
        if op in ends_at or op.type in ("Const", "VarHandleOp", "NoOp"):
            return False
        if READS.fullmatch(op.type):
            of_ids = [root for ids in op.inputs[1:] for root in graphs.roots(ids, ends)]
            return origin_of(op.inputs[0], unnoised) is not None or any(map(is_data, of_ids))
        if op.type != "Placeholder":
            return True
        [argument] = op.outputs
        captured = graphs.captured_as(argument)
        inner = [
            root for t in captured if tf.is_symbolic_tensor(t) for root in graphs.roots(t, ends)
        ]
        if captured or op in made:  # one made inside is a number that Python gives each time
            return any(map(is_data, inner))
        return argument.dtype != tf.resource

    effects = [op for op in operations if op.op_def.is_stateful and op.type != "Assert"]
    used = [(op.name, tensor) for op in effects for tensor in op.inputs]
    used += [(tensor.name, tensor) for tensor in leaving if tf.is_symbolic_tensor(tensor)]
    return [
        f"- {name}: uses {root.name}, which the step computed of its batch."
        for name, tensor in used
        for root in graphs.roots(tensor, ends)
        if is_data(root)
    ]

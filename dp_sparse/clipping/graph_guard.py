"""The graph guard: it refuses state, files, Python code and known random numbers in a traced graph.

The variable guard sees Keras' variables alone. There are also `tf.Variable`s, hash tables, queues,
files, and Python code that runs in a step. The graph has all of them as operations that TensorFlow
marks as stateful. Each must be known to be harmless, also in functions that the graph calls. This
costs time when a step is traced, and none when it runs.

### Formal Guarantees
Of what is traced inside `guarded`, only assignments to `writable` outlive the step, no random
number can be predicted from constants, and nothing that trains reads a statistic without noise.
Code that runs eagerly is not guarded, so private steps are always traced.

The update guard refuses an update that uses more of its batch than the noisy means.

Schedules, regularizers, constraints and optimizers are code of users, and run beside tensors that
no noise covers yet. The graph of an update shows what each of its operations was computed from.
This costs time when a step is traced, and none when it runs.

### Formal Guarantees
What is traced inside `update_from` depends on the batch only through `allowed`.
"""

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.non_private_statistics import non_private_variables
from dp_sparse.core import PrivacyError, UnsupportedLayerError, graphs

_HARMLESS = re.compile(
    "ReadVariableOp|ResourceGather(Nd)?|VarHandleOp|VariableShape|VarIsInitializedOp|"  # reading
    "LookupTable(Find|Size|Export)V2|"
    "Assert|CheckNumerics(V2)?|"
    "If|While|Case|StatefulPartitionedCall|"  # the functions that they call are read, too
    "TensorArray.*|Stack.*V2|"  # they do not outlive a step
    "StatelessRandomGetAlg|IsTensorFloat32Enabled|DeviceIndex|_Arg|"
    "CollectiveBcastRecv(V2)?"  # what is sent is checked where it is sent
)
_CONSOLE = "Print", "PrintV2"
_SENDS = "CollectiveBcastSend", "CollectiveBcastSendV2"  # a new variable's value, to other workers
_WITHOUT_STATE = re.compile("PyFuncStateless|Debug.*")  # not marked as stateful, but harmful
_READS = re.compile("ReadVariableOp|ResourceGather(Nd)?")
_PYTHON = re.compile(".*PyFunc.*")
_ASSIGNMENTS = re.compile("Assign(Add|Sub)?VariableOp|Resource(Scatter|StridedSlice).*")
_REASONS = {
    "Assign.*|Resource.*|LookupTable.*|Mut.*|.*Queue.*|.*Stage|.*Table.*|.*Accumul.*": (
        "keeps what was computed from examples, without noise. Remove what is assigned or inserted"
    ),
    ".*PyFunc.*": (
        "runs Python code, which may keep or send anything. Write it in TensorFlow's operations"
    ),
    "(Random|Multinomial|Truncated|Parameterized|Stateful|Rng|NonDet|SampleDist|Skipgram).*|"
    ".*CandidateSampler|Stateless.*": (
        "draws random numbers that can be predicted. Draw them by keras.random with a "
        "keras.random.SeedGenerator that the layer owns"
    ),
    ".*(Print|Summary|Write|Save|Debug|Dump|Record).*": (
        "writes to a file or a log. Remove it, or use tf.print, which writes to the console"
    ),
    ".*": "has state or effects that are not known to be harmless. Remove it",
}


def handles_of(variables: Sequence[keras.Variable | tf.Variable]) -> dict[Any, str]:
    """The handle of every copy of the variables that a strategy keeps, with the variable's path."""
    copies_of = tf.distribute.get_strategy().experimental_local_results
    values = [(v, v.name) if isinstance(v, tf.Variable) else (v.value, v.path) for v in variables]
    return {copy.handle.ref(): path for value, path in values for copy in copies_of(value)}


@dataclasses.dataclass
class _Guard:
    """The graph that is guarded, and ranges of its operations.

    Attributes:
        own: Operations of the package itself.
        recorded: Operations of calls that are recorded, with the ids of the variables that the
            records cover.
    """

    graph: tf.Graph
    own: list[range] = dataclasses.field(default_factory=list)
    recorded: list[tuple[range, frozenset[int]]] = dataclasses.field(default_factory=list)


_CURRENT: contextvars.ContextVar[_Guard | None] = contextvars.ContextVar("guard", default=None)


@contextlib.contextmanager
def guarded(
    kind: type[Exception] = UnsupportedLayerError,
    writable: Callable[[], Sequence[keras.Variable]] = list,
    trains: bool = True,
    recorded: Callable[[], Sequence[keras.Variable]] = list,
) -> Iterator[None]:
    """Checks every operation that is traced inside. Eager code has no graph, and is not checked.

    Args:
        kind: The exception to raise.
        writable: Called afterwards, for the variables that may be assigned.
        trains: Whether it takes part in training, so that it may not read unnoised statistics, nor
            draw random numbers that can be predicted.
        recorded: Called afterwards, for the variables that only calls may use that record them.

    Raises:
        `kind`, with the name of each operation that is not known to be harmless.
    """
    if tf.executing_eagerly():
        yield
        return
    guard = _Guard(tf.compat.v1.get_default_graph())
    start, token = len(guard.graph.get_operations()), _CURRENT.set(guard)
    try:
        yield
    finally:
        _CURRENT.reset(token)
    made = list(enumerate(guard.graph.get_operations()[start:], start))
    operations = _outside_of(made, guard.own)
    lines = [
        f"- {name}: uses {path} where its gradient cannot be recorded: outside of its layer, by "
        ".value, or in a function that was traced before (tf.function). Call the layer instead, "
        "or freeze it with trainable=False."
        for name, path in _not_recorded(guard, made, recorded())
    ]
    lines += _problems(operations, handles_of(writable()), trains)
    lines += readings(operations) if trains else []
    if lines:
        raise kind("Cannot train privately:\n" + "\n".join(dict.fromkeys(lines)))


@contextlib.contextmanager
def own_operations() -> Iterator[None]:
    """Marks what is traced inside as the package's own, which is not checked."""
    guard = _CURRENT.get()
    with _in_range(guard, guard.own if guard else []):
        yield


@contextlib.contextmanager
def recorded_operations(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Marks what is traced inside as a call whose records cover these variables, and no others."""
    guard, places = _CURRENT.get(), list[range]()
    with _in_range(guard, places):
        yield
    if guard:
        guard.recorded.append((places[0], frozenset(map(id, variables))))


@contextlib.contextmanager
def _in_range(guard: _Guard | None, ranges: list[range]) -> Iterator[None]:
    start = len(guard.graph.get_operations()) if guard else 0
    yield
    if guard:
        ranges.append(range(start, len(guard.graph.get_operations())))


def _outside_of(made: Sequence[tuple[int, Any]], ranges: list[range]) -> list[tf.Operation]:
    inside = {place for places in ranges for place in places}
    return [op for place, op in made if place not in inside]


def _not_recorded(
    guard: _Guard, made: Sequence[tuple[int, Any]], variables: Sequence[keras.Variable]
) -> list[tuple[str, str]]:
    """Operations that use a variable which no call records that they are in, and its path."""
    if not variables:
        return []
    covered_at: dict[int, frozenset[int]] = {}
    for places, covered in sorted(guard.recorded, key=lambda call: -len(call[0])):
        covered_at.update(dict.fromkeys(places, covered))  # that of the innermost call stays
    inside = {place for places in guard.own for place in places}
    by_cover: dict[frozenset[int], list[tf.Operation]] = {}
    for place, op in made:
        if place not in inside:
            by_cover.setdefault(covered_at.get(place, frozenset()), []).append(op)
    handles = {id(variable): handles_of([variable]) for variable in variables}
    found: list[tuple[str, str]] = []
    for covered, operations in by_cover.items():
        others = [own for key, own in handles.items() if key not in covered]
        found += _using(operations, {ref: path for own in others for ref, path in own.items()})
    return found


def readings(operations: Sequence[tf.Operation]) -> list[str]:
    """A line for each statistic without noise that these operations read."""
    return [
        f"- {name}: reads {path}, a statistic of training without noise. Leave it out."
        for name, path in _using(operations, handles_of(non_private_variables()))
    ]


def _problems(
    operations: Sequence[tf.Operation], writable: dict[Any, str], trains: bool
) -> list[str]:
    """A line for each harmful operation, also in functions that these operations call."""
    lines: list[str] = []
    for each in graphs.reachable(operations, writable):
        op = each.op
        harmful = _is_harmful(op) or (trains and each.seeds.is_known_of(op))
        if harmful and not _assigns(each):
            lines.append(f"- {each.name} ({op.type}): {reason(op)}.")
        if any(function is None for function in graphs.called(op)):
            lines.append(f"- {each.name} ({op.type}): calls a function that cannot be read.")
    return lines


def _using(operations: Sequence[tf.Operation], handles: dict[Any, str]) -> list[tuple[str, str]]:
    """Names of operations that take a handle, also in functions that they call, and its path."""
    return [
        (each.name, path)
        for each in graphs.reachable(operations, handles)
        for tensor in each.op.inputs
        if tensor.dtype == tf.resource
        and (path := graphs.origin_of(tensor, each.handles)) is not None
    ]


def _is_harmful(op: tf.Operation) -> bool:
    if op.type in _CONSOLE:
        return op.type == "PrintV2" and b"file:" in op.get_attr("output_stream")
    if not op.op_def.is_stateful:
        return bool(_WITHOUT_STATE.fullmatch(op.type))
    if op.type in _SENDS:
        return not graphs.is_constant(op.inputs[0])
    return not _HARMLESS.fullmatch(op.type)


def reason(op: tf.Operation) -> str:
    """Why an operation is refused, and what to do."""
    return next(text for types, text in _REASONS.items() if re.fullmatch(types, op.type))


def _assigns(found: graphs.Reachable) -> bool:
    """Whether it assigns to a variable that may be written."""
    if not _ASSIGNMENTS.fullmatch(found.op.type):
        return False
    return graphs.origin_of(found.op.inputs[0], found.handles) is not None


@contextlib.contextmanager
def update_from(allowed: Sequence[tf.Tensor]) -> Iterator[list[tf.Tensor]]:
    """Checks the update that is traced inside: of the batch it may use `allowed` and nothing else.

    It may use neither tensors of the step that Python code kept, nor statistics of training without
    noise. `allowed` are the noisy means: anyone who follows the graph back from them is refused,
    too. What is computed inside and used elsewhere is checked if it is put into the list that it
    gives.

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


def _python(operations: Sequence[tf.Operation]) -> list[str]:
    """A line for each operation that runs Python code, also in functions that they call."""
    return [
        f"- {each.name} ({each.op.type}): {reason(each.op)}."
        for each in graphs.reachable(operations)
        if _PYTHON.fullmatch(each.op.type)
    ]


def _foreign(
    operations: Sequence[tf.Operation], allowed: set[Any], leaving: Sequence[tf.Tensor]
) -> list[str]:
    """A line for each tensor of the step that is used and may not be; constants and weights may.

    It is used by an operation with effects, or in what is `leaving`.
    """
    made, ends_at = set(operations), {ref.deref().op for ref in allowed}
    statistics = handles_of(non_private_variables())
    ends = lambda op: op in ends_at or (op not in made and op.op_def.is_stateful)  # noqa: E731

    def is_data(op: tf.Operation) -> bool:
        if op in ends_at or op.type in ("Const", "VarHandleOp", "NoOp"):
            return False
        if _READS.fullmatch(op.type):
            of_ids = [root for ids in op.inputs[1:] for root in graphs.roots(ids, ends)]
            path = graphs.origin_of(op.inputs[0], statistics)
            return path is not None or any(map(is_data, of_ids))
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

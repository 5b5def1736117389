"""The graph guard: it refuses state, files, Python code and known random numbers in a traced graph.

The variable guard sees Keras' variables alone. There are also `tf.Variable`s, hash tables, queues,
files, and Python code that runs in a step. The graph has all of them as operations that TensorFlow
marks as stateful. Each must be known to be harmless, also in functions that the graph calls. This
costs time when a step is traced, and none when it runs.

### Formal Guarantees
Of what is traced inside `guarded`, only assignments to `writable` outlive the step, no random
number can be predicted from constants, and nothing that trains reads a statistic without noise.
Code that runs eagerly is not guarded, so private steps are always traced.
"""

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.graph_reading import handles_of, origin_of, passed_on
from dp_sparse.clipping.unnoised import unnoised_variables
from dp_sparse.core import KnownSeeds, UnsupportedLayerError, graphs

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
READS = re.compile("ReadVariableOp|ResourceGather(Nd)?")
PYTHON = re.compile(".*PyFunc.*")
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
    lines += _problems(operations, handles_of(writable()), trains=trains)
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
        for name, path in _using(operations, handles_of(unnoised_variables()))
    ]


def _problems(
    operations: Sequence[tf.Operation],
    writable: dict[Any, str],
    caller: str = "",
    seeds: KnownSeeds | None = None,
    *,
    trains: bool = True,
) -> list[str]:
    """A line for each harmful operation, also in functions that these operations call."""
    lines: list[str] = []
    seeds = (seeds or KnownSeeds()).within(operations)
    for op in operations:
        name = caller or op.name
        harmful = _is_harmful(op) or (trains and seeds.is_known_of(op))
        if harmful and not _assigns(op, writable):
            lines.append(f"- {name} ({op.type}): {reason(op)}.")
        for function in graphs.called(op):
            if function is None:
                lines.append(f"- {name} ({op.type}): calls a function that cannot be read.")
                continue
            inner = writable | passed_on(op, function.graph, writable)
            inside = function.graph.get_operations()
            passed = seeds.passed_on(op, function.graph)
            lines += _problems(inside, inner, name, passed, trains=trains)
    return lines


def _using(
    operations: Sequence[tf.Operation], handles: dict[Any, str], caller: str = ""
) -> list[tuple[str, str]]:
    """Names of operations that take a handle, also in functions that they call, and its path."""
    found: list[tuple[str, str]] = []
    for op in operations:
        name = caller or op.name
        resources = [tensor for tensor in op.inputs if tensor.dtype == tf.resource]
        taken = [origin_of(tensor, handles) for tensor in resources]
        found += [(name, path) for path in taken if path is not None]
        for function in graphs.called(op):
            if function is not None:
                inner = handles | passed_on(op, function.graph, handles)
                found += _using(function.graph.get_operations(), inner, name)
    return found


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


def _assigns(op: tf.Operation, writable: dict[Any, str]) -> bool:
    """Whether it assigns to a variable that may be written."""
    return bool(_ASSIGNMENTS.fullmatch(op.type)) and origin_of(op.inputs[0], writable) is not None

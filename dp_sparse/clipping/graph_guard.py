"""What a traced graph does beside computing: state that is written, files, Python, random numbers.

An audit of Keras' variables sees no `tf.Variable`, hash table, queue or file, and no Python code
that runs in a step. The graph has them all, as operations that TensorFlow marks as stateful: each
of them must be known to be harmless, in the functions that the graph calls, too. Costs time while a
step is traced, and none when it runs.

### Formal Guarantees
Of what is traced inside `audited`, nothing outlives the step but assignments to `writable`, no
random number can be foretold from constants, and what trains reads no statistic without noise. What
is traced inside `update_from` depends on the batch by what is allowed alone. Whoever runs such code
eagerly is not covered, so private steps are always traced.
"""

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.unnoised import unnoised_variables
from dp_sparse.core import PrivacyError, UnsupportedLayerError

_HARMLESS = re.compile(
    "ReadVariableOp|ResourceGather(Nd)?|VarHandleOp|VariableShape|VarIsInitializedOp|"  # reading
    "LookupTable(Find|Size|Export)V2|"
    "Assert|CheckNumerics(V2)?|"
    "If|While|Case|StatefulPartitionedCall|"  # what they call is read, too
    "TensorArray.*|Stack.*V2|"  # as long as a step
    "StatelessRandomGetAlg|IsTensorFloat32Enabled|DeviceIndex|_Arg|"
    "CollectiveBcastRecv(V2)?"  # what was sent is read where it is sent
)
_KNOWN = "ReadVariableOp", "Shape", "ShapeN", "Size", "Rank", "Const"  # as seeds
_CONSOLE = "Print", "PrintV2"
_SENDS = "CollectiveBcastSend", "CollectiveBcastSendV2"  # a new variable's value, to other workers
_WITHOUT_STATE = re.compile("PyFuncStateless|Debug.*")  # which TensorFlow does not mark as stateful
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
        "draws random numbers that can be foretold. Draw them by keras.random with a "
        "keras.random.SeedGenerator that the layer owns"
    ),
    ".*(Print|Summary|Write|Save|Debug|Dump|Record).*": (
        "writes to a file or a log. Remove it, or use tf.print, which writes to the console"
    ),
    ".*": "has state or effects that are not known to be harmless. Remove it",
}


@dataclasses.dataclass
class _Audit:
    """The graph that is audited, and ranges of its operations.

    Attributes:
        own: The package's own.
        recorded: Those of calls that are recorded.
    """

    graph: tf.Graph
    own: list[range] = dataclasses.field(default_factory=list)
    recorded: list[range] = dataclasses.field(default_factory=list)


_CURRENT: contextvars.ContextVar[_Audit | None] = contextvars.ContextVar("audit", default=None)


@contextlib.contextmanager
def audited(
    kind: type[Exception] = UnsupportedLayerError,
    writable: Callable[[], Sequence[keras.Variable]] = list,
    trains: bool = True,
    recorded: Callable[[], Sequence[keras.Variable]] = list,
) -> Iterator[None]:
    """Reads every operation that is traced inside; eagerly there is no graph to be read.

    Args:
        kind: What to raise.
        writable: Gives, afterwards, the variables that may be assigned.
        trains: Whether it has a part in training, so that it may read no statistics without noise.
        recorded: Gives, afterwards, the variables that only calls which are recorded may use.

    Raises:
        `kind`, with each operation that is not known to be harmless, under the names of its layers.
    """
    if tf.executing_eagerly():
        yield
        return
    audit = _Audit(tf.compat.v1.get_default_graph())
    start, token = len(audit.graph.get_operations()), _CURRENT.set(audit)
    try:
        yield
    finally:
        _CURRENT.reset(token)
    made = list(enumerate(audit.graph.get_operations()[start:], start))
    operations = _outside_of(made, audit.own)
    lines = [
        f"- {name}: uses {path} where its gradient cannot be recorded: outside of its layer, by "
        ".value, or in a function that was traced before (tf.function). Call the layer instead, "
        "or freeze it with trainable=False."
        for name, path in _using(
            _outside_of(made, audit.own + audit.recorded), handles_of(recorded())
        )
    ]
    lines += _problems(operations, handles_of(writable()))
    lines += _readings(operations) if trains else []
    if lines:
        raise kind("Cannot train privately:\n" + "\n".join(dict.fromkeys(lines)))


@contextlib.contextmanager
def update_from(allowed: Sequence[tf.Tensor]) -> Iterator[None]:
    """Reads what is traced inside, an update, which may use `allowed` of a batch and nothing else.

    Neither tensors of the step that Python kept, nor statistics of training without noise. Allowed
    are the clipped sums and the draw of the noise that the optimizer first of all adds to them; it
    hands code of users the noisy means alone. Code that looks for what these were computed from, in
    the graph behind them, is not stopped.

    Raises:
        PrivacyError: With all that a schedule, regularizer, constraint or optimizer uses besides.
    """
    graph = tf.compat.v1.get_default_graph()
    start = 0 if tf.executing_eagerly() else len(graph.get_operations())
    # Kept by the graph, since replicas are traced in turns, and each may use what others may.
    every: set[Any] = getattr(graph, "_dp_sparse_allowed", set())
    graph._dp_sparse_allowed = every
    every.update(tensor.ref() for tensor in allowed if tf.is_symbolic_tensor(tensor))
    yield
    if tf.executing_eagerly():
        return
    made = graph.get_operations()[start:]
    lines = _readings(made) + _python(made) + _foreign(made, every)
    if lines:
        raise PrivacyError(
            "The update uses what no noise covers. Leave metrics and tensors of layers and losses "
            "out of schedules, regularizers, constraints and optimizers:\n"
            + "\n".join(dict.fromkeys(lines))
        )


@contextlib.contextmanager
def own_operations() -> Iterator[None]:
    """What is traced inside is the package's own, and not looked at."""
    audit = _CURRENT.get()
    with _in_range(audit, audit.own if audit else []):
        yield


@contextlib.contextmanager
def recorded_operations() -> Iterator[None]:
    """What is traced inside is recorded, with the weights that it uses."""
    audit = _CURRENT.get()
    with _in_range(audit, audit.recorded if audit else []):
        yield


@contextlib.contextmanager
def _in_range(audit: _Audit | None, ranges: list[range]) -> Iterator[None]:
    start = len(audit.graph.get_operations()) if audit else 0
    yield
    if audit:
        ranges.append(range(start, len(audit.graph.get_operations())))


def _outside_of(made: Sequence[tuple[int, Any]], ranges: list[range]) -> list[tf.Operation]:
    inside = {place for places in ranges for place in places}
    return [op for place, op in made if place not in inside]


def handles_of(variables: Sequence[keras.Variable | tf.Variable]) -> dict[Any, str]:
    """Of every copy of the variables that a strategy keeps, each with the variable's path."""
    copies_of = tf.distribute.get_strategy().experimental_local_results
    values = [(v, v.name) if isinstance(v, tf.Variable) else (v.value, v.path) for v in variables]
    return {copy.handle.ref(): path for value, path in values for copy in copies_of(value)}


def _readings(operations: Sequence[tf.Operation]) -> list[str]:
    return [
        f"- {name}: reads {path}, a statistic of training without noise. Leave it out."
        for name, path in _using(operations, handles_of(unnoised_variables()))
    ]


def _problems(
    operations: Sequence[tf.Operation],
    writable: dict[Any, str],
    caller: str = "",
    seeds: "_Seeds | None" = None,
) -> list[str]:
    """Of these operations, and of the functions that they call, under the name of the caller."""
    lines: list[str] = []
    seeds = (seeds or _Seeds()).within(operations)
    for op in operations:
        name = caller or op.name
        harmful = _is_harmful(op) or seeds.is_known_of(op)
        if harmful and not _assigns(op, writable):
            lines.append(f"- {name} ({op.type}): {_reason(op)}.")
        for function in _called(op):
            if function is None:
                lines.append(f"- {name} ({op.type}): calls a function that cannot be read.")
                continue
            inner = writable | _passed_on(op, function.graph, writable)
            inside = function.graph.get_operations()
            lines += _problems(inside, inner, name, seeds.passed_on(op, function.graph))
    return lines


def _using(
    operations: Sequence[tf.Operation], handles: dict[Any, str], caller: str = ""
) -> list[tuple[str, str]]:
    """Names of these operations, also in functions they call, each with the handle it takes."""
    found: list[tuple[str, str]] = []
    for op in operations:
        name = caller or op.name
        resources = [tensor for tensor in op.inputs if tensor.dtype == tf.resource]
        taken = [origin_of(tensor, handles) for tensor in resources]
        found += [(name, path) for path in taken if path is not None]
        for function in _called(op):
            if function is not None:
                inner = handles | _passed_on(op, function.graph, handles)
                found += _using(function.graph.get_operations(), inner, name)
    return found


def _python(operations: Sequence[tf.Operation], caller: str = "") -> list[str]:
    """A line for each of these operations, also in functions they call, that runs Python code."""
    lines: list[str] = []
    for op in operations:
        name = caller or op.name
        lines += [f"- {name} ({op.type}): {_reason(op)}."] if _PYTHON.fullmatch(op.type) else []
        for function in _called(op):
            if function is not None:
                lines += _python(function.graph.get_operations(), name)
    return lines


def _foreign(operations: Sequence[tf.Operation], allowed: set[Any]) -> list[str]:
    """What these operations use, where they have effects, of data of before that is not allowed.

    Constants and weights may be used.
    """
    made, ends_at = set(operations), {ref.deref().op for ref in allowed}
    unnoised = handles_of(unnoised_variables())
    ends = lambda op: op in ends_at or (op not in made and op.op_def.is_stateful)  # noqa: E731

    def is_data(op: tf.Operation) -> bool:
        if op in ends_at or op.type in ("Const", "VarHandleOp", "NoOp"):
            return False
        if _READS.fullmatch(op.type):
            return origin_of(op.inputs[0], unnoised) is not None
        if op.type != "Placeholder":
            return True
        [argument] = op.outputs
        captured = _outside(argument)
        inner = [root for t in captured if tf.is_symbolic_tensor(t) for root in _roots(t, ends)]
        if captured or op in made:  # what is made inside is a number that Python gives anew
            return any(map(is_data, inner))
        return argument.dtype != tf.resource

    effects = [op for op in operations if op.op_def.is_stateful and op.type != "Assert"]
    return [
        f"- {op.name}: uses {root.name}, which the step computed of its batch."
        for op in effects
        for source in op.inputs
        for root in _roots(source, ends)
        if is_data(root)
    ]


def _is_harmful(op: tf.Operation) -> bool:
    if op.type in _CONSOLE:
        return op.type == "PrintV2" and b"file:" in op.get_attr("output_stream")
    if not op.op_def.is_stateful:
        return bool(_WITHOUT_STATE.fullmatch(op.type))
    if op.type in _SENDS:
        return not is_constant(op.inputs[0])
    return not _HARMLESS.fullmatch(op.type)


@dataclasses.dataclass(frozen=True)
class _Seeds:
    """Tells seeds into which only constants, variables, shapes and counters go from secret ones.

    Attributes:
        audited: Operations of this graph and of those that call it; secrets come from others.
        secret: References of the graph's arguments that are secret.
    """

    audited: frozenset[tf.Operation] = frozenset()
    secret: frozenset[Any] = frozenset()

    def within(self, operations: Sequence[tf.Operation]) -> "_Seeds":
        """The same for one more graph."""
        return dataclasses.replace(self, audited=self.audited | set(operations))

    def passed_on(self, op: tf.Operation, function: tf.Graph) -> "_Seeds":
        """The same inside a function that `op` calls."""
        inputs = _arguments(op, function)
        secret = {inside.ref() for given, inside in inputs if not self.is_known(given)}
        return dataclasses.replace(self, secret=self.secret | secret)

    def is_known_of(self, op: tf.Operation) -> bool:
        """Whether it is a random operation, and its seed known."""
        names = [argument.name for argument in op.op_def.input_arg]
        places = [names.index(name) for name in ("seed", "key") if name in names]
        if not op.type.startswith(("Stateless", "RandomIndexShuffle")) or not places:
            return False
        return all(self.is_known(op.inputs[place]) for place in places)

    def is_known(self, tensor: tf.Tensor) -> bool:
        """Whether nothing but constants, variables, shapes and counters goes into it."""
        ends = lambda op: op.type in _KNOWN or op not in self.audited  # noqa: E731
        return all(map(self._is_known_root, _roots(tensor, ends)))

    def _is_known_root(self, op: tf.Operation) -> bool:
        if op not in self.audited:
            return False
        if op.type != "Placeholder":
            return op.type in _KNOWN
        [argument] = op.outputs
        outside = _outside(argument)
        if outside:
            return all(not tf.is_symbolic_tensor(t) or self.is_known(t) for t in outside)
        return argument.ref() not in self.secret


def is_constant(tensor: tf.Tensor) -> bool:
    """Whether nothing but constants goes into a tensor; one made outside of graphs is constant."""
    if not tf.is_symbolic_tensor(tensor):
        return True
    return all(op.type == "Const" for op in _roots(tensor, lambda op: op.op_def.is_stateful))


def _roots(tensor: tf.Tensor, ends: Callable[[tf.Operation], bool]) -> list[tf.Operation]:
    """What a tensor is computed from, back to operations without inputs or where it `ends`."""
    found, seen, waiting = [], set(), [tensor.op]
    while waiting:
        op = waiting.pop()
        if op not in seen:
            seen.add(op)
            if ends(op) or not op.inputs:
                found.append(op)
            else:
                waiting += [source.op for source in op.inputs]
    return found


def _reason(op: tf.Operation) -> str:
    return next(text for types, text in _REASONS.items() if re.fullmatch(types, op.type))


def _assigns(op: tf.Operation, writable: dict[Any, str]) -> bool:
    """Whether it assigns to a variable that may be written."""
    return bool(_ASSIGNMENTS.fullmatch(op.type)) and origin_of(op.inputs[0], writable) is not None


def origin_of(tensor: tf.Tensor, handles: dict[Any, str]) -> str | None:
    """Which of these a tensor is, by way of the functions that captured it."""
    while tensor.ref() not in handles:
        outside = _outside(tensor)
        if not outside:
            return None
        [tensor] = outside
    return handles[tensor.ref()]


def _outside(tensor: tf.Tensor) -> list[tf.Tensor]:
    """What a function captured as this tensor, if it did."""
    captures = getattr(getattr(tensor, "graph", None), "captures", ())
    return [external for external, internal in captures if internal is tensor]


def _called(op: tf.Operation) -> Iterator[Any]:
    """The functions that an operation calls, None for one that the graph does not have."""
    for attribute in op.op_def.attr:
        if attribute.type in ("func", "list(func)"):
            value = op.get_attr(attribute.name)
            for called in value if isinstance(value, list) else [value]:
                yield op.graph._get_function(called.name)


def _passed_on(op: tf.Operation, function: tf.Graph, handles: dict[Any, str]) -> dict[Any, str]:
    """Inside a function, the arguments that are such handles."""
    if not handles:
        return {}
    given = [pair for pair in _arguments(op, function) if pair[0].dtype == tf.resource]
    origins = [(inside, origin_of(outside, handles)) for outside, inside in given]
    return {inside.ref(): path for inside, path in origins if path is not None}


def _arguments(op: tf.Operation, function: tf.Graph) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    """What a function is given by the operation that calls it, beside what it is inside."""
    given = list(op.inputs)[1 if op.type in ("If", "StatelessIf", "Case") else 0 :]
    return zip(given, function.inputs, strict=False)

"""The input guard: it reads the functions of a dataset, as the graph guard reads a layer.

A map over a sampler's batches sees whole batches. Random numbers of a known seed follow from how
many were drawn before and from the place in the batch, so one example less gives all that follow
other ones, which is no change of one example. The same holds for what a function keeps for later.
Reading costs some milliseconds for each function, before the first batch, and none when it runs.

### Formal Guarantees
What passes draws no random number that can be predicted, keeps nothing for batches to come, runs
no Python code, and does not choose among batches by what is in them. Random numbers of TensorFlow's
own entropy are allowed: they have the same distribution whatever is in a batch. Reading does not
show whether a map mixes the examples of one batch: it is tried on made-up rows (`row_check`).

Order is no secret of a stream, whose neighbours have padding in the place of an example, and
Poisson sampling gives each place the same chance. So a source may shuffle, with any seed.
"""

import itertools
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops.structured_function import StructuredFunctionWrapper

from dp_sparse.core import KnownSeeds, PrivacyError, draws_entropy, graphs, seeds_of
from dp_sparse.sampling import row_check

_OWN: weakref.WeakSet[tf.data.Dataset] = weakref.WeakSet()
_OWN_MAPS: weakref.WeakSet[tf.data.Dataset] = weakref.WeakSet()

_AUGMENT = (
    "draw them in plan.sampling.batches(..., augment=f), whose f(x, y, seed) gets a secret seed "
    "for each example"
)
_REASONS = {
    "random": "it draws random numbers that can be predicted (from seed=, a counter, a variable or "
    "keras.utils.set_random_seed), so one example less changes those of all others.\n"
    f"Instead, {_AUGMENT}.",
    "python": "it runs Python code, which may draw random numbers or keep examples. Write it in "
    f"TensorFlow's operations, or do it before training.\nRandom numbers: {_AUGMENT}.",
    "state": "it keeps what was computed from examples for those that follow. Remove what is "
    "assigned or inserted.",
    "unread": "it calls a function, or takes a dataset, that cannot be read. Build it from "
    "datasets that are passed on by zip, concatenate or flat_map.",
    "mixed": "what it gives for an example follows from other examples. Compute that beforehand, "
    "from an example's own record.",
    "joined": "it joins the batches of several passes. Read plan.sampling.batches(...) once, and "
    "join other data to the examples, before the sampler.",
    "chosen": "it takes or leaves batches by what is in them, or keeps something from one for the "
    "next. Leave it out: do it to the examples, before the sampler.",
}
_RANDOM = re.compile("(Rng|Stateful(Standard|Uniform|Truncated|Random)).*")
_PYTHON = re.compile(".*PyFunc.*")
_STATE = re.compile(
    "Assign.*|Resource(Scatter|StridedSlice|Apply|CountUpTo).*|LookupTable(Insert|Import|Remove).*|"
    ".*Queue(Enqueue|Dequeue).*|(Un)?[Ss]tage|.*Accumulator.*"
)
_JOINS = ("Zip", "DirectedInterleave")
_MIXERS = ("Scan", "GroupByWindow", "GroupByReducer", "Window")
_TAKES_APART = ("Unbatch", "FlatMap")
_BATCHES = ("Batch", "ParallelBatch", "PaddedBatch")
_IN_PLACE = ("Map", "ParallelMap", "Prefetch", "Options", "Cache", "Zip")  # keep the order
_COUNTED = ("Take", "Skip", "Batch", "ParallelBatch")  # move elements alike, by a number
_MADE_UP = 8  # examples on which a map over batches of a source is tried
_CHOOSERS = ("Filter", "TakeWhile", "Scan", "IgnoreErrors", "Unique", "GroupByWindow")
_DRAWN = re.compile(f"{_RANDOM.pattern}|Stateless.*(Random|Normal|Multinomial).*|Random.*Dataset.*")
_IGNORED = 1  # tf.data's ExternalStatePolicy.IGNORE


def own(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same dataset, remembered as one that this package made: what is in it is not read."""
    _OWN.add(dataset)
    return dataset


def own_map(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same dataset, whose last function is this package's; what it is made of is read."""
    _OWN_MAPS.add(dataset)
    return dataset


def check_batches(dataset: tf.data.Dataset) -> None:
    """Reads what became of a sampler's batches on their way to training.

    Raises:
        PrivacyError: With the first harmful operation, where it is, and what to do.
    """
    capacity = dataset.element_spec[2]["present"].shape[0] or 0
    for each in _behind_sampler(dataset):
        name = _name_of(each)
        if name in _CHOOSERS:
            _refuse("the sampler's batches", name, _called_by(each), "chosen")
        if name in _JOINS and sum(map(_has_own, each._inputs())) > 1:
            _refuse("batches of one pass", name, "batches of several", "joined")
        _check(each, "the sampler's batches", generators=False)
        if name in ("Map", "ParallelMap"):
            _try(each, capacity)


def check_source(dataset: tf.data.Dataset) -> None:
    """Reads a dataset of examples, which may begin with `from_generator`.

    Python code of a generator cannot be read: it must give each example by itself. Examples that
    are batched, mapped and unbatched again may not mix, and none may be joined with its neighbours.

    Raises:
        PrivacyError: As `check_batches`.
    """
    every = list(_behind_sampler(dataset))
    apart = (each for each in every if _name_of(each) in _TAKES_APART)
    taken_apart = {id(inner) for each in apart for inner in _all_of(each)}
    for each in every:
        _check(each, "a dataset of examples", generators=True)
        name = _name_of(each)
        if name in _MIXERS or (name == "Zip" and _joins_neighbours(each)):
            _refuse("a dataset of examples", name, _called_by(each), "mixed")
        batched = id(each) in taken_apart or any(_name_of(e) in _BATCHES for e in _all_of(each))
        if name in ("Map", "ParallelMap") and batched:
            _try(each, None)


def check_functions(dataset: tf.data.Dataset, where: str) -> None:
    """Reads the functions of the last transformation of a dataset, under this name.

    Raises:
        PrivacyError: As `check_batches`.
    """
    for function in _functions(dataset):
        check_function(function.function.graph, where)


def check_function(graph: tf.Graph, where: str, secret: Sequence[tf.Tensor] = ()) -> None:
    """Reads a function that is given to a sampler.

    Args:
        graph: Its graph.
        where: Its name.
        secret: Those of its arguments that nobody can predict.

    Raises:
        PrivacyError: As `check_batches`.
    """
    seeds = KnownSeeds(secret=frozenset(tensor.ref() for tensor in secret))
    for name, why in _worst(_problems(graph, seeds, generators=False)):
        _refuse(where, name, where, why)


def _check(dataset: tf.data.Dataset, what: str, generators: bool) -> None:
    name = _name_of(dataset)
    if name.startswith("DataService"):
        _refuse(what, name, "it", "unread")
    if name == "Variant":
        _check_serialized(dataset._variant_tensor, what, name)
    if name == "Random" and any(map(_seed_value, (dataset._seed, dataset._seed2))):
        _refuse(what, "Dataset.random", "it", "random")
    for function in _functions(dataset):
        graph = function.function.graph
        for found, why in _worst(_problems(graph, KnownSeeds(), generators)):
            _refuse(what, found, _called_by(dataset), why)
        for outside, _ in graph.captures:
            if outside.dtype == tf.variant:
                _check_serialized(outside, what, _called_by(dataset))


def _check_serialized(variant: tf.Tensor, what: str, where: str) -> None:
    """Reads a dataset of which there is no more than its tensor, as one that a function captured.

    What seeds come from cannot be told there, so no random number may have one.
    """
    try:
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant, external_state_policy=_IGNORED, strip_device_assignment=True
        )
    except tf.errors.OpError:
        _refuse(what, "a dataset", where, "unread")
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    nodes = itertools.chain(graph.node, *(f.node_def for f in graph.library.function))
    for node in nodes:
        seeded = any(node.attr[name].i for name in ("seed", "seed2") if name in node.attr)
        drawn = _DRAWN.fullmatch(node.op)
        why = "python" if _PYTHON.fullmatch(node.op) else "random" if seeded or drawn else None
        if why or _STATE.fullmatch(node.op):
            _refuse(what, node.op, where, why or "state")


def _all_of(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    yield dataset
    for each in _inputs(dataset):
        yield from _all_of(each)


def _joins_neighbours(zipped: tf.data.Dataset) -> bool:
    """Whether a dataset is joined with itself in another order, as with its own `skip(1)`."""
    branches = [list(_paths(each, ())) for each in _inputs(zipped)]
    for one, other in itertools.combinations(branches, 2):
        moves = {id(each): moved for each, moved in one}
        shared = [(moves[id(e)], moved) for e, moved in other if id(e) in moves]
        if shared and shared[0][0] != shared[0][1]:  # the first that both are made of
            return True
    return False


def _paths(
    dataset: tf.data.Dataset, moved: tuple[Any, ...]
) -> Iterator[tuple[tf.data.Dataset, tuple[Any, ...]]]:
    """What a dataset is made of, and what moves the elements on the way from there."""
    yield dataset, moved
    name = _name_of(dataset)
    if name in _COUNTED:
        number = dataset._count if name in ("Take", "Skip") else dataset._batch_size
        moved = (*moved, (name.removeprefix("Parallel"), tf.get_static_value(number)))
    elif name not in _IN_PLACE:
        moved = (*moved, id(dataset))
    for each in _inputs(dataset):
        yield from _paths(each, moved)


def _try(dataset: tf.data.Dataset, capacity: int | None) -> None:
    """Tries the function of a map on made-up batches.

    Args:
        dataset: Made by the map.
        capacity: The leading dimension of leaves with a row for each example; None for that of the
            map's own input, or any where it is unknown.
    """
    [source], [mapped] = dataset._inputs(), _functions(dataset)
    specs = tf.nest.flatten(source.element_spec)
    if not all(isinstance(s, tf.TensorSpec) and s.shape.rank is not None for s in specs):
        return
    leads = [spec.shape[0] for spec in specs if spec.shape.rank]
    any_size = capacity is None and None in leads
    if capacity is None:
        capacity = _MADE_UP if None in leads or not leads else max(leads, key=leads.count)
    ask = row_check.refuse_mixing_map
    if _draws_entropy(mapped.function.graph):
        ask = row_check.refuse_mixing_random_map
    ask(mapped.function, specs, capacity, _called_by(dataset), any_size=any_size)


def _draws_entropy(graph: tf.Graph) -> bool:
    return any(draws_entropy(each.op) for each in graphs.reachable(graph.get_operations()))


def _refuse(what: str, found: str, where: str, why: str) -> None:
    place = "" if where in (what, "it") else f" in {where}"
    raise PrivacyError(f"Expected {what} that can be checked, got {found}{place}: {_REASONS[why]}")


def _problems(graph: tf.Graph, seeds: KnownSeeds, generators: bool) -> Iterator[tuple[str, str]]:
    """Each harmful operation, and why it is, also in functions that others call."""

    def enters(op: tf.Operation) -> bool:
        return not (generators and op.type == "GeneratorDataset")

    for each in graphs.reachable(graph.get_operations(), seeds=seeds, enters=enters):
        why = _reason(each.op, each.seeds)
        if why is not None:
            yield each.op.type, why
        if enters(each.op) and any(function is None for function in graphs.called(each.op)):
            yield each.op.type, "unread"


def _worst(problems: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Random numbers first: the state of a generator is there for their sake."""
    return sorted(problems, key=lambda problem: problem[1] != "random")


def _reason(op: tf.Operation, seeds: KnownSeeds) -> str | None:
    if _PYTHON.fullmatch(op.type):
        return "python"
    if draws_entropy(op):
        return None
    if op.type.startswith("RandomDataset"):
        return "random" if any(map(_seed_value, op.inputs[:2])) else None
    if seeds_of(op) is not None or _RANDOM.fullmatch(op.type) or seeds.is_known_of(op):
        return "random"
    return "state" if _STATE.fullmatch(op.type) else None


def _seed_value(seed: Any) -> bool:
    """Whether a seed is not the 0 that stands for entropy."""
    value = tf.get_static_value(seed)
    return value is None or bool(value)


def _behind_sampler(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """A dataset and all that it is made of, up to those that this package made."""
    if dataset not in _OWN:
        if dataset not in _OWN_MAPS:
            yield dataset
        for each in _inputs(dataset):
            yield from _behind_sampler(each)


def _inputs(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Those that elements come from: what says from which one is order alone."""
    chooses = _name_of(dataset) == "DirectedInterleave"
    return list(dataset._inputs())[1 if chooses else 0 :]


def _has_own(dataset: tf.data.Dataset) -> bool:
    return dataset in _OWN or any(map(_has_own, _inputs(dataset)))


def _functions(dataset: tf.data.Dataset) -> list[StructuredFunctionWrapper]:
    """Also those that the dataset does not tell of, such as the reader of `load`."""
    kept = [v for v in vars(dataset).values() if isinstance(v, StructuredFunctionWrapper)]
    return list({id(f): f for f in itertools.chain(dataset._functions(), kept)}.values())


def _name_of(dataset: tf.data.Dataset) -> str:
    return type(dataset).__name__.strip("_").removesuffix("Dataset")


def _called_by(dataset: tf.data.Dataset) -> str:
    """The transformation and the functions that it was given, for a message."""
    given = [getattr(f._func, "__name__", type(f._func).__name__) for f in _functions(dataset)]
    return f"{_name_of(dataset)}({', '.join(given)})"

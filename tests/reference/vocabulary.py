"""A private vocabulary, plain: votes by lists, one example after the other; T by trying."""

import math
from collections.abc import Iterable, Mapping, Sequence

Value = str | int
Example = Mapping[str, Sequence[Value | None]]  # what stands in each column, in its order


def votes(example: Example, max_values: int) -> list[tuple[str, Value]]:
    """The first distinct values: the first of each column, then the second of each, and so on.

    What is missing has no place in this order.
    """
    there = {c: [v for v in values if v not in (None, "")] for c, values in example.items()}
    found: list[tuple[str, Value]] = []
    for position in range(max(map(len, there.values()), default=0)):
        for column, values in there.items():
            if position < len(values) and (column, values[position]) not in found:
                found.append((column, values[position]))
    return found[:max_values]


def counts(examples: Iterable[Example], max_values: int) -> dict[tuple[str, Value], int]:
    """How many examples vote for each value, in the order of appearance."""
    total: dict[tuple[str, Value], int] = {}
    for example in examples:
        for vote in votes(example, max_values):
            total[vote] = total.get(vote, 0) + 1
    return total


def upper_tail(x: float) -> float:
    """Ψ(x), the probability that a standard normal exceeds x."""
    return math.erfc(x / math.sqrt(2)) / 2


def leak(threshold: int, deviation: float, values: int) -> float:
    """The probability that one of `values` counts of 1 exceeds the threshold, noise rounded."""
    each = upper_tail((threshold - 0.5) / deviation)
    return 1.0 if each == 1 else -math.expm1(values * math.log1p(-each))


def threshold(deviation: float, max_values: int, delta: float) -> int:
    """The smallest whole number whose `leak` is at most δ."""
    found = 1
    while leak(found, deviation, max_values) > delta:
        found += 1
    while leak(found - 1, deviation, max_values) <= delta:
        found -= 1
    return found


def outcomes(count: int, deviation: float, threshold: int) -> dict[int | None, float]:
    """What may be seen of one value, and how likely: its noisy count above T, or nothing (None)."""
    largest = count + math.ceil(12 * deviation) + 1

    def beyond(noisy: int) -> float:
        return upper_tail((noisy - count - 0.5) / deviation)

    found: dict[int | None, float] = {
        noisy: beyond(noisy) - beyond(noisy + 1) for noisy in range(threshold + 1, largest)
    }
    return {**found, None: 1 - sum(found.values())}


def deltas(
    counts: Sequence[tuple[int, int]], deviation: float, threshold: int, epsilon: float
) -> tuple[float, float]:
    """δ(ε) of the whole vocabulary, exact: with an example against without it, and the reverse.

    Args:
        counts: Of each value that the example has: the count with it and without it; a value with
            the count 0 does not exist.
        deviation: s.
        threshold: T.
        epsilon: ε.
    """
    pairs = [(1.0, 1.0)]  # probabilities of everything that may be seen of the values so far
    for more, less in counts:
        own = outcomes(more, deviation, threshold)
        other = outcomes(less, deviation, threshold) if less else {None: 1.0}
        both = [(own.get(seen, 0.0), other.get(seen, 0.0)) for seen in {**own, **other}]
        pairs = [(p * a, q * b) for p, q in pairs for a, b in both]
    growth = math.exp(epsilon)
    with_it = math.fsum(max(p - growth * q, 0.0) for p, q in pairs)
    return with_it, math.fsum(max(q - growth * p, 0.0) for p, q in pairs)


def released(
    total: Mapping[tuple[str, Value], int], noise: Sequence[float], limit: int
) -> dict[str, list[tuple[Value, int]]]:
    """The values of each column whose noisy counts exceed the limit, with these counts.

    Args:
        total: Counts.
        noise: Of each of them, in their order; it is rounded.
        limit: T.
    """
    found: dict[str, list[tuple[Value, int]]] = {column: [] for column, _ in total}
    for ((column, value), count), each in zip(total.items(), noise, strict=True):
        if count + round(each) > limit:
            found[column].append((value, count + round(each)))
    return {c: sorted(values, key=lambda v: (-v[1], v[0])) for c, values in found.items()}

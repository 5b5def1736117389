"""A private vocabulary, plain: votes by lists, one example after the other; T by trying."""

import math
from collections.abc import Iterable, Mapping, Sequence

Value = str | int
Example = Mapping[str, Sequence[Value | None]]  # what stands in each column, in its order


def votes(example: Example, max_values: int) -> list[tuple[str, Value]]:
    """The first distinct values: the first of each column, then the second of each, and so on."""
    found: list[tuple[str, Value]] = []
    for position in range(max(map(len, example.values()), default=0)):
        for column, values in example.items():
            value = values[position] if position < len(values) else None
            if value not in (None, "") and (column, value) not in found:
                found.append((column, value))
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

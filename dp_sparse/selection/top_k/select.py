"""DP-FEST's selection: the k most frequent embedding rows, selected once before training.

This is "Sparsity-Preserving Differentially Private Training of Large Embedding Models" (Ghazi et
al., NeurIPS 2023), sections 3.1 and B.1, with three changes: four noise sources instead of one
(`noise_sources`), a corrected accounting (the paper's one-shot Gumbel top-k is not (ε, 0)-DP), and
one noisy histogram over all tables instead of a budget for each table.

Each count that is not zero gets its own noise, block by block. For the rows of count zero only the
largest noise values are drawn, by order statistics, and given to random ones of them. The result
has exactly the distribution of a noisy histogram over all rows. It takes O(rows seen + k) time, and
no vector of a table's size.

`allocate_rows` says how many of the k rows each table gets.
"""

import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from dp_sparse.core import validate
from dp_sparse.sampling import has_length
from dp_sparse.selection.top_k.counting import RowCounts, TopKTable, as_tables, count_rows
from dp_sparse.selection.top_k.noise_sources import (
    NoiseSource,
    PublicRows,
    distinct_integers,
    largest_quantiles,
    random_quantiles,
    secret_generator,
)
from dp_sparse.selection.top_k.selected_rows import SelectedRows

_BLOCK = 2**16  # counts that get their noise at once


@dataclasses.dataclass(frozen=True)
class RowAllocation:
    """How the k rows to select are divided among the tables. Public.

    Attributes:
        tables: Every table by name.
        rows: How many rows to select of each table.
    """

    tables: Mapping[str, TopKTable]
    rows: Mapping[str, int]

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows of each table."""
        return {name: table.num_rows for name, table in self.tables.items()}

    @property
    def counted(self) -> dict[str, TopKTable]:
        """Tables of which some rows are selected and some are not: others release nothing."""
        return {n: t for n, t in self.tables.items() if 0 < self.rows[n] < t.num_rows}

    @property
    def lookups(self) -> int:
        """p, the most counts that one example takes part in."""
        return sum(table.max_lookups for table in self.counted.values())

    @property
    def selected(self) -> int:
        """Rows to select in the tables that are counted."""
        return sum(self.rows[name] for name in self.counted)


def allocate_rows(
    k: int, tables: Mapping[str, TopKTable], weights: Mapping[str, float] | None = None
) -> RowAllocation:
    """Divides `k` rows among the tables, in proportion to their weights.

    A table with fewer rows than it would get is kept whole, and the other tables get the rest.
    Fractions go to the largest remainders; of equal ones the first table gets it. The numbers add
    up to k exactly, or to all rows of the tables of positive weight if k is larger. (The paper
    rounds k/p down and gives the rest to no table.)

    Args:
        k: >= 0.
        tables: Each table by name.
        weights: >= 0 for each table, equal by default; a table of weight 0 gets no row.

    Raises:
        ValueError: k or a weight is out of range, or the names are not those of the tables.
    """
    if not validate.is_weight(k) or k != int(k):
        raise ValueError(f"Expected k to be a whole number >= 0, got k={k!r}.")
    num_rows = {name: table.num_rows for name, table in tables.items()}
    weights = _checked_weights(num_rows, weights)
    whole, quotas = _quotas(int(k), num_rows, {n: Fraction(weights[n]) for n in num_rows})
    rows = {name: num_rows[name] if name in whole else int(quotas[name]) for name in num_rows}
    left = sum(quotas.values()) - sum(int(quota) for quota in quotas.values())
    for name in sorted(quotas, key=lambda name: int(quotas[name]) - quotas[name])[: int(left)]:
        rows[name] += 1
    return RowAllocation(dict(tables), rows)


def _quotas(
    k: int, num_rows: Mapping[str, int], weights: Mapping[str, Fraction]
) -> tuple[set[str], dict[str, Fraction]]:
    """The tables to keep whole, and what of the rest each other table gets, unrounded."""
    whole: set[str] = set()
    while True:
        rest = k - sum(num_rows[name] for name in whole)
        total = sum(weights[name] for name in num_rows if name not in whole)
        quotas = {n: rest * weights[n] / (total or 1) for n in num_rows if n not in whole}
        full = {name for name, quota in quotas.items() if num_rows[name] <= quota}
        if not full:
            return whole, quotas
        whole |= full


def _checked_weights(
    num_rows: Mapping[str, int], weights: Mapping[str, float] | None
) -> Mapping[str, float]:
    if weights is None:
        return dict.fromkeys(num_rows, 1.0)
    if set(weights) != set(num_rows):
        raise ValueError(
            f"Expected weights for the tables {sorted(num_rows)}, got weights for "
            f"{sorted(weights)}."
        )
    bad = {name: weight for name, weight in weights.items() if not validate.is_weight(weight)}
    if bad or not any(weights.values()):
        raise ValueError(
            f"Expected finite weights >= 0, not all 0, got weights={bad or dict(weights)}."
        )
    return weights


def select_top_k(
    examples: Any,
    tables: Mapping[str, int | TopKTable],
    k: int,
    source: NoiseSource,
    *,
    weights: Mapping[str, float] | None = None,
    num_examples: int | None = None,
    quarantine: bool = False,
    progress: bool = True,
) -> SelectedRows:
    """Selects `k` rows over all tables by how many examples look them up, plus noise.

    A table that gets all of its rows is kept whole and not counted: it costs nothing. If that holds
    for every table, or k is 0, the examples are not read. Of rows with equal counts, noise selects
    random ones; of public counts, the rows with lower ids are selected. Without any example a
    noise source with noise selects random rows, as its guarantee requires, with a warning.

    Args:
        examples: As `count_rows`: each example once, and not the batches of a sampler.
        tables: Each table by its name in x, as a `TopKTable`, or as its number of rows if an
            example looks up one row of it.
        k: Rows to select over all tables, >= 0.
        source: The noise source, which adds noise to the counts. `PublicRows` only for examples
            that are public.
        weights: Each table's weight when k is divided, >= 0; equal by default. See `allocate_rows`.
        num_examples: As `count_rows`. Needed if `examples` has no length and counts get noise.
        quarantine: As `count_rows`.
        progress: As `count_rows`.

    Returns:
        The rows, and what the selection costs.

    Raises:
        ValueError: An argument out of its range, public counts of no examples, or as `count_rows`.
        BadExampleError, PrivacyError: As `count_rows`.

    Examples:
        >>> import dp_sparse, numpy as np
        >>> examples = {"users": np.array([3, 3, 7, 1])}, np.ones(4)
        >>> rows = dp_sparse.select_top_k(
        ...     examples, {"users": 10}, k=2, source=dp_sparse.GaussianTopK(10.0), progress=False
        ... )
        >>> len(rows.row_ids["users"]), rows.release.event  # a plan pays for `rows.release`
        (2, GaussianDpEvent(noise_multiplier=10.0))

    ### Formal Guarantees
    Neighbouring datasets differ by one example added, removed or zeroed out. It changes at most p
    counts by 1 each, p the sum of `max_lookups` over the tables that are counted; the rows are a
    post-processing of `source`'s mechanism on these counts. Give `release` of the result to the
    plan of every training run that uses the rows. Public: `tables`, `k`, `weights`, `source`, the
    number of examples, and that no bad value stopped the selection. Each call takes a fresh key
    from the operating system. Sums of a count and its noise are float64; only the selected rows are
    released, never a noisy count.
    """
    if not isinstance(source, NoiseSource):
        raise ValueError(
            "Expected source to be GaussianTopK(...), GumbelTopK(...), LaplaceTopK(...) or "
            f"PublicRows(), got source={source!r}."
        )
    wanted = allocate_rows(k, as_tables(tables), weights)
    selected = {name: np.arange(rows) for name, rows in wanted.rows.items()}
    if wanted.counted:
        _check_number(examples, source, num_examples)
        counts = count_rows(
            examples,
            wanted.counted,
            num_examples=num_examples,
            quarantine=quarantine,
            progress=progress,
        )
        _check_public(source, counts)
        scale, rng = source.scale_of(wanted.lookups), secret_generator()
        for name, table in counts.items():
            selected[name] = noisy_top_k(table, wanted.rows[name], source, scale, rng)
    return SelectedRows(selected, wanted.num_rows, source, wanted.lookups)


def noisy_top_k(
    counts: RowCounts, k: int, source: NoiseSource, scale: float, rng: np.random.Generator
) -> np.ndarray:
    """The `k` rows of one table with the largest noisy counts, int64 `[k]`, sorted.

    Args:
        counts: The table's counts; all other rows have count 0.
        k: In [0, num_rows].
        source: The distribution of the noise.
        scale: The factor of a standard noise value.
        rng: Secret randomness.
    """
    values, row_ids = _noisy_seen(counts, k, source, scale, rng)
    zeros = counts.num_rows - len(counts.row_ids)
    largest = largest_quantiles(zeros, min(k, zeros), rng)
    zero_values = scale * source.quantiles(largest)
    order = np.argsort(-np.concatenate([values, zero_values]), kind="stable")[:k]
    seen = order[order < len(values)]
    return np.sort(np.concatenate([row_ids[seen], _zero_rows(counts, k - len(seen), source, rng)]))


def _noisy_seen(
    counts: RowCounts, k: int, source: NoiseSource, scale: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The `k` largest noisy counts of rows seen, decreasing, and their rows; fewer if k is more."""
    values, row_ids = np.zeros(0), np.zeros(0, np.int64)
    for start in range(0, len(counts.row_ids), max(_BLOCK, k)):
        block = slice(start, start + max(_BLOCK, k))
        noise = scale * source.quantiles(random_quantiles(len(counts.row_ids[block]), rng))
        values = np.concatenate([values, counts.counts[block] + noise])
        row_ids = np.concatenate([row_ids, counts.row_ids[block]])
        order = np.argsort(-values, kind="stable")[
            :k
        ]  # stable: of equal values the lower row is first
        values, row_ids = values[order], row_ids[order]
    return values, row_ids


def _zero_rows(
    counts: RowCounts, count: int, source: NoiseSource, rng: np.random.Generator
) -> np.ndarray:
    """`count` random rows that were not seen, as noise that does not depend on the row gives.

    Of public counts the lowest rows. O(rows seen + count).
    """
    zeros = counts.num_rows - len(counts.row_ids)
    if isinstance(source, PublicRows):
        ranks = np.arange(count)
    else:
        ranks = distinct_integers(zeros, count, rng)
    # Before the zero row of rank r are those seen rows that have at most r zero rows before them.
    before = counts.row_ids - np.arange(len(counts.row_ids))
    return ranks + np.searchsorted(before, ranks, side="right")


def _check_number(examples: Any, source: NoiseSource, num_examples: int | None) -> None:
    if num_examples is None and not has_length(examples) and not isinstance(source, PublicRows):
        raise ValueError(
            "Expected num_examples with examples that have no length, got num_examples=None: a "
            "dataset that repeats, or single examples instead of batches, would go unnoticed."
        )


def _check_public(source: NoiseSource, counts: Mapping[str, RowCounts]) -> None:
    empty = [name for name, table in counts.items() if not len(table.row_ids)]
    if isinstance(source, PublicRows) and empty:
        raise ValueError(
            f"Expected public examples that look up every table, got none for {empty}: give "
            "a table without public examples a weight of 0."
        )

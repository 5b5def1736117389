"""How many of the k rows each table gets, and which tables must be counted for that."""

import dataclasses
from collections.abc import Mapping
from fractions import Fraction

from dp_sparse.core import validate
from dp_sparse.selection.top_k.counting import TopKTable


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

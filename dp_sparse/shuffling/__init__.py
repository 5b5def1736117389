"""Shuffled DP-SGD: weights permuted where no output changes, and what that does not give.

May use: all subpackages but `distribution` and `auditing`.
"""

from dp_sparse.shuffling.groups import Group, Member, Part, permutation_groups, permuted, shuffle
from dp_sparse.shuffling.heuristic import (
    Theorem6Mechanism,
    theorem6_plan_not_a_guarantee,
    theorem6_sigma_not_a_guarantee,
)
from dp_sparse.shuffling.optimizer import ShuffledDPSGDOptimizer

__all__ = [
    "Group",
    "Member",
    "Part",
    "ShuffledDPSGDOptimizer",
    "Theorem6Mechanism",
    "permutation_groups",
    "permuted",
    "shuffle",
    "theorem6_plan_not_a_guarantee",
    "theorem6_sigma_not_a_guarantee",
]

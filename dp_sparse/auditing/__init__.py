"""Audits: what attacks on canaries show of ε, from below.

A plan says what a run costs at most; an audit trains with canaries, attacks, and says what it costs
at least. If that is more than the plan says, something is wrong. May use: all subpackages but
`distribution` and `shuffling`.
"""

from dp_sparse.auditing.audit import Audit, audit_of
from dp_sparse.auditing.canaries import GradientCanaries, InputCanaries
from dp_sparse.auditing.estimators import (
    CanaryScores,
    best_threshold,
    clopper_pearson,
    one_run_bound,
    one_run_fdp_bound,
    repeated_runs_bound,
)
from dp_sparse.auditing.trade_offs import (
    EpsilonDeltaTradeOff,
    GaussianTradeOff,
    PlanTradeOff,
)

__all__ = [
    "Audit",
    "CanaryScores",
    "EpsilonDeltaTradeOff",
    "GaussianTradeOff",
    "GradientCanaries",
    "InputCanaries",
    "PlanTradeOff",
    "audit_of",
    "best_threshold",
    "clopper_pearson",
    "one_run_bound",
    "one_run_fdp_bound",
    "repeated_runs_bound",
]

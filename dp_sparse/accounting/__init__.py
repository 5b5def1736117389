"""What a training run costs: the plan, its events, their privacy losses, the search for σ.

May use: `core`, `noise` (how far its tails reach) and `sampling`. Nothing here imports Keras.
"""

from dp_sparse.accounting.budget import FIXED, PrivacyBudget
from dp_sparse.accounting.budget_account import BudgetAccount
from dp_sparse.accounting.calibration import signal_to_noise
from dp_sparse.accounting.disjoint_plans import DisjointPlans
from dp_sparse.accounting.events import DeltaDpEvent, GumbelTopKDpEvent, event_config
from dp_sparse.accounting.forecast import Forecast, frequencies_of
from dp_sparse.accounting.mechanisms import (
    FALSE_ROWS,
    LEAST_WINDOWS,
    NOISE_RATIO,
    ExponentialSelection,
    GaussianMechanism,
    Mechanism,
    Release,
    RestsOnRelease,
    checked_window,
    default_threshold,
    longest_window,
    split_noise,
    survival_probability,
)
from dp_sparse.accounting.not_private import not_private_plan
from dp_sparse.accounting.plan import PrivacyPlan
from dp_sparse.accounting.plan_table import PlanTable, plan_table
from dp_sparse.accounting.release_noise import release_noise, smallest_noise
from dp_sparse.accounting.run_cost import RunCost
from dp_sparse.accounting.run_folders import has_folder, note_folder
from dp_sparse.accounting.statement import EPSILONS, beside, rounded_up, true_positive_rate

__all__ = [
    "EPSILONS",
    "FALSE_ROWS",
    "FIXED",
    "LEAST_WINDOWS",
    "NOISE_RATIO",
    "BudgetAccount",
    "DeltaDpEvent",
    "DisjointPlans",
    "ExponentialSelection",
    "Forecast",
    "GaussianMechanism",
    "GumbelTopKDpEvent",
    "Mechanism",
    "PlanTable",
    "PrivacyBudget",
    "PrivacyPlan",
    "Release",
    "RestsOnRelease",
    "RunCost",
    "beside",
    "checked_window",
    "default_threshold",
    "event_config",
    "frequencies_of",
    "has_folder",
    "longest_window",
    "not_private_plan",
    "note_folder",
    "plan_table",
    "release_noise",
    "rounded_up",
    "signal_to_noise",
    "smallest_noise",
    "split_noise",
    "survival_probability",
    "true_positive_rate",
]

"""What a run may say: checks and advice before it, logs while it trains, reports after it.

May use: all subpackages below.
"""

from dp_sparse.reports import report_page
from dp_sparse.reports.callbacks import PrivacyReport
from dp_sparse.reports.model_check import ModelCheck, check_model
from dp_sparse.reports.monitor import PrivacyMonitor
from dp_sparse.reports.recommendation import Recommendation, recommend

__all__ = [
    "ModelCheck",
    "PrivacyMonitor",
    "PrivacyReport",
    "Recommendation",
    "check_model",
    "recommend",
    "report_page",
]

"""The private train step: forward and backward pass of a batch, clipping, and all around them.

May use: all subpackages but `distribution`. Users reach the step through `compile_hook` alone.
"""

from dp_sparse.training import environment, metrics, report_page, sigterm
from dp_sparse.training.building import build_for
from dp_sparse.training.callback_guard import install_callback_guard
from dp_sparse.training.callbacks import PrivacyReport
from dp_sparse.training.checkpoint import PrivateCheckpoint
from dp_sparse.training.compile_hook import install_compile_hook
from dp_sparse.training.covered_steps import require_checkpoint
from dp_sparse.training.forward_backward import (
    led_by_batch,
    losses_with_padding,
)
from dp_sparse.training.model_check import ModelCheck, check_model
from dp_sparse.training.monitor import PrivacyMonitor
from dp_sparse.training.nan_in_bfloat16 import refuse_nan
from dp_sparse.training.plan_steps import rest_of_epoch, share_of_steps
from dp_sparse.training.preflight_checks import Schedule, preflight, refuse_coupled
from dp_sparse.training.recommendation import Recommendation, recommend

__all__ = [
    "ModelCheck",
    "PrivacyMonitor",
    "PrivacyReport",
    "PrivateCheckpoint",
    "Recommendation",
    "Schedule",
    "build_for",
    "check_model",
    "environment",
    "install_callback_guard",
    "install_compile_hook",
    "led_by_batch",
    "losses_with_padding",
    "metrics",
    "preflight",
    "recommend",
    "refuse_coupled",
    "refuse_nan",
    "report_page",
    "require_checkpoint",
    "rest_of_epoch",
    "share_of_steps",
    "sigterm",
]

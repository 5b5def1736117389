"""The private train step: a batch's forward and backward pass, clipping, and what surrounds it.

May use: all rooms below; nothing of the step but `compile_hook` is called by a user.
"""

from dp_sparse.training import environment, metrics, report_page
from dp_sparse.training.building import build_for
from dp_sparse.training.callback_guard import install_callback_guard
from dp_sparse.training.callbacks import PrivacyReport
from dp_sparse.training.compile_hook import install_compile_hook
from dp_sparse.training.forward_backward import (
    Used,
    led_by_batch,
    losses_with_padding,
)
from dp_sparse.training.model_check import ModelCheck, check_model

__all__ = [
    "ModelCheck",
    "PrivacyReport",
    "Used",
    "build_for",
    "check_model",
    "environment",
    "install_callback_guard",
    "install_compile_hook",
    "led_by_batch",
    "losses_with_padding",
    "metrics",
    "report_page",
]

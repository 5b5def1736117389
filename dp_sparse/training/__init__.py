"""Private training under Keras' own `fit`: the hook in `compile`, epochs, callbacks, checkpoints.

May use: all subpackages below. Users reach it through `compile`, `fit` and `PrivateCheckpoint`.
"""

from dp_sparse.training.callback_guard import install_callback_guard
from dp_sparse.training.checkpoint import PrivateCheckpoint
from dp_sparse.training.compile_hook import install_compile_hook
from dp_sparse.training.plan_steps import around_fit, rest_of_epoch, share_of_steps

__all__ = [
    "PrivateCheckpoint",
    "around_fit",
    "install_callback_guard",
    "install_compile_hook",
    "rest_of_epoch",
    "share_of_steps",
]

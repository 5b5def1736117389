"""The private step on one batch, and what is checked before it.

One forward and one backward pass, clipping, selection, noise and the update; the environment that
it needs; the preflight. May use: all subpackages below.
"""

from dp_sparse.step import checkpointed_steps, environment, flush_hooks, metrics
from dp_sparse.step.building import (
    all_built,
    build_for,
    build_metrics,
    build_optimizer,
    refuse_known_noise,
)
from dp_sparse.step.checkpointed_steps import (
    CheckpointedSteps,
    checkpointed_steps_of,
    set_checkpointed_steps,
)
from dp_sparse.step.environment import refuse_nan
from dp_sparse.step.forward_backward import led_by_batch, losses_with_padding
from dp_sparse.step.loss_kind import measure
from dp_sparse.step.own_loss import has_own_loss
from dp_sparse.step.preflight_checks import (
    Preflight,
    Schedule,
    arrays,
    isolation_of,
    preflight,
    recorded_pass,
    refuse_coupled,
)
from dp_sparse.step.traced_pass import (
    examples_of,
    inputs_of,
    lookups_of,
    same_seeds,
    signature_of,
    tables_by_name,
    terms_of_pass,
    values_of_outputs,
)
from dp_sparse.step.train_step import private_train_step, refuse_other_strategy
from dp_sparse.step.unsupported import refuse_wrapped, replaced_methods

__all__ = [
    "CheckpointedSteps",
    "Preflight",
    "Schedule",
    "all_built",
    "arrays",
    "build_for",
    "build_metrics",
    "build_optimizer",
    "checkpointed_steps",
    "checkpointed_steps_of",
    "environment",
    "examples_of",
    "flush_hooks",
    "has_own_loss",
    "inputs_of",
    "isolation_of",
    "led_by_batch",
    "lookups_of",
    "losses_with_padding",
    "measure",
    "metrics",
    "preflight",
    "private_train_step",
    "recorded_pass",
    "refuse_coupled",
    "refuse_known_noise",
    "refuse_nan",
    "refuse_other_strategy",
    "refuse_wrapped",
    "replaced_methods",
    "same_seeds",
    "set_checkpointed_steps",
    "signature_of",
    "tables_by_name",
    "terms_of_pass",
    "values_of_outputs",
]

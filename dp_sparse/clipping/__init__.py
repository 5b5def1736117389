"""Exact per-example clipping at the cost of one forward and one backward pass.

It records a pass, proves that what it recorded of an example depends on that example alone, and
computes norms and sums from the records. Only small variables (biases, scales, small kernels) have
per-example gradients in memory. May use: `core`.
"""

from dp_sparse.clipping import isolation
from dp_sparse.clipping.clipped_sums import Amounts, ClippedSums, zero_sums
from dp_sparse.clipping.coverage import (
    Survey,
    embedding_tables,
    survey,
    tables_read_whole,
    tapped_layers,
)
from dp_sparse.clipping.detached import detached
from dp_sparse.clipping.graph_guard import guarded
from dp_sparse.clipping.isolation_progress import IsolationProgress
from dp_sparse.clipping.leading_axis import recorded_tensors, require_batch_leads
from dp_sparse.clipping.machine_check import lets_nan_through, self_check
from dp_sparse.clipping.named_inputs import (
    named_inputs,
    take_by_name,
    take_by_place,
    typed_inputs,
)
from dp_sparse.clipping.observation import Observer, RecordedPass, Used, count_tensors, not_zero
from dp_sparse.clipping.recording import Recording, record
from dp_sparse.clipping.scaling import Scaled, scaled
from dp_sparse.clipping.styles import (
    STYLES,
    AutomaticClipping,
    ClippingStyle,
    FlatClipping,
    PerLayerClipping,
    QuantileClipping,
)
from dp_sparse.clipping.tap import BeforeLookup
from dp_sparse.clipping.unnoised import metric_variables, register_unnoised
from dp_sparse.clipping.update_guard import update_from
from dp_sparse.clipping.uses import Rows, Tied, Use, exact
from dp_sparse.clipping.variable_guard import Seeds

__all__ = [
    "STYLES",
    "Amounts",
    "AutomaticClipping",
    "BeforeLookup",
    "ClippedSums",
    "ClippingStyle",
    "FlatClipping",
    "IsolationProgress",
    "Observer",
    "PerLayerClipping",
    "QuantileClipping",
    "RecordedPass",
    "Recording",
    "Rows",
    "Scaled",
    "Seeds",
    "Survey",
    "Tied",
    "Use",
    "Used",
    "count_tensors",
    "detached",
    "embedding_tables",
    "exact",
    "guarded",
    "isolation",
    "lets_nan_through",
    "metric_variables",
    "named_inputs",
    "not_zero",
    "record",
    "recorded_tensors",
    "register_unnoised",
    "require_batch_leads",
    "scaled",
    "self_check",
    "survey",
    "tables_read_whole",
    "take_by_name",
    "take_by_place",
    "tapped_layers",
    "typed_inputs",
    "update_from",
    "zero_sums",
]

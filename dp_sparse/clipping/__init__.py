"""Exact per-example clipping at the cost of one forward and one backward pass.

It records a pass, and computes norms and sums from the records. Only small variables (biases,
scales, small kernels) have per-example gradients in memory. May use: `core`.
"""

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
from dp_sparse.clipping.leading_axis import recorded_tensors, require_batch_leads
from dp_sparse.clipping.machine_check import lets_nan_through, self_check
from dp_sparse.clipping.named_inputs import (
    named_inputs,
    take_by_name,
    take_by_place,
    typed_inputs,
)
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
from dp_sparse.clipping.uses import Rows, Tied, Use, Used, exact, fields_of, scalars_of
from dp_sparse.clipping.variable_guard import Seeds
from dp_sparse.clipping.zero_weights import filling_zeros

__all__ = [
    "STYLES",
    "Amounts",
    "AutomaticClipping",
    "BeforeLookup",
    "ClippedSums",
    "ClippingStyle",
    "FlatClipping",
    "PerLayerClipping",
    "QuantileClipping",
    "Recording",
    "Rows",
    "Scaled",
    "Seeds",
    "Survey",
    "Tied",
    "Use",
    "Used",
    "detached",
    "embedding_tables",
    "exact",
    "fields_of",
    "filling_zeros",
    "guarded",
    "lets_nan_through",
    "metric_variables",
    "named_inputs",
    "record",
    "recorded_tensors",
    "register_unnoised",
    "require_batch_leads",
    "scalars_of",
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

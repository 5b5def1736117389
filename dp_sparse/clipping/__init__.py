"""Exact per-example clipping at the cost of one forward and one backward pass.

It records a pass, and computes norms and sums from the records. Only small variables (biases,
scales, small kernels) have per-example gradients in memory. May use: `core`.
"""

from dp_sparse.clipping.clipped_sums import Amounts, ClippedSums, Scaled, scaled, zero_sums
from dp_sparse.clipping.gradient_terms import (
    GradientTerm,
    Rows,
    Terms,
    Tied,
    exact,
    fields_of,
    of_batch,
)
from dp_sparse.clipping.graph_guard import guarded, update_from
from dp_sparse.clipping.layer_rules import (
    LayerRules,
    embedding_tables,
    find_rules,
    tables_read_whole,
    tapped_layers,
)
from dp_sparse.clipping.machine_check import lets_nan_through, self_check
from dp_sparse.clipping.named_inputs import (
    named_inputs,
    take_by_name,
    take_by_place,
    typed_inputs,
)
from dp_sparse.clipping.non_private_statistics import metric_variables, register_statistics
from dp_sparse.clipping.public_rows import (
    SharedUniforms,
    public_lookups,
    scored_by,
    shared_uniforms,
)
from dp_sparse.clipping.recording import (
    Recording,
    Seeds,
    record,
    recorded_tensors,
    require_batch_leads,
)
from dp_sparse.clipping.rules import name_of_rule
from dp_sparse.clipping.styles import (
    STYLES,
    AutomaticClipping,
    ClippingStyle,
    FlatClipping,
    PerLayerClipping,
    QuantileClipping,
)
from dp_sparse.clipping.tap import BeforeLookup, stop_gradient_read
from dp_sparse.clipping.zero_weights import filling_zeros

__all__ = [
    "STYLES",
    "Amounts",
    "AutomaticClipping",
    "BeforeLookup",
    "ClippedSums",
    "ClippingStyle",
    "FlatClipping",
    "GradientTerm",
    "LayerRules",
    "PerLayerClipping",
    "QuantileClipping",
    "Recording",
    "Rows",
    "Scaled",
    "Seeds",
    "SharedUniforms",
    "Terms",
    "Tied",
    "embedding_tables",
    "exact",
    "fields_of",
    "filling_zeros",
    "find_rules",
    "guarded",
    "lets_nan_through",
    "metric_variables",
    "name_of_rule",
    "named_inputs",
    "of_batch",
    "public_lookups",
    "record",
    "recorded_tensors",
    "register_statistics",
    "require_batch_leads",
    "scaled",
    "scored_by",
    "self_check",
    "shared_uniforms",
    "stop_gradient_read",
    "tables_read_whole",
    "take_by_name",
    "take_by_place",
    "tapped_layers",
    "typed_inputs",
    "update_from",
    "zero_sums",
]

"""Exact per-example clipping at the cost of one forward and one backward pass.

Only of small variables are there per-example gradients: of biases, scales, small kernels.
"""

from dp_sparse.clipping.audit import Seeds
from dp_sparse.clipping.gradients import ClippedSums, Scaled, clip, scaled
from dp_sparse.clipping.machine_check import self_check
from dp_sparse.clipping.recorder import Recording, record
from dp_sparse.clipping.styles import (
    STYLES,
    AutomaticClipping,
    ClippingStyle,
    FlatClipping,
    PerLayerClipping,
    QuantileClipping,
)
from dp_sparse.clipping.survey import (
    Survey,
    embedding_tables,
    survey,
    tables_read_whole,
    tapped_layers,
)
from dp_sparse.clipping.tap import BeforeLookup

__all__ = [
    "STYLES",
    "AutomaticClipping",
    "BeforeLookup",
    "ClippedSums",
    "ClippingStyle",
    "FlatClipping",
    "PerLayerClipping",
    "QuantileClipping",
    "Recording",
    "Scaled",
    "Seeds",
    "Survey",
    "clip",
    "embedding_tables",
    "record",
    "scaled",
    "self_check",
    "survey",
    "tables_read_whole",
    "tapped_layers",
]

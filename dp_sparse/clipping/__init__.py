"""Exact per-example clipping at the cost of one forward and one backward pass.

Nothing per example is materialised.
"""

from dp_sparse.clipping.gradients import ClippedSums, clip
from dp_sparse.clipping.recorder import (
    Recording,
    Seeds,
    Survey,
    embedding_tables,
    record,
    survey,
    tapped_layers,
)
from dp_sparse.clipping.styles import (
    STYLES,
    AutomaticClipping,
    ClippingStyle,
    FlatClipping,
    PerLayerClipping,
    QuantileClipping,
)
from dp_sparse.clipping.uses import self_check

__all__ = [
    "STYLES",
    "AutomaticClipping",
    "ClippedSums",
    "ClippingStyle",
    "FlatClipping",
    "PerLayerClipping",
    "QuantileClipping",
    "Recording",
    "Seeds",
    "Survey",
    "clip",
    "embedding_tables",
    "record",
    "self_check",
    "survey",
    "tapped_layers",
]

"""Models leave training as plain Keras and TensorFlow read them, with the statement beside them.

Whole, or by the rows that training changed since the last time. May use: all subpackages but
`distribution`.
"""

from dp_sparse.export.delta import apply_deltas, export_delta
from dp_sparse.export.full import check_export, export_model
from dp_sparse.export.manifest import Export, ExportDelta

__all__ = ["Export", "ExportDelta", "apply_deltas", "check_export", "export_delta", "export_model"]

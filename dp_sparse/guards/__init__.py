"""Checks a model before it trains, outside of the step: whether its examples stay apart.

May use: `core`, `clipping`.
"""

from dp_sparse.guards.isolation import COUPLED, Isolation
from dp_sparse.guards.predictions import refuse_mixed_predictions
from dp_sparse.guards.sketches import RecordedPass

__all__ = ["COUPLED", "Isolation", "RecordedPass", "refuse_mixed_predictions"]

"""What judges a model before it trains, outside of the step: whether examples stay apart.

The step computes, and nothing in it imports this. May use: `core`, `clipping`.
"""

from dp_sparse.guards.isolation import COUPLED, Isolation
from dp_sparse.guards.sketches import RecordedPass

__all__ = ["COUPLED", "Isolation", "RecordedPass"]

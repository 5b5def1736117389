"""A run that survives a kill: one folder, one plan, one checkpoint, one log.

May use: all subpackages.
"""

from dp_sparse.runs.run import Run

__all__ = ["Run"]

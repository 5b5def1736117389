"""A run that survives a kill: one folder, one plan, one checkpoint, one log; and one call for all.

May use: all subpackages.
"""

from dp_sparse.runs.make_private import PrivateModel, make_private
from dp_sparse.runs.run import Run

__all__ = ["PrivateModel", "Run", "make_private"]

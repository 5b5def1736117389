"""A run that survives a kill, in one folder; one call for all of it; and the card of its model.

May use: all subpackages.
"""

from dp_sparse.runs.card import model_card
from dp_sparse.runs.make_private import PrivateModel, make_private
from dp_sparse.runs.run import Run

__all__ = ["PrivateModel", "Run", "make_private", "model_card"]

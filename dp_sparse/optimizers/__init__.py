"""Private optimizers: what `model.compile` takes, each around an ordinary Keras optimizer."""

from dp_sparse.optimizers.adafest import DPAdaFESTOptimizer
from dp_sparse.optimizers.base import PrivateOptimizer
from dp_sparse.optimizers.dpsgd import DPSGDOptimizer
from dp_sparse.optimizers.exponential import ExponentialSelectionOptimizer
from dp_sparse.optimizers.fest import DPFESTOptimizer
from dp_sparse.optimizers.lazy import LazyDPSGDOptimizer
from dp_sparse.optimizers.sums import PrivateSums, RowChoice

__all__ = [
    "DPAdaFESTOptimizer",
    "DPFESTOptimizer",
    "DPSGDOptimizer",
    "ExponentialSelectionOptimizer",
    "LazyDPSGDOptimizer",
    "PrivateOptimizer",
    "PrivateSums",
    "RowChoice",
]

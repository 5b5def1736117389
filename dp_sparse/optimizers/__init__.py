"""Private optimizers: what `model.compile` takes, each around an ordinary Keras optimizer.

They choose rows, add noise to clipped sums, and update. May use: all rooms below.
"""

from dp_sparse.optimizers.adafest import DPAdaFESTOptimizer
from dp_sparse.optimizers.base import PrivateOptimizer
from dp_sparse.optimizers.dpsgd import DPSGDOptimizer
from dp_sparse.optimizers.exponential import ExponentialSelectionOptimizer
from dp_sparse.optimizers.fest import DPFESTOptimizer
from dp_sparse.optimizers.lazy import LazyDPSGDOptimizer
from dp_sparse.optimizers.other_training import (
    install_build_hook,
    known_noise,
    remember,
    with_other_training,
)
from dp_sparse.optimizers.release import NoisyMeans
from dp_sparse.optimizers.replica_rows import rows_of_replicas
from dp_sparse.optimizers.row_updates import adagrad_rows, sgd_rows

__all__ = [
    "DPAdaFESTOptimizer",
    "DPFESTOptimizer",
    "DPSGDOptimizer",
    "ExponentialSelectionOptimizer",
    "LazyDPSGDOptimizer",
    "NoisyMeans",
    "PrivateOptimizer",
    "adagrad_rows",
    "install_build_hook",
    "known_noise",
    "remember",
    "rows_of_replicas",
    "sgd_rows",
    "with_other_training",
]

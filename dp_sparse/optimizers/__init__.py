"""Private optimizers: what `model.compile` takes, each around an ordinary Keras optimizer.

They choose rows, add noise to clipped sums, and update. May use: all subpackages below.
"""

from dp_sparse.optimizers.adafest import DPAdaFESTOptimizer
from dp_sparse.optimizers.base import Options, PrivateOptimizer, TableOptions, private_optimizer_of
from dp_sparse.optimizers.dpsgd import DPSGDOptimizer
from dp_sparse.optimizers.exponential import ExponentialSelectionOptimizer
from dp_sparse.optimizers.fest import DPFESTOptimizer
from dp_sparse.optimizers.lazy import LazyDPSGDOptimizer
from dp_sparse.optimizers.release import NoisyMeans
from dp_sparse.optimizers.replica_rows import rows_of_replicas
from dp_sparse.optimizers.row_updates import adagrad_rows, sgd_rows
from dp_sparse.optimizers.training_history import (
    Calibrated,
    calibrations_of,
    install_build_hook,
    known_noise,
    note_calibration,
    record,
    take_over,
    with_other_training,
)
from dp_sparse.optimizers.window import SelectionWindow

__all__ = [
    "Calibrated",
    "DPAdaFESTOptimizer",
    "DPFESTOptimizer",
    "DPSGDOptimizer",
    "ExponentialSelectionOptimizer",
    "LazyDPSGDOptimizer",
    "NoisyMeans",
    "Options",
    "PrivateOptimizer",
    "SelectionWindow",
    "TableOptions",
    "adagrad_rows",
    "calibrations_of",
    "install_build_hook",
    "known_noise",
    "note_calibration",
    "private_optimizer_of",
    "record",
    "rows_of_replicas",
    "sgd_rows",
    "take_over",
    "with_other_training",
]

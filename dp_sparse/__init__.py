"""Differentially private Keras training of large embedding models with sparse gradients."""

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"dp_sparse needs Keras on the TensorFlow backend, got {keras.backend.backend()!r}: set "
        f"KERAS_BACKEND=tensorflow."
    )

from dp_sparse import distribution
from dp_sparse.callback_guard import install_callback_guard
from dp_sparse.callbacks import PrivacyReport
from dp_sparse.checking import ModelCheck, check_model
from dp_sparse.clipping import AutomaticClipping, FlatClipping, PerLayerClipping, QuantileClipping
from dp_sparse.errors import BadExampleError, PrivacyError, UnsupportedLayerError
from dp_sparse.mechanisms import ExponentialSelection, GaussianMechanism
from dp_sparse.optimizers import (
    DPAdaFESTOptimizer,
    DPFESTOptimizer,
    DPSGDOptimizer,
    ExponentialSelectionOptimizer,
    LazyDPSGDOptimizer,
)
from dp_sparse.plan import PrivacyBudget, PrivacyPlan
from dp_sparse.release import Release
from dp_sparse.sampling import PoissonSampling, RecordFile, StreamSampling
from dp_sparse.selection.counting import TopKTable
from dp_sparse.selection.price import calibrate_top_k
from dp_sparse.selection.row_set import SelectedRows
from dp_sparse.selection.sources import GaussianTopK, GumbelTopK, LaplaceTopK, PublicRows
from dp_sparse.selection.top_k import select_top_k
from dp_sparse.training import install_compile_hook
from dp_sparse.version import __version__

install_compile_hook()
install_callback_guard()

__all__ = [
    "AutomaticClipping",
    "BadExampleError",
    "DPAdaFESTOptimizer",
    "DPFESTOptimizer",
    "DPSGDOptimizer",
    "ExponentialSelection",
    "ExponentialSelectionOptimizer",
    "FlatClipping",
    "GaussianMechanism",
    "GaussianTopK",
    "GumbelTopK",
    "LaplaceTopK",
    "LazyDPSGDOptimizer",
    "ModelCheck",
    "PerLayerClipping",
    "PoissonSampling",
    "PrivacyBudget",
    "PrivacyError",
    "PrivacyPlan",
    "PrivacyReport",
    "PublicRows",
    "QuantileClipping",
    "RecordFile",
    "Release",
    "SelectedRows",
    "StreamSampling",
    "TopKTable",
    "UnsupportedLayerError",
    "__version__",
    "calibrate_top_k",
    "check_model",
    "distribution",
    "select_top_k",
]

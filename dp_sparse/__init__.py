"""Differentially private Keras training of large embedding models with sparse gradients."""

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"dp_sparse needs Keras on the TensorFlow backend, got {keras.backend.backend()!r}: set "
        f"KERAS_BACKEND=tensorflow."
    )

from dp_sparse import auditing, distribution, layers
from dp_sparse.accounting import (
    BudgetAccount,
    DisjointPlans,
    ExponentialSelection,
    GaussianMechanism,
    PlanTable,
    PrivacyBudget,
    PrivacyPlan,
    Release,
    not_private_plan,
    plan_table,
)
from dp_sparse.auditing import Audit, GradientCanaries, InputCanaries
from dp_sparse.clipping import AutomaticClipping, FlatClipping, PerLayerClipping, QuantileClipping
from dp_sparse.core import BadExampleError, PrivacyError, UnsupportedLayerError, __version__
from dp_sparse.export import (
    Export,
    ExportDelta,
    apply_deltas,
    check_export,
    export_delta,
    export_model,
)
from dp_sparse.layers import losses
from dp_sparse.optimizers import (
    DPAdaFESTOptimizer,
    DPFESTOptimizer,
    DPSGDOptimizer,
    ExponentialSelectionOptimizer,
    LazyDPSGDOptimizer,
    install_build_hook,
)
from dp_sparse.probabilities import (
    Calibration,
    ScoreHistogram,
    calibrate_probabilities,
    reserve_calibration,
)
from dp_sparse.reports import (
    ModelCheck,
    PrivacyMonitor,
    PrivacyReport,
    Recommendation,
    check_model,
    recommend,
)
from dp_sparse.runs import PrivateModel, Run, make_private, model_card
from dp_sparse.sampling import (
    OfflineBatches,
    OfflinePoissonSampling,
    PoissonSampling,
    RecordFile,
    StreamSampling,
    offline,
    offline_sampling,
    write_records,
)
from dp_sparse.selection import (
    GaussianTopK,
    GumbelTopK,
    LaplaceTopK,
    NoisyHistogram,
    PrivateVocabulary,
    PublicRows,
    RowFrequencies,
    SelectedRows,
    TopKTable,
    calibrate_top_k,
    histogram_of_counts,
    noisy_frequencies,
    noisy_histogram,
    private_vocabulary,
    reserve_vocabulary,
    select_from_histograms,
    select_top_k,
)
from dp_sparse.shuffling import (
    ShuffledDPSGDOptimizer,
    theorem6_plan_not_a_guarantee,
    theorem6_sigma_not_a_guarantee,
)
from dp_sparse.step import preflight
from dp_sparse.training import PrivateCheckpoint, install_callback_guard, install_compile_hook

install_build_hook()
install_compile_hook()
install_callback_guard()

__all__ = [
    "Audit",
    "AutomaticClipping",
    "BadExampleError",
    "BudgetAccount",
    "Calibration",
    "DPAdaFESTOptimizer",
    "DPFESTOptimizer",
    "DPSGDOptimizer",
    "DisjointPlans",
    "ExponentialSelection",
    "ExponentialSelectionOptimizer",
    "Export",
    "ExportDelta",
    "FlatClipping",
    "GaussianMechanism",
    "GaussianTopK",
    "GradientCanaries",
    "GumbelTopK",
    "InputCanaries",
    "LaplaceTopK",
    "LazyDPSGDOptimizer",
    "ModelCheck",
    "NoisyHistogram",
    "OfflineBatches",
    "OfflinePoissonSampling",
    "PerLayerClipping",
    "PlanTable",
    "PoissonSampling",
    "PrivacyBudget",
    "PrivacyError",
    "PrivacyMonitor",
    "PrivacyPlan",
    "PrivacyReport",
    "PrivateCheckpoint",
    "PrivateModel",
    "PrivateVocabulary",
    "PublicRows",
    "QuantileClipping",
    "Recommendation",
    "RecordFile",
    "Release",
    "RowFrequencies",
    "Run",
    "ScoreHistogram",
    "SelectedRows",
    "ShuffledDPSGDOptimizer",
    "StreamSampling",
    "TopKTable",
    "UnsupportedLayerError",
    "__version__",
    "apply_deltas",
    "auditing",
    "calibrate_probabilities",
    "calibrate_top_k",
    "check_export",
    "check_model",
    "distribution",
    "export_delta",
    "export_model",
    "histogram_of_counts",
    "layers",
    "losses",
    "make_private",
    "model_card",
    "noisy_frequencies",
    "noisy_histogram",
    "not_private_plan",
    "offline",
    "offline_sampling",
    "plan_table",
    "preflight",
    "private_vocabulary",
    "recommend",
    "reserve_calibration",
    "reserve_vocabulary",
    "select_from_histograms",
    "select_top_k",
    "theorem6_plan_not_a_guarantee",
    "theorem6_sigma_not_a_guarantee",
    "write_records",
]

"""Which embedding rows a step may touch, and which rows or values are chosen before training.

May use: `core`, `noise`, `sampling` and `accounting`. Nothing here imports Keras.
"""

from dp_sparse.selection.contribution import (
    ContributionMap,
    TableLookups,
    contribution_map,
    row_scores,
    unit_of,
)
from dp_sparse.selection.exponential import select_top_rows, selected_by_table
from dp_sparse.selection.step_rows import (
    Restricted,
    StepChoice,
    StepRows,
    among_selected,
    looked_up_rows,
    restricted,
    step_rows_by_table,
    with_public_rows,
)
from dp_sparse.selection.threshold import Survivors, most_skips, select_rows
from dp_sparse.selection.top_k.calibration import calibrate_top_k
from dp_sparse.selection.top_k.counting import TopKTable
from dp_sparse.selection.top_k.frequencies import RowFrequencies, noisy_frequencies
from dp_sparse.selection.top_k.histograms import (
    NoisyHistogram,
    histogram_of_counts,
    noisy_histogram,
    select_from_histograms,
)
from dp_sparse.selection.top_k.noise_sources import (
    GaussianTopK,
    GumbelTopK,
    LaplaceTopK,
    PublicRows,
    gaussian_values,
)
from dp_sparse.selection.top_k.select import select_top_k
from dp_sparse.selection.top_k.selected_rows import SelectedRows
from dp_sparse.selection.vocabulary.draw import (
    asked_for,
    draw_vocabulary,
    private_vocabulary,
    reserve_vocabulary,
)
from dp_sparse.selection.vocabulary.vocabulary import PrivateVocabulary

__all__ = [
    "ContributionMap",
    "GaussianTopK",
    "GumbelTopK",
    "LaplaceTopK",
    "NoisyHistogram",
    "PrivateVocabulary",
    "PublicRows",
    "Restricted",
    "RowFrequencies",
    "SelectedRows",
    "StepChoice",
    "StepRows",
    "Survivors",
    "TableLookups",
    "TopKTable",
    "among_selected",
    "asked_for",
    "calibrate_top_k",
    "contribution_map",
    "draw_vocabulary",
    "gaussian_values",
    "histogram_of_counts",
    "looked_up_rows",
    "most_skips",
    "noisy_frequencies",
    "noisy_histogram",
    "private_vocabulary",
    "reserve_vocabulary",
    "restricted",
    "row_scores",
    "select_from_histograms",
    "select_rows",
    "select_top_k",
    "select_top_rows",
    "selected_by_table",
    "step_rows_by_table",
    "unit_of",
    "with_public_rows",
]

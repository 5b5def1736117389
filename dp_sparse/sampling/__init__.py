"""How batches are drawn. Each sampler has its dp-accounting event and neighbouring relation.

May use: `core`. Nothing here imports Keras.
"""

from dp_sparse.sampling import offline
from dp_sparse.sampling.augmentation import Augment, augmented
from dp_sparse.sampling.base import BatchPart, Sampling
from dp_sparse.sampling.batch import (
    OWN_ORDER,
    SEEDED,
    Batch,
    Examples,
    Marker,
    batch_of,
    is_sampled,
    new_nonce,
    real_examples,
    weights_of_outputs,
)
from dp_sparse.sampling.data_source import (
    RecordFile,
    as_data_source,
    checked_number,
    chunks_of,
    has_length,
    has_weight,
    parts_of,
    text_tensors,
)
from dp_sparse.sampling.held_out import trained_on
from dp_sparse.sampling.input_guard import check_batches, check_source, own_map
from dp_sparse.sampling.not_private import NotPrivateSampling
from dp_sparse.sampling.offline import OfflineBatches, OfflinePoissonSampling, offline_sampling
from dp_sparse.sampling.poisson import PoissonSampling
from dp_sparse.sampling.stream import StreamSampling
from dp_sparse.sampling.written_records import write_records

__all__ = [
    "OWN_ORDER",
    "SEEDED",
    "Augment",
    "Batch",
    "BatchPart",
    "Examples",
    "Marker",
    "NotPrivateSampling",
    "OfflineBatches",
    "OfflinePoissonSampling",
    "PoissonSampling",
    "RecordFile",
    "Sampling",
    "StreamSampling",
    "as_data_source",
    "augmented",
    "batch_of",
    "check_batches",
    "check_source",
    "checked_number",
    "chunks_of",
    "has_length",
    "has_weight",
    "is_sampled",
    "new_nonce",
    "offline",
    "offline_sampling",
    "own_map",
    "parts_of",
    "real_examples",
    "text_tensors",
    "trained_on",
    "weights_of_outputs",
    "write_records",
]

"""Poisson sampling before training: the coins, the files, and the sampler that reads them."""

from dp_sparse.sampling.offline.batches import OfflineBatches
from dp_sparse.sampling.offline.files import Manifest, read_manifest, write_bucket
from dp_sparse.sampling.offline.poisson import (
    CHUNK,
    OfflineDraw,
    OfflinePoissonSampling,
    draw_id,
    new_key,
    offline_sampling,
)

__all__ = [
    "CHUNK",
    "Manifest",
    "OfflineBatches",
    "OfflineDraw",
    "OfflinePoissonSampling",
    "draw_id",
    "new_key",
    "offline_sampling",
    "read_manifest",
    "write_bucket",
]

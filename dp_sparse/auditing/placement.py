"""Where canaries stand among the examples, and which steps may use them."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from dp_sparse.sampling import PoissonSampling, Sampling, StreamSampling


@dataclasses.dataclass(frozen=True)
class Placement:
    """Canaries among examples, spread evenly.

    Attributes:
        sampling: Of both together: steps, sampling probability or batch size, and passes are those
            of the plan that is audited.
        places: int64 `[canaries]`, increasing: where each stands.
    """

    sampling: Sampling
    places: np.ndarray

    @classmethod
    def of(cls, sampling: Sampling, canaries: int) -> "Placement":
        """So many canaries among the examples of a sampler.

        Raises:
            ValueError: Neither Poisson sampling nor a stream.
        """
        count = sampling.num_examples + canaries
        places = (np.arange(canaries) * count) // canaries
        if isinstance(sampling, PoissonSampling):
            batch_size = sampling.sampling_probability * count
            return cls(PoissonSampling(count, batch_size, sampling.steps), places)
        if isinstance(sampling, StreamSampling):
            return cls(StreamSampling(count, sampling.batch_size, sampling.passes), places)
        raise ValueError(
            f"Expected a plan with PoissonSampling or StreamSampling, got {sampling!r}: audit its "
            "noise under one of them (plan.with_noise)."
        )

    @property
    def sampling_probability(self) -> float:
        """That a canary is in a step's batch, if the step may use it."""
        sampling = self.sampling
        return sampling.sampling_probability if isinstance(sampling, PoissonSampling) else 1.0

    @property
    def coordinates(self) -> np.ndarray:
        """A number of each canary, int64 `[canaries]`, that no other in the same batch has."""
        if not isinstance(self.sampling, StreamSampling):
            return np.arange(len(self.places))
        _, first, batches = np.unique(self._batches, return_index=True, return_inverse=True)
        return np.arange(len(self.places)) - first[batches]

    def used_in(self, step: int) -> np.ndarray:
        """The numbers of the canaries that the batch of a step may hold."""
        if not isinstance(self.sampling, StreamSampling):
            return np.arange(len(self.places))
        return np.flatnonzero(self._batches == step % self.sampling.steps_per_pass)

    @property
    def _batches(self) -> np.ndarray:
        assert isinstance(self.sampling, StreamSampling)
        return self.places // self.sampling.batch_size

    def spread(self, examples: Any, canaries: Any) -> Any:
        """One nest of arrays `[examples + canaries, ...]` out of two, each at its place."""

        def of_leaf(among: np.ndarray, own: np.ndarray) -> np.ndarray:
            among, own = np.asarray(among), np.asarray(own)
            whole = np.empty((len(among) + len(own), *among.shape[1:]), among.dtype)
            at = np.zeros(len(whole), bool)
            at[self.places] = True
            whole[at], whole[~at] = own, among
            return whole

        return tf.nest.map_structure(of_leaf, examples, canaries)

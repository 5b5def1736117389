"""Privacy losses added up in extended precision: the T-th power of a Fourier transform, as it is.

With 64 bits of mantissa the error of the transform, some 10⁻¹⁹, may be multiplied by T = 10⁵ and
still be a millionth of δ = 10⁻⁸.
"""

from collections.abc import Sequence

import numpy as np
import scipy.fft
from dp_accounting.pld.pld_pmf import DensePLDPmf, PLDPmf

EXTENDED = np.finfo(np.longdouble).nmant > 60  # not on every processor


def composed(
    losses: Sequence[tuple[PLDPmf, int]], first: int, size: int, infinity_mass: float
) -> DensePLDPmf:
    """The losses from `first` on, in intervals, on `size` places; the rest must be negligible."""
    power: np.ndarray = np.ones(size, np.clongdouble)
    lowest = 0
    for pmf, count in losses:
        dense = pmf.to_dense_pmf()
        padded = np.zeros(size, np.longdouble)
        padded[: dense.size] = dense._probs
        power = power * scipy.fft.fft(padded) ** count
        lowest += count * dense._lower_loss
    sums = np.real(scipy.fft.ifft(power))
    places = (first - lowest + np.arange(size)) % size
    probabilities = sums[places].astype(np.float64)
    return DensePLDPmf(dense._discretization, first, probabilities, infinity_mass, True)

"""The sum of many privacy losses, with every probability rounded up by its possible error.

The distribution of a sum of T losses is the T-th power of a Fourier transform. The power multiplies
the transform's rounding error by T and spreads it evenly over all losses, while δ comes from rare
ones. At T = 10⁵ and δ = 2·10⁻⁸ the error was 10⁻⁴ of ε, of a sign that depended on the processor.
Two things keep it small. First, losses are tilted, p_j·e^(θj) / M(θ), so that rare ones become
likely and the error is relative to Chernoff's bound of their tail. Each θ gives an upper bound of
every probability, and the least is taken. Second, the number raised to a power is 1 + z, and z is
what is computed: the largest probability stands at place 0, the next ones are transformed by sines
if more than 64 losses are added (a power of few multiplies little), and the others by FFT. The cost
is a few FFTs of as many points as the composed losses have.

### Formal Guarantees
No probability is below that of exact arithmetic, provided that numbers are IEEE 754's and that
elementary functions and roots of unity are within a unit in the last place. With u = 2⁻⁵³, an FFT
of n numbers that add up to m takes log2(n) levels, each of a product by a root of unity and a sum,
together below 5u (levels of radix 3 and 5 cost less than the ones that they replace): each entry is
within 5u·log2(n)·m. Sines, log1p and what follows are within 16u of the sizes of their terms. An
error e of 1 + z moves its T-th power by less than T·e·(|1 + z| + 2e)^(T−1), and a probability by
the mean of that over all entries. Losses that wrap around only add to a probability. Losses outside
of the window, less than e⁻⁴⁶ on each side by Chernoff's bound, count as infinite.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import scipy.fft
from dp_accounting.pld.pld_pmf import DensePLDPmf, PLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from dp_sparse.accounting.privacy_loss import UNIT

_OUTSIDE = 46.0  # −log of the probability on each side of the window
_STEP = 16.0  # nats of Chernoff's bound between two tilts
_STEEPEST = 64.0  # θ at which only the largest loss has weight
_MOST_BY_SINES, _LEAST_BY_SINES = 16, 1e-3  # at most 16 probabilities, each at least 1e-3
_FEW = 64  # losses, whose sum has a small error without sines unless δ is far below 1e-8
_NOTHING = -80.0  # log below which a power is left out

Part = tuple[DensePLDPmf, int]  # a loss, and how often it is added


def composed(losses: Sequence[tuple[PrivacyLossDistribution, int]]) -> PrivacyLossDistribution:
    """The loss of mechanisms run one after the other, each `int` times, all on one grid."""
    removed = _composed([(loss._pmf_remove, count) for loss, count in losses])
    if all(loss._symmetric for loss, _ in losses):
        return PrivacyLossDistribution(removed)
    added = _composed([(loss._pmf_add, count) for loss, count in losses])
    return PrivacyLossDistribution(removed, added)


def _composed(losses: Sequence[tuple[PLDPmf, int]]) -> PLDPmf:
    parts = [(_trimmed(loss), count) for loss, count in losses if not _is_zero(loss)]
    if sum(count for _, count in parts) < 2:
        return parts[0][0] if parts else losses[0][0]
    upwards, downwards = _tilts(parts, 1, _STEP), _tilts(parts, -1, _OUTSIDE)
    places = _window(parts, upwards, downwards)
    size = max(len(places), *(loss.size for loss, _ in parts))
    size = scipy.fft.next_fast_len(size, real=True)
    bounds = [_probabilities(parts, tilt, places, size) for tilt in upwards]
    finite = sum(count * math.log1p(-loss._infinity_mass) for loss, count in parts)
    return DensePLDPmf(
        parts[0][0]._discretization,
        int(places[0]) + sum(count * loss._lower_loss for loss, count in parts),
        np.minimum.reduce(bounds),
        2 * math.exp(-_OUTSIDE) - math.expm1(finite),
        True,
    )


def _is_zero(loss: PLDPmf) -> bool:
    """Whether a loss is 0 with certainty."""
    if loss.size > 1:
        return False
    dense = loss.to_dense_pmf()
    return bool(dense._lower_loss == 0 and dense._infinity_mass == 0)


def _trimmed(loss: PLDPmf) -> DensePLDPmf:
    """Without losses at the ends that have no probability: tilting needs what stands there."""
    dense = loss.to_dense_pmf()
    there = np.flatnonzero(dense._probs)
    first, last = int(there[0]), int(there[-1])
    return DensePLDPmf(
        dense._discretization,
        dense._lower_loss + first,
        dense._probs[first : last + 1],
        dense._infinity_mass,
        True,
    )


@dataclasses.dataclass(frozen=True)
class _Tilt:
    """What is known of a tilt of all parts together.

    Attributes:
        theta: θ, by place on the grid.
        log_sum: log M(θ).
        nats: −log of Chernoff's bound that it gives at its own mean.
    """

    theta: float
    log_sum: float
    nats: float

    @property
    def window_end(self) -> float:
        """The place beyond which, in the direction of θ, less than e⁻⁴⁶ lies."""
        return (self.log_sum + _OUTSIDE) / self.theta


def _tilts(parts: Sequence[Part], sign: int, most: float) -> list[_Tilt]:
    """Tilts from θ = 0 in one direction, until Chernoff's bound is e⁻⁴⁶ or θ is `_STEEPEST`.

    From one tilt to the next the logarithm of the bound changes by at most `most`.
    """
    found, step = [_tilt(parts, 0.0)], min(4 / _deviation(parts), 1.0)
    while found[-1].nats < _OUTSIDE and abs(found[-1].theta) < _STEEPEST:
        tilt = _tilt(parts, found[-1].theta + sign * step)
        nats = tilt.nats - found[-1].nats
        step = step / 2 if nats > most else 2 * step if nats < most / 4 else step
        found += [tilt] if nats <= most else []
    return found


def _deviation(parts: Sequence[Part]) -> float:
    """The standard deviation of the parts' sum, in places; at least one."""
    variance = 0.0
    for loss, count in parts:
        weights, _, mean = _tilted(loss, 0.0)
        variance += count * float(np.sum(weights * (np.arange(loss.size) - mean) ** 2))
    return max(math.sqrt(variance), 1.0)


def _tilt(parts: Sequence[Part], theta: float) -> _Tilt:
    log_sum = mean = 0.0
    for loss, count in parts:
        _, log_of_part, mean_of_part = _tilted(loss, theta)
        log_sum, mean = log_sum + count * log_of_part, mean + count * mean_of_part
    return _Tilt(theta, log_sum, theta * mean - log_sum)


def _tilted(loss: DensePLDPmf, theta: float) -> tuple[np.ndarray, float, float]:
    """Normalised probabilities times e^(θ·place), the logarithm of their sum, their mean place."""
    places = np.arange(loss.size, dtype=np.float64)
    largest = max(theta * (loss.size - 1), 0.0)
    weights = loss._probs * np.exp(theta * places - largest)
    total = float(np.sum(weights))
    return weights / total, largest + math.log(total), float(np.sum(weights * places)) / total


def _window(
    parts: Sequence[Part], upwards: Sequence[_Tilt], downwards: Sequence[_Tilt]
) -> np.ndarray:
    """The places of the parts' sum without e⁻⁴⁶ on each side; 0 is the sum of least losses."""
    largest = sum(count * (loss.size - 1) for loss, count in parts)
    last = min(largest, *(math.ceil(tilt.window_end) for tilt in upwards if tilt.theta))
    first = max(0, *(math.floor(tilt.window_end) for tilt in downwards if tilt.theta))
    return np.arange(first, last + 1)


def _probabilities(parts: Sequence[Part], tilt: _Tilt, places: np.ndarray, size: int) -> np.ndarray:
    """Upper bounds of the probabilities of the parts' sum at `places`."""
    weights = [(_tilted(loss, tilt.theta)[0], count) for loss, count in parts]
    error = 5 * UNIT * math.log2(size)
    logs = [n * np.log(np.abs(scipy.fft.rfft(each, size)) + error) for each, n in weights]
    left_out = sum(logs) < _NOTHING
    entries = np.flatnonzero(~left_out)
    most = _MOST_BY_SINES if sum(count for _, count in parts) > _FEW else 0
    transforms = [(_transform(each, entries, size, most), n) for each, n in weights]
    tilted = _inverse(transforms, entries, size) + math.exp(_NOTHING)
    centre = sum(count * transform.centre for transform, count in transforms)
    steepest = max(abs(tilt.theta) * loss.size for loss, _ in parts)
    rounding = 8 * UNIT * (1 + steepest) * sum(count for _, count in parts)  # of all exponents
    with np.errstate(over="ignore"):  # infinity is an upper bound, too
        untilted = np.exp(tilt.log_sum - tilt.theta * places) * (1 + rounding)
        return tilted[(places - centre) % size] * untilted


@dataclasses.dataclass(frozen=True)
class _Transform:
    """Some entries of the Fourier transform 1 + z of probabilities around the largest of them.

    Attributes:
        centre: The place of the largest probability.
        largest: The largest probability.
        log_size: log |1 + z|.
        angle: The angle of 1 + z.
        error: The error of 1 + z.
    """

    centre: int
    largest: float
    log_size: np.ndarray
    angle: np.ndarray
    error: np.ndarray


def _transform(
    weights: np.ndarray, entries: np.ndarray, size: int, most_by_sines: int
) -> _Transform:
    centre = int(np.argmax(weights))
    rest = np.zeros(size)
    rest[(np.arange(len(weights)) - centre) % size] = weights
    rest[0] = 0
    z, terms = np.zeros(len(entries), complex), np.zeros(len(entries))
    large = np.flatnonzero(rest > _LEAST_BY_SINES)
    for place in large[np.argsort(-rest[large])][:most_by_sines]:
        half = np.pi / size * (entries * place % size)
        sine = 2 * rest[place] * np.sin(half)
        z -= sine * np.sin(half) + 1j * sine * np.cos(half)  # probability · (e^(−2i·half) − 1)
        terms += np.abs(sine)
        rest[place] = 0
    total = float(np.sum(rest))
    others = scipy.fft.rfft(rest)[entries] - total
    z += others
    error = 5 * UNIT * math.log2(size) * total + 16 * UNIT * (terms + np.abs(others))
    return _Transform(centre, float(weights[centre]), *_logarithm(z), error)


def _logarithm(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log |1 + z| and the angle of 1 + z, also of a small z without cancellation."""
    near = 2 * z.real + z.real**2 + z.imag**2
    far = np.log(np.maximum(np.abs(1 + z), 1e-300))
    small = np.abs(z) < 0.5
    log_size = np.where(small, np.log1p(np.where(small, near, 0)) / 2, far)
    return log_size, np.arctan2(z.imag, 1 + z.real)


def _inverse(
    transforms: Sequence[tuple[_Transform, int]], entries: np.ndarray, size: int
) -> np.ndarray:
    """Upper bounds of the probabilities of a sum, around the sum of the centres."""
    log_size = sum(count * transform.log_size for transform, count in transforms)
    angle = sum(count * transform.angle for transform, count in transforms)
    stays = math.prod(transform.largest**count for transform, count in transforms)
    power = np.full(size // 2 + 1, -stays, complex)
    power[entries] += np.exp(log_size + 1j * angle)
    probabilities = scipy.fft.irfft(power, size)
    probabilities[0] += stays
    bounds = [np.log(np.exp(t.log_size) + 2 * t.error) for t, _ in transforms]
    others = sum(n * bound for bound, (_, n) in zip(bounds, transforms, strict=True))
    others = np.exp(others - np.minimum.reduce(bounds))
    error = float(np.sum(sum(n * transform.error for transform, n in transforms) * others))
    error += 5 * UNIT * math.log2(size) * float(np.sum(np.abs(power))) + 4 * UNIT * stays * size
    return np.maximum(probabilities, 0) + 2 * error / size

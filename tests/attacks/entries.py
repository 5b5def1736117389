"""What an entry of the catalogue is, and whether an outcome is what is right."""

import dataclasses
import re
from collections.abc import Callable

from dp_sparse.core.errors import BadExampleError, PrivacyError, UnsupportedLayerError
from tests.attacks.measuring import TOLERANCE, Refusal
from tests.attacks.ways import ONES, WAYS, Way

_OWN = (PrivacyError, UnsupportedLayerError, BadExampleError)
_OWN_SENTENCE = re.compile(
    r"Expected .*\bgot\b|Cannot train privately|this plan's statement", re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class Expected:
    """What may come of an attack.

    Attributes:
        refusal: Whether it may be refused, before anything moves.
        harmless: Whether it may run, with a sensitivity of at most 1 + 1e-3.
        match: A regular expression that the refusal's sentence contains.
    """

    refusal: bool
    harmless: bool
    match: str = ""

    def matching(self, match: str) -> "Expected":
        """The same with another expression."""
        return dataclasses.replace(self, match=match)

    def problem(self, outcome: float | Refusal) -> str | None:
        """What is wrong with an outcome, in a sentence, or None."""
        if isinstance(outcome, float):
            if not self.harmless:
                return f"It ran, with a sensitivity of {outcome:.4g}, and must be refused."
            return None if outcome <= 1 + TOLERANCE else f"Its sensitivity is {outcome:.4g}."
        if not self.refusal:
            return f"It must run, and was refused: {outcome}"
        if outcome.late:
            return f"It was refused after an update: {outcome}"
        if not is_own(outcome.error):
            return f"It failed without a sentence of the package: {outcome}"
        if not re.search(self.match, str(outcome.error), re.IGNORECASE):
            return f"Its refusal says nothing of {self.match!r}: {outcome}"
        return None


REFUSED = Expected(refusal=True, harmless=False)
MEASURED = Expected(refusal=False, harmless=True)
REFUSED_OR_MEASURED = Expected(refusal=True, harmless=True)
MIXES = REFUSED.matching("example|batch")


def is_own(error: Exception) -> bool:
    """Whether the package itself says no, and how."""
    return isinstance(error, _OWN) or (
        isinstance(error, ValueError) and bool(_OWN_SENTENCE.search(str(error)))
    )


@dataclasses.dataclass(frozen=True)
class Entry:
    """One attack.

    Attributes:
        name: What it does, in a few words.
        attack: Runs it on a way and returns the measured sensitivity; raises `Refusal`.
        expected: What is right.
        ways: Those with code of their own for it, which every suite runs.
        elsewhere: Whether it can run on the other ways, too, which the slow test does.
        apart: Ways on which it means nothing.
        noisy: Whether it needs the noise itself.
    """

    name: str
    attack: Callable[[Way], float]
    expected: Expected
    ways: tuple[str, ...] = ("graph",)
    elsewhere: bool = True
    apart: tuple[str, ...] = ()
    noisy: bool = False

    def expected_on(self, way: str) -> Expected:
        """What is right there: an example alone in its batch or part may have none to mix with."""
        alone = way in ONES and way not in self.ways and self.expected.match == MIXES.match
        return dataclasses.replace(self.expected, harmless=True) if alone else self.expected

    def others(self) -> tuple[str, ...]:
        """The ways that only the slow test takes."""
        if not self.elsewhere:
            return ()
        return tuple(way for way in WAYS if way not in (*self.ways, *self.apart))


def outcome(entry: Entry, way: str) -> float | Refusal:
    """What comes of it."""
    try:
        return float(entry.attack(WAYS[way]))
    except Refusal as refusal:
        return refusal

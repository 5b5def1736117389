"""All planted faults."""

from tests.mutations import (
    of_accounting,
    of_auditing,
    of_checks,
    of_clipping,
    of_exports,
    of_layers,
    of_noise,
    of_own_losses,
    of_probabilities,
    of_retrieval,
    of_selection,
    of_shuffling,
    of_steps,
    of_vocabulary,
    of_windows,
)
from tests.mutations.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *of_noise.FAULTS,
    *of_own_losses.FAULTS,
    *of_clipping.FAULTS,
    *of_selection.FAULTS,
    *of_vocabulary.FAULTS,
    *of_windows.FAULTS,
    *of_probabilities.FAULTS,
    *of_retrieval.FAULTS,
    *of_accounting.FAULTS,
    *of_checks.FAULTS,
    *of_layers.FAULTS,
    *of_steps.FAULTS,
    *of_exports.FAULTS,
    *of_shuffling.FAULTS,
    *of_auditing.FAULTS,
)

"""All attacks."""

from tests.attacks import (
    batches,
    examples,
    mechanisms,
    mixing_batch,
    mixing_errors,
    mixing_extremes,
    mixing_gradients,
    mixing_losses,
    mixing_own_losses,
    mixing_positions,
    pipelines,
    reaching,
    resuming,
    settings,
    state,
    steering,
    streams,
    tables,
)
from tests.attacks.entries import Entry

CATALOGUE: list[Entry] = [
    *mixing_positions.ENTRIES,
    *mixing_batch.ENTRIES,
    *mixing_errors.ENTRIES,
    *mixing_extremes.ENTRIES,
    *mixing_gradients.ENTRIES,
    *mixing_losses.ENTRIES,
    *mixing_own_losses.ENTRIES,
    *state.ENTRIES,
    *batches.ENTRIES,
    *streams.ENTRIES,
    *resuming.ENTRIES,
    *examples.ENTRIES,
    *pipelines.ENTRIES,
    *steering.ENTRIES,
    *reaching.ENTRIES,
    *mechanisms.ENTRIES,
    *tables.ENTRIES,
    *settings.ENTRIES,
]

"""Says that examples did not train, since something of them was not a finite number."""

import warnings

from dp_sparse.optimizers import PrivateOptimizer

_DIVIDED = (
    "Look for divisions by 0, such as the mean of no rows where all ids of an example are masked, "
    "and for values that are not finite."
)
_DIVERGED = "The weights may have grown too large: lower the learning rate, and begin anew."


class Quarantine:
    """What a run has warned of so far. The count is covered by no ε, as the training loss is."""

    def __init__(self) -> None:
        self._seen = self._first = self._warned = 0

    def begin(self, optimizer: PrivateOptimizer) -> None:
        """A run begins: what an earlier one left out is not its own."""
        self._seen = int(optimizer.diagnostics.examples.numpy())
        self._first = self._warned = int(optimizer.diagnostics.not_finite.numpy())

    def warn(self, optimizer: PrivateOptimizer) -> None:
        """Warns if more examples than before were left out."""
        totals = optimizer.diagnostics
        count, before = int(totals.not_finite.numpy()), self._warned
        self._warned = count
        if count > before:
            left_out, drawn = count - self._first, int(totals.examples.numpy()) - self._seen
            why = _DIVERGED if 2 * left_out >= drawn else _DIVIDED
            warnings.warn(
                f"{left_out} of {drawn} examples that were drawn so far did not train: their loss "
                f"or gradient is nan or infinite. {why} (No epsilon covers this count.)",
                stacklevel=2,
            )

"""Says that examples did not train, since something of them was not a finite number."""

import warnings

from dp_sparse.optimizers import PrivateOptimizer


class Quarantine:
    """What a run has warned of so far. The count is covered by no ε, as the training loss is."""

    def __init__(self) -> None:
        self._warned = 0

    def warn(self, optimizer: PrivateOptimizer) -> None:
        """Warns if more examples than before were left out."""
        totals = optimizer.diagnostics
        count, before = int(totals.not_finite.numpy()), self._warned
        self._warned = count
        if count > before:
            warnings.warn(
                f"{count} of {int(totals.examples.numpy())} examples that were drawn so far did "
                "not train: their loss or gradient is nan or infinite. Look for divisions by 0, "
                "such as the mean of no rows where all ids of an example are masked, and for "
                "values that are not finite. (No epsilon covers this count.)",
                stacklevel=2,
            )

"""DP-AdaFEST's selection alone, from c = 1e5 to 1e9 rows, at the same expected number of false
rows.

One selection takes a batch's lookups (2,048 examples, 26 tables) to its survivors: contribution
map, noisy threshold, skips.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from benchmarks import harness
from dp_sparse import noise
from dp_sparse.selection.contribution import TableLookups, contribution_map
from dp_sparse.selection.threshold import default_threshold, select_rows

BATCH, TABLES, FALSE_ROWS = 2048, 26, 32
SIZES = {"1e5": 10**5, "1e6": 10**6, "1e7": 10**7, "1e8": 10**8, "1e9": 10**9}
DEVIATION = 3.0


def selection(num_rows: int) -> Callable[[], object]:
    """One call selects rows for one batch over `TABLES` tables of `num_rows` rows in all."""
    per_table = num_rows // TABLES
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.zipf(1.2, (TABLES, BATCH, 1)) - 1, per_table - 1)
    row_ids = [tf.constant(column) for column in ids]
    valid = tf.ones([BATCH, 1], tf.bool)
    threshold = default_threshold(FALSE_ROWS, per_table * TABLES, DEVIATION)
    key = noise.NoiseKey()

    @tf.function
    def select(columns: list[tf.Tensor]) -> tf.Tensor:
        tables = [TableLookups(per_table, column, valid) for column in columns]
        contributions = contribution_map(tables, clip_norm=1.0)
        return select_rows(contributions, threshold, DEVIATION, key.next_draw()).row_ids

    return lambda: select(row_ids)


def main() -> None:
    """Prints ms per selection and the flatness."""
    rounds = 40 if harness.arguments(__doc__ or "").quick else 400
    candidates = {name: selection(size) for name, size in SIZES.items()}
    seconds = harness.in_turns(candidates, rounds, warm_up=5)
    rows = [(SIZES[name], 1000 * s, s / seconds["1e5"]) for name, s in seconds.items()]
    metrics = {"threshold_flatness_1e9_over_1e5": seconds["1e9"] / seconds["1e5"]}
    harness.report("selection", ("rows", "ms", "over 1e5"), rows, metrics)


if __name__ == "__main__":
    main()

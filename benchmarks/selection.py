"""What selecting rows costs, and how it grows with the tables.

It prints three tables. First DP-AdaFEST's selection alone, from c = 1e5 to 1e9 rows, at the same
expected number of false rows: one selection of survivors for a batch's lookups (2,048 examples, 26
tables). Then a training step of each method on one table of 1e5, 1e6 and 1e7 rows (d = 64, batch
1,024, plain SGD): DP-FEST and DP-AdaFEST+ with 1,000 rows selected beforehand, exponential
selection of 100 rows, LazyDP, and DP-SGD, the only one whose step grows. Last `select_top_k`, which
counts Criteo's 26 features in 45 million made-up examples.
"""

from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from benchmarks import harness, one_table
from dp_sparse import noise
from dp_sparse.accounting import default_threshold
from dp_sparse.selection import TableLookups, contribution_map, select_rows
from pipelines.criteo.schema import TABLE3_VOCABULARIES

BATCH, TABLES, FALSE_ROWS = 2048, 26, 32
SIZES = {"1e5": 10**5, "1e6": 10**6, "1e7": 10**7, "1e8": 10**8, "1e9": 10**9}
DEVIATION = 3.0
SELECTED, ROWS_PER_STEP = 1_000, 100
COUNTED, QUICKLY_COUNTED = 45_000_000, 4_000_000
_CHUNK = 2**18  # examples of a batch that is counted


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


def _rows(vocabulary: int) -> dp_sparse.SelectedRows:
    """Public rows, spread over the table."""
    selected = np.linspace(0, vocabulary - 1, SELECTED).astype(np.int64)
    return dp_sparse.SelectedRows.public({one_table.NAME: selected}, {one_table.NAME: vocabulary})


def makers(vocabulary: int) -> dict[str, one_table.Make]:
    """Each method's optimizer from a plan; only the cost of "dpsgd" grows with the table."""
    sgd = keras.optimizers.SGD
    return {
        "adafest": lambda plan: dp_sparse.DPAdaFESTOptimizer(sgd(one_table.RATE), plan, 1.0),
        "fest": lambda plan: dp_sparse.DPFESTOptimizer(
            sgd(one_table.RATE), plan, 1.0, _rows(vocabulary)
        ),
        "adafest_plus": lambda plan: dp_sparse.DPAdaFESTOptimizer(
            sgd(one_table.RATE), plan, 1.0, rows=_rows(vocabulary)
        ),
        "exponential": lambda plan: dp_sparse.ExponentialSelectionOptimizer(
            sgd(one_table.RATE), plan, 1.0
        ),
        "lazy": lambda plan: dp_sparse.LazyDPSGDOptimizer(sgd(one_table.RATE), plan, 1.0),
        "dpsgd": lambda plan: dp_sparse.DPSGDOptimizer(sgd(one_table.RATE), plan, 1.0),
    }


def step_seconds(method: str, sizes: dict[str, int], rounds: int) -> dict[str, float]:
    """Median seconds of a step at each size, in turns."""
    warm_up = 5
    exponential = method == "exponential"
    mechanism = dp_sparse.ExponentialSelection(ROWS_PER_STEP) if exponential else None
    candidates = {
        name: one_table.private_step(size, rounds + warm_up, makers(size)[method], mechanism)
        for name, size in sizes.items()
    }
    seconds = harness.in_turns(candidates, rounds, warm_up)
    del candidates
    harness.forget()
    return seconds


def counting_rate(examples: int) -> float:
    """Examples a second that `select_top_k` counts, with Criteo's 26 features."""
    rng = np.random.default_rng(0)
    tables = {f"feature_{i}": size for i, size in enumerate(TABLE3_VOCABULARIES)}
    chunk = {
        name: np.minimum(rng.zipf(1.2, _CHUNK) - 1, size - 1).astype(np.int32)
        for name, size in tables.items()
    }

    def batches() -> Iterator[dict[str, np.ndarray]]:
        for start in range(0, examples, _CHUNK):
            count = min(_CHUNK, examples - start)
            yield {name: ids[:count] for name, ids in chunk.items()}

    def select() -> object:
        return dp_sparse.select_top_k(
            batches(),
            tables,
            10_000,
            dp_sparse.GaussianTopK(10.0),
            num_examples=examples,
            progress=False,
        )

    return examples / harness.in_turns({"count": select}, rounds=1, warm_up=0)["count"]


def main() -> None:
    """Prints the tables and the metrics."""
    options = harness.arguments(__doc__ or "")
    quick = options.quick
    alone = harness.in_turns(
        {name: selection(size) for name, size in SIZES.items()}, 40 if quick else 400, warm_up=5
    )
    lines = [("selection alone", n, 1000 * s, s / alone["1e5"]) for n, s in alone.items()]
    metrics = {"threshold_flatness_1e9_over_1e5": alone["1e9"] / alone["1e5"]}
    for method in makers(1):
        dense = method == "dpsgd"
        sizes = dict(list(one_table.SIZES.items())[:2]) if dense and quick else one_table.SIZES
        seconds = step_seconds(method, sizes, 3 if dense else 30 if quick else 200)
        lines += [(method, n, 1000 * s, s / seconds["1e5"]) for n, s in seconds.items()]
        if not dense:
            metrics[f"{method}_flatness_1e7_over_1e5"] = seconds["1e7"] / seconds["1e5"]
    metrics["top_k_rows_per_second"] = counting_rate(QUICKLY_COUNTED if quick else COUNTED)
    harness.report("selection", ("step", "rows", "ms", "over 1e5"), lines, metrics, options)


if __name__ == "__main__":
    main()

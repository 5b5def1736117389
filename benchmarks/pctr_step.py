"""A private step of the pCTR model against stock Keras: 26 tables, batch 2,048, Adagrad, 1e5 to 1e7
rows in all.

Both train on the same batches, without padding (a stream). The input pipeline is not timed.
"""

import itertools
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from benchmarks import harness
from models.pctr import pctr
from pipelines.criteo.schema import TABLE3_VOCABULARIES

BATCH = 2048
SIZES = {"1e5": 10**5, "1e6": 10**6, "1e7": 10**7}
ROUNDS = {"1e5": 60, "1e6": 40, "1e7": 15}
QUICK_ROUNDS = {"1e5": 12, "1e6": 6, "1e7": 1}
WARM_UP = 4  # the first three private steps also check that examples do not mix


def vocabularies(total: int) -> list[int]:
    """Table 3's vocabularies scaled to `total` rows, each at least 3."""
    scale = total / sum(TABLE3_VOCABULARIES)
    return [max(3, round(size * scale)) for size in TABLE3_VOCABULARIES]


def private_step(
    sizes: list[int],
    batches: int,
    initializer: str,
    jit_compile: bool = False,
    strategy: tf.distribute.Strategy | None = None,
    window: int = 1,
) -> Callable[[], object]:
    """One call is one DP-AdaFEST step; call it in the scope of `strategy`, if there is one."""
    sampling = dp_sparse.StreamSampling(num_examples=BATCH * batches, batch_size=BATCH)
    budget = dp_sparse.PrivacyBudget(epsilon=8.0, delta=1e-6)
    plan = dp_sparse.PrivacyPlan(budget, sampling).calibrate()
    optimizer = dp_sparse.DPAdaFESTOptimizer(
        keras.optimizers.Adagrad(0.01), plan, clip_norm=1.0, window=window
    )
    dataset = tf.data.Dataset.from_tensor_slices(examples(sizes, BATCH * batches))
    made = _shared_out(sampling.batches(dataset), strategy)
    return _step(sizes, initializer, optimizer, iter(made), jit_compile)


def stock_step(
    sizes: list[int],
    batches: int,
    initializer: str,
    strategy: tf.distribute.Strategy | None = None,
) -> Callable[[], object]:
    """One call is one step of stock Keras, without privacy."""
    x, y = examples(sizes, BATCH * batches)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    batches_again = itertools.cycle(_shared_out(dataset, strategy))
    return _step(sizes, initializer, keras.optimizers.Adagrad(0.01), batches_again)


def _shared_out(batches: tf.data.Dataset, strategy: tf.distribute.Strategy | None) -> list[object]:
    return list(strategy.experimental_distribute_dataset(batches) if strategy else batches)


def _step(
    sizes: list[int],
    initializer: str,
    optimizer: keras.optimizers.Optimizer,
    batches: Iterator[object],
    jit_compile: bool = False,
) -> Callable[[], object]:
    model = pctr(sizes, embeddings_initializer=initializer)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=jit_compile)
    optimizer.build(model.trainable_variables)
    model.make_train_function()
    return lambda: model.train_function(iter([next(batches)]))


def examples(sizes: list[int], count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Random examples; ids are Zipf-like, as clicks are."""
    rng = np.random.default_rng(0)
    ranks = [np.minimum(rng.zipf(1.2, count) - 1, size - 1) for size in sizes]
    x = {
        "integers": rng.normal(size=(count, 13)).astype(np.float32),
        "categories": np.stack(ranks, axis=1).astype(np.int32),
    }
    return x, (rng.random(count) < 0.25).astype(np.float32)


def main() -> None:
    """Prints ms per step and the ratios."""
    options = harness.arguments(__doc__ or "")
    initializer = (
        "zeros" if options.quick else "uniform"
    )  # 1e7 random rows take half a minute to draw
    rows, metrics = [], {}
    for name, total in SIZES.items():
        rounds = (QUICK_ROUNDS if options.quick else ROUNDS)[name]
        sizes = vocabularies(total)
        candidates = {
            "private": private_step(sizes, rounds + WARM_UP, initializer),
            "stock": stock_step(sizes, 3, initializer),
        }
        seconds = harness.in_turns(candidates, rounds, WARM_UP)
        ratio = seconds["private"] / seconds["stock"]
        metrics[f"private_over_stock_{name}"] = ratio
        rows.append((total, 1000 * seconds["private"], 1000 * seconds["stock"], ratio))
        del candidates
        harness.forget()
    headers = ("table rows", "private ms", "stock ms", "private / stock")
    harness.report("pctr_step", headers, rows, metrics, options)


if __name__ == "__main__":
    main()

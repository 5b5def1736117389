"""What shuffled DP-SGD adds to a step, and what products with matrices would cost instead.

Steps of `DPSGDOptimizer` and `ShuffledDPSGDOptimizer` in turns, 200 of each, on keras-hub's BERT (2
layers of width 128, 512 hidden units, 2 heads, 64 tokens of a vocabulary of 30,522: the shape of
its `bert_tiny_en_uncased`) and ViT (2 layers of width 128, 512 hidden units, 2 heads, images of
32×32 in patches of 4×4), with Adam and batches of 32.

Then rows and columns of a 10,000×10,000 matrix are permuted ("Shuffled DP-SGD", Table VII): by
index, as the optimizer does, and by products with permutation matrices that are there already,
dense or sparse.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import dp_sparse
from benchmarks import clipping_ways, harness
from dp_sparse import shuffling

BATCH, TOKENS, PIXELS = 32, 64, 32
WIDTHS = {"num_layers": 2, "num_heads": 2, "hidden_dim": 128}
HIDDEN, WORDS, CLASSES = 512, 30_522, 10
ROUNDS, QUICK_ROUNDS, WARM_UP = 200, 10, 2
SIZE = 10_000  # of the matrix
PRODUCTS, QUICK_PRODUCTS = 3, 1  # rounds of products, which take long

OPTIMIZERS = {
    "dp-sgd": dp_sparse.DPSGDOptimizer,
    "shuffled": dp_sparse.ShuffledDPSGDOptimizer,
}


def bert() -> keras.Model:
    """From tokens `[batch, 64]` to logits."""
    from keras_hub import models

    backbone = models.BertBackbone(
        WORDS, intermediate_dim=HIDDEN, max_sequence_length=TOKENS, dropout=0.0, **WIDTHS
    )
    ids = keras.Input((TOKENS,), dtype="int32")
    ones = keras.ops.ones_like(ids)
    given = {"token_ids": ids, "padding_mask": ones, "segment_ids": 0 * ones}
    pooled = backbone(given)["pooled_output"]
    return keras.Model(ids, keras.layers.Dense(CLASSES)(pooled))


def vit() -> keras.Model:
    """From images `[batch, 32, 32, 3]` to logits."""
    from keras_hub import models

    shape = (PIXELS, PIXELS, 3)
    backbone = models.ViTBackbone(shape, (4, 4), mlp_dim=HIDDEN, **WIDTHS)
    images = keras.Input(shape)
    return keras.Model(images, keras.layers.Dense(CLASSES)(backbone(images)[:, 0]))


MODELS = {"bert": bert, "vit": vit}


def private_step(build: Callable[[], keras.Model], optimizer: Any, steps: int) -> Any:
    """One call is one step; it can be called `steps` times."""
    model = build()
    sampling = dp_sparse.StreamSampling(BATCH, BATCH, passes=steps)
    budget = dp_sparse.PrivacyBudget(epsilon=8.0, delta=1e-5)
    plan = dp_sparse.PrivacyPlan(budget, sampling).calibrate()
    adam = keras.optimizers.Adam()
    model.compile(optimizer(adam, plan, clip_norm=1.0), clipping_ways.loss())
    dataset = tf.data.Dataset.from_tensor_slices(clipping_ways.examples(model, BATCH))
    return clipping_ways.train_steps(model, iter(list(sampling.batches(dataset))))


def overhead(build: Callable[[], keras.Model], rounds: int) -> dict[str, float]:
    """Median seconds of a step with each optimizer."""
    steps = {
        name: private_step(build, optimizer, rounds + WARM_UP)
        for name, optimizer in OPTIMIZERS.items()
    }
    seconds = harness.in_turns(steps, rounds, WARM_UP)
    del steps
    harness.forget()
    return seconds


def ways_to_permute(size: int) -> dict[str, Callable[[], tf.Tensor]]:
    """Each permutes rows and columns of one matrix in the same way."""
    matrix = tf.random.normal([size, size])
    rows, columns = (tf.random.shuffle(tf.range(size)) for _ in range(2))
    at = tf.cast(tf.stack([tf.range(size), rows], axis=1), tf.int64)
    back = tf.cast(tf.stack([tf.range(size), columns], axis=1), tf.int64)
    left, right = (tf.SparseTensor(each, tf.ones(size), [size, size]) for each in (at, back))
    dense_left, dense_right = map(tf.sparse.to_dense, (left, right))
    by_sparse = tf.sparse.sparse_dense_matmul

    def by_index() -> tf.Tensor:
        return shuffling.permuted(shuffling.permuted(matrix, 0, rows), 1, columns)

    def by_sparse_products() -> tf.Tensor:
        return tf.transpose(by_sparse(right, by_sparse(left, matrix), adjoint_b=True))

    def by_products() -> tf.Tensor:
        return tf.matmul(tf.matmul(dense_left, matrix), dense_right, transpose_b=True)

    return {
        "index": tf.function(by_index, autograph=False),
        "sparse products": tf.function(by_sparse_products, autograph=False),
        "products": tf.function(by_products, autograph=False),
    }


def permutation_times(size: int, rounds: int) -> dict[str, float]:
    """Median seconds of each way; only products, which compile nothing, are not warmed up."""
    ways = ways_to_permute(size)
    corners = {name: functools.partial(_corner, way) for name, way in ways.items()}
    for name in ("index", "sparse products"):
        harness.finish(corners[name]())
    return harness.in_turns(corners, rounds, warm_up=0)


def _corner(way: Callable[[], tf.Tensor]) -> tf.Tensor:
    """One entry, so that nothing is copied to see that the whole is there."""
    return way()[0, 0]


def main() -> None:
    """Prints ms and ratios."""
    options = harness.arguments(__doc__ or "")
    rows: list[tuple[object, ...]] = []
    metrics: dict[str, float] = {}
    for name, build in MODELS.items():
        seconds = overhead(build, QUICK_ROUNDS if options.quick else ROUNDS)
        metrics[f"{name}_overhead"] = seconds["shuffled"] / seconds["dp-sgd"]
        rows += [(f"{name}, {k}", 1000 * s, s / seconds["dp-sgd"]) for k, s in seconds.items()]
    seconds = permutation_times(SIZE, QUICK_PRODUCTS if options.quick else PRODUCTS)
    rows += [(f"{SIZE}², {k}", 1000 * s, s / seconds["index"]) for k, s in seconds.items()]
    metrics["matmul_over_index"] = seconds["products"] / seconds["index"]
    harness.report("shuffling", ("what", "ms", "ratio"), rows, metrics, options)


if __name__ == "__main__":
    main()

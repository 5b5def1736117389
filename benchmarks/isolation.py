"""What looking at batches costs a run of 200 pCTR steps, and how often it traces the model.

Steps with the first check, with a later one and without are timed in turns on the model of
`benchmarks.pctr_step` (26 tables, 1e5 rows, batch 2,048); three of the first 200 batches are
looked at.
"""

import time
from collections.abc import Iterator

import keras
import tensorflow as tf

import dp_sparse
from benchmarks import harness
from benchmarks.pctr_step import BATCH, examples, vocabularies
from models.pctr import pctr

STEPS, LATER = 200, 2  # checks after the first
ROUNDS, QUICK_ROUNDS, WARM_UP = 30, 6, 4


class Counting(keras.layers.Layer):
    """Counts how often the model around it is traced."""

    calls = 0

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """The inputs as they are."""
        Counting.calls += 1
        return inputs


def private_model(sampling: dp_sparse.StreamSampling, sizes: list[int]) -> keras.Model:
    """The pCTR model with DP-AdaFEST, ready for its first step."""
    budget = dp_sparse.PrivacyBudget(epsilon=8.0, delta=1e-6)
    plan = dp_sparse.PrivacyPlan(budget, sampling).calibrate()
    click_model = pctr(sizes)
    model = keras.Model(click_model.input, Counting()(click_model.output))
    optimizer = dp_sparse.DPAdaFESTOptimizer(keras.optimizers.Adagrad(0.01), plan, clip_norm=1.0)
    model.compile(optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True))
    optimizer.build(model.trainable_variables)
    model.make_train_function()
    return model


def steps_by_check(model: keras.Model, batches: Iterator[object], rounds: int) -> dict[str, float]:
    """Median seconds of a step with the first check, with a later one and without."""
    preflight = model.train_step.preflight
    traced = preflight._isolation
    preflight._made_anew = lambda: traced  # its trace belongs to the first step

    def step(checks: int, batches_before: int, checks_after: int) -> object:
        preflight.schedule = type(preflight.schedule)()
        for _ in range(checks):
            preflight.schedule.passed()
        preflight.schedule.batches = batches_before
        if not checks:
            preflight._signatures.clear()
        logs = model.train_function(iter([next(batches)]))
        assert preflight.schedule.checks == checks_after
        return logs

    candidates = {
        "first": lambda: step(0, 0, 1),
        "later": lambda: step(1, 1, 2),
        "none": lambda: step(1, 0, 1),
    }
    return harness.in_turns(candidates, rounds - 1, WARM_UP)


def main() -> None:
    """Prints ms a step and the part of a run's time."""
    options = harness.arguments(__doc__ or "")
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    count = 3 * (rounds + WARM_UP)
    sampling = dp_sparse.StreamSampling(num_examples=BATCH * count, batch_size=BATCH)
    sizes = vocabularies(10**5)
    data = tf.data.Dataset.from_tensor_slices(examples(sizes, BATCH * count))
    model, batches = private_model(sampling, sizes), iter(sampling.batches(data))
    Counting.calls = 0
    begun = time.perf_counter()
    model.train_function(iter([next(batches)]))
    print(f"first step, with its trace: {time.perf_counter() - begun:.2f} s")
    traces = Counting.calls
    seconds = steps_by_check(model, batches, rounds)
    extra = {name: each / seconds["none"] - 1 for name, each in seconds.items()}
    share = (extra["first"] + LATER * extra["later"]) / STEPS
    rows = [(name, 1000 * each, extra[name]) for name, each in seconds.items()]
    metrics = {"checks_share": share, "traces_of_the_model": traces}
    harness.report("isolation", ("check", "ms", "steps more"), rows, metrics, options)


if __name__ == "__main__":
    main()

"""What privacy and Re-Attention cost a next-item Transformer: steps and peak memory.

The setting of "Delving into Differentially Private Transformer" (Ding et al., ICML 2024, D.2) on
MovieLens-1M: 6,040 users, 200 items of each out of 3,416, two blocks of width 64 with one head, a
tied table, Adam, batches of 1,024, and the last position predicts the next item. `--all_positions`
takes batches of 64 and all positions: of 1,024 users one copy of all logits is 2.6 GiB. The ways:

- `stock` is Keras without privacy, as it compiles on a CPU, without XLA;
- `vanilla` is a private step with normalised gradients and plain attention;
- `re_attention` is the same with Re-Attention.

Private steps take micro-batches of a quarter of the batch, as `configs/movielens.py` does: clipping
needs what every layer read and got back until all norms are known, and of a whole batch that is
more than a stock step keeps.

Steps are timed on batches without padding (a stream). A Poisson batch is padded, here to
`capacity` examples, and its step costs as much more. Memory is the peak of resident bytes of a
process of its own above those that it had after a small stock step, which loads the libraries: the
graph, weights, optimizer, tensors and scratch memory of two steps.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from benchmarks import clipping_ways, harness
from models.sequence_transformer import Encoder, sequence_model

USERS, ITEMS, LENGTH, WIDTH, BLOCKS = 6_040, 3_416, 200, 64, 2
WAYS = ("stock", "vanilla", "re_attention")
IN_MEMORY = WAYS[:2]
WARM_UP = 3  # these private steps also check that examples do not mix
SIGMA = 4.0
SMALL = 16  # users of the step that loads the libraries


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row: how many of the last positions predict, users of a batch, timed rounds."""

    predicted: int
    batch: int
    rounds: int

    def step(self, way: str, steps: int) -> clipping_ways.Step:
        """One call is one step of a new model; it can be called `steps` times."""
        dataset = tf.data.Dataset.from_tensor_slices(examples(self.batch, self.predicted))
        adam = keras.optimizers.Adam()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
        if way == "stock":
            model = sequence_model(_encoder(way), self.predicted)
            model.compile(adam, loss)
            batches = itertools.cycle(list(dataset.batch(self.batch)))
            return clipping_ways.train_steps(model, batches)
        sampling = dp_sparse.StreamSampling(self.batch, self.batch, passes=steps)
        budget = dp_sparse.PrivacyBudget(epsilon=8.0, delta=1 / USERS)
        plan = dp_sparse.PrivacyPlan(budget, sampling).with_noise(SIGMA)
        model = sequence_model(_encoder(way, plan), self.predicted)
        clipping = dp_sparse.AutomaticClipping()
        part = max(1, self.batch // 4)
        optimizer = dp_sparse.DPSGDOptimizer(
            adam, plan, 1.0, clipping=clipping, microbatch_size=part
        )
        model.compile(optimizer, loss)
        return clipping_ways.train_steps(model, iter(list(sampling.batches(dataset))))


def _encoder(way: str, plan: dp_sparse.PrivacyPlan | None = None) -> Encoder:
    if way != "re_attention" or plan is None:
        return Encoder(ITEMS, LENGTH, "vanilla", WIDTH, blocks=BLOCKS)
    popular = 1 / np.arange(1.0, ITEMS + 2)  # Zipf's law
    frequencies = dp_sparse.RowFrequencies.public("items", popular)
    errors = dp_sparse.layers.effective_errors(plan, 1.0, frequencies)
    return Encoder(ITEMS, LENGTH, way, WIDTH, blocks=BLOCKS, errors=errors)


def examples(users: int, predicted: int) -> tuple[np.ndarray, np.ndarray]:
    """Items and those that follow, int32; an item's rank is log-uniform, as by Zipf's law."""
    uniform = np.random.default_rng(0).random((users, LENGTH + 1))
    items = (ITEMS**uniform).astype(np.int32)
    return items[:, :-1], items[:, 1:][:, -predicted:]


def peak_memory(setting: Setting, way: str) -> int:
    """Resident bytes that two steps add to this process, at their peak."""
    small = dataclasses.replace(setting, batch=SMALL)
    harness.finish(small.step("stock", 1)())
    harness.forget()
    before = _resident("VmRSS")
    step = setting.step(way, 2)
    for _ in range(2):
        harness.finish(step())
    return _resident("VmHWM") - before


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(what))


def memory_of(setting: Setting, way: str) -> int:
    """The same of a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as process:
        return process.submit(peak_memory, setting, way).result()


def setting_of(options: argparse.Namespace) -> Setting:
    """The one that is measured; quickly, a smaller batch."""
    if options.all_positions:
        return Setting(LENGTH, 16 if options.quick else 64, 3)
    return Setting(1, 128 if options.quick else 1_024, 3)


def step_seconds(setting: Setting) -> dict[str, float]:
    """Medians, in turns."""
    steps = {way: setting.step(way, WARM_UP + setting.rounds) for way in WAYS}
    seconds = harness.in_turns(steps, setting.rounds, WARM_UP)
    del steps
    harness.forget()
    return seconds


def main() -> None:
    """Prints ms a step, MiB, and the ratios."""
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--all_positions", action="store_true", help="all of them predict")
    options = parser.parse_args()
    setting = setting_of(options)
    memory = {way: memory_of(setting, way) for way in IN_MEMORY}
    seconds = step_seconds(setting)
    metrics = {
        "step_over_nonprivate": seconds["vanilla"] / seconds["stock"],
        "memory_over_nonprivate": memory["vanilla"] / memory["stock"],
        "re_attention_over_vanilla": seconds["re_attention"] / seconds["vanilla"],
    }
    capacity = dp_sparse.PoissonSampling(USERS, setting.batch, steps=600).capacity
    times = [1000 * seconds[way] for way in WAYS]
    mebibytes = [memory[way] / 2**20 for way in IN_MEMORY]
    row = (setting.predicted, setting.batch, capacity, *times, *mebibytes)
    per_way = (*(f"{way} ms" for way in WAYS), *(f"{way} MiB" for way in IN_MEMORY))
    name = "sequence_step_all_positions" if options.all_positions else "sequence_step"
    headers = ("predicted", "batch", "capacity", *per_way)
    harness.report(name, headers, [row], metrics, options)


if __name__ == "__main__":
    main()

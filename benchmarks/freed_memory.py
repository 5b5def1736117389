"""What it gains on a CPU that TensorFlow keeps the memory that it frees, as the jobs have it.

TensorFlow takes each tensor from the C library, which gives large ones back to the system after
their use, so that the system clears their pages anew in every step. With
`TF_CPU_ALLOCATOR_USE_BFC=true` in the environment TensorFlow keeps them. It reads that when it
first computes, so each way is a process of its own; the processes run in turns, and the medians of
their median steps are compared, and the largest of their peaks of resident memory, which are of
the whole process. The step is that of `benchmarks.sequence_step` on 256 users, stock and private,
which has four micro-batches.
"""

import os
import resource
import statistics

from benchmarks import clipping_ways, harness, sequence_step
from pipelines.own_process import in_own_process

ALLOCATOR = "TF_CPU_ALLOCATOR_USE_BFC"
WAYS = ("stock", "vanilla")
WARM_UP, STEPS = 3, 5
TURNS = 3


def measured(setting: sequence_step.Setting, way: str, kept: bool) -> tuple[float, int]:
    """Seconds of a step and peak KiB of this process, where TensorFlow has not computed yet."""
    os.environ[ALLOCATOR] = str(kept).lower()
    step: clipping_ways.Step = setting.step(way, WARM_UP + STEPS)
    seconds = harness.in_turns({way: step}, STEPS, WARM_UP)[way]
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Prints ms a step and the ratios."""
    options = harness.arguments(__doc__ or "")
    setting = sequence_step.Setting(1, 32 if options.quick else 256, STEPS)
    found: dict[tuple[str, bool], list[tuple[float, int]]] = {}
    for _ in range(1 if options.quick else TURNS):
        for way in WAYS:
            for kept in (False, True):
                of_process = in_own_process(measured, setting, way, kept)
                found.setdefault((way, kept), []).append(of_process)
    medians = {key: statistics.median(t for t, _ in each) for key, each in found.items()}
    peaks = {key: max(kib for _, kib in each) / 1024 for key, each in found.items()}
    rows, metrics = [], {}
    for way in WAYS:
        given_back, kept = medians[way, False], medians[way, True]
        memory = peaks[way, False], peaks[way, True]
        rows.append((way, 1000 * given_back, 1000 * kept, given_back / kept, *memory))
        metrics[f"{way}_given_back_over_kept"] = given_back / kept
        metrics[f"{way}_memory_kept_over_given_back"] = memory[1] / memory[0]
    for name, kept in (("given_back", False), ("kept", True)):
        metrics[f"private_over_stock_{name}"] = medians["vanilla", kept] / medians["stock", kept]
    headers = ("step", "given back ms", "kept ms", "given back / kept", "MiB", "MiB kept")
    harness.report("freed_memory", headers, rows, metrics, options)


if __name__ == "__main__":
    main()

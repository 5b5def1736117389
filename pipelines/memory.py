"""Memory that TensorFlow frees stays with a job's process."""

import os


def keep_freed_memory() -> None:
    """Has TensorFlow keep the memory of tensors for the next step.

    Otherwise it takes each tensor on a CPU from the C library, which gives large ones back to the
    system after their use, and the system clears their pages anew in every step:
    `python -m benchmarks.freed_memory`. TensorFlow reserves addresses in regions, each up to twice
    as large as the one before, and counts them whole, also where nothing is used. So its limit is
    four times the memory of the machine: what fits without this fits with it.

    Call it before TensorFlow first computes. What the environment says stays.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")
    os.environ.setdefault("TF_CPU_BFC_MEM_LIMIT_IN_MB", str(4 * machine >> 20))

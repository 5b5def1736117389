"""Memory that TensorFlow frees stays with a job's process."""

import os


def keep_freed_memory() -> None:
    """Has TensorFlow keep the memory of tensors for the next step, up to that of the machine.

    Otherwise it takes each tensor on a CPU from the C library, which gives large ones back to the
    system after their use, and the system clears their pages anew in every step:
    `python -m benchmarks.freed_memory`. Call it before TensorFlow first computes. What the
    environment says stays.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")
    os.environ.setdefault("TF_CPU_BFC_MEM_LIMIT_IN_MB", str(machine >> 20))

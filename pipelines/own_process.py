"""A run in a process of its own, whose graphs and kernels end with it.

TensorFlow keeps them as long as their process: a study of many runs would fill the memory.
"""

import concurrent.futures
import multiprocessing
import os
import threading
from collections.abc import Callable
from typing import Any

from pipelines.memory import keep_freed_memory


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module returns, or raises, in a new process.

    The process ends with this one, also if this one is killed.

    Args:
        function: By its name in its module.
        *arguments: Of it; they are pickled, and what it returns, too.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=context, initializer=_begin
    ) as process:
        return process.submit(function, *arguments).result()


def _begin() -> None:
    keep_freed_memory()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()

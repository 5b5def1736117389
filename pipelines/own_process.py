"""A run in a process of its own, whose graphs and kernels end with it.

TensorFlow keeps them as long as their process: a study of many runs would fill the memory.
"""

import concurrent.futures
import multiprocessing
from collections.abc import Callable
from typing import Any


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module returns, or raises, in a new process.

    Args:
        function: By its name in its module.
        *arguments: Of it; they are pickled, and what it returns, too.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(function, *arguments).result()

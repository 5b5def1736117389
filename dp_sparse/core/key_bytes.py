"""Where keys come from: the operating system, or a seed for runs that are not private."""

import os
from collections.abc import Callable

import numpy as np


def key_bytes(seed: int | None, purpose: str, number: int) -> Callable[[int], bytes]:
    """A function that gives as many bytes as it is asked for, others at each call.

    Args:
        seed: None for secret bytes of `os.urandom`. With a seed the same bytes come in each
            process, and anyone who knows it knows them: nothing is private.
        purpose: What they are for.
        number: Which of several keys of one purpose: by the steps before it, for instance. Bytes
            of one seed have nothing in common unless purpose and number are the same.
    """
    if seed is None:
        return os.urandom
    return np.random.default_rng([seed, number, *purpose.encode()]).bytes

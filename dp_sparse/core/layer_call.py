"""The call of a layer's instance, replaced for a while."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced_call(layer: Any, call: Callable[..., Any]) -> Iterator[None]:
    """Within it `layer.call` is `call`; after it, what it was, also if an error ended it."""
    own = vars(layer).get("call")
    layer.call = call
    try:
        yield
    finally:
        del layer.call
        if own is not None:
            layer.call = own

"""What the process writes to its standard error, TensorFlow's own log included."""

import contextlib
import os
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def stderr_without(*expected: str) -> Iterator[None]:
    """Holds back what is written to file descriptor 2, and writes all but expected lines after.

    TensorFlow logs a failed assertion in C++, also one that is meant to fail. Keep the body short:
    lines of other threads come late, too.

    Args:
        *expected: Parts of the lines to leave out.
    """
    try:
        console = os.dup(2)
    except OSError:  # closed, as in some services
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(console, 2)
            os.close(console)
            held.seek(0)
            for line in held:
                if not any(part.encode() in line for part in expected):
                    os.write(2, line)

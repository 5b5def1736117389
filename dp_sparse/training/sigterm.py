"""What a fit does when its process is asked to end."""

import signal
import threading
import weakref
from typing import Any

TERMINATED = 143  # 128 + SIGTERM, as shells say it


class Sigterm:
    """Notes that SIGTERM came while a fit runs; a second one ends the process.

    A fit that an exception ended leaves its handler, which passes signals on to the one before when
    nobody has this object any more, and which the next fit does not take for one before.

    Attributes:
        came: Whether it did since `wait`.
    """

    def __init__(self) -> None:
        self.came = False
        self._handler: _Handler | None = None

    def wait(self) -> None:
        """From now on SIGTERM is noted; nothing changes outside the main thread."""
        self.came = False
        if threading.current_thread() is threading.main_thread():
            self._handler = _Handler(self)
            signal.signal(signal.SIGTERM, self._handler)

    def end(self) -> None:
        """Sets the handler again that was there before `wait`, unless another one came since."""
        if self._handler is not None:
            self._handler.end()


class _Handler:
    def __init__(self, sigterm: Sigterm) -> None:
        there = signal.getsignal(signal.SIGTERM)
        self.before: Any = there.before if isinstance(there, _Handler) else there
        self._sigterm = weakref.ref(sigterm)  # a run that is over keeps nothing by its handler

    def __call__(self, number: int, frame: Any) -> None:
        sigterm = self._sigterm()
        if sigterm is None:
            signal.signal(number, self.before)
            signal.raise_signal(number)
        elif sigterm.came:
            raise SystemExit(TERMINATED)
        else:
            sigterm.came = True

    def end(self) -> None:
        there: Any = signal.getsignal(signal.SIGTERM)
        if there is self:
            signal.signal(signal.SIGTERM, self.before)

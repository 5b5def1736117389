"""What a fit does when its process is asked to end."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

TERMINATED = 143  # 128 + SIGTERM, as shells say it


class Sigterm:
    """Notes that SIGTERM came while a fit runs; a second one ends the process.

    Meanwhile it takes the place of the handler before, to which it passes on what comes when nobody
    waits any more, or to a child that was forked in a fit. A handler that was not set from Python
    stays, since nothing could set it again.

    Attributes:
        came: Whether it did since `wait`.
    """

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None
        self._process = 0  # which waits

    def wait(self) -> None:
        """From now on SIGTERM is noted; nothing changes outside the main thread."""
        self.end()
        self.came = False
        before = signal.getsignal(signal.SIGTERM)
        if _in_main_thread() and before is not None:
            self._before, self._process = before, os.getpid()
            _WAITING.append(self)
            signal.signal(signal.SIGTERM, self._note)

    def end(self) -> None:
        """Sets the handler again that was there before `wait`, unless another one came since."""
        if self in _WAITING and _in_main_thread():
            _WAITING.remove(self)
            if signal.getsignal(signal.SIGTERM) == self._note:
                signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: Any) -> None:
        if self not in _WAITING or os.getpid() != self._process:
            self._pass_on(number, frame)
        elif self.came:
            self.end()
            raise SystemExit(TERMINATED)
        else:
            self.came = True

    def _pass_on(self, number: int, frame: Any) -> None:
        if callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


_WAITING: list[Sigterm] = []  # of the main thread; the last one is that of the innermost fit


@contextlib.contextmanager
def around_fit() -> Iterator[None]:
    """Has nobody wait for SIGTERM who began to in this fit, also if an exception ends it.

    If it came, and the exception came before a step could end the process, the handler before gets
    it, after the exception was printed.
    """
    waited_before = len(_WAITING)
    try:
        yield
    except BaseException:
        if _in_main_thread() and any([_ended(each) for each in reversed(_WAITING[waited_before:])]):
            sys.excepthook(*sys.exc_info())
            signal.raise_signal(signal.SIGTERM)
        raise


def _ended(sigterm: Sigterm) -> bool:
    """Whether a signal came that nobody has acted on; from now on it counts as acted on."""
    sigterm.end()
    came, sigterm.came = sigterm.came, False
    return came


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()

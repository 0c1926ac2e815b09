"""The wish to stop: made by a button or an interrupt, read by the training loop when a step is finished."""

from __future__ import annotations

import signal
import threading
from typing import Any, ClassVar


class Stop:
    """Becomes `requested` once, and stays so.

    Attributes:
        heeded: whether somebody has asked yet. Until then an interrupt is a KeyboardInterrupt, as without this.
    """

    _active: ClassVar[list[Stop]] = []
    _before: ClassVar[Any] = None

    def __init__(self) -> None:
        self.heeded = False
        self._wished = threading.Event()

    @property
    def requested(self) -> bool:
        """Whether to stop now; asking is a promise to heed the answer, step for step."""
        self.heeded = True
        return self._wished.is_set()

    @property
    def wished(self) -> bool:
        """The same for those who only show it."""
        return self._wished.is_set()

    def request(self) -> None:
        """Stop after the step under way. May be called on any thread."""
        self._wished.set()

    def catch_interrupts(self) -> None:
        """From now on an interrupt is a wish to stop, and a second one breaks off; only the main thread hears them."""
        if threading.current_thread() is not threading.main_thread() or self in Stop._active:
            return
        if not Stop._active:
            Stop._before = signal.signal(signal.SIGINT, Stop._interrupted)
        Stop._active.append(self)

    def let_interrupts_go(self) -> None:
        """As before."""
        if self not in Stop._active:
            return
        Stop._active.remove(self)
        on_main = threading.current_thread() is threading.main_thread()
        if not Stop._active and on_main and signal.getsignal(signal.SIGINT) == Stop._interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler if Stop._before is None else Stop._before)

    @staticmethod
    def _interrupted(number: int, frame: Any) -> None:
        heeding = [stop for stop in Stop._active if stop.heeded and not stop.wished]
        for stop in heeding:
            stop.request()
        if heeding:
            return
        before = Stop._before if callable(Stop._before) else signal.default_int_handler
        before(number, frame)

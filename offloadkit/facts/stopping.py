"""Requests to stop after the current step: a button, an interrupt, SIGTERM or SIGHUP (a preempted machine)."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """A request to stop, which cannot be withdrawn.

    Attributes:
        is_polled: whether the loop has read `requested`, or promises to. Until then signals have their previous effect.
        signal: the signal that requested the stop, and its time (`time.monotonic`); None if no signal did.
    """

    _active: ClassVar[list[Stop]] = []
    _before: ClassVar[dict[int, Any]] = {}

    def __init__(self) -> None:
        self.is_polled = False
        self.signal: tuple[signal.Signals, float] | None = None
        self._requested = threading.Event()

    @property
    def requested(self) -> bool:
        """Whether to stop now. A loop that reads this once must read it after every step."""
        self.is_polled = True
        return self._requested.is_set()

    @property
    def is_requested(self) -> bool:
        """Like `requested`, for displays: reading it does not set `is_polled`."""
        return self._requested.is_set()

    @property
    def ends_process(self) -> bool:
        """Whether SIGTERM or SIGHUP requested the stop, so that the process will soon be killed."""
        return self.signal is not None and self.signal[0] != signal.SIGINT

    def request(self) -> None:
        """Request a stop after the current step. Thread-safe."""
        self._requested.set()

    def catch_signals(self) -> None:
        """Turn signals into stop requests; a second signal has its previous effect. Ignored signals stay ignored.

        Prints a line and does nothing outside the main thread, where Python cannot install handlers.
        """
        if self in Stop._active:
            return
        if threading.current_thread() is not threading.main_thread():
            print(
                "training does not run on the main thread, so SIGTERM, SIGHUP and Ctrl-C end it without a last save",
                file=sys.stderr,
                flush=True,
            )
            return
        if not Stop._active:
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN and before is not None:  # None: not installed from Python
                    Stop._before[number] = signal.signal(number, Stop._received)
        Stop._active.append(self)

    def let_signals_go(self) -> None:
        if self not in Stop._active:
            return
        Stop._active.remove(self)
        if not Stop._active and threading.current_thread() is threading.main_thread():
            for number, before in Stop._before.items():
                if signal.getsignal(number) == Stop._received:
                    signal.signal(number, before)
            Stop._before.clear()

    @staticmethod
    def _received(number: int, frame: FrameType | None) -> None:
        heeding = [stop for stop in Stop._active if stop.is_polled and not stop.is_requested]
        for stop in heeding:
            stop.signal = signal.Signals(number), time.monotonic()
            stop.request()
        before = Stop._before.get(number, signal.SIG_DFL)
        if number == signal.SIGINT:
            if not heeding:
                (before if callable(before) else signal.default_int_handler)(number, frame)
        elif callable(before):
            before(number, frame)
        elif not heeding:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


@contextmanager
def forwarded(to: Callable[[int], object]) -> Iterator[None]:
    """Forward this process's SIGTERM and SIGHUP to `to`; a second one ends the process.

    Works only on the main thread. Ignored signals stay ignored.
    """
    before: dict[int, Any] = {}

    def received(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before[number])
        to(number)

    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS[1:]:
            found = signal.getsignal(number)
            if found is not signal.SIG_IGN and found is not None:
                before[number] = signal.signal(number, received)
    try:
        yield
    finally:
        for caught, previous in before.items():
            if signal.getsignal(caught) is received:
                signal.signal(caught, previous)

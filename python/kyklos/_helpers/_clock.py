"""How long a device works for a call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

#: Of devices that work while the program goes on: what has begun and ended, and who wants to know.
_running: list[tuple[torch.Event, torch.Event, Callable[[float], None]]] = []
_lock = threading.Lock()
#: More are not kept: then a device does not tell.
_MOST = 64


class Clock:
    """Runs from now on until :meth:`stop`: seconds of the processor, or of the device's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = time.perf_counter()
        self._first: torch.Event | None = None
        if device.type != "cpu":
            _tell()
            self._first = torch.Event(device, enable_timing=True)
            self._first.record(torch.accelerator.current_stream(device))

    def stop(self, learn: Callable[[float], None]) -> None:
        """``learn`` gets the seconds: now, or when another clock of a device starts that has ended by then."""
        if self._first is None:
            learn(time.perf_counter() - self._began)
            return
        last = torch.Event(self._device, enable_timing=True)
        last.record(torch.accelerator.current_stream(self._device))
        with _lock:
            if len(_running) >= _MOST:
                return
            _running.append((self._first, last, learn))


def _tell() -> None:
    """Tells what has ended since."""
    ended = []
    with _lock:
        while _running and _running[0][1].query():
            ended.append(_running.pop(0))
    for first, last, learn in ended:
        learn(first.elapsed_time(last) / 1e3)

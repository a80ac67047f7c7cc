"""Where the time and the memory of a pipeline go, on each rank."""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .._group import Group
from .._models.pace import wait_for
from .._rows import gather

# What a pipeline calls of its parts; of most of them their forward.
_METHODS = ("encode", "decode")
_MIB = 1 << 20


@dataclass
class Part:
    """The calls of one part of a pipeline, on this rank."""

    #: Seconds of each call.
    calls_s: list[float] = field(default_factory=list)

    @property
    def total_s(self) -> float:
        return sum(self.calls_s)


class timed:
    """A block in which the calls of a pipeline's parts are timed. Devices are waited for after each call, which may slow it down a little.

    ::

        with kyklos.diffusers.timed(pipe, group) as times:
            image = pipe(prompt).images[0]
        print(times)                # a table of all ranks, the same on each

    All ranks leave the block together. Calls within calls count for the outer part.
    """

    def __init__(self, pipe: Any, group: Group) -> None:
        self._pipe, self._group = pipe, group
        #: By name, as ``transformer`` and ``vae decode``.
        self.parts: dict[str, Part] = {}
        self.total_s = 0.0
        #: Most memory of this rank: of its accelerator, and of the process; 0 where nobody tells.
        self.accelerator_mib = self.process_mib = 0.0
        self._undo: list[Callable[[], None]] = []
        self._depth = 0
        self._table = "not measured yet"

    def __enter__(self) -> timed:
        if torch.accelerator.is_available():
            with contextlib.suppress(RuntimeError):
                torch.accelerator.reset_peak_memory_stats()
        parts = {name: part for name, part in self._pipe.components.items() if isinstance(part, torch.nn.Module)}
        for name, part in parts.items():
            self._time(part, "forward", name)
            for method in _METHODS:
                if callable(getattr(part, method, None)):
                    self._time(part, method, f"{name} {method}")
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.total_s = time.perf_counter() - self._began
        while self._undo:
            self._undo.pop()()
        with contextlib.suppress(ImportError):
            import resource  # Not on Windows.

            unit = 1 if sys.platform == "darwin" else 1024
            self.process_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _MIB
        if torch.accelerator.is_available():
            with contextlib.suppress(RuntimeError):
                self.accelerator_mib = torch.accelerator.max_memory_allocated() / _MIB
        if error is None:
            self._table = self._of_all_ranks()

    def _time(self, part: Any, method: str, name: str) -> None:
        run, own = getattr(part, method), method in part.__dict__

        @functools.wraps(run)
        def call(*args: Any, **options: Any) -> Any:
            if self._depth:
                return run(*args, **options)
            self._depth += 1
            began = time.perf_counter()
            try:
                return run(*args, **options)
            finally:
                self._depth -= 1
                parameter = next(iter(part.parameters()), None)
                wait_for(torch.device("cpu") if parameter is None else parameter.device)
                self.parts.setdefault(name, Part()).calls_s.append(time.perf_counter() - began)

        setattr(part, method, call)
        self._undo.append(functools.partial(setattr, part, method, run) if own else functools.partial(delattr, part, method))

    def _rows(self) -> dict[str, float]:
        rows = {}
        for name, part in self.parts.items():
            first, *others = part.calls_s
            rows[f"{name}: first call (s)"] = first
            if others:
                rows[f"{name}: {len(others)} more, median (s)"] = statistics.median(others)
            rows[f"{name}: all (s)"] = part.total_s
        rows["the rest (s)"] = self.total_s - sum(part.total_s for part in self.parts.values())
        rows["all (s)"] = self.total_s
        rows["accelerator, most memory (MiB)"] = self.accelerator_mib
        rows["process, most memory (MiB)"] = self.process_mib
        return rows

    def _of_all_ranks(self) -> str:
        rows = self._rows()
        own = torch.tensor([list(rows.values())], dtype=torch.float32)
        columns = gather(self._group, own[None], f"times of {len(rows)} rows")[0].T.tolist()
        width = max(map(len, rows))
        lines = [f"{'':{width}}" + "".join(f"{f'rank {rank}':>12}" for rank in range(self._group.size))]
        for name, numbers in zip(rows, columns, strict=True):
            lines.append(f"{name:{width}}" + "".join(f"{number:12.3f}" for number in numbers))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self._table

"""The times of a transformer's forwards on this rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..._models.pace import wait_for

_S = 10**9


@dataclass(frozen=True)
class Calls:
    """The calls of split attention in a forward."""

    #: Entries of the batch, and query heads of all calls.
    entries: int
    total_heads: int
    #: Of the first call: query heads, key/value heads, head dim as devices take it, type.
    heads: int
    kv_heads: int
    dim: int
    dtype: str

    @property
    def kind(self) -> dict[str, Any]:
        return {"heads": self.heads, "kv_heads": self.kv_heads, "dim": self.dim, "dtype": self.dtype}

    @property
    def number(self) -> int:
        """As many calls like the first one have as many heads."""
        return max(1, self.total_heads // self.heads)


class Stopwatch:
    """Times forwards, from :meth:`begin` to :meth:`end`, and of attention the calls within :meth:`attending`. Waits for devices."""

    def __init__(self) -> None:
        #: Queries of this rank in the forward, and its calls; none before the first one, and after a forward that failed.
        self.own = 0
        self.calls: Calls | None = None
        #: Seconds of the last forward that has ended well.
        self.wall_s = 0.0
        #: Of each forward, for a batch entry: seconds without attention, and those between its calls, so many times; and the queries of this rank.
        self._seen: list[tuple[float, float, int, int]] = []
        self._device = torch.device("cpu")
        self._kind: Calls | None = None
        self._began = self._attending = self._left = self._between = 0.0
        self._heads = self._own = self._times = 0

    def begin(self) -> None:
        self.own, self.calls, self._kind = 0, None, None
        self._heads = self._own = self._times = 0
        self._attending = self._between = 0.0
        self._began = time.perf_counter()

    @contextmanager
    def attending(self, q: torch.Tensor, k: torch.Tensor, waits: bool) -> Iterator[None]:
        """A call of attention with this rank's tokens ``[batch, tokens, heads, dim]``. With ``waits`` what was before is not counted."""
        if self._kind is None:
            self._own, self._device = q.shape[1], q.device
            dtype, dim = str(q.dtype).removeprefix("torch."), -(-q.shape[3] // 8) * 8
            self._kind = Calls(q.shape[0], 0, q.shape[2], k.shape[2], dim, dtype)
        self._heads += q.shape[2]
        if waits:
            wait_for(self._device)
        began = time.perf_counter()
        if self._attending:
            self._between, self._times = self._between + began - self._left, self._times + 1
        yield
        self._left = time.perf_counter()
        self._attending += self._left - began

    def end(self) -> None:
        """The forward has ended well."""
        wait_for(self._device)
        self.wall_s = time.perf_counter() - self._began
        if self._kind is None:
            return
        kind, self.own = self._kind, self._own
        self.calls = Calls(kind.entries, self._heads, kind.heads, kind.kv_heads, kind.dim, kind.dtype)
        wall_s, attending_s, between_s = (x / kind.entries for x in (self.wall_s, self._attending, self._between))
        self._seen.append((wall_s - attending_s, between_s, self._times, self._own))

    def beside_ns(self) -> tuple[int, int]:
        """Nanoseconds of a batch entry outside of attention: for each token of this rank, and for what it does whatever its tokens. Of the
        fastest forward with as many but the first of all, which allocates memory and compiles kernels."""
        alike = [seen for seen in self._seen[1:] if seen[3] == self.own]
        beside_s, between_s, times, _ = min(alike, default=(0.0, 0.0, 0, 0))
        # What is between two calls is of this rank's tokens; the rest, such as the embedding of the whole input, is not.
        layers_s = min(beside_s, between_s / times * (times + 1)) if times else beside_s
        return round(layers_s / max(1, self.own) * _S), round((beside_s - layers_s) * _S)

    def __deepcopy__(self, memo: dict[int, Any]) -> Stopwatch:
        """That of a copy of the transformer has seen nothing."""
        return Stopwatch()

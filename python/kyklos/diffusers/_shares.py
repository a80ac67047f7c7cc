"""The shares of the ranks of a split transformer: given, or by the pace of the ranks, which forwards show."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .._group import Group
from .._models.agreement import Passes
from .._models.execution import checked_shares
from .._models.pace import Pace, Reach, Watch, wait_for

# Forwards that show the pace. The first one allocates memory and compiles kernels, and so may the second.
_MEASURED = 3
# Tokens of the call whose speed is measured.
_USUAL_TOKENS = 4096
_S = 10**9


class Shares:
    """The tokens of the ranks, relative to each other. All ranks change them before the same forward."""

    def __init__(self, group: Group, given: str | Sequence[float] | None, has_ring: bool) -> None:
        self._group, self._has_ring = group, has_ring
        #: In the forward that runs, or in the next one.
        self.now = _whole(checked_shares(given, group.size))
        #: Tokens of all ranks of the inputs that the forward has split so far, by name.
        self.totals: dict[str, int] = {}
        self._by_pace = isinstance(given, str) and given == "auto"
        self._pace: Pace | None = None
        #: The shapes of the inputs of the last forward, and the shares that were chosen for some.
        self._shapes: tuple[Any, ...] = ()
        self._known: dict[tuple[Any, ...], tuple[int, ...]] = {}
        #: What its attention calls are like: batch entries, and of each the queries of this rank; query heads of all calls so far; heads, head
        #: dim and type of the first one.
        self._entries = self._own = self._heads = 0
        #: Queries and heads of the last forward, if it has ended well.
        self._last = (0, 0)
        self._kind: tuple[Any, ...] = ()
        #: Seconds of each forward so far without attention, for a batch entry: all of it, and what is between attention calls, for so many.
        self._seen: list[tuple[float, float, int]] = []
        #: The tokens of the forward and the heads of its attention, where its shares are chosen.
        self._chosen: dict[tuple[Any, ...], tuple[int, list[tuple[int, Reach]]]] = {}
        self._watch: Watch | None = None
        self._device = torch.device("cpu")
        self._began = self._attending = 0.0
        #: When the last attention call ended, and the sum and number of the times between calls.
        self._left, self._between = 0.0, (0.0, 0)

    def __str__(self) -> str:
        # Labels have at most 128 bytes.
        parts = ":".join(map(str, self.now))
        return parts if len(parts) <= 24 else format(zlib.crc32(parts.encode()), "x")

    def begin(self, passes: Passes, number: int, inputs: dict[str, Any]) -> None:
        """A forward with this number begins, on all ranks. Shares by pace change here."""
        self.totals = {}
        if not self._by_pace:
            return
        # All of this is equal on all ranks, also after forwards that failed on one of them.
        if number > _MEASURED and self._shapes and self._shapes not in self._known:
            self._choose(passes)
        self._shapes = tuple((name, tuple(x.shape)) for name, x in inputs.items() if isinstance(x, torch.Tensor))
        self.now = self._known.get(self._shapes, self.now)
        self._own, self._heads, self._last = 0, 0, (0, 0)
        self._attending, self._between, self._began = 0.0, (0.0, 0), time.perf_counter()

    @contextmanager
    def attending(self, q: torch.Tensor, k: torch.Tensor) -> Iterator[None]:
        """A call of attention, with this rank's tokens."""
        if not self._by_pace:
            yield
            return
        if self._heads == 0:
            self._entries, self._own, self._device = q.shape[0], q.shape[1], q.device
            self._kind = (q.shape[2], k.shape[2], -(-q.shape[3] // 8) * 8, str(q.dtype).removeprefix("torch."))
        self._heads += q.shape[2]
        if self._pace is None:
            wait_for(self._device)
        began = time.perf_counter()
        if self._attending:
            self._between = self._between[0] + began - self._left, self._between[1] + 1
        yield
        self._left = time.perf_counter()
        self._attending += self._left - began

    def end(self) -> None:
        """The forward has ended well."""
        self._last = (self._own, self._heads)
        if not self._by_pace or not self._own:
            return
        wait_for(self._device)
        wall_s = (time.perf_counter() - self._began) / self._entries
        if self._pace is None:
            between_s, times = self._between
            self._seen.append((wall_s - self._attending / self._entries, between_s / self._entries, times))
        elif self._watch is not None and self._shapes in self._chosen:
            self._watch.saw(self._pace, *self._chosen[self._shapes], wall_s)

    def _choose(self, passes: Passes) -> None:
        """Shares for the shapes of the last forward, if it has told all ranks what they need to know."""
        own, layer_heads = self._last
        beside_s, between_s, times = min(self._seen[1:], default=(0.0, 0.0, 0))
        # What is between two calls is of this rank's tokens; the rest, such as the embedding of the whole input, is not.
        layers_s = min(beside_s, between_s / times * (times + 1)) if times else beside_s
        found = round(layers_s / max(1, own) * _S), round((beside_s - layers_s) * _S)
        rows = passes.compare([own, *divmod(found[0], 1 << 24), *divmod(found[1], 1 << 24)], "pace")
        if any(own == 0 or (self._pace is None and high + low == 0) for own, high, low, *_ in rows):
            return
        if self._pace is None:
            heads, kv_heads, dim, dtype = self._kind
            speeds = self._group.speeds(_USUAL_TOKENS, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
            token_ns, fixed_ns = ([(row[at] << 24) + row[at + 1] for row in rows] for at in (1, 3))
            self._pace = Pace.of(token_ns, speeds, fixed_ns)
        tokens = sum(own for own, *_ in rows)
        if self._watch is None and self._group.rank == 0:
            self._watch = Watch(tokens)
        attention: list[tuple[int, Reach]] = [(layer_heads, (None, None))]
        self._known[self._shapes] = tuple(self._pace.counts(tokens, attention if self._has_ring else []))
        self._chosen[self._shapes] = tokens, attention


def _whole(shares: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportion of ``shares``."""
    if all(share.is_integer() for share in shares):
        return tuple(int(share) for share in shares)
    return tuple(max(1, round(share / max(shares) * 2**20)) for share in shares)

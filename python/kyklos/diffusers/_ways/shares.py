"""How a split transformer runs: with given shares of the ranks, or by their pace, which forwards show."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..._group import Group
from ..._models.agreement import Passes
from ..._models.execution import checked_shares, has_ring
from ..._models.pace import Pace, Reach, Watch
from .stopwatch import Calls, Stopwatch

# Forwards that show the pace. The first one allocates memory and compiles kernels, and so may the second.
MEASURED = 3
# Tokens of the call whose speed is measured.
USUAL_TOKENS = 4096


def bounds(total: int, shares: Sequence[int], least: int = 1) -> list[int]:
    """Positions at which ``total`` tokens are cut: rank r has those from ``bounds[r]`` to ``bounds[r + 1]``. Each rank has ``least`` of them or
    more, unless there are none."""
    size, whole, sum_ = len(shares), sum(shares), 0
    if total == 0:
        return [0] * (size + 1)
    cuts = [0]
    for rank, share in enumerate(shares):
        sum_ += share
        cut = (2 * total * sum_ + whole) // (2 * whole)
        cuts.append(max(min(cut, total - least * (size - 1 - rank)), cuts[-1] + least))
    return cuts


class Shares:
    """The tokens of the ranks, relative to each other, and how attention runs. All ranks change them before the same forward.

    :param execution: options of :meth:`Group.attend`.
    :param least: the fewest tokens of a rank.
    """

    #: Whether the forward that runs is not split: single ranks compute it, or entries of it, whole.
    whole = False

    def __init__(self, group: Group, given: str | Sequence[float] | None, execution: dict[str, Any], least: int = 1) -> None:
        self.group, self.execution, self.least = group, execution, least
        #: In the forward that runs, or in the next one.
        self.now = whole_numbers(checked_shares(given, group.size))
        #: Tokens of all ranks of the inputs that the forward has split so far, by name.
        self.totals: dict[str, int] = {}
        #: Those of the grid of these tokens.
        self.extents: list[int] = []
        #: Whether forwards are timed: shares are by pace.
        self._measures = isinstance(given, str) and given == "auto"
        self._has_ring = self._measures and has_ring(group, execution)
        self._times = Stopwatch()
        self._pace: Pace | None = None
        #: The shapes of the inputs of the last forward, and the shares that were chosen for some.
        self._shapes: tuple[Any, ...] = ()
        self._known: dict[tuple[Any, ...], tuple[int, ...]] = {}
        #: The tokens of the forward and the heads of its attention, where its shares are chosen.
        self._chosen: dict[tuple[Any, ...], tuple[int, list[tuple[int, Reach]]]] = {}
        self._watch: Watch | None = None

    def __str__(self) -> str:
        # Labels have at most 128 bytes.
        parts = ":".join(map(str, self.now))
        return parts if len(parts) <= 24 else format(zlib.crc32(parts.encode()), "x")

    def cuts(self, total: int) -> list[int]:
        """:func:`bounds` of so many tokens."""
        return bounds(total, self.now, self.least)

    def own(self, total: int) -> tuple[int, int]:
        """The first token of this rank, of so many of all ranks, and the one behind its last."""
        cuts = self.cuts(total)
        return cuts[self.group.rank], cuts[self.group.rank + 1]

    def begin(self, passes: Passes, number: int, inputs: dict[str, Any]) -> None:
        """A forward with this number begins, on all ranks. Shares by pace change here."""
        self.totals = {}
        if not self._measures:
            return
        # All of this is equal on all ranks, also after forwards that failed on one of them.
        if number > MEASURED and self._shapes and self._shapes not in self._known:
            self._choose(passes)
        self._shapes = tuple((name, tuple(x.shape)) for name, x in inputs.items() if isinstance(x, torch.Tensor))
        self.now = self._known.get(self._shapes, self.now)
        self._times.begin()

    @contextmanager
    def attending(self, q: torch.Tensor, k: torch.Tensor) -> Iterator[None]:
        """A call of attention, with this rank's tokens."""
        if not self._measures:
            yield
            return
        with self._times.attending(q, k, self._pace is None):
            yield

    def end(self) -> None:
        """The forward has ended well."""
        if not self._measures:
            return
        times = self._times
        times.end()
        if self._watch is not None and self._pace is not None and self._shapes in self._chosen and times.calls is not None:
            self._watch.saw(self._pace, *self._chosen[self._shapes], times.wall_s / times.calls.entries)

    def _choose(self, passes: Passes) -> None:
        """Shares for the shapes of the last forward, if it has told all ranks what they need to know."""
        calls = self._times.calls
        tokens = self._measured(passes)
        if self._pace is None or calls is None or tokens is None:
            return
        if self._watch is None and self.group.rank == 0:
            self._watch = Watch(sum(tokens))
        attention: list[tuple[int, Reach]] = [(calls.total_heads, (None, None))]
        self._known[self._shapes] = tuple(self._pace.counts(sum(tokens), attention if self._has_ring else []))
        self._chosen[self._shapes] = sum(tokens), attention

    def _measured(self, passes: Passes) -> list[int] | None:
        """The tokens of each rank in the last forward, and the pace, if it is not known; nothing if that forward has failed on some rank."""
        times = self._times
        found = times.beside_ns()
        rows = passes.compare([times.own, *divmod(found[0], 1 << 24), *divmod(found[1], 1 << 24)], "pace")
        if any(own == 0 or (self._pace is None and high + low == 0) for own, high, low, *_ in rows):
            return None
        if self._pace is None and times.calls is not None:
            token_ns, fixed_ns = ([(row[at] << 24) + row[at + 1] for row in rows] for at in (1, 3))
            self._pace = Pace.of(token_ns, self._speeds(times.calls), fixed_ns)
        return [own for own, *_ in rows]

    def _speeds(self, calls: Calls) -> list[int]:
        """How many pairs of a query and a key each rank attends to in a second."""
        return self.group.speeds(USUAL_TOKENS, **calls.kind)


def whole_numbers(shares: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportion of ``shares``."""
    if all(share.is_integer() for share in shares):
        return tuple(int(share) for share in shares)
    return tuple(max(1, round(share / max(shares) * 2**20)) for share in shares)

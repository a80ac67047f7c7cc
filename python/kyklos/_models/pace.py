"""How fast each rank computes a split model, and the tokens of each with which all end at the same time.

A rank needs ``token_ns`` nanoseconds for what the model does with one token outside of attention, ``whole_ns`` for what it does with each
token of all ranks, ``fixed_ns`` for what it does whatever the tokens, and attends to ``pairs_per_s`` pairs of a query and a key in a second. It has consecutive tokens, so with a causal mask later ranks have more pairs for a token.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: How far a query sees to the left and to the right, ``None`` for all keys.
Reach = tuple[int | None, int | None]

# Tokens of the first measurement, and of the last; and how long one takes that is good enough.
_FIRST, _MOST, _LONG_ENOUGH_S = 64, 4096, 0.1
# Numbers that differ by less are equal: measurements vary.
_NOISE = 0.1
# Lengths of passes that are watched at a time.
_LENGTHS = 64
# Nanoseconds in a second.
_S = 10**9


@dataclass(frozen=True)
class Pace:
    """What all ranks need, by rank; equal on all of them."""

    token_ns: tuple[int, ...]
    pairs_per_s: tuple[int, ...]
    fixed_ns: tuple[int, ...]
    #: Empty: nothing.
    whole_ns: tuple[int, ...] = ()

    @staticmethod
    def of(token_ns: Sequence[int], pairs_per_s: Sequence[int], fixed_ns: Sequence[int] = (), whole_ns: Sequence[int] = ()) -> Pace:
        """Without differences that are noise."""
        fixed_ns = fixed_ns or [0] * len(token_ns)
        whole = _smoothed(whole_ns) if any(whole_ns) else ()
        return Pace(_smoothed(token_ns), _smoothed([max(1, speed) for speed in pairs_per_s]), _smoothed(fixed_ns), whole)

    def counts(self, tokens: int, attention: Sequence[tuple[int, Reach]]) -> list[int]:
        """The tokens of each rank, one at least. In whole numbers, so that all ranks get the same.

        :param attention: query heads of all layers that reach so far, for each reach.
        """
        if tokens < len(self.token_ns):
            raise ValueError(f"{tokens} tokens for {len(self.token_ns)} ranks")
        return list(_counts(self, tokens, tuple(attention)))

    def _cost(self, rank: int, tokens: int, attention: Sequence[tuple[int, Reach]], first: int, end: int) -> int:
        """Nanoseconds of these tokens on a rank, times its pairs in a second."""
        pairs = sum(heads * (visible(tokens, reach, end) - visible(tokens, reach, first)) for heads, reach in attention)
        whole_ns = self.whole_ns[rank] * tokens if self.whole_ns else 0
        beside_ns = self.fixed_ns[rank] + whole_ns + self.token_ns[rank] * (end - first)
        return beside_ns * self.pairs_per_s[rank] + pairs * _S

    def alone(self, rank: int, tokens: int, attention: Sequence[tuple[int, Reach]]) -> float:
        """Seconds of a rank that has all tokens."""
        return self._cost(rank, tokens, attention, 0, tokens) / self.pairs_per_s[rank] / _S

    def seconds(self, counts: Sequence[int], attention: Sequence[tuple[int, Reach]]) -> list[float]:
        """The time of each rank, without messages."""
        ends = list(itertools.accumulate(counts, initial=0))
        costs = [self._cost(rank, ends[-1], attention, *ends[rank : rank + 2]) for rank in range(len(counts))]
        return [cost / speed / _S for cost, speed in zip(costs, self.pairs_per_s, strict=True)]


class Watch:
    """Compares passes of a split model with what the fastest rank would need alone, and says once if that is less.

    :param least: tokens with which pace was measured: of fewer ones each takes longer.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        #: Of passes over so many tokens their number, and the shortest time.
        self._seen: dict[int, tuple[int, float]] = {}
        self._has_told = False

    def saw(self, pace: Pace, tokens: int, attention: Sequence[tuple[int, Reach]], wall_s: float) -> None:
        """A pass over so many tokens took so long. Warns after the third one that is too long: the first ones may compile."""
        size = len(pace.token_ns)
        if self._has_told or size == 1 or tokens < self._least:
            return
        number, shortest_s = self._seen.pop(tokens, (0, wall_s))
        number, shortest_s = number + 1, min(shortest_s, wall_s)
        if len(self._seen) >= _LENGTHS:
            self._seen.clear()
        self._seen[tokens] = number, shortest_s
        alone_s, rank = min((pace.alone(rank, tokens, attention), rank) for rank in range(size))
        if number < 3 or shortest_s <= (1 + _NOISE) * alone_s:
            return
        self._has_told = True
        # Where warnings are errors, this one must not end the group in the middle of a pass.
        with contextlib.suppress(UserWarning):
            warnings.warn(
                f"a pass over {tokens} tokens takes {shortest_s:.3g} s on {size} ranks, and would take about {alone_s:.3g} s on rank {rank} alone: "
                "the time of messages is more than what the others save; use longer inputs, a faster network, another strategy or wire, or one rank",
                stacklevel=2,
            )


@functools.lru_cache(maxsize=256)
def _counts(pace: Pace, tokens: int, attention: tuple[tuple[int, Reach], ...]) -> tuple[int, ...]:
    ranks = range(len(pace.token_ns))

    def dealt(limit_ns: int) -> list[int]:
        """The ends of the ranks, each of which takes what it computes within the limit, and leaves one token to each later one."""
        ends = [0]
        for rank in ranks:
            low, high = ends[-1] + 1, tokens - (len(ranks) - 1 - rank)
            while low < high:
                middle = (low + high + 1) // 2
                if pace._cost(rank, tokens, attention, ends[-1], middle) <= limit_ns * pace.pairs_per_s[rank]:
                    low = middle
                else:
                    high = middle - 1
            ends.append(low)
        return ends

    low, high = 0, 1
    while dealt(high)[-1] < tokens:
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if dealt(middle)[-1] == tokens else (middle, high)
    ends = dealt(high)
    return tuple(end - first for first, end in itertools.pairwise(ends))


def visible(tokens: int, reach: Reach, rows: int) -> int:
    """Pairs of the first ``rows`` queries, of ``tokens`` tokens in all."""
    left, right = (tokens if extent is None else extent for extent in reach)
    return rows + _within(rows, left) + _within(tokens, right) - _within(tokens - rows, right)


def _within(rows: int, extent: int) -> int:
    """The sum of ``min(row, extent)`` over the rows before ``rows``."""
    short = min(rows, extent + 1)
    return short * (short - 1) // 2 + (rows - short) * extent


def _smoothed(numbers: Sequence[int]) -> tuple[int, ...]:
    most, least = max(numbers), min(numbers)
    return (most,) * len(numbers) if most - least <= _NOISE * most else tuple(numbers)


def token_ns(run: Callable[[int], None], most: int) -> tuple[int, int]:
    """Nanoseconds of a token in ``run(tokens)``, with as many tokens as it takes to be long, and at most ``most``; and that number."""
    tokens = min(_FIRST, most)
    while True:
        # The first run allocates memory and compiles kernels.
        seconds = min(_timed(run, tokens), _timed(run, tokens))
        if seconds >= _LONG_ENOUGH_S or tokens >= min(_MOST, most):
            return max(1, round(seconds / tokens * _S)), tokens
        tokens = min(4 * tokens, _MOST, most)


def _timed(run: Callable[[int], None], tokens: int) -> float:
    began = time.perf_counter()
    run(tokens)
    return time.perf_counter() - began


def wait_for(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)

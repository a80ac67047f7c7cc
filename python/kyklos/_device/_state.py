"""Running states: of each row and head the largest logit m, l = Σ exp(x − m), and a = Σ exp(x − m)·v, in float32."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import torch

from ._memory import dense

#: m of a row that saw no key, as in the crate ``kyklos``: finite.
EMPTY_M = -0.7 * torch.finfo(torch.float32).max


class RowSet:
    """Rows of batch entries."""

    def __init__(self, batch: int, rows: int) -> None:
        self._in = [bytearray(b"\1") * rows for _ in range(batch)]

    def take(self, batch: slice, rows: slice) -> bool:
        """Takes these rows out, if all of them are in."""
        whole = b"\1" * (rows.stop - rows.start)
        if any(entry[rows] != whole for entry in self._in[batch]):
            return False
        for entry in self._in[batch]:
            entry[rows] = bytes(len(whole))
        return True

    def ranges(self) -> Iterator[tuple[slice, slice]]:
        """The rows that are in, as few ranges."""
        same = all(entry == self._in[0] for entry in self._in)
        for index, entry in enumerate(self._in[:1] if same else self._in):
            batch = slice(0, len(self._in)) if same else slice(index, index + 1)
            for found in re.finditer(b"\1+", entry):
                yield batch, slice(*found.span())


class State:
    """A state with heads before rows: ``a [batch, heads, rows, dim]``, ``m`` and ``l`` ``[batch, heads, rows]``."""

    def __init__(self, a: torch.Tensor, m: torch.Tensor, l: torch.Tensor, *, is_output: bool = False) -> None:
        """``is_output``: ``l`` is 1, or 0 where a row saw no key. Then ``a`` is the output, of any type."""
        self.a, self.m, self.l, self.is_output = a, m, l, is_output

    @classmethod
    def empty(cls, shape: Sequence[int], device: torch.device) -> State:
        """Of rows that saw no key; ``shape`` is that of ``a``."""
        a = torch.empty(tuple(shape), dtype=torch.float32, device=device)
        state = cls(a, a.new_empty(a.shape[:3]), a.new_empty(a.shape[:3]))
        state.reset()
        return state

    @classmethod
    def of(cls, a: torch.Tensor, ml: torch.Tensor, shape: Sequence[int]) -> State:
        """The state in two buffers: ``a [batch, rows, heads, dim]``, ``ml [batch, heads, rows, 2]``."""
        batch, rows, heads, dim = shape
        pairs = dense(ml, torch.float32, (batch, heads, rows, 2))
        return cls(dense(a, torch.float32, shape).transpose(1, 2), pairs[..., 0], pairs[..., 1])

    def part(self, batch: slice, rows: slice) -> State:
        return State(self.a[batch, :, rows], self.m[batch, :, rows], self.l[batch, :, rows])

    def reset(self) -> None:
        self.a.zero_()
        self.m.fill_(EMPTY_M)
        self.l.zero_()

    def copy_(self, other: State) -> None:
        self.a.copy_(other.a)
        self.m.copy_(other.m)
        self.l.copy_(other.l)

    def merge(self, other: State) -> None:
        """Adds the keys of ``other``. Where one of both is empty, the result is the other one."""
        m = torch.maximum(self.m, other.m)
        ours = torch.where(other.is_empty(), 1.0, torch.exp(self.m - m))
        theirs = torch.where(self.is_empty(), 1.0, torch.exp(other.m - m))
        m = torch.where(self.is_empty(), other.m, torch.where(other.is_empty(), self.m, m))
        self.a.mul_(ours[..., None]).addcmul_(other.a, theirs[..., None])
        self.l.mul_(ours).addcmul_(other.l, theirs)
        self.m.copy_(m)

    def is_empty(self) -> torch.Tensor:
        return (self.l == 0) & (self.m == EMPTY_M)


def finalize(state: State, sinks: Sequence[float], o: torch.Tensor, lse: torch.Tensor) -> None:
    """Writes ``o [batch, heads, rows, dim]`` and ``lse [batch, heads, rows, 2]``: the log-sum-exp rounded, and the rest. A
    sink is a key with a logit and without a value."""
    m, l, saw = state.m, state.l, state.l != 0
    if state.is_output and not sinks:
        o.copy_(state.a)
        lse[..., 0] = torch.where(saw, m, -math.inf)
        lse[..., 1] = 0.0
        return
    weight: torch.Tensor | float = 1.0
    nothing: torch.Tensor | float = -math.inf
    if sinks:
        sink = torch.tensor(sinks, dtype=torch.float32, device=m.device)[None, :, None]
        nothing, most = sink, torch.maximum(m, sink)
        weight = torch.exp(m - most)
        m, l = most, l * weight + torch.exp(sink - most)
    ln = torch.log(l)
    total = m + ln
    lse[..., 0] = torch.where(saw, total, nothing)
    lse[..., 1] = torch.where(saw, ln - (total - m), 0.0)
    # `a` is 0 in rows that saw nothing. Adding to zero removes the sign of zeros, which depends on the order of merges.
    factor = torch.where(saw, weight / l, 0.0)[..., None]
    if o.dtype == torch.float32:
        torch.addcmul(o.new_zeros(()), state.a, factor, out=o)
    else:
        o.copy_(torch.addcmul(factor.new_zeros(()), state.a, factor))

"""Running states: of each row and head the largest logit m, l = Σ exp(x − m), and a = Σ exp(x − m)·v, in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ._memory import dense

#: m of a row that saw no key, as in the crate ``kyklos``: finite.
EMPTY_M = -0.7 * torch.finfo(torch.float32).max


class State:
    """A state with heads before rows: ``a [batch, heads, rows, dim]``, ``m`` and ``l`` ``[batch, heads, rows]``."""

    def __init__(self, a: torch.Tensor, m: torch.Tensor, l: torch.Tensor) -> None:
        self.a, self.m, self.l = a, m, l

    @classmethod
    def empty(cls, shape: Sequence[int], device: torch.device) -> State:
        """Of rows that saw no key; ``shape`` is that of ``a``."""
        a = torch.empty(tuple(shape), device=device)
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
    weight = torch.ones_like(l)
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
    # Adding zero removes the sign of zeros: it depends on the order of merges.
    rows = state.a * weight[..., None] / l[..., None] + 0.0
    o.copy_(torch.where(saw[..., None], rows, 0.0))

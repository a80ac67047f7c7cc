"""Attention of a piece of a block into a running state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ._block import Block, Piece
from ._kernels import Kernel
from ._state import EMPTY_M, RowSet, State, finalize

#: The most logits that are in memory at a time: on a CPU what its caches like, elsewhere what fills a GPU.
LOGITS = {"cpu": 1 << 23}
LOGITS_OF_A_GPU = 1 << 27
#: The most keys that are looked at together.
KEYS = 8192


@dataclass
class Results:
    """Where the output of a block goes, heads before rows: ``o [batch, heads, rows, dim]``, ``lse [batch, heads, rows, 2]``."""

    sinks: Sequence[float]
    o: torch.Tensor
    lse: torch.Tensor
    #: Rows that are not written yet.
    left: RowSet

    def write(self, state: State, batch: slice, rows: slice) -> None:
        finalize(state, self.sinks, self.o[batch, :, rows], self.lse[batch, :, rows])


class Running:
    """The state that a block is attended into."""

    def __init__(self, state: State, is_empty: bool, results: Results | None) -> None:
        """``is_empty``: of rows that saw no key, and ``a`` is not even written."""
        self.state, self.results = state, results
        batch, _, rows, _ = state.a.shape
        #: Rows whose ``a`` is not written.
        self.unwritten = RowSet(batch if is_empty else 0, rows)
        self.is_empty = is_empty

    def add(self, piece: Piece, found: State, alone: bool) -> None:
        """Adds the state of ``piece``; ``alone``: its rows are in no other piece of the block."""
        batch, rows = piece.batch, piece.rows
        if alone and self.results and self.is_empty:
            self.unwritten.take(batch, rows)
            self.results.left.take(batch, rows)
            self.results.write(found, batch, rows)
            return
        part = self.state.part(batch, rows)
        if self.is_empty and self.unwritten.take(batch, rows):
            part.copy_(found)
            return
        self._write_zeros()
        part.merge(found)

    def end(self) -> None:
        """After the last piece."""
        self._write_zeros()
        if self.results is None:
            return
        for batch, rows in self.results.left.ranges():
            self.results.write(self.state.part(batch, rows), batch, rows)

    def _write_zeros(self) -> None:
        for batch, rows in list(self.unwritten.ranges()):
            self.state.part(batch, rows).a.zero_()
            self.unwritten.take(batch, rows)


def attend(block: Block, piece: Piece, alone: bool, into: Running, kernel: Kernel | None) -> None:
    """Adds the visible keys of ``piece`` to the rows of the whole block. ``alone``: its rows are in no other piece."""
    if kernel is None:
        into.add(piece, by_products(block, piece), alone)
        return
    try:
        found, right = kernel.attend(block, piece)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # A shape for which it has no plan. A device that is lost fails below again.
        into.add(piece, by_products(block, piece), alone)
        return
    if right is not None:
        found = _mended(found, right, block, piece)
    into.add(piece, found, alone)


def _mended(found: State, right: torch.Tensor, block: Block, piece: Piece) -> State:
    """``found`` with other rows by products. Only rows between the first and the last of them are computed."""
    wrong = (~right).any(0).any(0).nonzero()
    part = slice(int(wrong[0]), int(wrong[-1]) + 1)
    exact = by_products(block, piece, slice(piece.rows.start + part.start, piece.rows.start + part.stop))
    right = right[:, :, part]
    state = State(found.a.float(), found.m.clone(), found.l.clone())
    for into, other in ((state.m, exact.m), (state.l, exact.l)):
        into[:, :, part] = torch.where(right, into[:, :, part], other)
    state.a[:, :, part] = torch.where(right[..., None], state.a[:, :, part], exact.a)
    return state


def chunks(block: Block, piece: Piece, some: slice | None = None) -> Iterator[tuple[slice, slice]]:
    """Rows and keys of ``piece`` whose logits fit in memory; only the rows ``some``."""
    some = some or piece.rows
    each = (piece.batch.stop - piece.batch.start) * block.heads
    width = min(KEYS, piece.keys.stop - piece.keys.start)
    height = max(1, LOGITS.get(block.device.type, LOGITS_OF_A_GPU) // max(1, each * width))
    for first in range(some.start, some.stop, height):
        rows = slice(first, min(first + height, some.stop))
        last = piece.keys.stop
        if piece.kind == "causal":
            last = piece.keys.start + rows.stop - piece.rows.start
        for key in range(piece.keys.start, last, width):
            yield rows, slice(key, min(key + width, last))


def by_products(block: Block, piece: Piece, some: slice | None = None) -> State:
    """The state of a piece alone, of all rows or of the rows ``some``."""
    some = some or piece.rows
    count = some.stop - some.start
    state = State.empty((piece.batch.stop - piece.batch.start, block.heads, count, block.q.shape[3]), block.device)
    for rows, keys in chunks(block, piece, some):
        part = slice(rows.start - some.start, rows.stop - some.start)
        state.part(slice(None), part).merge(_products(block, piece, rows, keys))
    return state


def _products(block: Block, piece: Piece, rows: slice, keys: slice) -> State:
    """The state of these keys alone, by two matrix products in float32: on any device, for any numbers."""
    logits, visible, _ = block.logits(piece, rows, keys)
    m = logits.amax(-1)
    m = torch.where(m == -math.inf, EMPTY_M, m)
    weights = torch.exp(logits - m[..., None])
    a = block.weigh(weights, block.v[piece.batch, :, keys].float(), visible)
    return State(a, m, weights.sum(-1))

"""Attention of a piece of a block into a running state."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ._block import Block, Piece
from ._kernels import Kernel
from ._state import EMPTY_M, State

#: The most logits that are in memory at a time.
LOGITS = 1 << 23
#: The most keys that are looked at together.
KEYS = 8192


def attend(block: Block, piece: Piece, state: State, kernel: Kernel | None) -> None:
    """Adds the visible keys of ``piece`` to ``state``, which has the rows of the whole block."""
    if kernel is None or not kernel.takes(block, piece):
        for rows, keys in chunks(block, piece):
            state.part(piece.batch, rows).merge(_products(block, piece, rows, keys))
        return
    found, right = kernel.attend(block, piece)
    if right is not None:
        exact = by_products(block, piece)
        found = State(
            torch.where(right[..., None], found.a, exact.a),
            torch.where(right, found.m, exact.m),
            torch.where(right, found.l, exact.l),
        )
    state.part(piece.batch, piece.rows).merge(found)


def chunks(block: Block, piece: Piece) -> Iterator[tuple[slice, slice]]:
    """Rows and keys of ``piece`` whose logits fit in memory."""
    each = (piece.batch.stop - piece.batch.start) * block.heads
    width = min(KEYS, piece.keys.stop - piece.keys.start)
    height = max(1, LOGITS // max(1, each * width))
    for first in range(piece.rows.start, piece.rows.stop, height):
        rows = slice(first, min(first + height, piece.rows.stop))
        last = piece.keys.stop
        if piece.kind == "causal":
            last = piece.keys.start + rows.stop - piece.rows.start
        for key in range(piece.keys.start, last, width):
            yield rows, slice(key, min(key + width, last))


def by_products(block: Block, piece: Piece) -> State:
    """The state of a piece alone."""
    count = piece.rows.stop - piece.rows.start
    state = State.empty((piece.batch.stop - piece.batch.start, block.heads, count, block.q.shape[3]), block.device)
    for rows, keys in chunks(block, piece):
        part = slice(rows.start - piece.rows.start, rows.stop - piece.rows.start)
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

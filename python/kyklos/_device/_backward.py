"""Gradients of a piece of a block, by five matrix products in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ._block import Block, Piece
from ._forward import chunks
from ._kernels import Kernel
from ._memory import Place, rows
from ._state import EMPTY_M


def row_stats(o: torch.Tensor, d_o: torch.Tensor, lse: torch.Tensor, d_lse: torch.Tensor | None, stats: torch.Tensor) -> None:
    """Writes the statistics of rows, ``[batch, rows, heads, 4]``: the log-sum-exp, e^−rest, δ = Σ d_o·o − d_lse, the rest."""
    delta = torch.linalg.vecdot(o.float(), d_o.float())
    if d_lse is not None:
        delta = delta - d_lse
    first, rest = lse[..., 0], lse[..., 1]
    saw = first != -math.inf
    stats[..., 0] = torch.where(saw, first, -EMPTY_M)
    stats[..., 1] = torch.where(saw, torch.exp(-rest), 1.0)
    stats[..., 2] = torch.where(saw, delta, 0.0)
    stats[..., 3] = torch.where(saw, rest, 0.0)


@dataclass
class Gradients:
    """What the gradients of a block are computed of and added to: ``d_o [batch, heads, rows, dim]``, the statistics of rows
    ``[batch, heads, rows, 4]``; float32 ``dq`` like ``d_o``, ``dk`` and ``dv`` ``[batch, kv_heads, keys, dim]``; of an additive
    bias ``[batch, rows, heads, columns]`` with extents of 1 where it is shared."""

    d_o: torch.Tensor
    stats: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    d_bias: torch.Tensor | None


def bias_sum(buffer: torch.Tensor, place: Place, shape: tuple[int, int, int], columns: int) -> torch.Tensor:
    """The sum of the gradient of a bias for ``shape`` = batch, rows and heads of a block."""
    extents = [extent if stride else 1 for extent, stride in zip(shape, place[1:], strict=True)]
    return rows(buffer, torch.float32, [*extents, columns], place)


def attend(block: Block, piece: Piece, to: Gradients, kernel: Kernel | None) -> None:
    """Adds the gradients of ``piece``."""
    if kernel is not None and to.d_bias is None:
        try:
            found = kernel.gradients(block, piece, to.d_o, to.stats)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            # A shape for which it has no plan. A device that is lost fails below again.
            found = None
        if found is not None:
            dq, dk, dv = found
            to.dq[piece.batch, :, piece.rows].add_(dq)
            _add_to_keys(block, to, piece.batch, piece.keys, dk, dv)
            return
    for some, keys in chunks(block, piece):
        _chunk(block, piece, some, keys, to)


def _chunk(block: Block, piece: Piece, some: slice, keys: slice, to: Gradients) -> None:
    d_o, stats = to.d_o[piece.batch, :, some].float(), to.stats[piece.batch, :, some]
    logits, visible, slope = block.logits(piece, some, keys)
    lse, factor, delta = (stats[..., index, None] for index in range(3))
    saw = lse != -EMPTY_M
    if not bool(saw.all()):
        # Whatever d_o holds in a row that saw nothing, its gradients are 0.
        visible = saw.expand_as(logits) if visible is None else saw & visible
        logits = logits.masked_fill(~visible, -math.inf)
    q, k, v = block.q[piece.batch, :, some].float(), block.k[piece.batch, :, keys].float(), block.v[piece.batch, :, keys].float()
    weights = torch.exp(logits - lse) * factor
    gradient = weights * (block.product(d_o, v.mT) - delta)
    if visible is not None:
        weights, gradient = weights.masked_fill(~visible, 0.0), gradient.masked_fill(~visible, 0.0)
    if to.d_bias is not None:
        _add_to_bias(to.d_bias, gradient, piece.batch, some, block.positions[keys])
    if slope is not None:
        gradient = gradient * slope
        if visible is not None:
            gradient = gradient.masked_fill(~visible, 0.0)
    to.dq[piece.batch, :, some].add_(block.weigh(gradient, k, visible), alpha=block.scale)
    dk = _to_keys(block, gradient, q, visible) * block.scale
    _add_to_keys(block, to, piece.batch, keys, dk, _to_keys(block, weights, d_o, visible))


def _add_to_keys(
    block: Block, to: Gradients, batch: slice, keys: slice, dk: torch.Tensor, dv: torch.Tensor
) -> None:
    """Adds gradients of the heads of ``block.k``."""
    for into, values in ((to.dk, dk), (to.dv, dv)):
        part = into[batch, :, keys]
        if block.chosen is None:
            part.add_(values)
            continue
        # Without `index_add_`, whose order on a GPU is any.
        for head in range(part.shape[1]):
            of_head = [index for index, own in enumerate(block.chosen) if own == head]
            if of_head:
                part[:, head].add_(values[:, of_head[0] : of_head[-1] + 1].sum(1))


def _to_keys(block: Block, weights: torch.Tensor, right: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """Σ over rows and the heads of a group of ``weights · right``: ``[batch, kv_heads, keys, dim]``."""
    batch, heads, count, keys = weights.shape
    rows_of = heads // block.kv_heads * count
    turned = weights.reshape(batch, block.kv_heads, rows_of, keys).mT
    if visible is not None:
        visible = visible.expand(batch, heads, count, keys).reshape(batch, block.kv_heads, rows_of, keys).mT
    return block.weigh(turned, right.reshape(batch, block.kv_heads, rows_of, right.shape[3]), visible)


def _add_to_bias(into: torch.Tensor, gradient: torch.Tensor, batch: slice, some: slice, positions: torch.Tensor) -> None:
    values = gradient.transpose(1, 2)
    for axis in range(3):
        if into.shape[axis] == 1 and values.shape[axis] != 1:
            values = values.sum(axis, keepdim=True)
    part = into
    if into.shape[0] != 1:
        part = part[batch]
    if into.shape[1] != 1:
        part = part[:, some]
    part.index_add_(3, positions, values)

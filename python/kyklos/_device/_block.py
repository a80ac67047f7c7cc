"""One block of queries against one block of keys: its tensors, and what its rows see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ._memory import Place, rows

#: Numbers of a bias below it count as it, on all devices.
LEAST_BIAS = -1e38


@dataclass
class Piece:
    """A part of a block. ``kind``: ``"full"``, ``"causal"`` (as many rows as keys; row i sees keys 0 to i), or ``"masked"``."""

    kind: str
    batch: slice
    rows: slice
    keys: slice
    #: Index of the mask's class, for ``"masked"``.
    mask: int


@dataclass
class Bias:
    """A tensor over (query, key position) pairs. ``place`` has strides of 0 where it is shared, and counts in words of 32
    bits if it ``hides`` keys, else in elements."""

    hides: bool
    buffer: torch.Tensor
    place: Place

    def of(self, block: Block, piece: Piece, keys: slice) -> torch.Tensor:
        """The terms of logits, float32, or which keys are visible, bool: ``[batch, heads, rows, keys]`` with extents of 1
        where they are shared."""
        offset, *strides = self.place
        parts = (piece.batch, piece.rows, slice(0, block.heads))
        starts = [part.start for part in parts]
        shape = [part.stop - part.start if stride else 1 for part, stride in zip(parts, strides, strict=True)]
        offset += sum(start * stride for start, stride in zip(starts, strides, strict=True))
        place = (offset, strides[0], strides[1], strides[2])
        positions = block.positions[keys]
        columns = block.columns
        if self.hides:
            words = rows(self.buffer, torch.int32, [*shape, -(-columns // 32)], place)
            bits = words.index_select(3, positions >> 5) >> (positions & 31).to(torch.int32)
            return (bits & 1).bool().transpose(1, 2)
        terms = rows(self.buffer, block.q.dtype, [*shape, columns], place).index_select(3, positions).float()
        # Only −∞ hides a key. Stand-ins for it all weigh the same.
        return terms.clamp(min=LEAST_BIAS).masked_fill_(terms == -math.inf, -math.inf).transpose(1, 2)


class Block:
    """The tensors of a block, heads before rows: ``q [batch, heads, rows, dim]``, ``k`` and ``v`` ``[batch, kv_heads, keys,
    dim]``, where ``heads`` is a multiple of ``kv_heads`` and a group of consecutive heads shares one."""

    def __init__(
        self,
        dtype: torch.dtype,
        shape: Sequence[int],
        q: tuple[torch.Tensor, Place],
        k: tuple[torch.Tensor, Place],
        v: tuple[torch.Tensor, Place],
        kv_head_of: Sequence[int],
        numbers: tuple[float, float | None, bool],
        positions: bytes,
        spans: Sequence[bytes],
        bias: Bias | None,
    ) -> None:
        batch, count, heads, dim = shape
        #: The factor on q·k, the softcap, and whether no backward pass follows.
        self.scale, self.softcap, self.inference = numbers
        self.heads, self.bias = heads, bias
        self.device = q[0].device
        keys = len(positions) // 4
        self.kv_heads = max(kv_head_of, default=-1) + 1
        self.q = rows(q[0], dtype, shape, q[1]).transpose(1, 2)
        kv = (batch, keys, self.kv_heads, dim)
        self.k, self.v = (rows(buffer, dtype, kv, place).transpose(1, 2) for buffer, place in (k, v))
        #: Where query heads do not follow each other in groups of one size, the key/value head of each: ``k`` and ``v`` are then
        #: copies with a head for each.
        self.chosen: Sequence[int] | None = None
        size = heads // max(self.kv_heads, 1)
        if heads != size * self.kv_heads or any(head != index // size for index, head in enumerate(kv_head_of)):
            self.chosen = kv_head_of
            index = torch.tensor(kv_head_of, device=self.device)
            self.k, self.v = (tensor.index_select(1, index) for tensor in (self.k, self.v))
            self.kv_heads = heads
        self._positions, self._spans = positions, spans
        self._on_device: dict[int, torch.Tensor] = {}

    @property
    def positions(self) -> torch.Tensor:
        """The position of each key, int64."""
        return self._numbers(-1, self._positions)

    @property
    def columns(self) -> int:
        """One more than the last position."""
        return max(memoryview(self._positions).cast("I"), default=-1) + 1

    def _numbers(self, index: int, data: bytes) -> torch.Tensor:
        found = self._on_device.get(index)
        if found is None:
            words = torch.frombuffer(bytearray(data), dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF
            found = self._on_device[index] = words.to(self.device)
        return found

    def visible(self, piece: Piece, some: slice, keys: slice) -> torch.Tensor | None:
        """Which of ``keys`` the rows ``some`` see, bool ``[rows, keys]``, without the bias; ``None`` for all."""
        if piece.kind == "full":
            return None
        if piece.kind == "causal":
            row = torch.arange(some.start - piece.rows.start, some.stop - piece.rows.start, device=self.device)
            key = torch.arange(keys.start - piece.keys.start, keys.stop - piece.keys.start, device=self.device)
            return key <= row[:, None]
        spans = self._numbers(piece.mask, self._spans[piece.mask]).view(-1, 2)[some]
        positions = self.positions[keys]
        return (positions >= spans[:, :1]) & (positions < spans[:, 1:])

    def sees_any(self, chosen: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Which rows of ``piece`` see any of its keys that are ``chosen [batch, kv_heads, keys]``: ``[batch, heads, rows]``."""
        visible = self.visible(piece, piece.rows, piece.keys)
        if self.bias is not None:
            terms = self.bias.of(self, piece, piece.keys)
            shown = terms if self.bias.hides else terms != -math.inf
            visible = shown if visible is None else shown & visible
        counts = chosen.repeat_interleave(self.heads // self.kv_heads, 1).float()
        if visible is None:
            return counts.any(-1, keepdim=True)
        if visible.dim() == 2:
            return torch.einsum("rk,bhk->bhr", visible.float(), counts) > 0
        return (visible.float() @ counts[..., None])[..., 0] > 0

    def logits(self, piece: Piece, some: slice, keys: slice) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The logits of the rows ``some`` and ``keys``, float32 ``[batch, heads, rows, keys]``, with −∞ where a key is hidden;
        which keys are visible, ``None`` for all; and the slope of the softcap, ``None`` without one."""
        q, k = self.q[piece.batch, :, some].float(), self.k[piece.batch, :, keys].float()
        # A product out of range is one whose factor brings it back, or whose logit is out of range.
        small = abs(self.scale) < 1
        logits = self.product(q * self.scale if small else q, k.mT)
        if not small:
            logits = logits * self.scale
        slope = None
        if self.softcap is not None:
            bent = torch.tanh(logits / self.softcap)
            slope, logits = 1 - bent * bent, self.softcap * bent
        visible = self.visible(piece, some, keys)
        if self.bias is not None:
            terms = self.bias.of(self, replace(piece, rows=some), keys)
            shown = terms
            if not self.bias.hides:
                logits, shown = logits + terms, terms != -math.inf
            visible = shown if visible is None else shown & visible
        if visible is not None:
            logits = logits.masked_fill(~visible, -math.inf)
        return logits, visible, slope

    def product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """``left [batch, heads, rows, n] @ right [batch, kv_heads, n, m]``: each head with its key/value head."""
        batch, heads, count, inner = left.shape
        if heads == self.kv_heads:
            return left @ right
        grouped = left.reshape(batch, self.kv_heads, heads // self.kv_heads * count, inner)
        return (grouped @ right).view(batch, heads, count, right.shape[3])

    def weigh(self, weights: torch.Tensor, right: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        """:meth:`product`, where ``weights`` are 0 for hidden keys, and what is not finite in ``right`` reaches only rows that
        see it."""
        finite = torch.isfinite(right)
        if bool(finite.all()):
            return self.product(weights, right)
        result = self.product(weights, torch.where(finite, right, 0.0))
        sees = torch.ones_like(weights, dtype=torch.bool) if visible is None else visible.expand_as(weights)
        any_of = lambda rows, columns: self.product((rows & sees).float(), columns.float()) > 0  # noqa: E731
        up, down, infinite = weights > 0, weights < 0, torch.isinf(right)
        above, below = right == math.inf, right == -math.inf
        plus = any_of(up, above) | any_of(down, below)
        minus = any_of(up, below) | any_of(down, above)
        lost = any_of(sees, torch.isnan(right)) | any_of(weights == 0, infinite) | (plus & minus)
        result = torch.where(plus, math.inf, torch.where(minus, -math.inf, result))
        return torch.where(lost, math.nan, result)


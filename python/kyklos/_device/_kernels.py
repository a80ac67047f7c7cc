"""The attention kernels of PyTorch that give a log-sum-exp, and what they can be trusted with."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ._block import Block, Piece
from ._state import EMPTY_M, State

#: Above it, the rounding of a log-sum-exp in float32 changes a weight by more than the rounding of the elements does (float32:
#: of the logit itself), and states of such rows do not merge well.
LARGEST = {torch.float32: 1024.0, torch.float16: 4096.0, torch.bfloat16: 16384.0}
#: The same where a backward pass follows in float32, whose weights are e^(logit − log-sum-exp).
LARGEST_OF_GRADIENTS = 32.0


class Kernel:
    """A kernel of PyTorch. Of its results those rows are taken that are right for sure: it multiplies hidden values by 0 instead
    of leaving them out, and tells the log-sum-exp as one number."""

    #: In reports.
    name = ""
    #: Whether it takes a term for each logit.
    masked = False
    #: Whether a group of query heads can share a key/value head.
    grouped = True
    #: The largest head dim.
    largest_dim = 256
    #: Types of elements, and the type in which it is given them.
    dtypes: Mapping[torch.dtype, torch.dtype] = {torch.float16: torch.float16, torch.bfloat16: torch.bfloat16}

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, terms: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``o`` like ``q``, and the log-sum-exp, float32 ``[batch, heads, rows]``."""
        raise NotImplementedError

    def accuracy(self, dtype: torch.dtype) -> tuple[float, float]:
        """The largest error of a log-sum-exp, and of the output of a block relative to its largest element, beyond float32
        arithmetic. Kernels in 16 bits take exponentials that are good enough for those (on the CPU 5.5e-5 was seen), and round
        the output."""
        given = self.dtypes.get(dtype, torch.float32)
        return (0.0, 0.0) if given == torch.float32 else (2**-13, torch.finfo(given).eps / 2)

    def takes(self, block: Block, piece: Piece) -> bool:
        dim = block.q.shape[3]
        masked = piece.kind == "masked" or block.bias is not None
        return (
            block.softcap is None
            and block.q.dtype in self.dtypes
            and 0 < dim <= self.largest_dim
            and dim % 8 == 0
            and (self.masked or not masked)
        )

    def attend(self, block: Block, piece: Piece) -> tuple[State, torch.Tensor | None]:
        """The state of a piece, and which of its rows are right, bool ``[batch, heads, rows]``; ``None`` for all."""
        dtype = self.dtypes[block.q.dtype]
        q = block.q[piece.batch, :, piece.rows].to(dtype)
        k, v = (x[piece.batch, :, piece.keys].to(dtype) for x in (block.k, block.v))
        terms, sees = _terms(block, piece, dtype)
        causal = piece.kind == "causal" and terms is None
        largest = LARGEST[dtype] if block.inference or dtype != torch.float32 else LARGEST_OF_GRADIENTS
        o, lse = self._rows(q, k, v, causal, terms, sees, block.scale)
        # A sum of numbers that are not all finite is not finite.
        total = o.sum(dtype=torch.float32) if dtype == torch.float16 else o.sum()
        if bool((lse.abs().amax() <= largest) & torch.isfinite(total)):
            return _state(o, lse, sees), None
        finite = torch.isfinite(k).all(-1) & torch.isfinite(v).all(-1)
        if not bool(finite.all()):
            # Again, without what would reach rows that do not see it; those that see it are wrong.
            k, v = (x.masked_fill(~finite[..., None], 0.0) for x in (k, v))
            o, lse = self._rows(q, k, v, causal, terms, sees, block.scale)
        right = (lse.abs() <= largest) & torch.isfinite(o).all(-1)
        if not bool(finite.all()):
            right &= ~block.sees_any(~finite, piece)
        return _state(o, lse, sees), right

    def _rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        terms: torch.Tensor | None,
        sees: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`run`, with zeros for rows that see nothing, whatever the kernel makes of them."""
        if not self.grouped and k.shape[1] < q.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        o, lse = self.run(q, k, v, causal, terms, scale)
        if sees is None:
            return o, lse
        return torch.where(sees[..., None], o, 0.0), torch.where(sees, lse, 0.0)


def _state(o: torch.Tensor, lse: torch.Tensor, sees: torch.Tensor | None) -> State:
    if sees is None:
        return State(o, lse, torch.ones((), device=o.device).expand_as(lse), is_output=True)
    return State(o, torch.where(sees, lse, EMPTY_M), sees.float().expand_as(lse), is_output=True)


def _terms(block: Block, piece: Piece, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What is added to logits, of four axes; and which rows see a key, of three, ``None`` for all."""
    if piece.kind != "masked" and block.bias is None:
        return None, None
    visible, added = block.visible(piece, piece.rows, piece.keys), None
    if block.bias is not None:
        bias = block.bias.of(block, piece, piece.keys)
        if block.bias.hides:
            visible = bias if visible is None else bias & visible
        else:
            added = bias
    terms = torch.zeros((), device=block.device) if added is None else added
    if visible is not None:
        terms = torch.where(visible, terms, -math.inf)
    while terms.dim() < 4:
        terms = terms[None]
    return terms.to(dtype), (terms != -math.inf).any(-1)


class FlashOnCpu(Kernel):
    """Flash attention of PyTorch's CPU backend. float16 takes it as long as float32, whose results are better."""

    name = "flash for CPU"
    masked = True
    largest_dim = 1 << 16
    dtypes = {torch.float32: torch.float32, torch.float16: torch.float32, torch.bfloat16: torch.bfloat16}

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, terms: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=terms, scale=scale)


def kernel_of(device: torch.device) -> Kernel | None:
    """The kernel that is used on ``device``; ``None`` where matrix products are."""
    return FlashOnCpu() if device.type == "cpu" else None

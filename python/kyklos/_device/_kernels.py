"""What kernels of PyTorch can be trusted with. Which there are: ``_vendors.py``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ._block import Block, Piece
from ._state import EMPTY_M, State

#: Above it, the rounding of a log-sum-exp in float32 changes a weight by more than the rounding of the elements does (float32:
#: of the logit itself), and states of such rows do not merge well.
LARGEST = {torch.float32: 1024.0, torch.float16: 4096.0, torch.bfloat16: 16384.0}
#: The same where a backward pass follows in float32, whose weights are e^(logit − log-sum-exp).
LARGEST_OF_GRADIENTS = 32.0
#: Kernels multiply by the scale after the sum: beyond it q·k may be ∞ where the logit is not.
LARGEST_PRODUCT = 1e38


class Inputs(NamedTuple):
    """What a kernel is given: ``q [batch, heads, rows, dim]``, ``k`` and ``v`` ``[batch, kv_heads, keys, dim]``, of one type."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    #: The factor on q·k.
    scale: float
    #: Whether row i sees the keys 0 to i only.
    causal: bool
    #: What is added to logits, of four axes.
    terms: torch.Tensor | None

    def with_heads_alike(self) -> Inputs:
        """A key/value head for each query head."""
        group = self.q.shape[1] // self.k.shape[1]
        if group == 1:
            return self
        return self._replace(k=self.k.repeat_interleave(group, 1), v=self.v.repeat_interleave(group, 1))


class Kernel:
    """A kernel of PyTorch. Of its results those rows are taken that are right for sure: it multiplies hidden values by 0 instead
    of leaving them out, and tells the log-sum-exp as one number."""

    #: In reports.
    name = ""
    #: Whether it takes a term for each logit.
    masked = False
    #: Whether a group of query heads can share a key/value head.
    grouped = True
    #: The same for gradients.
    grouped_gradients = True
    #: The largest head dim.
    largest_dim = 256
    #: Head dims are multiples of it.
    dim_step = 8
    #: Types of elements, and the type in which it is given them.
    dtypes: Mapping[torch.dtype, torch.dtype] = {torch.float16: torch.float16, torch.bfloat16: torch.bfloat16}
    #: The same of gradients: none without a kernel for them.
    gradient_dtypes: Mapping[torch.dtype, torch.dtype] = {}
    #: Whether equal calls have equal gradients under ``torch.use_deterministic_algorithms(True)``.
    repeats_gradients = True

    def run(self, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """``o`` like ``q``, and the log-sum-exp, float32 ``[batch, heads, rows]``."""
        raise NotImplementedError

    def run_backward(
        self, x: Inputs, d_o: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of q, k and v, of their type and shape."""
        raise NotImplementedError

    def accuracy(self, dtype: torch.dtype) -> tuple[float, float, float]:
        """The largest error of a log-sum-exp, and of the output and the gradients of a block relative to their largest element,
        beyond float32 arithmetic. Kernels in 16 bits take exponentials that are good enough for those (on the CPU 5.5e-5 was
        seen), and round the output, the gradients of each query head, and their sum over the heads of a group."""
        given, of_gradients = (kinds.get(dtype, torch.float32) for kinds in (self.dtypes, self.gradient_dtypes))
        wide = torch.float32
        log_sum_exp, output = (0.0, 0.0) if given == wide else (2**-13, torch.finfo(given).eps / 2)
        return log_sum_exp, output, 0.0 if of_gradients == wide else torch.finfo(of_gradients).eps

    def takes(self, block: Block, piece: Piece) -> bool:
        dim = block.q.shape[3]
        masked = piece.kind == "masked" or block.bias is not None
        return (
            block.softcap is None
            and block.q.dtype in self.dtypes
            and 0 < dim <= self.largest_dim
            and dim % self.dim_step == 0
            and (self.masked or not masked)
        )

    def takes_gradients(self, block: Block, piece: Piece) -> bool:
        repeats = self.repeats_gradients or not torch.are_deterministic_algorithms_enabled()
        return block.q.dtype in self.gradient_dtypes and repeats and self.takes(block, piece)

    def attend(self, block: Block, piece: Piece) -> tuple[State, torch.Tensor | None]:
        """The state of a piece, and which of its rows are right, bool ``[batch, heads, rows]``; ``None`` for all."""
        dtype = self.dtypes[block.q.dtype]
        x, sees = _inputs(block, piece, dtype)
        largest = LARGEST[dtype] if block.inference or dtype != torch.float32 else LARGEST_OF_GRADIENTS
        o, lse = self._rows(x, sees)
        if _all_right(x, o, lse, sees, largest):
            return _state(o, lse, sees), None
        finite = torch.isfinite(x.k).all(-1) & torch.isfinite(x.v).all(-1)
        whole = bool(finite.all())
        if not whole:
            # Again, without what would reach rows that do not see it; those that see it are wrong.
            k, v = (tensor.masked_fill(~finite[..., None], 0.0) for tensor in (x.k, x.v))
            x = x._replace(k=k, v=v)
            o, lse = self._rows(x, sees)
        products = _norm_of_rows(x.q) * _norm_of_rows(x.k).amax()
        empty = (lse == 0) & (o == 0).all(-1)
        if sees is not None:
            empty &= sees
        right = (products < LARGEST_PRODUCT) & (lse.abs() <= largest) & torch.isfinite(o).all(-1) & ~empty
        if not whole:
            right &= ~block.sees_any(~finite, piece)
        return _state(o, lse, sees), None if bool(right.all()) else right

    def gradients(
        self, block: Block, piece: Piece, d_o: torch.Tensor, stats: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """The gradients of q, k and v of ``piece``; ``None`` if they may be wrong. ``d_o`` and ``stats`` have the rows of the
        whole block."""
        dtype = self.gradient_dtypes[block.q.dtype]
        x, _ = _inputs(block, piece, dtype)
        d_o = d_o[piece.batch, :, piece.rows].to(dtype)
        lse, _, delta, _ = stats[piece.batch, :, piece.rows].unbind(-1)
        saw = lse != -EMPTY_M
        largest = LARGEST_OF_GRADIENTS if block.q.dtype == torch.float32 else LARGEST[torch.float32]
        # The kernel computes δ as Σ d_o·o, and has no d_lse. So it gets another o, along d_o, whose sum is the δ that is wanted. In 16
        # bits its terms have one sign: they round no more than those of the true o.
        size = _norm_of_rows(d_o)
        nothing = delta == 0
        o = (d_o * torch.where(nothing, 0.0, delta / size / size)[..., None]).to(dtype)
        # The square of a size in between is a normal number.
        usual = (size > 1e-15) & (size < 1e15) | nothing
        # In rows that saw nothing the weights are 0, and so are the gradients, whatever finite d_o they have.
        right = (usual & ((lse.abs() <= largest) | ~saw)).all() & _all_finite(x.v, d_o, o)
        if dtype != torch.float16:
            right &= _norm(x.q) * _norm(x.k) < LARGEST_PRODUCT
        given = x if self.grouped_gradients else x.with_heads_alike()
        dq, dk, dv = self.run_backward(given, d_o, o, lse.contiguous())
        if dk.shape[1] > x.k.shape[1]:
            dk, dv = (tensor.unflatten(1, (x.k.shape[1], -1)).sum(2, dtype=torch.float32) for tensor in (dk, dv))
        return (dq, dk, dv) if bool(right & _all_finite(dq, dk, dv)) else None

    def _rows(self, x: Inputs, sees: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`run`, with zeros for rows that see nothing, whatever the kernel makes of them."""
        o, lse = self.run(x if self.grouped else x.with_heads_alike())
        if sees is None:
            return o, lse
        return torch.where(sees[..., None], o, 0.0), torch.where(sees, lse, 0.0)


def _all_right(x: Inputs, o: torch.Tensor, lse: torch.Tensor, sees: torch.Tensor | None, largest: float) -> bool:
    """Whether all rows are right for sure. It waits for the device once."""
    size = lse.abs()
    # Kernels give a row whose logits are all −∞ the output and log-sum-exp 0, which is also the row of one key with the logit 0.
    least, most = torch.aminmax(size if sees is None else torch.where(sees, size, 1.0))
    # A sum of numbers that are not all finite is not finite.
    numbers = [least, most, _sum(o)]
    # Of float16 no product is too large, and NaN shows in `lse`.
    if x.q.dtype != torch.float16:
        numbers += [_norm(x.q), _norm(x.k)]
    least_lse, largest_lse, total, *norms = torch.stack([number.float() for number in numbers]).tolist()
    # No q·k is larger than the product of the norms, which is NaN if an element is.
    return 0 < least_lse and largest_lse <= largest and math.isfinite(total) and math.prod(norms) < LARGEST_PRODUCT


def _norm(x: torch.Tensor) -> torch.Tensor:
    # Another type than that of the elements takes three times as long.
    return torch.linalg.vector_norm(x, dtype=torch.float32 if x.dtype == torch.float16 else x.dtype).float()


def _norm_of_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)


def _all_finite(*tensors: torch.Tensor) -> torch.Tensor:
    """Whether all elements are finite: their sums are. Sums that overflow count as not finite."""
    return torch.stack([torch.isfinite(_sum(tensor)) for tensor in tensors]).all()


def _sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(dtype=torch.float32) if x.dtype == torch.float16 else x.sum()


def _state(o: torch.Tensor, lse: torch.Tensor, sees: torch.Tensor | None) -> State:
    if sees is None:
        return State(o, lse, torch.ones((), dtype=torch.float32, device=o.device).expand_as(lse), is_output=True)
    return State(o, torch.where(sees, lse, EMPTY_M), sees.float().expand_as(lse), is_output=True)


def _inputs(block: Block, piece: Piece, dtype: torch.dtype) -> tuple[Inputs, torch.Tensor | None]:
    """The inputs of a piece in this type; and which rows see a key, of three axes, ``None`` for all."""
    terms, sees = _terms(block, piece, dtype)
    q = block.q[piece.batch, :, piece.rows].to(dtype)
    k, v = (tensor[piece.batch, :, piece.keys].to(dtype) for tensor in (block.k, block.v))
    return Inputs(q, k, v, block.scale, piece.kind == "causal" and terms is None, terms), sees


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
    terms = torch.zeros((), dtype=torch.float32, device=block.device) if added is None else added
    if visible is not None:
        terms = torch.where(visible, terms, -math.inf)
    while terms.dim() < 4:
        terms = terms[None]
    return terms.to(dtype), (terms != -math.inf).any(-1)

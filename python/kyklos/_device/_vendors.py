"""The attention kernels of PyTorch that give a log-sum-exp, by device. Those that do not are left out: kernels for Metal, and the
kernels of ``scaled_dot_product_attention`` by itself."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from ._backward import Gradients
from ._backward import attend as attend_backward
from ._block import Block, Piece
from ._forward import by_products
from ._kernels import Inputs, Kernel
from ._state import EMPTY_M, State

aten = torch.ops.aten


class FlashOnCpu(Kernel):
    """Flash attention of PyTorch's CPU backend. float16 takes it as long as float32, whose results are better."""

    name = "flash for CPU"
    masked = True
    largest_dim = 1 << 16
    dim_step = 1
    dtypes = {torch.float32: torch.float32, torch.float16: torch.float32, torch.bfloat16: torch.bfloat16}
    #: In bfloat16 it would round the sums of each block.
    gradient_dtypes = dict.fromkeys(dtypes, torch.float32)

    def run(self, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu(*x[:3], 0.0, x.causal, attn_mask=x.terms, scale=x.scale)

    def run_backward(
        self, x: Inputs, d_o: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_o, *x[:3], o, lse, 0.0, x.causal, attn_mask=x.terms, scale=x.scale
        )


class Flash(Kernel):
    """Flash attention on NVIDIA and AMD: version 2, or what ``torch.nn.attention.activate_flash_attention_impl`` has chosen."""

    name = "flash"
    gradient_dtypes = Kernel.dtypes

    def run(self, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse, *_ = aten._scaled_dot_product_flash_attention(*x[:3], 0.0, x.causal, False, scale=x.scale)
        return o, lse

    def run_backward(
        self, x: Inputs, d_o: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        counts = (None, None, x.q.shape[2], x.k.shape[2])
        run = aten._scaled_dot_product_flash_attention_backward
        return run(d_o, *x[:3], o, lse, *counts, 0.0, x.causal, *_no_dropout(x.q), scale=x.scale)


class CuDnn(Kernel):
    """The kernel of NVIDIA's cuDNN."""

    name = "cuDNN"
    largest_dim = 128

    def run(self, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse, *_ = aten._scaled_dot_product_cudnn_attention(*x[:3], None, True, 0.0, x.causal, False, scale=x.scale)
        # Some versions have a last axis of 1.
        return o, lse.reshape(x.q.shape[:3])


class Efficient(Kernel):
    """Memory-efficient attention on NVIDIA and AMD, which takes masks and float32."""

    name = "efficient"
    masked = True
    grouped = grouped_gradients = False
    dtypes = {**Kernel.dtypes, torch.float32: torch.float32}
    gradient_dtypes = dtypes

    def run(self, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        run = aten._scaled_dot_product_efficient_attention
        o, lse, *_ = run(*x[:3], _aligned(x), True, 0.0, x.causal, scale=x.scale)
        # Rows are padded.
        return o, lse[..., : x.q.shape[2]]

    def run_backward(
        self, x: Inputs, d_o: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if torch.version.hip is None:
            lse = torch.nn.functional.pad(lse, (0, -x.q.shape[2] % ROWS_OF_EFFICIENT), value=math.inf)
        # It takes heads of one row of o to follow each other.
        o = o.transpose(1, 2).contiguous().transpose(1, 2)
        run = aten._scaled_dot_product_efficient_attention_backward
        wanted = (True, True, True, False)
        dq, dk, dv, _ = run(d_o, *x[:3], _aligned(x), o, lse, *_no_dropout(x.q), 0.0, wanted, x.causal, scale=x.scale)
        return dq, dk, dv


class Overrideable(Kernel):
    """The kernel that the device of another vendor brings, such as Intel's."""

    name = "the vendor's"
    masked = True
    grouped_gradients = False
    dtypes = {**Kernel.dtypes, torch.float32: torch.float32}
    gradient_dtypes = dtypes
    #: Nothing says so.
    repeats_gradients = False

    def run(self, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        # Intel's gives a log-sum-exp only for an input that needs gradients. Nothing is recorded.
        q = (x.q.clone() if x.q.is_inference() else x.q.detach()).requires_grad_()
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            o, lse, *_ = aten._scaled_dot_product_fused_attention_overrideable(q, x.k, x.v, x.terms, 0.0, x.causal, False, scale=x.scale)
        return o, lse.reshape(x.q.shape[:3])

    def run_backward(
        self, x: Inputs, d_o: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        counts = (None, None, x.q.shape[2], x.k.shape[2])
        run = aten._scaled_dot_product_fused_attention_overrideable_backward
        wanted = (True, True, True, False)
        rest = (0.0, x.causal, *_no_dropout(x.q))
        dq, dk, dv, _ = run(d_o, *x[:3], x.terms, wanted, o, lse[..., None], *counts, *rest, scale=x.scale)
        return dq, dk, dv


#: On NVIDIA log-sum-exps of the efficient kernel are padded to a multiple of it, with ∞.
ROWS_OF_EFFICIENT = 32


def _aligned(x: Inputs) -> torch.Tensor | None:
    """Terms for the efficient kernel, which reads their rows in whole groups of 16 bytes."""
    if x.terms is None:
        return None
    count = x.k.shape[2]
    padded = torch.nn.functional.pad(x.terms, (0, -count % 16))
    return padded.expand(*x.q.shape[:3], -1)[..., :count]


def _no_dropout(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The state of a generator, which nothing reads without dropout."""
    return q.new_empty(2, dtype=torch.int64), q.new_empty((), dtype=torch.int64)


_BY_DEVICE: dict[str, list[type[Kernel]]] = {
    "cpu": [FlashOnCpu],
    "cuda": [Flash, CuDnn, Efficient],
}
#: Of XPU, and of every other device.
_OF_OTHERS: list[type[Kernel]] = [Overrideable]
#: In ``KYKLOS_TORCH_KERNEL``: no kernel but matrix products.
PRODUCTS = "products"


class Kernels:
    """The kernels of a device, best first. Each is used for a type and head dim, for its masks and for its gradients when small
    blocks of that kind have shown that its results are right there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        found = [kind() for kind in _BY_DEVICE.get(device.type, _OF_OTHERS)]
        wanted = os.environ.get("KYKLOS_TORCH_KERNEL", "")
        names = [kernel.name for kernel in found]
        if wanted and wanted not in [*names, PRODUCTS]:
            raise ValueError(f"KYKLOS_TORCH_KERNEL={wanted!r}: on {device} there are {', '.join([*names, PRODUCTS])}")
        self._kernels = [kernel for kernel in found if wanted in ("", kernel.name)]
        self._found_right = cache(self._found_right)  # type: ignore[method-assign]

    def of(self, block: Block, piece: Piece, gradients: bool = False) -> Kernel | None:
        """The kernel for a piece; ``None`` where matrix products are used."""
        dtype, dim = block.q.dtype, block.q.shape[3]
        masked = piece.kind == "masked" or block.bias is not None
        takes = (kernel for kernel in self._kernels if (kernel.takes_gradients if gradients else kernel.takes)(block, piece))
        return next((kernel for kernel in takes if self._is_right(kernel, dtype, dim, gradients, masked)), None)

    def names(self, dtype: torch.dtype, dim: int, gradients: bool) -> str:
        """Which kernels are used for elements of a type and a head dim, in words."""
        usable = (kernel for kernel in self._kernels if dtype in (kernel.gradient_dtypes if gradients else kernel.dtypes))
        fits = (kernel for kernel in usable if dim <= kernel.largest_dim and dim % kernel.dim_step == 0)
        return ", ".join(kernel.name for kernel in fits if self._is_right(kernel, dtype, dim, gradients, False)) or "matrix products"

    def accuracy(self, dtype: torch.dtype) -> tuple[float, float, float]:
        """:meth:`Kernel.accuracy` of the worst of them."""
        of_log_sum_exp, of_output, of_gradients = zip((0.0, 0.0, 0.0), *(kernel.accuracy(dtype) for kernel in self._kernels), strict=True)
        return max(of_log_sum_exp), max(of_output), max(of_gradients)

    def _is_right(self, kernel: Kernel, dtype: torch.dtype, dim: int, gradients: bool, masked: bool) -> bool:
        return self._found_right(kernel, dtype, dim, gradients, masked, _flash_version())

    def _found_right(self, kernel: Kernel, dtype: torch.dtype, dim: int, gradients: bool, masked: bool, _version: str | None) -> bool:
        """Tries a kernel on small blocks. In a thread of its own: modes of this one, as autocast, do not count."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._tries, kernel, dtype, dim, gradients, masked).result()

    def _tries(self, kernel: Kernel, dtype: torch.dtype, dim: int, gradients: bool, masked: bool) -> bool:
        kinds = [("masked", 77)] if masked else [("full", 1), ("causal", 77), ("full", 77)]
        try:
            blocks = [_small_block(self.device, dtype, dim, kind, rows) for kind, rows in kinds]
            if gradients:
                return all(_gradients_agree(kernel, *block) for block in blocks)
            return all(_agrees(kernel, *block) for block in blocks) and _notices(kernel, *blocks[-1])
        except torch.OutOfMemoryError:
            # It says nothing about the kernel.
            raise
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):
            # Not on this device, or not with these arguments in this version.
            return False


def _flash_version() -> str | None:
    """The flash attention that the program has chosen for the operator, ``None`` for PyTorch's own."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if current is None else current()


def _rounding(dtype: torch.dtype) -> float:
    """Of elements of size one, with their own roundings before and after: five units are far from any fault."""
    return 5 * max(torch.finfo(dtype).eps, 1e-6)


def _output(exact: State) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which rows saw a key, the output, and the log-sum-exp."""
    saw = exact.l != 0
    return saw, exact.a / torch.where(saw, exact.l, 1.0)[..., None], torch.where(saw, exact.m + exact.l.log(), 0.0)


def _agrees(kernel: Kernel, block: Block, piece: Piece) -> bool:
    """Whether a kernel agrees with matrix products."""
    dtype = block.q.dtype
    found, right = kernel.attend(block, piece)
    if right is not None and not bool(right.all()):
        return False
    of_lse, _, _ = kernel.accuracy(dtype)
    saw, o, lse = _output(by_products(block, piece))
    own_lse = torch.where(saw, found.m + found.l.log(), 0.0)
    return bool(((found.a - o).abs().amax() <= _rounding(dtype)) & ((own_lse - lse).abs().amax() <= of_lse + 1e-5))


def _gradients_agree(kernel: Kernel, block: Block, piece: Piece) -> bool:
    """Whether the gradients of a kernel agree with those by matrix products."""
    saw, o, lse = _output(by_products(block, piece))
    d_o, delta = torch.sin(o * 7).to(block.q.dtype), torch.cos(lse)
    stats = torch.stack([torch.where(saw, lse, -EMPTY_M), torch.ones_like(lse), torch.where(saw, delta, 0.0), torch.zeros_like(lse)], -1)
    gradients = kernel.gradients(block, piece, d_o, stats)
    if gradients is None:
        return False
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (block.q, block.k, block.v))
    by_hand = Gradients(d_o, stats, dq, dk, dv, None)
    attend_backward(block, piece, by_hand, None)
    pairs = zip(gradients, (by_hand.dq, by_hand.dk, by_hand.dv), strict=True)
    limit = _rounding(block.q.dtype)
    agrees = all(bool((own - other).abs().amax() <= limit * other.abs().amax()) for own, other in pairs)
    has_row_5 = piece.rows.stop > 5
    return agrees and (not has_row_5 or all(kernel.gradients(block, piece, d_o, stats) is None for _ in _poisoned(block)))


def _notices(kernel: Kernel, block: Block, piece: Piece) -> bool:
    """Whether it can be seen in a kernel's results that it met what is not finite: such rows count as wrong."""
    batch, kv_heads, keys, _ = block.k.shape
    key = (torch.arange(keys, device=block.device) == 5).expand(batch, kv_heads, keys)
    sees = block.sees_any(key, piece)
    for name in _poisoned(block):
        _, right = kernel.attend(block, piece)
        if right is None or bool((right[:, :, 5] if name == "q" else right & sees).any()):
            return False
    return True


def _poisoned(block: Block) -> Iterator[str]:
    """Which tensor of ``block`` has a NaN or an infinity for now, in row 5."""
    for name, number in itertools.product(("q", "k", "v"), (math.nan, math.inf)):
        given = getattr(block, name)
        poisoned = given.clone()
        poisoned[:, :, 5, 0] = number
        setattr(block, name, poisoned)
        yield name
        setattr(block, name, given)


def _small_block(device: torch.device, dtype: torch.dtype, dim: int, kind: str, rows: int) -> tuple[Block, Piece]:
    """Two batch entries, and rows and keys that are no multiples of anything."""
    batch, keys, heads, kv_heads = 2, 77 if kind == "causal" else 143, 4, 2
    # The same numbers everywhere, without a change of anybody's generator.
    wave = lambda n, factor: torch.sin(torch.arange(n, dtype=torch.float64, device="cpu") * factor).to(dtype).to(device)  # noqa: E731
    place = lambda count, of: (0, count * of * dim, of * dim, dim)  # noqa: E731
    q, k, v = (
        (wave(batch * count * of * dim, factor).view(torch.uint8), place(count, of))
        for count, of, factor in ((rows, heads, 0.71), (keys, kv_heads, 0.37), (keys, kv_heads, 0.53))
    )
    positions = torch.arange(keys, dtype=torch.int32, device="cpu")
    row = torch.arange(rows, dtype=torch.int32, device="cpu")
    # The first row sees nothing.
    spans = torch.stack([row // 3, torch.where(row == 0, 0, row + 60)], -1)
    numbers = (dim**-0.5, None, True)
    words = [bytes(tensor.numpy().tobytes()) for tensor in (positions, spans)]
    block = Block(dtype, (batch, rows, heads, dim), q, k, v, [0, 0, 1, 1], numbers, words[0], words[1:], None)
    return block, Piece(kind, slice(0, batch), slice(0, rows), slice(0, keys), 0)

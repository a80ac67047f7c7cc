"""The attention kernels of PyTorch that give a log-sum-exp, by device. Those that do not are left out: kernels for Metal, and the
kernels of ``scaled_dot_product_attention`` by itself."""

from __future__ import annotations

import os
from functools import cache

import torch

from ._block import Block, Piece
from ._forward import by_products
from ._kernels import Kernel

aten = torch.ops.aten


class FlashOnCpu(Kernel):
    """Flash attention of PyTorch's CPU backend. float16 takes it as long as float32, whose results are better."""

    name = "flash for CPU"
    masked = True
    largest_dim = 1 << 16
    dim_step = 1
    dtypes = {torch.float32: torch.float32, torch.float16: torch.float32, torch.bfloat16: torch.bfloat16}

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, terms: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=terms, scale=scale)

    def run_backward(
        self,
        d_o: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        terms: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_o, q, k, v, o, lse, 0.0, causal, attn_mask=terms, scale=scale
        )


class Flash(Kernel):
    """Flash attention on NVIDIA and AMD: version 2, or what ``torch.nn.attention.activate_flash_attention_impl`` has chosen."""

    name = "flash"

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, terms: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return o, lse


class CuDnn(Kernel):
    """The kernel of NVIDIA's cuDNN."""

    name = "cuDNN"
    largest_dim = 128

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, terms: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        # Some versions have a last axis of 1.
        return o, lse.reshape(q.shape[:3])


class Efficient(Kernel):
    """Memory-efficient attention on NVIDIA and AMD, which takes masks."""

    name = "efficient"
    masked = True
    grouped = False

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, terms: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if terms is not None:
            # It reads rows of terms in whole groups of 16 bytes.
            count = k.shape[2]
            padded = torch.nn.functional.pad(terms, (0, -count % 16))
            terms = padded.expand(q.shape[0], q.shape[1], q.shape[2], -1)[..., :count]
        o, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, terms, True, 0.0, causal, scale=scale)
        # Rows are padded.
        return o, lse[..., : q.shape[2]]


class Overrideable(Kernel):
    """The kernel that a device of another vendor brings, such as Intel's."""

    name = "the vendor's"
    grouped = False

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, terms: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        run = aten._scaled_dot_product_fused_attention_overrideable
        o, lse, *_ = run(q, k, v, None, 0.0, causal, False, scale=scale)
        return o, lse.reshape(q.shape[:3])


_BY_DEVICE: dict[str, list[type[Kernel]]] = {
    "cpu": [FlashOnCpu],
    "cuda": [Flash, CuDnn, Efficient],
    "xpu": [Overrideable],
}
#: In ``KYKLOS_TORCH_KERNEL``: no kernel but matrix products.
PRODUCTS = "products"


class Kernels:
    """The kernels of a device, best first. Each is used for a type and head dim when a small block has shown that its results
    are right there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        found = [kind() for kind in _BY_DEVICE.get(device.type, [])]
        wanted = os.environ.get("KYKLOS_TORCH_KERNEL", "")
        names = [kernel.name for kernel in found]
        if wanted and wanted not in [*names, PRODUCTS]:
            raise ValueError(f"KYKLOS_TORCH_KERNEL={wanted!r}: on {device} there are {', '.join([*names, PRODUCTS])}")
        self._kernels = [kernel for kernel in found if wanted in ("", kernel.name)]
        self._is_right = cache(self._is_right)  # type: ignore[method-assign]

    def of(self, block: Block, piece: Piece) -> Kernel | None:
        """The kernel for a piece; ``None`` where matrix products are used."""
        dtype, dim = block.q.dtype, block.q.shape[3]
        takes = (kernel for kernel in self._kernels if kernel.takes(block, piece))
        return next((kernel for kernel in takes if self._is_right(kernel, dtype, dim)), None)

    def names(self, dtype: torch.dtype, dim: int) -> str:
        """Which kernels are used for elements of a type and a head dim, in words."""
        usable = (kernel for kernel in self._kernels if dtype in kernel.dtypes and dim <= kernel.largest_dim)
        names = [kernel.name for kernel in usable if dim % kernel.dim_step == 0 and self._is_right(kernel, dtype, dim)]
        return ", ".join(names) or "matrix products"

    def accuracy(self, dtype: torch.dtype) -> tuple[float, float]:
        worst = [kernel.accuracy(dtype) for kernel in self._kernels] or [(0.0, 0.0)]
        return max(error for error, _ in worst), max(error for _, error in worst)

    def _is_right(self, kernel: Kernel, dtype: torch.dtype, dim: int) -> bool:
        """Tries a kernel on pieces of all kinds with rows and keys that are no multiples of anything."""
        try:
            return all(self._agrees(kernel, dtype, dim, kind) for kind in ("full", "causal", "masked"))
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):
            # Not on this device, or not with these arguments in this version.
            return False

    def _agrees(self, kernel: Kernel, dtype: torch.dtype, dim: int, kind: str) -> bool:
        if kind == "masked" and not kernel.masked:
            return True
        block, piece = _small_block(self.device, dtype, dim, kind)
        found, right = kernel.attend(block, piece)
        exact = by_products(block, piece)
        if right is not None and not bool(right.all()):
            return False
        # Elements of size one, with their own roundings before and after: five units are far from any fault.
        rounding = 5 * max(torch.finfo(dtype).eps, 1e-6)
        o, lse = exact.a / exact.l[..., None], exact.m + exact.l.log()
        of_o, of_lse = (found.a - o).abs().amax(), (found.m + found.l.log() - lse).abs().amax()
        return bool((of_o <= rounding) & (of_lse <= max(1e-4, 0.1 * rounding)))


def _small_block(device: torch.device, dtype: torch.dtype, dim: int, kind: str) -> tuple[Block, Piece]:
    rows, keys, heads, kv_heads = 77, 77 if kind == "causal" else 143, 4, 2
    # The same numbers everywhere, without a change of anybody's generator.
    wave = lambda n, factor: torch.sin(torch.arange(n, dtype=torch.float64, device="cpu") * factor).to(dtype).to(device)  # noqa: E731
    place = lambda of: (0, 0, of * dim, dim)  # noqa: E731
    q, k, v = (
        (wave(count * of * dim, factor).view(torch.uint8), place(of))
        for count, of, factor in ((rows, heads, 0.71), (keys, kv_heads, 0.37), (keys, kv_heads, 0.53))
    )
    positions = torch.arange(keys, dtype=torch.int32, device="cpu")
    row = torch.arange(rows, dtype=torch.int32, device="cpu")
    spans = torch.stack([row // 3, row + 60], -1)
    numbers = (dim**-0.5, None, True)
    words = [bytes(tensor.numpy().tobytes()) for tensor in (positions, spans)]
    block = Block(dtype, (1, rows, heads, dim), q, k, v, [0, 0, 1, 1], numbers, words[0], words[1:], None)
    return block, Piece(kind, slice(0, 1), slice(0, rows), slice(0, keys), 0)

"""The operations of a device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch

from . import _backward, _codes, _forward
from ._backward import Gradients
from ._block import Bias, Block, Piece
from ._forward import Results, Running
from ._memory import DTYPES, Place, dense, elements, rows, unit
from ._state import EMPTY_M, RowSet, State, finalize
from ._vendors import Kernels

#: Kernels of GPUs read so many bytes at once.
GPU_ALIGNMENT = 16
#: Types of devices with several streams.
STREAMS = ("cuda", "xpu")
#: Buffers begin and end at multiples of it.
ALIGNMENT = 16
Shape = tuple[int, int, int, int]


class Device:
    """A device of PyTorch, ``name`` as in :class:`torch.device`."""

    def __init__(self, name: str) -> None:
        # With its index, as tensors have it.
        self.device = torch.empty(0, device=name).device
        if self.device.type == "meta":
            raise ValueError("tensors of it have no elements")
        #: The default stream, as a new thread has it.
        self._stream: Any = None
        if self.device.type in STREAMS:
            with ThreadPoolExecutor(1) as thread:
                self._stream = thread.submit(torch.accelerator.current_stream, self.device).result()
        self.kernels = Kernels(self.device)

    def info(self) -> tuple[str, str, str]:
        """Name, driver, and kernel."""
        return f"torch:{self.device}", f"PyTorch {torch.__version__}", self.kernels.names(torch.bfloat16, 128, gradients=False)

    def accuracy(self, dtype: str) -> tuple[float, float, float]:
        """How far results may be off beyond float32 arithmetic: of a log-sum-exp, and of the output and the gradients of a block
        relative to their largest element."""
        return self.kernels.accuracy(DTYPES[dtype])

    def kernel(self, dtype: str, dim: int) -> str:
        """The kernels for elements of a type and a head dim, in words."""
        forward, gradients = (self.kernels.names(DTYPES[dtype], dim, gradients=which) for which in (False, True))
        return forward if forward == gradients else f"{forward}; gradients: {gradients}"

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    # Memory.

    def alloc(self, count: int) -> torch.Tensor:
        try:
            return torch.empty(-(-count // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None
        except (RuntimeError, TypeError, OverflowError) as error:
            # The CPU's allocator has no type of its own for it.
            raise (MemoryError(str(error)) if self.is_cpu else error) from None

    def upload(self, data: Any, count: int) -> torch.Tensor:
        """``data``: an array by DLPack of at least ``count`` bytes, which is only read."""
        given = torch.from_dlpack(data).view(torch.uint8)[:count]
        if self.device.type in STREAMS:
            given = _pinned(count).copy_(given)
        # PyTorch does not use pinned memory again before the copy is done.
        return given.to(self.device, non_blocking=given.is_pinned())

    def adopt(self, array: Any) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], str] | None:
        """The memory of a tensor of this device as a buffer, with its shape, strides and type; ``None`` of another array. A copy,
        if elements share memory, if those of the last axis are apart, and on a GPU if rows begin where its kernels do not read."""
        if not isinstance(array, torch.Tensor) or array.device != self.device or array.layout != torch.strided:
            return None
        dtype = next((name for name, dtype in DTYPES.items() if dtype == array.dtype), None)
        if dtype is None:
            raise TypeError(f"elements of {str(array.dtype).removeprefix('torch.')}")
        array = array.detach()
        axes = sorted((stride, extent) for stride, extent in zip(array.stride(), array.shape, strict=True) if extent > 1)
        apart = all(outer[0] >= inner[0] * inner[1] for inner, outer in zip(axes, axes[1:], strict=False))
        whole = not axes or axes[0][0] > 0 and (array.shape[-1] == 1 or array.stride(-1) == 1)
        size = array.element_size()
        aligned = self.is_cpu or all(
            number % GPU_ALIGNMENT == 0
            for number in (array.data_ptr(), *(stride * size for stride, _ in axes if stride != 1))
        )
        if not (apart and whole and aligned) or array.is_conj() or array.is_neg():
            array = array.clone(memory_format=torch.contiguous_format)
        reach = 0
        if array.numel():
            reach = 1 + sum((extent - 1) * stride for extent, stride in zip(array.shape, array.stride(), strict=True))
        self._wait_for_caller()
        flat = array.as_strided((reach,), (1,), int(array.storage_offset())).view(torch.uint8)
        return flat, tuple(array.shape), array.stride(), dtype

    def _wait_for_caller(self) -> None:
        """The thread of the session gives its work to the default stream. What the caller has given to another stream is done
        before."""
        if self.device.type in STREAMS and torch.accelerator.current_stream(self.device) != self._stream:
            torch.accelerator.current_stream(self.device).synchronize()

    def rows_on_host(self, array: Any, some_in_place: bool) -> torch.Tensor | None:
        """The rows of a mask or a bias in host memory, if ``array`` is a tensor of this device; ``None`` of another array. With
        ``some_in_place`` ``None`` of numbers whose rows end on a 4-byte boundary, too."""
        if not isinstance(array, torch.Tensor) or array.device != self.device:
            return None
        whole = array.dtype in DTYPES.values() and array.dim() and array.shape[-1] * array.dtype.itemsize % 4 == 0
        return None if some_in_place and whole else array.detach().cpu()

    def result(self, buffer: torch.Tensor, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        """What is at the beginning of a buffer, as a tensor for the caller, and computed."""
        self.wait()
        return dense(buffer, DTYPES[dtype], shape)

    def write(self, buffer: torch.Tensor, offset: int, data: bytes) -> None:
        if data:
            buffer[offset : offset + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)

    def on_host(self, buffer: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, int, int]:
        """Bytes of a buffer in host memory, with their address and number."""
        host = buffer[start:end]
        if not self.is_cpu:
            host = _pinned(end - start).copy_(host) if self.device.type in STREAMS else host.to("cpu")
        return host, host.data_ptr(), host.numel()

    def clone(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.clone()

    def clear(self, buffer: torch.Tensor) -> None:
        buffer.zero_()

    def wait(self) -> None:
        """Until what the thread of a session has given to the device is done."""
        if self._stream is not None:
            self._stream.synchronize()
        elif not self.is_cpu:
            torch.accelerator.synchronize(self.device)

    def repack(
        self, source: torch.Tensor, at: Place, into: torch.Tensor, into_at: Place, extent: tuple[int, int, int, int]
    ) -> None:
        """Copies rows; places and the last extent are in bytes. Also called by the caller's thread."""
        *counts, width = extent
        starts = (int(source.storage_offset()), int(into.storage_offset()))
        dtype = unit(width, *at, *into_at, *starts)
        size = dtype.itemsize
        shape = [*counts, width // size]
        to, of = (tuple(number // size for number in place) for place in (into_at, at))
        with self._stream or nullcontext():
            rows(into, dtype, shape, to).copy_(rows(source, dtype, shape, of))  # type: ignore[arg-type]

    def accumulate(
        self, source: torch.Tensor, at: Place, into: torch.Tensor, into_at: Place, extent: tuple[int, int, int, int]
    ) -> None:
        *counts, width = extent
        shape = [*counts, width // 4]
        to, of = (tuple(number // 4 for number in place) for place in (into_at, at))
        rows(into, torch.float32, shape, to).add_(rows(source, torch.float32, shape, of))  # type: ignore[arg-type]

    # Other forms of elements.

    def convert(
        self,
        source: tuple[torch.Tensor, int, str],
        into: tuple[torch.Tensor, int, str],
        shape: Shape,
        overflow: torch.Tensor | None,
    ) -> None:
        """Between storage types: buffer, first element, type."""
        (given, wanted) = (_stored(*stored, shape) for stored in (source, into))
        wanted.copy_(given)
        if overflow is not None and (given.dtype, wanted.dtype) == (torch.float32, torch.float16):
            lost = (torch.isinf(wanted) & torch.isfinite(given)).any()
            word = elements(overflow, torch.int32)[:1]
            word.bitwise_or_(lost.to(torch.int32))

    def encode(
        self, source: tuple[torch.Tensor, int, str], codes: torch.Tensor, scales: torch.Tensor, channels: bool, shape: Shape
    ) -> None:
        _codes.encode(_stored(*source, shape), dense(codes, torch.int8, shape), elements(scales, torch.float32), channels)

    def decode(
        self, codes: torch.Tensor, scales: torch.Tensor, channels: bool, into: tuple[torch.Tensor, int, str], shape: Shape
    ) -> None:
        _codes.decode(dense(codes, torch.int8, shape), elements(scales, torch.float32), channels, _stored(*into, shape))

    # Attention.

    def reset_state(self, ml: torch.Tensor, shape: Shape) -> None:
        """Without ``a``, whose zeros are written when something reads it."""
        batch, count, heads, _ = shape
        pairs = dense(ml, torch.float32, (batch, heads, count, 2))
        pairs[..., 0], pairs[..., 1] = EMPTY_M, 0.0

    def merge(self, a: torch.Tensor, ml: torch.Tensor, from_a: torch.Tensor, from_ml: torch.Tensor, shape: Shape) -> None:
        State.of(a, ml, shape).merge(State.of(from_a, from_ml, shape))

    def finalize(
        self,
        a: torch.Tensor,
        ml: torch.Tensor,
        shape: Shape,
        sinks: Sequence[float],
        dtype: str,
        o: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        finalize(State.of(a, ml, shape), sinks, *_results(dtype, shape, o, lse))

    def block(
        self,
        dtype: str,
        shape: Shape,
        q: tuple[torch.Tensor, Place],
        k: tuple[torch.Tensor, Place],
        v: tuple[torch.Tensor, Place],
        kv_head_of: Sequence[int],
        numbers: tuple[float, float | None, bool],
        positions: bytes,
        spans: Sequence[bytes],
        bias: tuple[bool, torch.Tensor, Place] | None,
    ) -> Block:
        """One block of queries and keys, for :meth:`attend` and :meth:`attend_backward`."""
        of = None if bias is None else Bias(*bias)
        return Block(DTYPES[dtype], shape, q, k, v, kv_head_of, numbers, positions, spans, of)

    def running(
        self,
        a: torch.Tensor,
        ml: torch.Tensor,
        shape: Shape,
        is_empty: bool,
        results: tuple[Sequence[float], str, torch.Tensor, torch.Tensor] | None,
    ) -> Running:
        """What a block is attended into: a state, whose ``a`` is not written if it ``is_empty``; and the sinks, the type, ``o``
        and ``lse`` of results, if these are wanted."""
        into = None
        if results is not None:
            sinks, dtype, o, lse = results
            into = Results(sinks, *_results(dtype, shape, o, lse), RowSet(shape[0], shape[1]))
        return Running(State.of(a, ml, shape), is_empty, into)

    def attend(self, block: Block, into: Running, piece: tuple[Any, ...], alone: bool) -> None:
        part = _piece(*piece)
        _forward.attend(block, part, alone, into, self.kernels.of(block, part))

    def row_stats(
        self,
        dtype: str,
        shape: Shape,
        o: torch.Tensor,
        d_o: torch.Tensor,
        lse: torch.Tensor,
        d_lse: torch.Tensor | None,
        stats: torch.Tensor,
    ) -> None:
        *counts, _ = shape
        given, gradient = (dense(buffer, DTYPES[dtype], shape) for buffer in (o, d_o))
        of_lse = None if d_lse is None else dense(d_lse, torch.float32, counts)
        pairs, four = (dense(buffer, torch.float32, [*counts, n]) for buffer, n in ((lse, 2), (stats, 4)))
        _backward.row_stats(given, gradient, pairs, of_lse, four)

    def gradients(
        self,
        block: Block,
        shape: Shape,
        d_o: tuple[torch.Tensor, Place],
        stats: tuple[torch.Tensor, Place],
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        kv: tuple[int, Place],
        d_bias: tuple[torch.Tensor, Place, int] | None,
    ) -> Gradients:
        """The gradients of ``block``. ``kv``: the key/value heads of ``dk`` and ``dv``, and their place in both."""
        batch, count, heads, dim = shape
        kv_heads, place = kv
        of_kv = [batch, block.k.shape[2], kv_heads, dim]
        bias = None
        if d_bias is not None:
            buffer, at, columns = d_bias
            bias = _backward.bias_sum(buffer, at, (batch, count, heads), columns)
        return Gradients(
            d_o=rows(d_o[0], block.q.dtype, shape, d_o[1]).transpose(1, 2),
            stats=rows(stats[0], torch.float32, [batch, count, heads, 4], stats[1]).transpose(1, 2),
            dq=dense(dq, torch.float32, shape).transpose(1, 2),
            dk=rows(dk, torch.float32, of_kv, place).transpose(1, 2),
            dv=rows(dv, torch.float32, of_kv, place).transpose(1, 2),
            d_bias=bias,
        )

    def attend_backward(self, block: Block, gradients: Gradients, piece: tuple[Any, ...]) -> None:
        part = _piece(*piece)
        _backward.attend(block, part, gradients, self.kernels.of(block, part, gradients=True))


def _pinned(count: int) -> torch.Tensor:
    """Bytes of host memory that a GPU reads and writes by itself, which is several times as fast; other memory where the system gives
    none."""
    try:
        return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty(count, dtype=torch.uint8, device="cpu")


def _results(dtype: str, shape: Shape, o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    *counts, _ = shape
    return dense(o, DTYPES[dtype], shape).transpose(1, 2), dense(lse, torch.float32, [*counts, 2]).transpose(1, 2)


def _stored(buffer: torch.Tensor, first: int, dtype: str, shape: Shape) -> torch.Tensor:
    batch, tokens, heads, dim = shape
    count = batch * tokens * heads * dim
    return elements(buffer, DTYPES[dtype])[first : first + count].view(shape)


def _piece(kind: str, mask: int, batch: tuple[int, int], rows_: tuple[int, int], keys: tuple[int, int]) -> Piece:
    return Piece(kind, slice(*batch), slice(*rows_), slice(*keys), mask)

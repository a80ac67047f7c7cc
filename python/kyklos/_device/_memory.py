"""Buffers as tensors of other types and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

#: The first element, and the strides of batch, rows and heads.
Place: TypeAlias = "tuple[int, int, int, int]"

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def elements(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """All of ``buffer`` in another type; without its last bytes, if they are no whole element."""
    size = dtype.itemsize
    return buffer[: buffer.numel() // size * size].view(dtype)


def rows(buffer: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], place: Place) -> torch.Tensor:
    """``[batch, rows, heads, dim]`` in ``buffer``."""
    offset, batch, row, head = place
    typed = elements(buffer, dtype)
    return typed.as_strided(tuple(shape), (batch, row, head, 1), int(typed.storage_offset()) + offset)


def dense(buffer: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of ``shape`` at the beginning of ``buffer``."""
    count = 1
    for extent in shape:
        count *= extent
    return elements(buffer, dtype)[:count].view(tuple(shape))


def unit(*numbers: int) -> torch.dtype:
    """The largest type whose size divides all of these numbers of bytes."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(number % dtype.itemsize == 0 for number in numbers):
            return dtype
    return torch.uint8

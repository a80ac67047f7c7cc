"""8-bit codes with scales, the format ``int8`` of messages: an element is its code times its scale, and the code −128 is NaN."""

from __future__ import annotations

import torch

#: Consecutive tokens of a channel that share a scale.
TOKENS_PER_SCALE = 64
NOT_FINITE = -128


def encode(source: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, channels: bool) -> None:
    """``source`` and ``codes``: ``[batch, tokens, heads, dim]``. A scale is for 64 tokens of a channel, or for a head of a token."""
    numbers = source.float()
    finite = torch.isfinite(numbers)
    sizes = torch.where(finite, numbers.abs(), 0.0)
    if channels:
        batch, tokens, heads, dim = sizes.shape
        groups = -(-tokens // TOKENS_PER_SCALE)
        padded = torch.nn.functional.pad(sizes, (0, 0, 0, 0, 0, groups * TOKENS_PER_SCALE - tokens))
        largest = padded.view(batch, groups, TOKENS_PER_SCALE, heads, dim).amax(2)
    else:
        largest = sizes.amax(-1)
    scale = largest / 127.0
    # Devices may flush subnormal numbers.
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
    scales[: scale.numel()].view(scale.shape).copy_(scale)
    each = _each(scale, codes.shape, channels)
    rounded = torch.round(torch.where(finite, numbers, 0.0) / torch.where(each == 0, 1.0, each))
    codes.copy_(torch.where(finite, rounded, NOT_FINITE))


def decode(codes: torch.Tensor, scales: torch.Tensor, channels: bool, into: torch.Tensor) -> None:
    batch, tokens, heads, dim = codes.shape
    shape = (batch, -(-tokens // TOKENS_PER_SCALE), heads, dim) if channels else (batch, tokens, heads)
    count = 1
    for extent in shape:
        count *= extent
    each = _each(scales[:count].view(shape), codes.shape, channels)
    into.copy_(torch.where(codes == NOT_FINITE, torch.nan, codes.float() * each))


def _each(scales: torch.Tensor, shape: torch.Size, channels: bool) -> torch.Tensor:
    """The scale of each element, to be broadcast."""
    return scales.repeat_interleave(TOKENS_PER_SCALE, 1)[:, : shape[1]] if channels else scales[..., None]

"""Masks of the attention of diffusers, as groups take them."""

from __future__ import annotations

import math

import torch

from .._group import Group
from .._rows import gather


def four_axes(mask: torch.Tensor, rows_alike: bool) -> torch.Tensor:
    """``[batch, heads or 1, queries or 1, keys]``, with the first row alone if they are alike."""
    if mask.dim() == 2:
        return mask[:, None, None]
    mask = mask[:, None] if mask.dim() == 3 else mask
    return mask[:, :, :1] if rows_alike else mask


def of_keys(mask: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether a mask of four axes is of this rank's keys ``[batch, tokens, ...]``, for all queries. One of its only query is of all keys."""
    return mask.shape[2] == 1 and mask.shape[3] == k.shape[1]


def gather_mask(group: Group, mask: torch.Tensor, label: str) -> torch.Tensor:
    """``[batch or 1, keys of all ranks]`` in the order of the ranks, which is how the engine numbers tokens here; with the
    heads between if there are several."""
    rows = mask[:, :, 0, :].permute(2, 0, 1)
    if mask.dtype == torch.bool:
        hidden, shift = ~rows, torch.zeros(rows.shape)
    else:
        # Minus infinity apart: products of it with the zero weights of other rows would be NaN.
        hidden, shift = torch.isneginf(rows), rows.float().masked_fill(torch.isneginf(rows), 0.0)
    flat = torch.stack([hidden.float(), shift], -1).flatten(1)
    whole = gather(group, flat[None], label).reshape(-1, *rows.shape[1:], 2).permute(1, 2, 0, 3)
    hidden, shift = whole[..., 0] > 0.5, whole[..., 1]
    keys = ~hidden if mask.dtype == torch.bool else shift.masked_fill(hidden, -math.inf)
    return keys[:, 0] if keys.shape[1] == 1 else keys


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two masks are the same."""
    return a.dtype == b.dtype and torch.equal(a, b)


def mask_type(mask: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The type in which a group takes a mask: bool, or that of q."""
    return torch.bool if mask.dtype == torch.bool else dtype


def rows_of(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask of this rank's queries over all keys, ``[batch, heads, tokens, keys]``, as the bias of a call."""
    bias = mask.detach().to("cpu").transpose(1, 2)
    return bias if bias.dtype == torch.bool else bias.to(dtype)

"""Queries, keys and values, as groups take them."""

from __future__ import annotations

import torch

from .._group import Group
from .._arrays.torch import readable


def same_dim(group: Group, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Where the group reads them, with zeros up to the next multiple of 8 elements, which change neither q·k nor the rows of v."""
    states = readable(group, *(x.detach() for x in tensors))
    dim = -max(x.shape[-1] for x in states) // 8 * -8
    return tuple(x if x.shape[-1] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[-1])) for x in states)


def own_keys(group: Group, x: torch.Tensor, common: int, behind: bool = False) -> torch.Tensor:
    """Keys or values ``[batch, tokens, ...]`` with an equal part of the first ``common``, or of the last ones, which every rank has, so that each
    counts once."""
    first, end = (common * rank // group.size for rank in (group.rank, group.rank + 1))
    if behind:
        own = x.shape[1] - common
        return torch.cat([x[:, :own], x[:, own + first : own + end]], 1)
    return torch.cat([x[:, first:end], x[:, common:]], 1)


def alone(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``Split.attend``, to the keys that are here, without what gradients need. For compiled code, in which the call is fixed."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
    of_groups = q.shape[1] != k.shape[1]
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=of_groups).transpose(1, 2)
    return o.contiguous(), q.new_zeros(*o.shape[:-1], 2, dtype=torch.float32), torch.zeros(3, dtype=torch.int64)

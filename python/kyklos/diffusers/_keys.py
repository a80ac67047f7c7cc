"""Queries, keys and values, as groups take them."""

from __future__ import annotations

import torch

from .._group import Group
from .._torch_tensors import readable


def same_dim(group: Group, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Where the group reads them, with zeros up to the next multiple of 8 elements, which change neither q·k nor the rows of v."""
    states = readable(group, *(x.detach() for x in tensors))
    dim = -max(x.shape[-1] for x in states) // 8 * -8
    return tuple(x if x.shape[-1] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[-1])) for x in states)


def own_keys(group: Group, x: torch.Tensor, common: int) -> torch.Tensor:
    """Keys or values ``[batch, tokens, ...]`` with an equal part of the first ``common``, which every rank has, so that each counts once."""
    first, end = (common * rank // group.size for rank in (group.rank, group.rank + 1))
    return torch.cat([x[:, first:end], x[:, common:]], 1)

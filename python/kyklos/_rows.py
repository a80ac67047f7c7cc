"""Rows of tensors that are spread over the ranks, brought to all of them.

A call of attention in which each token sees its own value alone gives that value back: its only weight is exactly 1. With
``results="all"`` every rank gets the rows of all ranks, in the order of the ranks. So groups need no second kind of collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ._errors import RequestError
from ._group import Group

# Elements of a head: a multiple of 8 that kernels take.
_DIM = 64
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def gather(group: Group, rows: torch.Tensor, label: str) -> torch.Tensor:
    """The rows of all ranks.

    :param rows: ``[batch, own tokens, ...]``, float32, float16 or bfloat16. Ranks may have any numbers of tokens, zero included;
        the other axes and the type are the same on all ranks.
    :returns: ``[batch, tokens of all ranks, ...]`` on the device of ``rows``, with the bits of the rank that owned the row.
    """
    if rows.dtype not in _TYPES:
        raise RequestError(f"rows of {rows.dtype} for all ranks: use float32, float16 or bfloat16")
    batch, own, *rest = rows.shape
    width = math.prod(rest)
    padding = -width % _DIM

    def run(rows: torch.Tensor) -> torch.Tensor:
        flat = torch.nn.functional.pad(rows.reshape(batch, own, width), (0, padding))
        values = flat.reshape(batch, own, (width + padding) // _DIM, _DIM).to("cpu")
        none = torch.zeros_like(values)
        o, _ = group.attend(none, none, values, mask="window:0,0", results="all", label=label)
        everything = o.reshape(batch, o.shape[1], width + padding)[:, :, :width]
        return everything.reshape(batch, o.shape[1], *rest).to(rows.device)

    return without_backward(run, rows)


def broadcast(group: Group, numbers: list[int], label: str) -> list[int]:
    """The ``numbers`` of rank 0 on all ranks. All ranks pass as many, from 0 to 2^24 - 1, which float32 holds exactly."""
    own = numbers if group.rank == 0 else []
    rows = torch.zeros(1, 1 if own else 0, len(numbers))
    if own:
        rows[0, 0] = torch.tensor(own, dtype=torch.float32)
    return [int(number) for number in gather(group, rows, label)[0, 0].tolist()]


def without_backward(run: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """``run(*tensors)`` outside of autograd. If a gradient is asked for, ``backward()`` raises instead of leaving it out."""
    return _NoBackward.apply(run, *tensors)


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        return run(*(tensor.detach() for tensor in tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("a split model has no backward pass yet: run it under torch.no_grad()")

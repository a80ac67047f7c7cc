"""Rows of tensors that are spread over the ranks, brought to all of them.

A call of attention in which each token sees its own value alone gives that value back: its only weight is exactly 1. With
``results="all"`` every rank gets the rows of all ranks, in the order of the ranks. So groups need no second kind of collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._errors import RequestError
from ._group import Group
from ._arrays.torch import readable

# Elements of a head: a multiple of 8 that kernels take.
_DIM = 64
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def gather(group: Group, rows: torch.Tensor, label: str) -> torch.Tensor:
    """The rows of all ranks.

    Each rank's ``backward()`` gives its rows the sum of the gradients that all ranks have for them: the gradient of the sum of
    the losses of all ranks.

    :param rows: ``[batch, own tokens, ...]``, float32, float16 or bfloat16. Ranks may have any numbers of tokens, zero included;
        the other axes and the type are the same on all ranks.
    :returns: ``[batch, tokens of all ranks, ...]`` on the device of ``rows``, with the values of the rank that owned the row; −0 becomes 0.
    """
    return _Gathered.apply(rows, group, label)


def sum_rows(group: Group, rows: torch.Tensor, counts: list[int], label: str) -> torch.Tensor:
    """The sum of the ``rows`` of all ranks, of this rank's tokens. It is added in float64 and rounded once.

    :param rows: ``[batch, tokens of all ranks, ...]``, of one shape and type on all ranks.
    :param counts: the tokens of each rank, the same on all ranks.
    :returns: ``[batch, own tokens, ...]`` on the device of ``rows``.
    """
    own = rows[:, :0]
    for owner, part in enumerate(rows.split(counts, 1)):
        if counts[owner] == 0:
            continue
        everything = _exchange(group, part, f"{label} {owner}", owner)
        if owner == group.rank:
            # In the order of the ranks, each with all of these tokens.
            each = everything.unflatten(1, (group.size, counts[owner]))
            own = each.double().sum(1).to(rows.dtype)
    return own


def send(
    group: Group, rows: torch.Tensor, kept: Sequence[Sequence[tuple[int, int]]], wanted: Sequence[Sequence[tuple[int, int]]], label: str
) -> torch.Tensor:
    """Rows that one rank has and another one wants.

    :param rows: ``[batch, own tokens, ...]``; types as for :func:`gather`.
    :param kept: for each rank the numbers of its tokens, as half-open ranges; ``wanted`` those that it gets. Each number has one rank that keeps
        it, and one that wants it.
    :returns: ``[batch, wanted tokens, ...]`` on the device of ``rows``.
    """
    tokens = {"q_tokens": [_full(ranges) for ranges in wanted], "kv_tokens": [_full(ranges) for ranges in kept]}
    return _exchange(group, rows, label, "owner", sum(end - first for first, end in wanted[group.rank]), **tokens)


def _full(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(first, end) for first, end in ranges if end > first]


def _exchange(
    group: Group, rows: torch.Tensor, label: str, results: str | int, wanted: int | None = None, **tokens: Any
) -> torch.Tensor:
    """The rows of all ranks, on the ranks of ``results``; or those of the ``wanted`` tokens."""
    if rows.dtype not in _TYPES:
        raise RequestError(f"rows of {rows.dtype} for all ranks: use float32, float16 or bfloat16")
    batch, own, *rest = rows.shape
    width = math.prod(rest)
    padding = -width % _DIM
    flat = torch.nn.functional.pad(rows.detach().reshape(batch, own, width), (0, padding))
    (values,) = readable(group, flat.reshape(batch, own, (width + padding) // _DIM, _DIM))
    none = torch.zeros_like(values)
    q = none if wanted is None else none.new_zeros(batch, wanted, *none.shape[2:])
    o, _ = group.attend(q, none, values, mask="window:0,0", layout="bshd", results=results, label=label, **tokens)
    everything = o.reshape(batch, o.shape[1], width + padding)[:, :, :width]
    return everything.reshape(batch, o.shape[1], *rest).to(rows.device)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Group, label: str) -> torch.Tensor:
        ctx.group, ctx.label, ctx.own = group, label, rows.shape[1]
        return _exchange(group, rows, label, "all")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        label = f"{ctx.label[-100:]}, backward"
        own = torch.full((1, 1, 1), float(ctx.own))
        counts = [int(count) for count in _exchange(ctx.group, own, f"{label} rows", "all").flatten().tolist()]
        return sum_rows(ctx.group, gradients[0], counts, label), None, None


def broadcast(group: Group, numbers: list[int], label: str) -> list[int]:
    """The ``numbers`` of rank 0 on all ranks. All ranks pass as many, from 0 to 2^24 - 1, which float32 holds exactly."""
    own = numbers if group.rank == 0 else []
    rows = torch.zeros(1, 1 if own else 0, len(numbers))
    if own:
        rows[0, 0] = torch.tensor(own, dtype=torch.float32)
    return [int(number) for number in gather(group, rows, label)[0, 0].tolist()]


def without_backward(run: Callable[..., torch.Tensor], why: str, *tensors: torch.Tensor) -> torch.Tensor:
    """``run(*tensors)`` outside of autograd. If a gradient is asked for, ``backward()`` raises ``why`` instead of leaving it out."""
    return _NoBackward.apply(run, why, *tensors)


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], why: str, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.why = why
        return run(*(tensor.detach() for tensor in tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(ctx.why)

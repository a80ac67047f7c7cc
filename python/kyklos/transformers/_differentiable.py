"""A call of a group with gradients of q, k, v and sinks, for split models in eager mode.

Their labels have the number of the pass, so each call is another one: :mod:`kyklos.torch`, whose operator also works in compiled
code, would keep the options of each.
"""

from __future__ import annotations

from typing import Any

import torch

from .._group import Group


def attend(
    group: Group, states: list[torch.Tensor], sinks: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    """``o`` of :meth:`Group.attend` with these options. ``states`` are q, k and v where the group reads them. ``backward()`` is a
    call of all ranks."""
    return _Attend.apply(*states, sinks, group, options)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        group: Group,
        options: dict[str, Any],
    ) -> torch.Tensor:
        values = None if sinks is None else sinks.detach().to("cpu", torch.float32).tolist()
        ctx.group, ctx.options = group, {**options, "sinks": values}
        o, lse = group.attend(q.detach(), k.detach(), v.detach(), lse_pair=True, **ctx.options)
        ctx.save_for_backward(q, k, v, o, lse, sinks)
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        q, k, v, o, lse, sinks = ctx.saved_tensors
        d_o = gradients[0].to(o.dtype).contiguous()
        found = ctx.group.backward(*(x.detach() for x in (q, k, v, o, lse)), d_o, **ctx.options)
        d_sinks = None if sinks is None else torch.tensor(found.d_sinks_part).to(sinks)
        return found.dq, found.dk, found.dv, d_sinks, None, None

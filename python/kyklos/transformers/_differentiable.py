"""A call of a group with gradients of q, k, v, sinks and a bias, for split models in eager mode.

Their labels have the number of the pass, so each call is another one: :mod:`kyklos.torch`, whose operator also works in compiled
code, would keep the options of each.
"""

from __future__ import annotations

from typing import Any

import torch

from .._group import Group


def attend(
    group: Group, states: list[torch.Tensor], sinks: torch.Tensor | None, bias: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    """``o`` of :meth:`Group.attend` with these options. ``states`` are q, k and v, ``bias`` numbers, all where the group reads them.
    ``backward()`` is a call of all ranks."""
    return _Attend.apply(*states, sinks, bias, group, options)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        bias: torch.Tensor | None,
        group: Group,
        options: dict[str, Any],
    ) -> torch.Tensor:
        values = None if sinks is None else sinks.detach().to("cpu", torch.float32).tolist()
        ctx.group, ctx.options = group, {**options, "sinks": values}
        own = None if bias is None else bias.detach()
        o, lse = group.attend(q.detach(), k.detach(), v.detach(), lse_pair=True, bias=own, **ctx.options)
        ctx.save_for_backward(q, k, v, o, lse, sinks, bias)
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        q, k, v, o, lse, sinks, bias = ctx.saved_tensors
        d_o = gradients[0].to(o.dtype).contiguous()
        of_bias = ctx.needs_input_grad[4]
        own = None if bias is None else bias.detach()
        arrays = (x.detach() for x in (q, k, v, o, lse))
        found = ctx.group.backward(*arrays, d_o, bias=own, bias_gradient=of_bias, **ctx.options)
        d_sinks = None if sinks is None else torch.tensor(found.d_sinks_part).to(sinks)
        d_bias = found.d_bias.to(bias) if of_bias else None
        return found.dq, found.dk, found.dv, d_sinks, d_bias, None, None

"""A PyTorch operator for attention over the tokens of all ranks.

::

    import kyklos, kyklos.torch

    with kyklos.Group.from_env() as group:
        o, lse = kyklos.torch.attention(q, k, v, group, mask="causal")

The operator ``torch.ops.kyklos.attention`` works in eager mode and under ``torch.compile(fullgraph=True)``, where ranks may have
different numbers of tokens. It has an ordered effect: compiled code neither drops nor reorders it, so all ranks make the same
calls. Tensors of the CPU are read in place, and so are those of the NVIDIA GPU on which the rank computes
(``device="cuda:0"``); those of other devices pass through host memory.

It has gradients of q, k, v, sinks and of a bias, computed on processors, wgpu devices and NVIDIA GPUs; a ``backward()`` is a
call of all ranks, too. Each rank's loss is a part of one loss, the sum over the ranks: nothing is divided by their number.
:func:`sum_gradients` adds the gradients of parameters over the ranks.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch
from torch._library.effects import EffectType

from ._errors import RequestError
from ._gradients import sum_gradients
from ._group import Group
from ._options import complete
from ._torch_tensors import readable

__all__ = ["attention", "sum_gradients"]

# What a call's number stands for: the group and the options. The operator has the number, since graphs take no objects.
_calls: dict[int, tuple[weakref.ref[Group], dict[str, Any]]] = {}
_numbers: dict[tuple[Any, ...], int] = {}
_next = itertools.count()
_lock = threading.Lock()


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group,
    *,
    mask: str | torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    layout: str = "bhsd",
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over the tokens of all ranks of ``group``.

    :param q: this rank's queries ``[batch, heads, tokens, dim]``, of float32, float16 or bfloat16. Under autocast, q, k and v
        are converted to its type.
    :param k: its keys ``[batch, kv_heads, tokens, dim]``; ``heads`` is a multiple of ``kv_heads``, nothing is repeated.
    :param v: its values, of the shape of ``k``.
    :param mask: a notation as in :meth:`kyklos.Group.attend` (``"causal"``), or a bool tensor in which false hides a key, over
        the keys of all ranks: ``[batch or 1, heads or 1, tokens, keys]`` with the rows of this rank, or ``[batch or 1, keys]``,
        the same on all ranks. ``None``: every query sees every key.
    :param scale: factor on q·k; by default ``1/√dim``.
    :param softcap: logits become ``softcap · tanh(logit / softcap)``.
    :param sinks: one logit without a value for each query head, ``[heads]``. Their gradient on a rank is its rows' part: sum it
        over the ranks, as that of any parameter.
    :param bias: as a four-axis ``mask``, of the type of q, added to the logits. Its gradient is that of this rank's rows; that of a
        ``key_bias`` of numbers is this rank's part, as that of the sinks.
    :param layout: ``"bhsd"`` as above, or ``"bshd"`` for ``[batch, tokens, heads, dim]``.
    :param options: the other options of :meth:`kyklos.Group.attend`. ``results`` is ``"owner"``.
    :returns: ``o`` like ``q``, and ``lse``, float32 ``[batch, heads, tokens]`` (``"bshd"``: ``[batch, tokens, heads]``).
    """
    if options.get("results", "owner") != "owner":
        raise ValueError('kyklos.torch.attention has results="owner"; use Group.attend for others')
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f'layout {layout!r} is not known; use "bhsd" or "bshd"')
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    key_mask = options.pop("key_bias", None)
    if isinstance(mask, torch.Tensor):
        if mask.dtype != torch.bool:
            raise ValueError(f"a mask of {mask.dtype}: use bool, or pass it as bias")
        if mask.dim() == 2 and key_mask is None and bias is None:
            key_mask = mask
        elif bias is None and key_mask is None:
            bias = mask
        else:
            raise ValueError("a mask tensor beside a bias: add minus infinity to the bias where the mask is false")
        mask = None
    text = mask or "full"
    number = _number(group, scale, softcap, text, layout, *options.items())
    return torch.ops.kyklos.attention(q, k, v, bias, key_mask, sinks, number, layout == "bhsd")


@torch.compiler.assume_constant_result
def _number(group: Group, scale: float | None, softcap: float | None, mask: str, layout: str, *options: Any) -> int:
    """The number of a call. Equal calls of a group have one number, so that compiled code is made once."""
    given = {"scale": scale, "softcap": softcap, "mask": mask, "layout": layout, **dict(options)}
    key = (id(group), repr(sorted(given.items())))
    with _lock:
        number = _numbers.get(key)
        if number is not None and _calls[number][0]() is group:
            return number
        number = next(_next)
        _numbers[key] = number
        _calls[number] = (weakref.ref(group), complete(given))
        weakref.finalize(group, _forget, key, number)
        return number


def _forget(key: tuple[Any, ...], number: int) -> None:
    with _lock:
        _calls.pop(number, None)
        if _numbers.get(key) == number:
            del _numbers[key]


@torch.library.custom_op("kyklos::attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    key_bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    call: int,
    heads_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    group, options, states = _prepared((q, k, v), bias, key_bias, sinks, call)
    o, lse = group.attend(*states, **options)
    return o.to(q.device), lse.to(q.device)


def _prepared(
    tensors: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    key_bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    call: int,
) -> tuple[Group, dict[str, Any], list[torch.Tensor]]:
    """The group and the options of a call, and its tensors where the group reads them. It reads sinks and ``key_bias`` in host memory."""
    reference, options = _calls.get(call, (None, None))
    group = None if reference is None else reference()
    if group is None or options is None:
        raise RequestError("the group of this call is gone: form a new one, and compile again for it")
    if sinks is not None:
        options = {**options, "sinks": sinks.detach().to("cpu", torch.float32).tolist()}
    states = readable(group, *(tensor.detach() for tensor in tensors))
    own = None if bias is None else _bias(group, bias.detach())
    return group, {**options, "bias": own, "key_bias": None if key_bias is None else key_bias.detach().to("cpu")}, states


def _bias(group: Group, bias: torch.Tensor) -> torch.Tensor:
    """A bias where ``group`` reads it: numbers also on its GPU, if their rows end on a 4-byte boundary; a mask in host memory."""
    if bias.is_floating_point() and bias.shape[-1] * bias.element_size() % 4 == 0:
        return readable(group, bias)[0]
    return bias.to("cpu")


@_attention.register_fake
def _(q, k, v, bias, key_bias, sinks, call, heads_first):  # noqa: ANN001, ANN202
    lse = _fresh(q[..., :1].to(torch.float32), heads_first).squeeze(3)
    return _fresh(q, heads_first), lse


@torch.library.custom_op("kyklos::attention_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _attention_backward(
    d_o: torch.Tensor,
    d_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    bias: torch.Tensor | None,
    key_bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    of_bias: bool,
    call: int,
    heads_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = (q, k, v, o, lse, d_o.to(o.dtype), *([] if d_lse is None else [d_lse.to(torch.float32)]))
    group, options, states = _prepared(tensors, bias, key_bias, sinks, call)
    gradients = group.backward(*states, **{**options, "bias_gradient": of_bias})
    given = bias if key_bias is None else key_bias
    d_bias = q.new_empty(0, dtype=torch.float32) if gradients.d_bias is None or given is None else gradients.d_bias.to(given)
    d_sinks = torch.tensor(gradients.d_sinks_part, dtype=torch.float32 if sinks is None else sinks.dtype, device=q.device)
    tensors = gradients.dq.to(q.device), gradients.dk.to(q.device), gradients.dv.to(q.device)
    return *tensors, d_sinks if sinks is None else d_sinks.to(sinks.device), d_bias


@_attention_backward.register_fake
def _(d_o, d_lse, q, k, v, o, lse, bias, key_bias, sinks, of_bias, call, heads_first):  # noqa: ANN001, ANN202
    d_sinks = q.new_empty(0, dtype=torch.float32) if sinks is None else sinks.new_empty(sinks.shape)
    if not of_bias:
        d_bias = q.new_empty(0, dtype=torch.float32)
    else:
        d_bias = _fresh(bias, heads_first) if key_bias is None else key_bias.new_empty(key_bias.shape)
    return *(_fresh(tensor, heads_first) for tensor in (q, k, v)), d_sinks, d_bias


def _fresh(tensor: torch.Tensor, heads_first: bool) -> torch.Tensor:
    """A tensor of this shape as the library makes it: tokens before heads in memory."""
    if not heads_first:
        return tensor.new_empty(tensor.shape)
    batch, heads, tokens, dim = tensor.shape
    return tensor.new_empty(batch, tokens, heads, dim).transpose(1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.call, ctx.heads_first = inputs
    ctx.save_for_backward(*tensors, *output)
    # A gradient that nobody has asked for stays None.
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_o: torch.Tensor | None, d_lse: torch.Tensor | None) -> Any:
    q, k, v, bias, key_bias, sinks, o, lse = ctx.saved_tensors
    d_o = torch.zeros_like(o) if d_o is None else d_o
    wanted = ctx.needs_input_grad[3:5]
    dq, dk, dv, d_sinks, d_bias = torch.ops.kyklos.attention_backward(
        d_o, d_lse, q, k, v, o, lse, bias, key_bias, sinks, any(wanted), ctx.call, ctx.heads_first
    )
    of_bias = [d_bias if needed else None for needed in wanted]
    return dq, dk, dv, *of_bias, None if sinks is None else d_sinks, None, None


_attention.register_autograd(_differentiate, setup_context=_save)
_attention.register_effect(EffectType.ORDERED)
_attention_backward.register_effect(EffectType.ORDERED)

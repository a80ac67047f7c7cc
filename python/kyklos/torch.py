"""A PyTorch operator for attention over the tokens of all ranks.

::

    import kyklos, kyklos.torch

    with kyklos.Group.from_env() as group:
        o, lse = kyklos.torch.attention(q, k, v, group, mask="causal")

The operator ``torch.ops.kyklos.attention`` works in eager mode and under ``torch.compile(fullgraph=True)``, where ranks may have
different numbers of tokens. It has an ordered effect: compiled code neither drops nor reorders it, so all ranks make the same
calls. Tensors of the CPU are read in place; those of other devices pass through host memory. There is no backward pass yet:
``backward()`` raises.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch
from torch._library.effects import EffectType

from ._errors import RequestError
from ._group import Group
from ._options import complete

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
    :param sinks: one logit without a value for each query head, ``[heads]``.
    :param bias: as a four-axis ``mask``, of the type of q, added to the logits.
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
    if call not in _calls:
        raise RequestError("the group of this call is gone: form a new one, and compile again for it")
    reference, options = _calls[call]
    group = reference()
    if group is None:
        raise RequestError("the group of this call is gone: form a new one, and compile again for it")
    if sinks is not None:
        options = {**options, "sinks": sinks.detach().to("cpu", torch.float32).tolist()}
    host = [None if tensor is None else tensor.detach().to("cpu") for tensor in (q, k, v, bias, key_bias)]
    options = {**options, "bias": host[3], "key_bias": host[4]}
    o, lse = group.attend(*host[:3], **options)
    return o.to(q.device), lse.to(q.device)


@_attention.register_fake
def _(q, k, v, bias, key_bias, sinks, call, heads_first):  # noqa: ANN001, ANN202
    if heads_first:
        batch, heads, tokens, dim = q.shape
        o = q.new_empty(batch, tokens, heads, dim).transpose(1, 2)
        return o, q.new_empty(batch, tokens, heads, dtype=torch.float32).transpose(1, 2)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _no_backward(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError(
        "kyklos has no backward pass yet: run the model under torch.no_grad(), or detach what attention returns"
    )


_attention.register_autograd(_no_backward)
_attention.register_effect(EffectType.ORDERED)

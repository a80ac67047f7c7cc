"""The operator `torch.ops.kyklos.attention` and its gradients."""

from __future__ import annotations

import itertools
import threading
import weakref
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._library.effects import EffectType
from torch.autograd import forward_ad

from .._backward import Gradients
from .._errors import RequestError
from .._group import Group
from .._options import complete
from .._sequence import keeping_place
from .._arrays.torch import readable, readable_bias
from ._inputs import Wrong, amount, of_keys, with_rows

_Result = TypeVar("_Result")

# What a call's number stands for: the group, and the options but scale, softcap and q_offset, or what is wrong with the call. The
# operator has the number, since graphs take no objects.
_calls: dict[int, tuple[weakref.ref[Group], dict[str, Any] | Wrong]] = {}
_numbers: dict[tuple[Any, ...], int] = {}
_next = itertools.count()
# A finalizer may take it where this thread has it.
_lock = threading.RLock()


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
        are converted to its type, and a ``bias`` of numbers too.
    :param k: its keys ``[batch, kv_heads, tokens, dim]``; ``heads`` is a multiple of ``kv_heads``, nothing is repeated.
    :param v: its values ``[batch, kv_heads, tokens, width]``, with a ``width`` that may differ from ``dim``. Then, and where ``dim``
        is no multiple of 8, heads are computed with zeros at their ends.
    :param mask: a notation as in :meth:`kyklos.Group.attend` (``"causal"``), or a bool tensor in which false hides a key, over
        the keys of all ranks: ``[batch or 1, heads or 1, tokens or 1, keys]`` with the rows of this rank, or ``[batch or 1, keys]``,
        the same on all ranks. A mask of two axes that may be ``[tokens, keys]``, as ``F.scaled_dot_product_attention`` has it,
        is refused. ``None``: every query sees every key.
    :param scale: factor on q·k; by default ``1/√dim``. A number, as ``softcap``: a tensor is a ``TypeError``.
    :param softcap: logits become ``softcap · tanh(logit / softcap)``.
    :param sinks: one logit without a value for each query head, ``[heads]``. Their gradient on a rank is its rows' part: sum it
        over the ranks, as that of any parameter.
    :param bias: as a four-axis ``mask``, of the type of q, added to the logits. Its gradient is that of this rank's rows; that of a
        ``key_bias`` of numbers is this rank's part, as that of the sinks.
    :param layout: ``"bhsd"`` as above, or ``"bshd"`` for ``[batch, tokens, heads, dim]``, where a mask or bias of four axes is ``[batch,
        tokens, heads, keys]``, with ones where it is shared. Arrays in the other layout give wrong numbers without an error where their
        shapes allow it.
    :param options: the other options of :meth:`kyklos.Group.attend`. ``results`` is ``"owner"``.
    :returns: ``o`` like ``q``, with heads of ``width``, and ``lse``, float32 ``[batch, heads, tokens]`` (``"bshd"``: ``[batch, tokens, heads]``).
    :raises RequestError: as :meth:`kyklos.Group.attend`.
    :raises NotImplementedError: in forward-mode differentiation (``torch.func.jvp``), on all ranks.
    """
    if torch.compiler.is_compiling():
        return _called(q, k, v, group, mask, scale, softcap, sinks, bias, layout, options)
    return keeping_place(group._core, lambda: _called(q, k, v, group, mask, scale, softcap, sinks, bias, layout, options))


def _called(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        arguments = _arguments(q, k, v, group, *given)
    except Wrong as wrong:
        return refused(q, k, v, group, wrong)
    o, lse = torch.ops.kyklos.attention(*arguments)
    return (o if o.shape[-1] == v.shape[-1] else o[..., : v.shape[-1]]), lse[..., 0]


def refused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, wrong: Wrong) -> tuple[torch.Tensor, torch.Tensor]:
    """A call with wrong arguments, which raises on all ranks: here, or when the turn of compiled code comes."""
    if not torch.compiler.is_compiling():
        raise wrong.refused(group) from None
    number = _number_of_fault(group, wrong.fault, wrong.remedy, wrong.kind)
    o, lse = torch.ops.kyklos.attention(q, k, v, None, None, None, None, None, 0, number, False)
    return o, lse[..., 0]


def _arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group,
    mask: Any,
    scale: Any,
    softcap: Any,
    sinks: Any,
    bias: Any,
    layout: str,
    options: dict[str, Any],
) -> tuple[Any, ...]:
    """The arguments of the operator."""
    if q.dim() != 4:
        raise Wrong(f"q of shape {list(q.shape)}", "pass [batch, heads, tokens, dim], or [batch, tokens, heads, dim] in another layout")
    if forward_ad._current_level >= 0:
        raise Wrong("forward-mode derivatives (torch.func.jvp, jacfwd, hessian)", "use backward()", NotImplementedError)
    if options.get("results", "owner") != "owner":
        raise Wrong('kyklos.torch.attention has results="owner"', "use Group.attend for others")
    if layout not in ("bhsd", "bshd"):
        raise Wrong(f"layout {layout!r} is not known", 'use "bhsd" or "bshd"')
    key_bias = options.pop("key_bias", None)
    if isinstance(mask, torch.Tensor):
        if mask.dtype != torch.bool:
            raise Wrong(f"a mask of {mask.dtype}", "use bool, or pass it as bias")
        if bias is not None or key_bias is not None:
            raise Wrong("a mask tensor beside a bias", "add minus infinity to the bias where the mask is false")
        if mask.dim() == 2:
            key_bias = of_keys(mask, q, layout)
        else:
            bias = mask
        mask = None
    if bias is not None:
        bias = with_rows(bias, q, layout)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        bias, key_bias = (
            given if given is None or given.dtype == torch.bool else given.to(dtype) for given in (bias, key_bias)
        )
    if 0 < q.shape[-1] == k.shape[-1] and 0 < v.shape[-1]:
        dim = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
        if not q.shape[-1] == v.shape[-1] == dim:
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            # Ranks must agree on what only they know.
            options["label"] = _label(options.get("label", ""), f"[heads of {q.shape[-1]} and {v.shape[-1]}]")
            # Zeros at the end of a head change neither q·k nor the values.
            q, k, v = (x if x.shape[-1] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[-1])) for x in (q, k, v))
    amounts = amount("scale", scale), amount("softcap", softcap)
    q_offset = options.pop("q_offset", 0)
    if not isinstance(q_offset, int):
        raise Wrong(f"a q_offset of type {type(q_offset).__name__}", "pass an int", TypeError)
    tensors = (q, k, v, bias, key_bias, sinks)
    records = torch.is_grad_enabled() and any(given is not None and given.requires_grad for given in tensors)
    options = {"inference": not records, **options}
    number = _number(group, "full" if mask is None else mask, layout, *options.items())
    return q, k, v, bias, key_bias, sinks, *amounts, q_offset, number, layout == "bhsd"


@torch.compiler.assume_constant_result
def _label(given: str, more: str) -> str:
    """A label with an addition, in the 128 bytes that a label may have. Unlike ones stay unlike."""
    whole = f"{given} {more}".lstrip()
    return whole if len(whole.encode()) <= 128 or len(given.encode()) > 128 else f"{zlib.crc32(given.encode()):08x} {more}"


@torch.compiler.assume_constant_result
def _number(group: Group, mask: str, layout: str, *options: Any) -> int:
    """The number of a call. Equal calls of a group have one number, so that compiled code is made once."""
    try:
        given = complete({"mask": mask, "layout": layout, **dict(options)})
        key = (id(group), tuple(_value(name, value) for name, value in given.items()))
    except TypeError as error:
        return _number_of_fault(group, str(error), "help(kyklos.torch.attention) has the options", TypeError)
    return _numbered(group, key, given)


@torch.compiler.assume_constant_result
def _number_of_fault(group: Group, fault: str, remedy: str, kind: type[Exception]) -> int:
    """The number of a call that is wrong in this way."""
    return _numbered(group, (id(group), fault, remedy, kind), Wrong(fault, remedy, kind))


def _numbered(group: Group, key: tuple[Any, ...], given: dict[str, Any] | Wrong) -> int:
    with _lock:
        number = _numbers.get(key)
        if number is not None and _calls[number][0]() is group:
            return number
        number = next(_next)
        _numbers[key] = number
        _calls[number] = (weakref.ref(group), given)
        weakref.finalize(group, _forget, key, number)
        return number


def _value(name: str, value: Any) -> Any:
    """An option as a part of a key: equal keys are equal options."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_value(name, part) for part in value)
    raise TypeError(f"an option {name} with a {type(value).__name__}; it takes texts, numbers, and lists of them")


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
    scale: torch.Tensor | None,
    softcap: torch.Tensor | None,
    q_offset: int,
    call: int,
    heads_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    def attend(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        states, options = _prepared(group, (q, k, v), bias, key_bias, sinks, (scale, softcap, q_offset), call)
        o, lse = group.attend(*states, lse_pair=True, **options)
        return o.to(q.device), lse.to(q.device)

    return _in_place(call, attend)


def _in_place(call: int, run: Callable[[Group], _Result]) -> _Result:
    """What ``run`` makes of the group of a call, which has its place in the sequence also where its tensors cannot be read."""
    reference, _ = _calls.get(call, (None, None))
    group = None if reference is None else reference()
    if group is None:
        raise RequestError("the group of this call is gone: form a new one, and compile again for it")
    return keeping_place(group._core, lambda: run(group))


def _prepared(
    group: Group,
    tensors: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    key_bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    amounts: tuple[torch.Tensor | None, torch.Tensor | None, int],
    call: int,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The tensors of a call where its group reads them, and the options. It reads sinks and ``key_bias`` in host memory. ``amounts``:
    scale, softcap and q_offset."""
    _, options = _calls[call]
    if isinstance(options, Wrong):
        raise options.refused(group)
    scale, softcap = (None if amount is None else amount.item() for amount in amounts[:2])
    options = {**options, "scale": scale, "softcap": softcap, "q_offset": amounts[2]}
    if sinks is not None:
        options = {**options, "sinks": sinks.detach().to("cpu", torch.float32).tolist()}
    states = readable(group, *(tensor.detach() for tensor in tensors))
    own = None if bias is None else readable_bias(group, bias.detach())
    return states, {**options, "bias": own, "key_bias": None if key_bias is None else key_bias.detach().to("cpu")}


@_attention.register_fake
def _(q, k, v, bias, key_bias, sinks, scale, softcap, q_offset, call, heads_first):  # noqa: ANN001, ANN202
    if not heads_first:  # Also of a call that is wrong, whatever its axes.
        return q.new_empty(q.shape), q.new_empty(*q.shape[:-1], 2, dtype=torch.float32)
    return _fresh(q, heads_first), _fresh(q.new_empty(*q.shape[:-1], 2, dtype=torch.float32), heads_first)


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
    scale: torch.Tensor | None,
    softcap: torch.Tensor | None,
    q_offset: int,
    of_bias: bool,
    call: int,
    heads_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = (q, k, v, o, lse, d_o.to(o.dtype), *([] if d_lse is None else [d_lse[..., 0].to(torch.float32)]))

    def backward(group: Group) -> Gradients:
        states, options = _prepared(group, tensors, bias, key_bias, sinks, (scale, softcap, q_offset), call)
        return group.backward(*states, **{**options, "bias_gradient": of_bias})

    gradients = _in_place(call, backward)
    given = bias if key_bias is None else key_bias
    d_bias = q.new_empty(0, dtype=torch.float32) if gradients.d_bias is None or given is None else gradients.d_bias.to(given)
    d_sinks = torch.tensor(gradients.d_sinks_part, dtype=torch.float32 if sinks is None else sinks.dtype, device=q.device)
    tensors = gradients.dq.to(q.device), gradients.dk.to(q.device), gradients.dv.to(q.device)
    return *tensors, d_sinks if sinks is None else d_sinks.to(sinks.device), d_bias


@_attention_backward.register_fake
def _(  # noqa: ANN202
    d_o, d_lse, q, k, v, o, lse, bias, key_bias, sinks, scale, softcap, q_offset, of_bias, call, heads_first  # noqa: ANN001
):
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
    *tensors, ctx.q_offset, ctx.call, ctx.heads_first = inputs
    ctx.save_for_backward(*tensors, *output)
    # A gradient that nobody has asked for stays None.
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_o: torch.Tensor | None, d_lse: torch.Tensor | None) -> Any:
    q, k, v, bias, key_bias, sinks, scale, softcap, o, lse = ctx.saved_tensors
    d_o = torch.zeros_like(o) if d_o is None else d_o
    wanted = ctx.needs_input_grad[3:5]
    dq, dk, dv, d_sinks, d_bias = torch.ops.kyklos.attention_backward(
        d_o,
        d_lse,
        q,
        k,
        v,
        o,
        lse,
        bias,
        key_bias,
        sinks,
        scale,
        softcap,
        ctx.q_offset,
        any(wanted),
        ctx.call,
        ctx.heads_first,
    )
    of_bias = [d_bias if needed else None for needed in wanted]
    return dq, dk, dv, *of_bias, None if sinks is None else d_sinks, None, None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_save)
_attention.register_effect(EffectType.ORDERED)
_attention_backward.register_effect(EffectType.ORDERED)

"""One call of attention, shared with helpers: ``[batch, heads, tokens, dim]`` as PyTorch has it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .._errors import DeviceError, GroupError, RequestError
from .._kyklos import Owner, SharedCall
from ._clock import Clock

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
#: Whether this thread computes a part, whose attention is not shared again.
inside = threading.local()

#: Key/value heads and rows, as two half-open ranges.
Ranges = tuple[int, int, int, int]


@dataclass
class Call:
    """A call that may be shared."""

    core: Owner
    wire: str
    original: Callable[..., torch.Tensor]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    #: Four axes, each that of the call or 1.
    mask: torch.Tensor | None
    scale: float
    causal: bool

    @property
    def dim(self) -> int:
        """Elements of a head as helpers have it: zeros at its end change neither q·k nor the values."""
        return -(-max(self.q.shape[-1], self.v.shape[-1]) // 8) * 8

    def options(self, gradients: bool) -> dict[str, Any]:
        """The call for the extension module. Tensors of 16 bits travel as they are where f16 is asked for."""
        (batch, heads, rows, _), (_, kv_heads, keys, _) = self.q.shape, self.k.shape
        bias = key_bias = None
        if self.mask is not None:
            host = _on_host(self.mask)
            bias, key_bias = (None, host[:, :, 0]) if host.shape[2] == 1 and rows != 1 else (host, None)
        return {
            "mask": "causal" if self.causal else "full",
            "scale": self.scale,
            "bias": bias,
            "key_bias": key_bias,
            "wire": "same" if self.wire == "f16" and self.q.dtype != torch.float32 else self.wire,
            "gradients": gradients,
            "q": (batch, rows, heads, self.dim),
            "kv": (batch, keys, kv_heads, self.dim),
            "dtype": _DTYPES[self.q.dtype],
        }

    def slices(self, part: Ranges) -> tuple[slice, slice, slice]:
        """Query heads, key/value heads and rows of a part."""
        first, end, row, last = part
        group = self.q.shape[1] // self.k.shape[1]
        return slice(first * group, end * group), slice(first, end), slice(row, last)

    def part(self, part: Ranges, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """A part of the output, computed here."""
        heads, kv_heads, rows = self.slices(part)
        # A causal mask counts from the first row.
        first = 0 if self.causal else rows.start
        mask = self.mask
        if mask is not None:
            of_heads = heads if mask.shape[1] > 1 else slice(None)
            mask = mask[:, of_heads, first : rows.stop] if mask.shape[2] > 1 else mask[:, of_heads]
        was, inside.now = getattr(inside, "now", False), True
        try:
            o = self.original(q[:, heads, first : rows.stop], k[:, kv_heads], v[:, kv_heads], mask)
        finally:
            inside.now = was
        return o[:, :, rows.start - first :]

    def host(self, x: torch.Tensor, heads: slice, rows: slice) -> torch.Tensor:
        """A part of a tensor as helpers get it: ``[batch, rows, heads, dim]``, on the way to host memory."""
        part = x[:, heads, rows].transpose(1, 2)
        if x.shape[-1] != self.dim:
            part = torch.nn.functional.pad(part, (0, self.dim - x.shape[-1]))
        part = part.contiguous()
        if part.device.type == "cpu":
            return part
        host = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.device.type in ("cuda", "xpu"))
        return host.copy_(part, non_blocking=True)

    def arrays(self, shared: SharedCall, d_o: torch.Tensor | None) -> list[list[tuple[Any, ...]]]:
        """What helpers get."""
        every = slice(None)
        shares = []
        for share in shared.shares:
            parts = []
            for part, new_keys in share:
                heads, kv_heads, rows = self.slices(part)
                keys = [self.host(x, kv_heads, every) for x in (self.k, self.v)] if new_keys else [None, None]
                of_output = None if d_o is None else self.host(d_o, heads, rows)
                parts.append((self.host(self.q, heads, rows), *keys, of_output))
            shares.append(parts)
        return shares

    def received(self, array: Any, like: torch.Tensor) -> torch.Tensor:
        """A helper's result as a part of a tensor like this."""
        x = torch.from_dlpack(array).transpose(1, 2)[..., : like.shape[-1]]
        return x.to(like.device, non_blocking=True)


def attention(
    core: Owner,
    wire: str,
    original: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    gqa: bool,
) -> torch.Tensor:
    """Attention, with the helpers where that pays."""
    if q.dim() != 4 or k.dim() != 4 or torch.compiler.is_compiling() or getattr(inside, "now", False):
        return original(q, k, v, mask)
    if not core.wants(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]) or _is_traced(q):
        return original(q, k, v, mask)
    if torch.is_autocast_enabled(q.device.type):
        # As PyTorch's function does.
        to = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(to) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
        mask = mask.to(to) if mask is not None and mask.is_floating_point() else mask
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    whole = _mask_of_four_axes(mask, q, k)
    if not _understood(q, k, v, mask, whole, causal, gqa) or not scale > 0.0:
        return original(q, k, v, mask)
    call = Call(core, wire, original, q, k, v, whole, scale, causal)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    options = call.options(False)
    shared = _decided(core, options)
    if learns and (shared is None or _decided(core, {**options, "gradients": True}) is None):
        # PyTorch's own gradients reuse what its forward pass has kept.
        shared = None
    if shared is None:
        clock = Clock(q.device)
        alone = call.original(q, k, v, mask)
        clock.stop(lambda seconds: core.learn_alone(options, seconds))
        return alone
    o: torch.Tensor = _Shared.apply(q, k, v, call, shared) if learns else _forward(call, shared)
    return o


def _is_traced(q: torch.Tensor) -> bool:
    """Whether these are no numbers yet: in a graph that is being captured, and inside of ``vmap`` and ``torch.func.grad``."""
    if torch._C._are_functorch_transforms_active():
        return True
    return q.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _decided(core: Owner, options: dict[str, Any]) -> SharedCall | None:
    """How a call is shared; not at all if the engine does not know such calls."""
    try:
        return core.decide(options)
    except RequestError:
        return None


def _mask_of_four_axes(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    while mask is not None and mask.dim() < 4:
        mask = mask[None]
    return mask


def _understood(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    given: torch.Tensor | None,
    mask: torch.Tensor | None,
    causal: bool,
    gqa: bool,
) -> bool:
    """Whether these tensors mean the same for helpers as for PyTorch; others stay with PyTorch's function, which may refuse them."""
    (batch, heads, rows, dim), (_, kv_heads, keys, _) = q.shape, k.shape
    plain = (torch.Tensor, torch.nn.Parameter)
    if any(type(x) not in plain or x.layout != torch.strided or x.device != q.device for x in (q, k, v)):
        return False
    if q.dtype not in _DTYPES or (k.dtype, v.dtype) != (q.dtype, q.dtype) or q.device.type == "meta" or dim == 0:
        return False
    if k.shape != (batch, kv_heads, keys, dim) or v.shape[:3] != k.shape[:3] or v.dim() != 4 or v.shape[3] == 0:
        return False
    if kv_heads == 0 or heads % kv_heads or (heads != kv_heads and not gqa) or 0 in (batch, rows, keys):
        return False
    if given is None:
        return True
    # A mask of another type than q would be rounded.
    if mask is None or causal or given.requires_grad or type(given) not in plain or mask.device != q.device:
        return False
    if mask.dtype not in (torch.bool, q.dtype):
        return False
    return all(extent in (1, full) for extent, full in zip(mask.shape[:3], (batch, heads, rows), strict=True)) and mask.shape[3] == keys


def _forward(call: Call, shared: SharedCall) -> torch.Tensor:
    """The output of a shared call."""
    o = call.q.new_empty((*call.q.shape[:3], call.v.shape[-1]))
    clock = Clock(call.q.device)
    with torch.no_grad():
        q, k, v = call.q, call.k, call.v
        missing = _run(call, shared, None, lambda part: [call.part(part, q, k, v)], [o])
        for part in missing:
            _place(call, part, [call.part(part, q, k, v)], [o])
    clock.stop(lambda seconds: call.core.learn_shared(shared, seconds))
    return o


def _place(call: Call, part: Ranges, results: list[torch.Tensor], into: list[torch.Tensor]) -> None:
    """Results of a part, in their places: the output, or the gradients of q, k and v."""
    heads, kv_heads, rows = call.slices(part)
    into[0][:, heads, rows] = results[0]
    for result, whole in zip(results[1:], into[1:], strict=True):
        whole[:, kv_heads] = result


def _run(
    call: Call,
    shared: SharedCall,
    d_o: torch.Tensor | None,
    compute: Callable[[Ranges], list[torch.Tensor]],
    into: list[torch.Tensor],
) -> list[Ranges]:
    """Sends shares, computes this process' part, and takes the results. Returns the parts that are missing."""
    is_processor = call.q.device.type == "cpu"
    # Not what the device has still to do of other layers.
    if not is_processor:
        torch.accelerator.current_stream(call.q.device).synchronize()
    began = time.perf_counter()
    arrays = call.arrays(shared, d_o)
    if not is_processor:
        torch.accelerator.current_stream(call.q.device).synchronize()
    try:
        flight = call.core.begin(shared, arrays, time.perf_counter() - began)
    except (RequestError, GroupError, DeviceError):
        # What the wire cannot carry stays here.
        return [*shared.own, *(part for share in shared.shares for part, _ in share)]
    clock = Clock(call.q.device)
    own = [(part, compute(part)) for part in shared.own]
    clock.stop(lambda seconds: call.core.learn_own(shared, seconds))
    missing = []
    for share in call.core.finish(flight):
        for part, results in share:
            if results is None:
                missing.append(part)
            else:
                received = [call.received(result, whole) for result, whole in zip(results, into, strict=True)]
                _place(call, part, received, into)
    for part, computed in own:
        _place(call, part, computed, into)
    return missing


class _Shared(torch.autograd.Function):
    """A shared call with gradients of q, k and v. Its backward pass is shared too, or computed here."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, shared: SharedCall) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.call = call
        return _forward(call, shared)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_o: torch.Tensor) -> tuple[Any, ...]:
        q, k, v = ctx.saved_tensors
        call = Call(**{**ctx.call.__dict__, "q": q, "k": k, "v": v})
        into = [torch.empty_like(x) for x in (q, k, v)]

        def compute(part: Ranges) -> list[torch.Tensor]:
            heads, kv_heads, rows = call.slices(part)
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (q[:, heads], k[:, kv_heads], v[:, kv_heads])]
                group = leaves[0].shape[1] // leaves[1].shape[1]
                whole = Call(**{**call.__dict__, "q": leaves[0], "k": leaves[1], "v": leaves[2]})
                whole.mask = call.mask[:, heads] if call.mask is not None and call.mask.shape[1] > 1 else call.mask
                assert group * leaves[1].shape[1] == leaves[0].shape[1]
                o = whole.part((0, leaves[1].shape[1], 0, q.shape[2]), *leaves)
                return list(torch.autograd.grad(o, leaves, d_o[:, heads]))

        clock = Clock(q.device)
        shared = _decided(call.core, call.options(True))
        parts = [(0, k.shape[1], 0, q.shape[2])] if shared is None else _run(call, shared, d_o, compute, into)
        for part in parts:
            _place(call, part, compute(part), into)
        if shared is not None:
            clock.stop(lambda seconds: call.core.learn_shared(shared, seconds))
        return (*into, None, None)


#: The last mask in host memory: models give each layer the same one, or the same view of it.
_last_mask: list[tuple[weakref.ref[torch.Tensor], tuple[Any, ...], torch.Tensor]] = []


def _on_host(mask: torch.Tensor) -> torch.Tensor:
    mask = mask.detach()
    if mask.device.type == "cpu":
        return mask
    if mask.is_inference():
        # Nothing tells whether its numbers are the same as before.
        return mask.cpu()
    base = mask._base if mask._base is not None else mask
    view = (base._version, mask.shape, mask.stride(), mask.storage_offset(), mask.dtype)
    for of, known, host in _last_mask:
        if of() is base and known == view:
            return host
    host = mask.cpu()
    _last_mask[:] = [(weakref.ref(base), view, host)]
    return host

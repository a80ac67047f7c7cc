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
#: Subclasses may mean something else by their shapes.
_PLAIN = (torch.Tensor, torch.nn.Parameter)

#: Key/value heads and rows, as two half-open ranges.
Ranges = tuple[int, int, int, int]


@dataclass
class Call:
    """A call that may be shared."""

    core: Owner
    wire: str
    #: Of the helpers that may have a share; all if there are none.
    names: list[str] | None
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
        bias = None
        if self.mask is not None:
            bias = (self.mask.dtype != torch.bool, self.mask.shape[0], self.mask.shape[1], self._has_one_row)
        return {
            "mask": "causal" if self.causal else "full",
            "scale": self.scale,
            "bias": bias,
            "names": self.names,
            "wire": "same" if self.wire == "f16" and self.q.dtype != torch.float32 else self.wire,
            "gradients": gradients,
            "q": (batch, rows, heads, self.dim),
            "kv": (batch, keys, kv_heads, self.dim),
            "dtype": _DTYPES[self.q.dtype],
        }

    @property
    def _has_one_row(self) -> bool:
        """Whether all queries share one row of the mask."""
        return self.mask is not None and self.mask.shape[2] == 1 and self.q.shape[2] != 1

    def bias(self) -> torch.Tensor | None:
        """The mask for the extension module."""
        if self.mask is None:
            return None
        host = _on_host(self.mask)
        return host[:, :, 0] if self._has_one_row else host

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
        part = part.resolve_neg().contiguous()
        if part.device.type == "cpu":
            return part
        host = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=part.device.type in ("cuda", "xpu"))
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


def may_share(core: Owner, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether a call is worth a look; cheap, since small calls are many."""
    if type(q) not in _PLAIN or type(k) not in _PLAIN or q.is_nested or q.ndim != 4 or k.ndim != 4:
        return False
    dim = q.size(-1)
    return dim != 0 and core.wants(q.numel() // dim * k.size(-2)) and not getattr(inside, "now", False)


def attention(
    core: Owner,
    wire: str,
    names: list[str] | None,
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
    # A compiler may not look into the extension module.
    if torch.compiler.is_compiling() or not may_share(core, q, k) or _is_traced(q):
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
    call = Call(core, wire, names, original, q, k, v, whole, scale, causal)
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
    """Whether these are not just numbers: in a graph that is being captured or traced, on a device without memory, under dispatch modes, and inside
    of ``vmap``, ``torch.func.grad`` and forward derivatives."""
    if q.device.type == "meta" or torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return True
    if torch._C._get_tracing_state() is not None or torch.autograd.forward_ad._current_level >= 0:
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
    if any(type(x) not in _PLAIN or x.is_nested or x.layout != torch.strided or x.device != q.device for x in (q, k, v)):
        return False
    if q.dtype not in _DTYPES or (k.dtype, v.dtype) != (q.dtype, q.dtype):
        return False
    if k.shape != (batch, kv_heads, keys, dim) or v.shape[:3] != k.shape[:3] or v.dim() != 4 or v.shape[3] == 0:
        return False
    if kv_heads == 0 or heads % kv_heads or (heads != kv_heads and not gqa) or 0 in (batch, rows, keys):
        return False
    if given is None:
        return True
    # A mask of another type than q would be rounded.
    if mask is None or given.dim() < 2 or causal or given.requires_grad or type(given) not in _PLAIN or mask.device != q.device:
        return False
    if mask.dtype not in (torch.bool, q.dtype):
        return False
    return all(extent in (1, full) for extent, full in zip(mask.shape[:3], (batch, heads, rows), strict=True)) and mask.shape[3] == keys


def _forward(call: Call, shared: SharedCall) -> torch.Tensor:
    """The output of a shared call."""
    # In memory as PyTorch has it: as q is.
    o = torch.empty_like(call.q) if call.q.shape[-1] == call.v.shape[-1] else call.q.new_empty((*call.q.shape[:3], call.v.shape[-1]))
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
        flight = call.core.begin(shared, arrays, call.bias(), time.perf_counter() - began)
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
        # As PyTorch does: it keeps numbers, and makes numbers of bools.
        mask = call.mask.clone() if call.mask is not None and call.mask.dtype == torch.bool else call.mask
        ctx.save_for_backward(q, k, v, mask)
        # Tensors are kept above only, where checkpoints and offloading find them.
        ctx.call = {**call.__dict__, "q": None, "k": None, "v": None, "mask": None}
        return _forward(call, shared)

    @staticmethod
    def backward(ctx: Any, d_o: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, mask = ctx.saved_tensors
        call = Call(**{**ctx.call, "q": q, "k": k, "v": v, "mask": mask})
        functorch = torch._C._functorch
        if torch.is_grad_enabled() or functorch.is_batchedtensor(d_o) or functorch.is_legacy_batchedtensor(d_o):
            # Gradients of gradients, and many at a time, are PyTorch's.
            return (*_differentiable(call, d_o), None, None)
        into = [torch.empty_like(x) for x in (q, k, v)]
        clock = Clock(q.device)
        shared = _decided(call.core, call.options(True))
        compute = lambda part: _gradients(call, part, d_o)  # noqa: E731
        parts = [(0, k.shape[1], 0, q.shape[2])] if shared is None else _run(call, shared, d_o, compute, into)
        for part in parts:
            _place(call, part, compute(part), into)
        if shared is not None:
            clock.stop(lambda seconds: call.core.learn_shared(shared, seconds))
        return (*into, None, None)


def _gradients(call: Call, part: Ranges, d_o: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the heads of a part, which has all rows, computed here."""
    heads, kv_heads, rows = call.slices(part)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (call.q[:, heads], call.k[:, kv_heads], call.v[:, kv_heads])]
        mask = call.mask[:, heads] if call.mask is not None and call.mask.shape[1] > 1 else call.mask
        of_heads = Call(**{**call.__dict__, "q": leaves[0], "k": leaves[1], "v": leaves[2], "mask": mask})
        o = of_heads.part((0, leaves[1].shape[1], rows.start, rows.stop), *leaves)
        return list(torch.autograd.grad(o, leaves, d_o[:, heads]))


def _differentiable(call: Call, d_o: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of the whole call that have gradients themselves, as far as PyTorch's own have."""
    with torch.enable_grad():
        states = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
        was, inside.now = getattr(inside, "now", False), True
        try:
            o = call.original(*states, call.mask)
        finally:
            inside.now = was
        return torch.autograd.grad(o, states, d_o, create_graph=True)


#: The last mask in host memory: models give each layer the same one, or the same view of it.
_last_mask: list[tuple[weakref.ref[torch.Tensor], tuple[Any, ...], torch.Tensor]] = []


def _on_host(mask: torch.Tensor) -> torch.Tensor:
    mask = mask.detach().resolve_neg()
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

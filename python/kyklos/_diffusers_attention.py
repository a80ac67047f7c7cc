"""The attention of a split transformer: a backend of diffusers that hands its calls to a group.

diffusers gives each call the ``_parallel_config`` of its attention processor. Every registered backend is wrapped: calls whose
config is a :class:`Split` go to the group, all others to the backend as before.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch._library.effects import EffectType

from ._agreement import Passes, halves, samples
from ._errors import RequestError
from ._group import Group

# Splits by number: the operator has the number, since graphs take no objects.
_splits: dict[int, Split] = {}
_next = itertools.count()
_lock = threading.Lock()

#: Arguments of ``dispatch_attention_fn`` that each backend must let through, lest it drops them.
_NEEDED = frozenset({"attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "_parallel_config"})
#: Key masks that are kept. A denoising step has one or two: with and without the prompt.
_MASKS = 8
#: Axes and values of each input that ranks compare, and the relative difference that unlike devices may have.
_AXES, _SAMPLES, _DRIFT = 8, 8, 0.25
#: The same for inputs that no network has computed.
_ROUNDING = 1e-3


class Split:
    """One transformer on one rank: its group, and how far the current forward is.

    :param calls: calls of split attention in each forward.
    """

    def __init__(self, group: Group, name: str, shares: tuple[int, ...], mesh: str | None, calls: int) -> None:
        self.group, self.name, self.mesh, self.expected = group, name, mesh, calls
        self.number = next(_next)
        # In the label of each call, of at most 128 bytes: ranks that cut differently must not compute together.
        parts = ":".join(map(str, shares))
        self.passes = Passes(group)
        self._title = f"{name[:40]}, {self.passes.model}, shares {parts if len(parts) <= 24 else format(zlib.crc32(parts.encode()), 'x')}"
        self._forward = 0
        self._calls = 0
        self._gathers = 0
        self._active = False
        # Masks of this rank beside those of all ranks. All ranks append in the same calls, so the numbers agree.
        self._masks: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque(maxlen=_MASKS)
        self._mask_numbers = itertools.count()
        self._reuse = True

    def begin(self, inputs: dict[str, Any]) -> None:
        """Starts a forward. All ranks must have inputs of the same shapes, and of the same values but for rounding."""
        if self._active:
            # No end: the last forward has failed.
            self.passes.failed()
        self._active = False
        self._forward = self.passes.next()
        self._calls, self._gathers, self._active = 0, 0, True
        self._compare(inputs)

    def end(self) -> None:
        """Ends a forward.

        :raises RequestError: an attention call is missing: it ran on the tokens of this rank alone, or not at all.
        """
        self._active = False
        if self._calls != self.expected:
            self.passes.failed()
            raise RequestError(
                f"{self.name} made {self._calls} calls of split attention in a forward, its plan has {self.expected}: call parallelize "
                "again after a change of attention processors, and name in plan.attention the modules whose keys are split"
            )

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """``x`` of all ranks, joined along ``dim`` by rank; the same on each rank."""
        return _Gathered.apply(x, dim, self)

    def _gather_rows(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        self._gathers += 1
        label = f"{self._place()}, gather {self._gathers}"
        rows = x.detach().movedim(dim, 0)
        flat = rows.reshape(1, rows.shape[0], math.prod(rows.shape[1:])).to("cpu")
        whole = _gather(self.group, flat, label)
        return whole.reshape(-1, *rows.shape[1:]).movedim(0, dim).to(x.device)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        """Attention over the keys of all ranks. Shapes as in :func:`attention`, ``mask`` with four axes."""
        if not self._active:
            raise RequestError(
                f"an attention call of {self.name} outside its forward: call the transformer itself, on which parallelize was called"
            )
        self._calls += 1
        if self._calls > self.expected:
            raise RequestError(
                f"{self.name} makes more than the {self.expected} calls of split attention that its plan has in a forward: name in "
                "plan.attention the modules whose keys are split, and unload adapters that attend to other tokens"
            )
        label = f"{self._place()}, attention {self._calls}"
        dim, out_dim = q.shape[-1], v.shape[-1]
        q, k, v = _same_dim(*(x.detach().to("cpu") for x in (q, k, v)))
        run = functools.partial(self.group.attend, q, k, v, scale=scale, mesh=self.mesh)
        if mask is None:
            o, _ = run(label=label)
        elif mask.shape[2] == 1:
            o = self._attend_masked(run, mask.detach().to("cpu"), q.dtype, label)
        elif mask.shape[3] != k.shape[1] or self.group.world == 1:
            # Rows of this rank's queries over all keys: [batch, heads, tokens, keys].
            bias = mask.detach().to("cpu").transpose(1, 2)
            o, _ = run(label=label, bias=bias if bias.dtype == torch.bool else bias.to(q.dtype))
        else:
            raise RequestError(
                f"{self.name} has a mask of {mask.shape[2]} queries by the {mask.shape[3]} keys of this rank: such rows need the keys of "
                "all ranks; use a key mask [batch, 1, 1, keys]"
            )
        return o[..., :out_dim].contiguous() if o.shape[-1] != dim else o

    def _attend_masked(
        self, run: Callable[..., Any], mask: torch.Tensor, dtype: torch.dtype, label: str
    ) -> torch.Tensor:
        """With a mask of this rank's keys ``[batch or 1, heads or 1, 1, keys]``, all ranks having one.

        Masks are gathered once and then found again by their values. A rank that finds its mask may meet ranks that do not:
        then the calls disagree, all ranks see that, and from there on masks are gathered for each call.
        """
        if self._reuse:
            known = next((item for item in self._masks if _equal(item[1], mask)), None)
            try:
                if known is not None:
                    return run(label=f"{label}, mask {known[0]}", key_bias=known[2].to(_mask_type(mask, dtype)))[0]
                return self._attend_gathered(run, mask, dtype, label)
            except RequestError:
                self._reuse = False
        return self._attend_gathered(run, mask, dtype, f"{label}, again")

    def _attend_gathered(
        self, run: Callable[..., Any], mask: torch.Tensor, dtype: torch.dtype, label: str
    ) -> torch.Tensor:
        number = next(self._mask_numbers)
        whole = self._gather_mask(mask, f"{label}, its mask")
        o, _ = run(label=label, key_bias=whole.to(_mask_type(mask, dtype)))
        if self._reuse:
            self._masks.append((number, mask.clone(), whole))
        return o

    def _gather_mask(self, mask: torch.Tensor, label: str) -> torch.Tensor:
        """``[batch or 1, keys of all ranks]`` in the order of the ranks, which is how the engine numbers tokens here; with the
        heads between if there are several."""
        rows = mask[:, :, 0, :].permute(2, 0, 1)
        if mask.dtype == torch.bool:
            hidden, shift = ~rows, torch.zeros(rows.shape)
        else:
            # Minus infinity apart: products of it with the zero weights of other rows would be NaN.
            hidden, shift = torch.isneginf(rows), rows.float().masked_fill(torch.isneginf(rows), 0.0)
        flat = torch.stack([hidden.float(), shift], -1).flatten(1)
        whole = _gather(self.group, flat[None], label).reshape(-1, *rows.shape[1:], 2).permute(1, 2, 0, 3)
        hidden, shift = whole[..., 0] > 0.5, whole[..., 1]
        keys = ~hidden if mask.dtype == torch.bool else shift.masked_fill(hidden, -math.inf)
        return keys[:, 0] if keys.shape[1] == 1 else keys

    def _compare(self, inputs: dict[str, Any]) -> None:
        """Shapes and some values of each input, of all ranks: ranks with another seed or prompt would give plausible nonsense."""
        tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        plain = {name: zlib.crc32(_text(x).encode()) for name, x in inputs.items() if name not in tensors}
        others = torch.tensor([half for crc in plain.values() for half in halves(crc)], dtype=torch.float32)
        row = torch.cat([torch.zeros(1), others, *(torch.cat([_shape(x), _sample(x)]) for x in tensors.values())])
        label = f"{self._place()}, inputs {zlib.crc32(' '.join([*plain, '', *tensors]).encode()):x}"
        whole = _gather(self.group, row[None, None], label)[0, :, 1:]
        for name, part in zip(plain, whole[:, : len(others)].unflatten(1, (len(plain), 2)).unbind(1), strict=True):
            for rank in range(1, self.group.world):
                if not torch.equal(part[rank], part[0]):
                    raise RequestError(
                        f"rank {rank} has another {name} than rank 0: give the pipeline the same arguments on all ranks"
                    )
        whole = whole[:, len(others) :].unflatten(1, (len(tensors), _AXES + _SAMPLES))
        for name, part in zip(tensors, whole.unbind(1), strict=True):
            for rank in range(1, self.group.world):
                own, first = part[rank], part[0]
                if not torch.equal(own[:_AXES], first[:_AXES]):
                    sizes = [[int(n) for n in axes[:_AXES] if n >= 0] for axes in (own, first)]
                    raise RequestError(
                        f"rank {rank} has {name} of shape {sizes[0]}, rank 0 of {sizes[1]}: give the pipeline the same inputs on all ranks"
                    )
                own, first = own[_AXES:], first[_AXES:]
                drift = _ROUNDING if _is_setting(name, tensors[name]) else _DRIFT
                if (own - first).norm() > drift * (own.norm() + first.norm()):
                    raise RequestError(
                        f"rank {rank} has other values of {name} than rank 0: give the pipeline the same inputs on all ranks, and "
                        "a generator with the same seed"
                    )

    def _place(self) -> str:
        return f"{self._title}: forward {self._forward}"


def _shape(x: torch.Tensor) -> torch.Tensor:
    """The extents of the first 8 axes, then -1."""
    return torch.tensor([*x.shape, *[-1] * _AXES][:_AXES], dtype=torch.float32)


def _sample(x: torch.Tensor) -> torch.Tensor:
    """Values of x at equal distances, ``[8]``; zeros if it has no elements."""
    return samples(x, _SAMPLES) if x.numel() else torch.zeros(_SAMPLES)


def _is_setting(name: str, x: torch.Tensor) -> bool:
    """Whether an input is not computed by a network, so that only its rounding may differ between devices."""
    return (
        x.dim() <= 1 or not x.is_floating_point() or "timestep" in name or "guidance" in name or name.endswith("_ids")
    )


def _text(x: object) -> str:
    """An argument that is no tensor, as far as ranks compare it: numbers and texts, also in lists and dicts."""
    if isinstance(x, dict):
        return "{" + ", ".join(f"{key}: {_text(value)}" for key, value in sorted(x.items(), key=str)) + "}"
    if isinstance(x, (list, tuple)):
        return "[" + ", ".join(map(_text, x)) + "]"
    return repr(x) if x is None or isinstance(x, (bool, int, float, str)) else type(x).__name__


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _mask_type(mask: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    return torch.bool if mask.dtype == torch.bool else dtype


def _same_dim(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """With zeros up to the next multiple of 8 elements, which change neither q·k nor the rows of v."""
    dim = -max(q.shape[-1], v.shape[-1]) // 8 * -8
    return tuple(x if x.shape[-1] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[-1])) for x in (q, k, v))


def _gather(group: Group, x: torch.Tensor, label: str) -> torch.Tensor:
    """``x [1, tokens, elements]`` of all ranks, ``[1, tokens of all ranks, elements]``, bit by bit: attention in which each
    token sees itself alone returns the values."""
    tokens, elements = x.shape[1:]
    heads = -(-elements // 256)
    dim = -(-elements // (heads * 8)) * 8
    v = torch.nn.functional.pad(x, (0, heads * dim - elements)).reshape(1, tokens, heads, dim)
    zeros = torch.zeros_like(v)
    o, _ = group.attend(zeros, zeros, v, mask="window:0,0", results="all", label=label)
    return o.reshape(1, -1, heads * dim)[..., :elements]


def attention(
    split: Split,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
    **others: Any,
) -> torch.Tensor:
    """Attention of diffusers over the tokens of all ranks.

    :param query: this rank's queries ``[batch, tokens, heads, dim]``; ``key`` and ``value`` ``[batch, tokens, kv_heads, dim]``.
    :param attn_mask: of this rank's keys, ``[batch, keys]`` or ``[batch or 1, heads or 1, 1, keys]``, or of its queries by all
        keys; bool, or added to the logits.
    :returns: like ``query``.
    """
    asked = sorted(name for name, given in others.items() if given not in (None, False))
    if dropout_p or is_causal or asked:
        what = "dropout" if dropout_p else "is_causal" if is_causal else ", ".join(asked)
        raise RequestError(
            f"{split.name} attends with {what}, but split attention has none of it: remove the option that asks for it"
        )
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if attn_mask is not None and attn_mask.dim() == 2:
        if tuple(attn_mask.shape) != (query.shape[0], key.shape[1]):
            raise RequestError(
                f"{split.name} has a mask of shape {list(attn_mask.shape)} for {query.shape[0]} batch entries of {key.shape[1]} keys "
                "on this rank: use a key mask [batch, keys]"
            )
        attn_mask = attn_mask[:, None, None, :]
    elif attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask[:, None]
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    return torch.ops.kyklos.diffusers_attention(query, key, value, attn_mask, float(scale), split.number)


@torch.library.custom_op("kyklos::diffusers_attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, split: int
) -> torch.Tensor:
    if split not in _splits:
        raise RequestError("the handle of this transformer was removed: compile it again")
    return _splits[split].attend(q, k, v, mask, scale).to(q.device)


@_attention.register_fake
def _(q, k, v, mask, scale, split):  # noqa: ANN001, ANN202
    return q.new_empty(*q.shape[:-1], v.shape[-1])


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, split: Split) -> torch.Tensor:
        return split._gather_rows(x, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _no_backward(ctx, *gradients)


def _no_backward(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError("a split model has no backward pass yet: run it under torch.no_grad()")


_attention.register_autograd(_no_backward)
_attention.register_effect(EffectType.ORDERED)


_plain: dict[Any, tuple[Callable[..., Any], set[str]]] = {}


def register(split: Split) -> None:
    """Lets the operator find ``split``. The first one wraps the backends of diffusers."""
    with _lock:
        if not _splits:
            for name, backend in _AttentionBackendRegistry._backends.items():
                accepted = _AttentionBackendRegistry._supported_arg_names[name]
                _plain[name] = (backend, accepted)
                _AttentionBackendRegistry._backends[name] = _wrapped(backend, frozenset(accepted))
                _AttentionBackendRegistry._supported_arg_names[name] = accepted | _NEEDED
        _splits[split.number] = split


def unregister(split: Split) -> None:
    """The reverse. The last one puts the backends of diffusers back."""
    with _lock:
        if _splits.pop(split.number, None) is None or _splits:
            return
        for name, (backend, accepted) in _plain.items():
            _AttentionBackendRegistry._backends[name] = backend
            _AttentionBackendRegistry._supported_arg_names[name] = accepted
        _plain.clear()


def _wrapped(backend: Callable[..., Any], accepted: frozenset[str]) -> Callable[..., Any]:
    @functools.wraps(backend)
    def call(**given: Any) -> Any:
        split = given.get("_parallel_config")
        if isinstance(split, Split):
            return attention(split, **given)
        return backend(**{name: value for name, value in given.items() if name in accepted})

    return call

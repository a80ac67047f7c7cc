"""The attention of a split transformer: a backend of diffusers that hands its calls to a group.

diffusers gives each call the ``_parallel_config`` of its attention processor. Every registered backend is wrapped: calls whose
config is a :class:`Split` go to the group, all others to the backend as before.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch._library.effects import EffectType

from .._errors import RequestError
from .._group import Group
from .._models.agreement import Passes
from .._models.telling import tell, told
from .._rows import gather, sum_rows
from .._arrays.torch import readable
from ._calls import Calls
from ._inputs import compare
from ._keys import alone, own_keys, same_dim
from ._masks import equal, four_axes, gather_mask, mask_type, of_keys, rows_of
from ._plan import SplitPlan
from ._ways.shares import Shares

# Splits by number: the operator has the number, since graphs take no objects. Attention processors hold them.
_splits: weakref.WeakValueDictionary[int, Split] = weakref.WeakValueDictionary()
_next = itertools.count()
_lock = threading.RLock()

#: Arguments of ``dispatch_attention_fn`` that each backend must let through, lest it drops them.
_NEEDED = frozenset({"attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "_parallel_config"})
#: Key masks that are kept. A denoising step has one or two: with and without the prompt.
_MASKS = 8


class Split:
    """One transformer on one rank: its group, and how far the current forward is."""

    def __init__(self, group: Group, name: str, shares: Shares, calls: Calls, plan: SplitPlan = SplitPlan({})) -> None:
        self.group, self.name, self.plan, self.shares, self.calls = group, name, plan, shares, calls
        self.number = next(_next)
        self.passes = Passes(group)
        self._forward = 0
        self._gathers = 0
        #: Whether a forward runs, and its inputs by name.
        self.active = False
        self.inputs: dict[str, Any] = {}
        # Masks of this rank beside those of all ranks. All ranks append in the same calls, so the numbers agree.
        self._masks: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque(maxlen=_MASKS)
        self._mask_numbers = itertools.count()
        self._reuse = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Split:
        """The split of a copy of the transformer, which is another model to the ranks of the group."""
        copied = Split(self.group, self.name, copy.deepcopy(self.shares, memo), copy.copy(self.calls), self.plan)
        copied.passes = copy.deepcopy(self.passes)
        register(copied)
        return copied

    def begin(self, transformer: torch.nn.Module, inputs: dict[str, Any]) -> None:
        """Starts a forward. All ranks must have inputs of the same shapes, and of the same values but for rounding."""
        if self.active:
            # No end: the last forward has failed.
            self.group._refused += 1
        self.active = False
        self._forward = self.passes.next(transformer, torch.is_grad_enabled())
        self._gathers, self.active = 0, True
        self.calls.begin(inputs)
        compare(self.group, inputs, self.place())
        # Some models empty the lists that they are given.
        self.inputs = {name: list(x) if isinstance(x, list) else x for name, x in inputs.items()}
        self.shares.begin(self.passes, self._forward, self.inputs)

    def end(self) -> None:
        """Ends a forward. An attention call that is missing is a RequestError."""
        self.active, self.inputs, whole = False, {}, self.shares.whole
        self.shares.end()
        if not whole:
            self.calls.end()

    def common(self, query: torch.Tensor, key: torch.Tensor) -> tuple[int, bool]:
        """How many keys of a call every rank has, and whether they are behind the others."""
        of = self.plan.common_behind
        if of is None:
            return (key.shape[1] - query.shape[1] if self.plan.common_keys else 0), False
        first, end = self.shares.own(self.shares.totals.get(of, 0))
        return key.shape[1] - (end - first), True

    def begin_call(self) -> int:
        """The number of the call of split attention that begins.

        :raises RequestError: outside of a forward, or one too many.
        """
        if not self.active:
            raise RequestError(
                f"an attention call of {self.name} outside its forward: call the transformer itself, on which parallelize was called"
            )
        return self.calls.next()

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """``x`` of all ranks, joined along ``dim`` by rank; the same on each rank. Its gradient is as that of :func:`gather`."""
        self._gathers += 1
        rows = x.movedim(dim, 0)
        flat = rows.reshape(1, rows.shape[0], math.prod(rows.shape[1:]))
        whole = gather(self.group, flat, f"{self.place()}, gather {self._gathers}")
        return whole.reshape(-1, *rows.shape[1:]).movedim(0, dim)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attention over the keys of all ranks. Shapes as in :func:`attention`, ``mask`` with four axes.

        :returns: the output; the log-sum-exp ``[batch, tokens, heads, 2]``; and which call it was, for :meth:`backward`.
        """
        if self.shares.whole:
            return alone(q, k, v, mask, scale)
        call = self.begin_call()
        label = f"{self.place()}, attention {call}"
        out_dim = v.shape[-1]
        states = same_dim(self.group, q, k, v)
        run = functools.partial(self.group.attend, *states, layout="bshd", scale=scale, lse_pair=True, **self.shares.execution)
        number = -1
        with self.shares.attending(q, k):
            if mask is None:
                o, lse = run(label=label)
            elif of_keys(mask, k):
                o, lse, number = self._attend_masked(run, mask.detach().to("cpu"), q.dtype, label)
            elif mask.shape[3] != k.shape[1] or self.group.size == 1:
                o, lse = run(label=label, bias=rows_of(mask, q.dtype))
            else:
                raise RequestError(
                    f"{self.name} has a mask of {mask.shape[2]} queries by the {mask.shape[3]} keys of this rank: such rows need the keys of "
                    "all ranks; use a key mask [batch, 1, 1, keys]"
                )
        return o[..., :out_dim].contiguous(), lse, torch.tensor([self._forward, call, number])

    def backward(
        self, d_o: torch.Tensor, states: list[torch.Tensor], mask: torch.Tensor | None, of_mask: bool, scale: float, place: list[int]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The gradients of q, k and v; and with ``of_mask`` that of the mask, of the queries of all ranks.

        :param states: q, k, v, the output and the log-sum-exp.
        :param place: which call it was.
        """
        forward, call, number = place
        label = f"{self._title()}: forward {forward}, attention {call}, backward"
        q, k, v, o, lse = states
        widths = [x.shape[-1] for x in (q, k, v)]
        options: dict[str, Any] = {"label": label, "layout": "bshd", "scale": scale}
        options |= {**self.shares.execution, "bias_gradient": of_mask}
        if mask is not None and of_keys(mask, k):
            whole = next((item[2] for item in self._masks if item[0] == number), None)
            if whole is None:
                # It was not kept, on no rank.
                whole = gather_mask(self.group, mask.detach().to("cpu"), f"{label}, its mask")
            options["key_bias"] = whole.to(mask_type(mask, q.dtype))
        elif mask is not None:
            options["bias"] = rows_of(mask, q.dtype)
        *states, lse = readable(self.group, *same_dim(self.group, q, k, v, o, d_o.to(o.dtype).contiguous()), lse.detach())
        q, k, v, o, d_o = states
        found = self.group.backward(q, k, v, o, lse, d_o, **options)
        widened = zip((found.dq, found.dk, found.dv), widths, strict=True)
        gradients = [gradient[..., :width].contiguous() for gradient, width in widened]
        if not of_mask or mask is None:
            return gradients, None
        if not of_keys(mask, k):
            return gradients, found.d_bias.transpose(1, 2)
        # Of the keys of all ranks, one part from the queries of each rank: their sum, of the keys of this rank.
        part = found.d_bias if found.d_bias.dim() == 3 else found.d_bias[:, None]
        own = gather(self.group, torch.full((1, 1, 1), float(mask.shape[3])), f"{label}, keys")
        counts = [int(count) for count in own.flatten().tolist()]
        rows = part.permute(2, 0, 1).flatten(1)[None]
        summed = sum_rows(self.group, rows, counts, f"{label}, mask")
        return gradients, summed[0].unflatten(1, part.shape[:2]).permute(1, 2, 0)[:, :, None]

    @contextmanager
    def repeated(self, place: tuple[Any, ...]) -> Iterator[None]:
        """A block that computes a part of a forward again, from :meth:`position` on."""
        before = (*self.position(), self.active)
        self._forward, self.calls.made, self.shares.now, self.shares.totals, self.active = *place, True
        try:
            yield
        finally:
            self._forward, self.calls.made, self.shares.now, self.shares.totals, self.active = before

    def position(self) -> tuple[Any, ...]:
        """The forward, its calls so far, its shares, and what it has split."""
        return self._forward, self.calls.made, self.shares.now, self.shares.totals

    def _attend_masked(
        self, run: Callable[..., Any], mask: torch.Tensor, dtype: torch.dtype, label: str
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """With a mask of this rank's keys ``[batch or 1, heads or 1, 1, keys]``, all ranks having one.

        Masks are gathered once and then found again by their values. A rank that finds its mask may meet ranks that do not:
        then the calls disagree, all ranks see that, and from there on masks are gathered for each call. Returns the number of the
        mask last; -1 if it is not kept.
        """
        if self._reuse:
            known = next((item for item in self._masks if equal(item[1], mask)), None)
            try:
                if known is not None:
                    bias = known[2].to(mask_type(mask, dtype))
                    return *run(label=f"{label}, mask {known[0]}", key_bias=bias), known[0]
                return self._attend_gathered(run, mask, dtype, label)
            except RequestError:
                self._reuse = False
        return self._attend_gathered(run, mask, dtype, f"{label}, again")

    def _attend_gathered(
        self, run: Callable[..., Any], mask: torch.Tensor, dtype: torch.dtype, label: str
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        number = next(self._mask_numbers)
        whole = gather_mask(self.group, mask, f"{label}, its mask")
        o, lse = run(label=label, key_bias=whole.to(mask_type(mask, dtype)))
        if not self._reuse:
            return o, lse, -1
        self._masks.append((number, mask.clone(), whole))
        return o, lse, number

    def _title(self) -> str:
        # In the label of each call: ranks that cut differently must not compute together.
        return f"{self.name[:40]}, {self.passes.model}, shares {self.shares}"

    def place(self) -> str:
        """The forward, for labels of its calls."""
        return f"{self._title()}: forward {self._forward}"


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
        keys; bool, or added to the logits. Its gradient is complete: that of a key mask is of the queries of all ranks.
    :returns: like ``query``.
    """
    asked = sorted(name for name, given in others.items() if given not in (None, False))
    if dropout_p or is_causal or asked:
        what = "dropout" if dropout_p else "is_causal" if is_causal else ", ".join(asked)
        raise _refused(split, f"attends with {what}, but split attention has none of it: remove the option that asks for it")
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if attn_mask is not None and attn_mask.dim() == 2 and tuple(attn_mask.shape) != (query.shape[0], key.shape[1]):
        what = f"has a mask of shape {list(attn_mask.shape)} for {query.shape[0]} batch entries of {key.shape[1]} keys on this rank"
        raise _refused(split, f"{what}: use a key mask [batch, keys]")
    attn_mask = None if attn_mask is None else four_axes(attn_mask, split.plan.rows_alike)
    common, behind = split.common(query, key)
    if common:
        if attn_mask is not None:
            attn_mask = own_keys(split.group, attn_mask.movedim(3, 1), common, behind).movedim(1, 3)
        key, value = (own_keys(split.group, x, common, behind) for x in (key, value))
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    return torch.ops.kyklos.diffusers_attention(query, key, value, attn_mask, float(scale), split.number)[0]


def _refused(split: Split, why: str) -> RequestError:
    error = RequestError(f"{split.name} {why}")
    # Compiled code makes no calls of a group.
    return error if torch.compiler.is_compiling() else tell(split.group, error)


def _split(number: int) -> Split:
    split = _splits.get(number)
    if split is None:
        raise RequestError("the handle of this transformer was removed: split it again, and compile it again")
    return split


@torch.library.custom_op("kyklos::diffusers_attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, split: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of = _split(split)
    # Errors of whole forwards are told where they end.
    with contextlib.nullcontext() if of.shares.whole else told(of.group):
        o, lse, place = of.attend(q, k, v, mask, scale)
    return o.to(q.device), lse.to(q.device), place


@_attention.register_fake
def _(q, k, v, mask, scale, split):  # noqa: ANN001, ANN202
    lse = q.new_empty(*q.shape[:-1], 2, dtype=torch.float32)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse, torch.empty(3, dtype=torch.int64)


@torch.library.custom_op("kyklos::diffusers_attention_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _attention_backward(
    d_o: torch.Tensor,
    states: list[torch.Tensor],
    mask: torch.Tensor | None,
    of_mask: bool,
    place: torch.Tensor,
    scale: float,
    split: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (dq, dk, dv), of_rows = _split(split).backward(d_o, states, mask, of_mask, scale, place.tolist())
    device = d_o.device
    d_mask = torch.empty(0, device=device) if of_rows is None or mask is None else of_rows.to(mask).contiguous()
    return dq.to(device), dk.to(device), dv.to(device), d_mask


@_attention_backward.register_fake
def _(d_o, states, mask, of_mask, place, scale, split):  # noqa: ANN001, ANN202
    d_mask = mask.new_empty(mask.shape) if of_mask else d_o.new_empty(0, dtype=torch.float32)
    return *(state.new_empty(state.shape) for state in states[:3]), d_mask


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, mask, ctx.scale, ctx.split = inputs
    ctx.save_for_backward(q, k, v, mask, *output)


def _differentiate(ctx: Any, d_o: torch.Tensor, *_: Any) -> Any:
    q, k, v, mask, o, lse, place = ctx.saved_tensors
    states = [q, k, v, o, lse]
    of_mask = ctx.needs_input_grad[3]
    dq, dk, dv, d_mask = torch.ops.kyklos.diffusers_attention_backward(d_o, states, mask, of_mask, place, ctx.scale, ctx.split)
    return dq, dk, dv, d_mask if of_mask else None, None, None


_attention.register_autograd(_differentiate, setup_context=_save)
_attention.register_effect(EffectType.ORDERED)
_attention_backward.register_effect(EffectType.ORDERED)

_plain: dict[Any, tuple[Callable[..., Any], set[str]]] = {}


def register(split: Split) -> None:
    """Lets the operator find ``split``. The first one wraps the backends of diffusers."""
    with _lock:
        # First, so that the end of another split does not put the backends back.
        _splits[split.number] = split
        if not _plain:
            for name, backend in _AttentionBackendRegistry._backends.items():
                accepted = _AttentionBackendRegistry._supported_arg_names[name]
                _plain[name] = (backend, accepted)
                _AttentionBackendRegistry._backends[name] = _wrapped(backend, frozenset(accepted))
                _AttentionBackendRegistry._supported_arg_names[name] = accepted | _NEEDED
    weakref.finalize(split, _put_back)


def unregister(split: Split) -> None:
    """The reverse. The last one puts the backends of diffusers back, as the end of the last one does."""
    with _lock:
        _splits.pop(split.number, None)
        _put_back()


def _put_back() -> None:
    """Puts the backends of diffusers back, if there is no split. May be called within itself, by the garbage collector."""
    with _lock:
        if any(True for _ in _splits.values()):
            return
        while _plain:
            name, (backend, accepted) = _plain.popitem()
            _AttentionBackendRegistry._backends[name] = backend
            _AttentionBackendRegistry._supported_arg_names[name] = accepted


def _wrapped(backend: Callable[..., Any], accepted: frozenset[str]) -> Callable[..., Any]:
    @functools.wraps(backend)
    def call(**given: Any) -> Any:
        split = given.get("_parallel_config")
        if isinstance(split, Split):
            is_whole = not torch.compiler.is_compiling() and split.shares.whole
            if not is_whole and not (split.plan.common_keys and given.get("is_causal")):
                return attention(split, **given)
            given["_parallel_config"] = None
        return backend(**{name: value for name, value in given.items() if name in accepted})

    return call

"""Attention over the tokens of all ranks with the arguments of PyTorch's function."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointFunction

from .._errors import RequestError
from .._group import Group
from .._sequence import keeping_place
from ._inputs import Wrong
from ._operator import attention, refused

_SDPA: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention
_MODULES: Any = torch.nn.functional.multi_head_attention_forward
_PARAMETERS = inspect.signature(_MODULES)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group: Group,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` in which each rank of ``group`` passes its own tokens, and the keys are those of all ranks.

    :param query: this rank's queries ``[batch, heads, tokens, dim]``, or without the axis of the batch; ``key`` and ``value`` likewise, with
        as many heads, or fewer with ``enable_gqa``. Values may have another dim.
    :param attn_mask: of this rank's queries by the keys of all ranks: bool, in which false hides a key, or added to the logits. It broadcasts
        to ``[batch, heads, tokens, keys]`` but for its last axis, which has all keys.
    :param is_causal: a query sees the tokens of lower ranks, and those before it on its own.
    :param dropout_p: 0.
    :returns: ``[batch, heads, tokens, dim of values]``. Its gradients are as those of :func:`attention`.
    :raises RequestError: as :meth:`kyklos.Group.attend`.
    """
    given = (query, key, value, group, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return _called(*given) if torch.compiler.is_compiling() else keeping_place(group._core, lambda: _called(*given))


class split_attention(TorchFunctionMode):
    """A block in which ``F.scaled_dot_product_attention`` is that over the tokens of all ranks, also within PyTorch's own modules.

    ::

        with kyklos.torch.split_attention(group):
            y = model(x[:, rows])       # of this rank's tokens; positions are the model's own, so pass those of the whole sequence

    It is for models whose other layers treat each token by itself, and which attend in no other way: other threads, ``flex_attention`` and
    operators called by name are not seen, and attend to the tokens of one rank. All ranks make the same calls. ``backward()`` may follow the block, also
    where checkpoints compute a part of it again. Calls whose keys every rank has whole, such as
    attention to a prompt, belong outside of the block, or into ``local``.

    :param local: called with the query, key and value of a call; true if the call attends to the tokens of this rank only.
    :raises RequestError: attention whose weights are asked for; at the end of a block in which nothing has called the function.
    """

    def __init__(self, group: Group, local: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool] | None = None) -> None:
        super().__init__()
        self._group, self._local, self._called = group, local, False
        # Of PyTorch's functions the one that calls the other: what it calls is outside of the mode.
        inside = {_SDPA.__name__: self._attend, "has_torch_function": lambda _: False}
        self._of_modules = FunctionType(_MODULES.__code__, {**_MODULES.__globals__, **inside})
        self._of_modules.__defaults__, self._of_modules.__kwdefaults__ = _MODULES.__defaults__, _MODULES.__kwdefaults__

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is _MODULES:
            named = _PARAMETERS.bind(*args, **given).arguments
            if named.get("need_weights", True):
                raise self._group.refuse("a MultiheadAttention that is asked for its weights", "call it with need_weights=False")
            if named.get("bias_k") is not None or named.get("add_zero_attn"):
                raise self._group.refuse(
                    "a MultiheadAttention with add_bias_kv or add_zero_attn, whose key each rank would add", "make it without"
                )
            func = self._of_modules
        return (self._attend if func is _SDPA else func)(*args, **given)

    def __enter__(self) -> split_attention:
        super().__enter__()
        _blocks().append(self)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        _blocks().pop()
        super().__exit__(kind, error, trace)
        if error is None and not self._called:
            raise RequestError(
                "a block of split_attention in which nothing calls F.scaled_dot_product_attention, so that each rank would attend to its own "
                "tokens: use kyklos.torch.attention where the model attends"
            )

    def _attend(self, *args: Any, **given: Any) -> torch.Tensor:
        self._called = True
        if self._local is not None:
            states = dict(zip(("query", "key", "value"), args, strict=False)) | given
            if self._local(states["query"], states["key"], states["value"]):
                return _SDPA(*args, **given)
        return scaled_dot_product_attention(*args, **given, group=self._group)


def _blocks() -> list[split_attention]:
    """The blocks that this thread is in."""
    if not hasattr(_local, "blocks"):
        _local.blocks = []
    return _local.blocks


def _again(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which ``backward()`` calls again, then in the block that this thread is in now."""
    if not _blocks():
        return function
    block = _blocks()[-1]

    def run(*args: Any, **given: Any) -> Any:
        # backward() has no modes, also where it is called in the block.
        if block in _get_current_function_mode_stack():
            return function(*args, **given)
        with block:
            return function(*args, **given)

    return run


def _remember_blocks() -> None:
    """PyTorch's checkpoints of both kinds call their functions again in the block that they were in."""
    # The second name is that of earlier releases.
    names = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    name = next((name for name in names if hasattr(checkpoints, name)), names[0])
    forward, generator = CheckpointFunction.forward, getattr(checkpoints, name, None)

    @functools.wraps(forward)
    def reentrant(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, _again(function), *args)

    CheckpointFunction.forward = staticmethod(reentrant)  # type: ignore[method-assign]
    if generator is None:
        # PyTorch then refuses the other kind, whose function has other tensors the second time.
        return

    @functools.wraps(generator)
    def other(function: Callable[..., Any], *args: Any, **given: Any) -> Any:
        return generator(_again(function), *args, **given)

    setattr(checkpoints, name, other)


_local = threading.local()
_remember_blocks()


def _called(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: Group,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    states = [x[None] if x.dim() == 3 else x for x in (query, key, value)]
    q, k, v = states
    try:
        if dropout_p:
            raise Wrong(f"dropout_p={dropout_p}", "leave it out: there is no dropout")
        if is_causal and attn_mask is not None:
            raise Wrong("attn_mask beside is_causal", "leave out one of them, as for PyTorch's function")
        if any(x.dim() != 4 for x in states):
            raise Wrong(f"tensors of {query.dim()}, {key.dim()} and {value.dim()} axes", "pass [batch, heads, tokens, dim]")
        if 0 in (query.shape[-1], value.shape[-1]):
            raise Wrong("heads of no elements", "pass [batch, heads, tokens, dim]")
        if not enable_gqa and q.shape[1] != k.shape[1]:
            raise Wrong(f"{q.shape[1]} query heads for {k.shape[1]} key heads", "pass enable_gqa=True")
        while attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask[None]
        if attn_mask is not None:
            _check(attn_mask, q)
    except Wrong as wrong:
        return refused(query, key, value, group, wrong)[0]
    is_mask = attn_mask is not None and attn_mask.dtype == torch.bool
    try:
        o, _ = attention(
            q,
            k,
            v,
            group,
            mask=attn_mask if is_mask else "causal" if is_causal else None,
            bias=None if is_mask else attn_mask,
            scale=scale,
        )
    except RequestError as error:
        # Only the engine knows the keys of all ranks, and it calls a mask a bias.
        error.args = (str(error).replace("attention bias tensor", "attn_mask").replace("the bias of rank", "the attn_mask of rank"),)
        raise
    return o[0] if query.dim() == 3 else o


def _check(attn_mask: torch.Tensor, q: torch.Tensor) -> None:
    """Of a mask what does not depend on other ranks."""
    if attn_mask.dim() > 4 or any(extent not in (1, whole) for extent, whole in zip(attn_mask.shape[:3], q.shape[:3], strict=True)):
        batch, heads, tokens, _ = q.shape
        fits = f"pass one that broadcasts to [{batch}, {heads}, {tokens}, keys of all ranks]"
        raise Wrong(f"attn_mask of shape {list(attn_mask.shape)} for queries of shape {list(q.shape)}", fits)
    if attn_mask.dtype not in (torch.bool, torch.float32, torch.float16, torch.bfloat16):
        raise Wrong(f"attn_mask of {attn_mask.dtype}", "use bool, float32, float16 or bfloat16")

"""The function that ComfyUI calls instead of its attention.

A model whose ``transformer_options`` have ``optimized_attention_override`` calls ``override(original, *args, **kwargs)`` for every
attention of its blocks, where ``original`` is the function that ComfyUI has chosen. The picture never fails for a helper: whatever is not
understood, and whatever helpers cannot compute, ``original`` computes with the arguments as they came.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .call import Call, read

if TYPE_CHECKING:
    import torch

    from .sharing import Opened

#: After so many failures in a row...
MOST_FAILURES = 3
#: ...so many calls are computed here before helpers are tried again.
CALLS_OF_REST = 200
#: Wire formats that round.
ROUNDING = frozenset({"f16", "int8"})
#: Where ComfyUI's own node for the choice of a kernel makes its override. It changes nothing but the kernel.
KERNEL_CHOICES = frozenset({"comfy.model_patcher"})

_log = logging.getLogger("kyklos.comfyui")
# A model on several GPUs calls from several threads, and helpers take one call at a time.
_one_call = threading.Lock()


def make_override(
    opened: Opened, *, smallest_tokens: int, wire: str = "same", previous: Any = None, over_others: bool = False
) -> Callable[..., Any]:
    """An override for ``transformer_options``.

    It is a function, since ComfyUI copies the options of a model deeply with each clone, and functions stay as they are.

    :param smallest_tokens: calls with fewer queries, or with fewer keys, are computed here.
    :param wire: the wire format of these helpers.
    :param previous: the override that the model had. It computes what is computed here.
    :param over_others: share calls although ``previous`` may change more than the kernel.
    """
    failures = 0
    rest = 0
    other = "" if previous is None or over_others or getattr(previous, "__module__", "") in KERNEL_CHOICES else _name(previous)

    def override(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal failures, rest

        def untouched(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if previous is None else previous(original, *args, **kwargs)

        if _is_recorded():
            return untouched(*args, **kwargs)
        call = f"another node replaces attention: {other}" if other else _read(original, args, kwargs)
        if not isinstance(call, str) and (reason := _small(call, smallest_tokens)):
            call = reason
        if not isinstance(call, str) and wire in ROUNDING and call.wants_precision:
            call = f"a call that must not be rounded, and {wire} on the wire"
        if not isinstance(call, str) and rest:
            rest -= 1
            call = "helpers failed a moment ago"
        if isinstance(call, str):
            opened.counts.local(call)
            return untouched(*args, **kwargs)
        if not _one_call.acquire(blocking=False):
            opened.counts.local("another call is being shared")
            return untouched(*args, **kwargs)
        try:
            local = _Local(untouched, call, args, kwargs)
            o = _shared(opened, call, local)
        except Exception as error:
            # What the model's own attention raises is the caller's, as without helpers. Too little memory is tried again below, with
            # nothing of the helpers in memory.
            if local.error is not None and not _is_memory(local.error):
                raise local.error from None
            failures += 1
            if failures >= MOST_FAILURES:
                failures, rest = 0, CALLS_OF_REST
            opened.counts.failed(error)
            _log.warning("Kyklos: helpers failed, this machine computes the call: %s", error)
        else:
            failures, opened.counts.error = 0, ""
            # Where no helper pays, all of it was computed here.
            if local.was_whole:
                opened.counts.local("no helper pays for it")
            else:
                opened.counts.shared += 1
            return call.result(o)
        finally:
            _one_call.release()
        return untouched(*args, **kwargs)

    override.kyklos_previous = previous  # type: ignore[attr-defined]
    return override


def previous_of(override: Any) -> Any:
    """The override that a model had before this pack's; the given one if it is not of this pack."""
    while hasattr(override, "kyklos_previous"):
        override = override.kyklos_previous
    return override


class _Local:
    """The model's own attention on heads that are computed here."""

    def __init__(self, untouched: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.untouched, self.call, self.args, self.kwargs = untouched, call, args, kwargs
        self.error: Exception | None = None
        self.was_whole = False

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """q, k, v and the result are ``[batch, heads, tokens, dim]``."""
        call = self.call
        try:
            if q is call.q and k is call.k and v is call.v and mask is call.mask:
                self.was_whole = True
                return _with_heads(self.untouched(*self.args, **self.kwargs), q)
            layout = {"mask": mask, "skip_reshape": True, "skip_output_reshape": True}
            o = _with_heads(self.untouched(q, k, v, q.shape[1], **layout, **call.options), q)
            if o.dtype != q.dtype:
                raise _OtherType(f"the model's attention returns {o.dtype} for {q.dtype}")
            return o
        except _OtherType:
            raise
        except Exception as error:
            self.error = error
            raise


class _OtherType(Exception):
    """Parts of this machine and of helpers would be of two types: the call is computed here."""


def _shared(opened: Opened, call: Call, local: _Local) -> torch.Tensor:
    attention = opened.helpers.attention
    o: torch.Tensor = attention(local, call.q, call.k, call.v, mask=call.mask, scale=call.scale, causal=False, gqa=call.gqa)
    # What the model's own attention returns is right, whatever its type is; autocast decides the type of others.
    if not local.was_whole and (o.shape != call.q.shape or o.dtype != _result_dtype(call.q) or o.device != call.q.device):
        raise ValueError(f"helpers gave {list(o.shape)} in {o.dtype} for {list(call.q.shape)} in {call.q.dtype}")
    return o


def _result_dtype(q: torch.Tensor) -> torch.dtype:
    import torch

    return torch.get_autocast_dtype(q.device.type) if torch.is_autocast_enabled(q.device.type) else q.dtype


def _with_heads(o: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The result of a function of ComfyUI as ``[batch, heads, queries, dim]``, whichever layout it has. Some ignore what was asked for."""
    if o.ndim == 3:
        return o.unflatten(2, (q.shape[1], q.shape[3])).transpose(1, 2)
    return o


def _read(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | str:
    try:
        return read(original, args, kwargs)
    except Exception as error:
        return f"arguments that cannot be read: {type(error).__name__}"


def _small(call: Call, smallest_tokens: int) -> str:
    return f"fewer than {smallest_tokens} tokens" if min(call.q.shape[2], call.k.shape[2]) < smallest_tokens else ""


def _is_recorded() -> bool:
    """Whether calls are recorded for later (by a compiler, in a CUDA graph): nothing may wait for a network then."""
    import torch

    return torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _is_memory(error: Exception) -> bool:
    import torch

    return isinstance(error, (MemoryError, torch.OutOfMemoryError))


def _name(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"

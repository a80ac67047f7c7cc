"""What attends in the block of helpers: PyTorch's function, and the functions of transformers and diffusers beside it."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ._owner import Helpers

_NAME = "scaled_dot_product_attention"
_SDPA: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention

_lock = threading.Lock()
#: The blocks that have begun and not ended, the newest last.
_blocks: list[Capture] = []
#: What was replaced: an object or a dictionary, the name there, and what it had.
_replaced: list[tuple[Any, Any, Any]] = []


class Capture:
    """Replaces attention functions in all threads, from the first :meth:`start` until the last :meth:`stop`."""

    def __init__(self, helpers: Helpers) -> None:
        self.helpers = helpers

    def start(self) -> None:
        with _lock:
            _blocks.append(self)
            if len(_blocks) == 1:
                _replace_all()

    def stop(self) -> None:
        with _lock:
            _blocks.remove(self)
            if not _blocks:
                while _replaced:
                    where, name, had = _replaced.pop()
                    if isinstance(where, dict):
                        where[name] = had
                    else:
                        setattr(where, name, had)


def _replace(where: Any, name: Any, function: Any) -> None:
    _replaced.append((where, name, where[name] if isinstance(where, dict) else getattr(where, name)))
    if isinstance(where, dict):
        where[name] = function
    else:
        setattr(where, name, function)


def _replace_all() -> None:
    # PyTorch's own modules and most libraries look the function up there at each call; others have imported it by its name.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_NAME) is _SDPA:
            _replace(module, _NAME, _attention)
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is not None:
        functions = transformers.AttentionInterface._global_mapping
        for name, function in list(functions.items()):
            if name not in _NOT_REPLACED and not name.startswith("paged|"):
                _replace(functions, name, _of_transformers(function))
    diffusers = sys.modules.get("diffusers.models.attention_dispatch")
    if diffusers is not None:
        functions = diffusers._AttentionBackendRegistry._backends
        for name, function in list(functions.items()):
            if "native" not in str(getattr(name, "value", name)):
                _replace(functions, name, _of_diffusers(function))


#: Functions of transformers: the first calls PyTorch's, the second sums blocks of its own, the third splits a sequence over ranks.
_NOT_REPLACED = ("sdpa", "flex_attention", "kyklos")


def _block() -> Capture | None:
    # Without the lock: a list is read whole, and an ended block still computes right.
    return _blocks[-1] if _blocks else None


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention``, shared with helpers where that pays."""

    def original(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return _SDPA(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    block = _block()
    # Weights that are dropped at random, and arguments that PyTorch refuses, stay with it.
    if block is None or dropout_p or (is_causal and attn_mask is not None):
        return original(query, key, value, attn_mask)
    shared = block.helpers.attention
    return shared(original, query, key, value, mask=attn_mask, scale=scale, causal=is_causal, gqa=enable_gqa)


#: Arguments of attention functions of transformers that change nothing here.
_WITHOUT_EFFECT = {"use_cache", "position_ids", "return_dict", "output_hidden_states", "logits_to_keep", "num_items_in_batch"}


def _of_transformers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the ``AttentionInterface``: q ``[batch, heads, tokens, dim]``, and the output with tokens before heads."""

    @functools.wraps(function)
    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, *args: Any, **given: Any
    ) -> Any:
        block = _block()
        known = {name: given.get(name) for name in ("dropout", "scaling", "is_causal")}
        other = {name for name, what in given.items() if name not in known and name not in _WITHOUT_EFFECT and what is not None and what is not False}
        if block is None or args or other or known["dropout"] or attention_mask is not None:
            return function(module, query, key, value, attention_mask, *args, **given)
        causal = known["is_causal"]
        causal = getattr(module, "is_causal", True) if causal is None else causal
        # Of fewer queries than keys each library has its own idea which keys come before.
        if causal and query.shape[2] != key.shape[2]:
            return function(module, query, key, value, attention_mask, *args, **given)

        def original(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            o: torch.Tensor = function(module, q, k[:, :, : q.shape[2]] if causal else k, v[:, :, : q.shape[2]] if causal else v, mask, **given)[0]
            return o.transpose(1, 2)

        o = block.helpers.attention(original, query, key, value, scale=known["scaling"], causal=bool(causal), gqa=True)
        return o.transpose(1, 2), None

    return attend


def _of_diffusers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A backend of diffusers: q ``[batch, tokens, heads, dim]``."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def attend(*args: Any, **given: Any) -> Any:
        block = _block()
        given = dict(zip(names, args, strict=False)) | given
        mask, causal = given.get("attn_mask"), bool(given.get("is_causal"))
        known = {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}
        other = {name for name, what in given.items() if name not in known and what is not None and what is not False}
        if block is None or other or given.get("dropout_p") or (causal and given["query"].shape[1] != given["key"].shape[1]):
            return function(**given)

        def original(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            keys = slice(q.shape[2]) if causal else slice(None)
            states = {"query": q, "key": k[:, :, keys], "value": v[:, :, keys]}
            states = {name: x.transpose(1, 2) for name, x in states.items()}
            with_mask = {"attn_mask": mask} if "attn_mask" in given else {}
            o: torch.Tensor = function(**{**given, **states, **with_mask})
            return o.transpose(1, 2)

        q, k, v = (given[name].transpose(1, 2) for name in ("query", "key", "value"))
        gqa = bool(given.get("enable_gqa"))
        o = block.helpers.attention(original, q, k, v, mask=mask, scale=given.get("scale"), causal=causal, gqa=gqa)
        return o.transpose(1, 2)

    return attend

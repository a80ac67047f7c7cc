"""A call of ComfyUI's attention: its tensors as ``[batch, heads, tokens, dim]``, or the reason why it is not shared.

ComfyUI calls ``attention(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **more)``. Without
``skip_reshape`` the tensors are ``[batch, tokens, heads * dim]``, with it ``[batch, heads, tokens, dim]``; ``skip_output_reshape`` says the
same of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Positional arguments of ComfyUI's attention functions, in order. One of them names the first three otherwise.
NAMES = ("q", "k", "v", "heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape")
#: Other arguments that are understood. ``_inside_attn_wrapper`` is ComfyUI's own mark; functions that call others pass it on.
MORE = frozenset({"transformer_options", "_inside_attn_wrapper", "low_precision_attention", "scale", "enable_gqa", "preferred_attention"})
#: Functions of ComfyUI that add a bool mask to the logits, or read one as ``[batch, keys]``. The others hide the keys where it is false.
OTHER_BOOL_MASKS = frozenset({"attention_basic", "attention_split", "attention_sub_quad"})


@dataclass(frozen=True)
class Call:
    """A call that can be shared."""

    #: ``[batch, heads, queries, dim]``.
    q: torch.Tensor
    #: ``[batch, kv heads, keys, dim]``, as ``v``.
    k: torch.Tensor
    v: torch.Tensor
    #: ``[1 or batch, 1 or heads, 1 or queries, 1 or keys]``: bool, in which false hides a key, or added to the logits.
    mask: torch.Tensor | None
    scale: float | None
    #: Whether k and v have fewer heads than q.
    gqa: bool
    #: Whether the caller wants ``[batch, heads, tokens, dim]``, not ``[batch, tokens, heads * dim]``.
    keeps_heads: bool
    #: Whether the caller refuses attention that rounds more than its type does.
    wants_precision: bool
    #: What a function of ComfyUI gets beside tensors, mask and layout.
    options: dict[str, Any]

    def result(self, o: torch.Tensor) -> torch.Tensor:
        """``[batch, heads, queries, dim]`` in the layout that the caller wants."""
        return o if self.keeps_heads else o.transpose(1, 2).flatten(2)


def read(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | str:
    """The call, or in words why it is not one that helpers can share."""
    if len(args) > len(NAMES):
        return "an argument that this pack does not know"
    given = dict(zip(NAMES, args))
    if given.keys() & kwargs.keys():
        return "an argument twice"
    given.update(kwargs)
    if unknown := given.keys() - set(NAMES) - MORE:
        return f"the argument {min(unknown)}, which this pack does not know"
    if any(name not in given for name in NAMES[:4]):
        return "a call without q, k, v or heads"
    q, k, v, heads = (given[name] for name in NAMES[:4])
    if reason := _unlike(q, k, v):
        return reason
    gqa = bool(given.get("enable_gqa", False))
    if not given.get("skip_reshape", False):
        if q.ndim != 3 or not isinstance(heads, int) or heads < 1 or q.shape[2] % heads:
            return f"queries of shape {list(q.shape)} for {heads} heads"
        dim = q.shape[2] // heads
        if any(t.shape[2] % dim for t in (k, v)):
            return f"keys of shape {list(k.shape)} for heads of {dim}"
        # Views: no tensor is copied.
        q, k, v = (t.unflatten(2, (t.shape[2] // dim, dim)).transpose(1, 2) for t in (q, k, v))
    if reason := _misfit(q, k, v, heads, gqa):
        return reason
    mask = given.get("mask")
    if mask is not None:
        mask = _mask(mask, q, k, getattr(original, "__name__", ""))
        if isinstance(mask, str):
            return mask
    scale = given.get("scale")
    if scale is not None and not isinstance(scale, (int, float)):
        return "a scale that is no number"
    options = {name: value for name, value in given.items() if name == "attn_precision" or name in MORE}
    keeps_heads = bool(given.get("skip_output_reshape", False))
    wants_precision = given.get("low_precision_attention", True) is False
    return Call(q, k, v, mask, None if scale is None else float(scale), gqa, keeps_heads, wants_precision, options)


def _unlike(*tensors: Any) -> str:
    """Why q, k and v are not tensors of one kind; empty if they are."""
    import torch

    # Subclasses hold other numbers than their elements (quantized tensors), or record what is done with them.
    if any(type(t) is not torch.Tensor or t.layout is not torch.strided for t in tensors):
        return "tensors of a kind that helpers do not take"
    q = tensors[0]
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"tensors of {q.dtype}"
    if any(t.dtype != q.dtype or t.device != q.device or t.ndim != q.ndim for t in tensors):
        return "q, k and v that differ in type, device or axes"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "gradients are wanted"
    return ""


def _misfit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: Any, gqa: bool) -> str:
    """Why tensors ``[batch, heads, tokens, dim]`` do not fit each other; empty if they do."""
    if q.ndim != 4 or q.shape[1] != heads:
        return f"queries of shape {list(q.shape)} for {heads} heads"
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or 0 in q.shape or 0 in k.shape:
        return f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}"
    if heads % k.shape[1] or (k.shape[1] != heads and not gqa):
        return f"{k.shape[1]} heads of keys for {heads} of queries"
    return ""


def _mask(mask: Any, q: torch.Tensor, k: torch.Tensor, function: str) -> torch.Tensor | str:
    """The mask with four axes, as ComfyUI broadcasts it, or why it is not understood.

    Two axes are ``[queries, keys]``, three ``[batch, queries, keys]``, four ``[batch, heads, queries, keys]``.
    """
    import torch

    if type(mask) is not torch.Tensor or mask.device != q.device:
        return "a mask of another kind or device"
    if mask.dtype == torch.bool:
        if function in OTHER_BOOL_MASKS:
            return f"a bool mask in {function}, which reads it in another way"
    elif mask.dtype != q.dtype:
        return f"a mask of {mask.dtype} for queries of {q.dtype}"
    if torch.is_grad_enabled() and mask.requires_grad:
        return "gradients are wanted"
    if mask.ndim == 2:
        mask = mask[None, None]
    elif mask.ndim == 3:
        mask = mask[:, None]
    extents = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if mask.ndim != 4 or any(has not in (1, most) for has, most in zip(mask.shape, extents)):
        return f"a mask of shape {list(mask.shape)} for {list(extents)}"
    return mask

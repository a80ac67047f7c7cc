"""Attention classes of the library that compute attention themselves, and do not ask ``AttentionInterface``: while a model is split, theirs goes
through it.

What they do besides attention is here as in the library, so that a class is known by its name only. ALiBi is a number for each key, as in the
library: a term that all keys of a query have in common changes no weight.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from ._attention import attention
from ._hooks import Undo, replace
from ._masks import MaskRule


def is_known(base: PreTrainedModel) -> bool:
    """Whether the model attends by classes that are known here."""
    return any(_replacement(module) for module in base.modules())


def needs_no_positions(base: PreTrainedModel) -> bool:
    """Whether positions enter the model by ALiBi alone, so that it takes no ``position_ids``."""
    return any(_replacement(module) in (_bloom, _mpt) for module in base.modules())


def choose(base: PreTrainedModel, implementation: str) -> None:
    """Sets ``attn_implementation``, also of models that do not let callers choose it."""
    if base._can_set_attn_implementation():
        base.set_attn_implementation(implementation)
    elif is_known(base):
        base.config._attn_implementation = implementation


def install(base: PreTrainedModel, undo: Undo) -> None:
    """Makes the known classes of a model ask the attention function of ranks, until the functions of ``undo`` are called."""
    for module in [] if base._can_set_attn_implementation() else base.modules():
        if function := _replacement(module):
            name = "_attn" if function is _attn else "forward"
            replace(module, name, functools.partial(function, module), undo)


def _replacement(module: torch.nn.Module) -> Callable[..., Any] | None:
    of_library = type(module).__module__.startswith("transformers.models.")
    return _REPLACEMENTS.get(type(module).__name__) if of_library else None


def _attn(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None) -> tuple[torch.Tensor, None]:
    """``_attn`` of GPT-J and its relatives; ``[batch, heads, tokens, dim]`` in and out."""
    # GPT-Neo does not scale.
    scale = 1 / float(getattr(module, "scale_attn", 1))
    if getattr(module, "attention_type", None) == "local":
        attention_mask = dataclasses.replace(attention_mask, left=module.config.window_size - 1)
    return _attend(module, query, key, value, attention_mask, scale, module.attn_dropout.p).transpose(1, 2), None


def _bloom(
    module: Any, hidden_states: torch.Tensor, residual: torch.Tensor, alibi: Any, attention_mask: Any, layer_past: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    own = functools.partial(_slopes, module, hidden_states.dtype)
    dropout = max(module.attention_dropout.p, module.hidden_dropout)
    o = _attend(module, query, key, value, attention_mask, module.inv_norm_factor, dropout, own)
    return module.dense(o.flatten(2)) + residual, None


def _falcon(
    module: Any,
    hidden_states: torch.Tensor,
    alibi: Any,
    attention_mask: Any,
    layer_past: Any = None,
    position_embeddings: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = (x.transpose(1, 2) for x in module._split_heads(module.query_key_value(hidden_states)))
    if module.new_decoder_architecture:
        # The library repeats them for each query head.
        key, value = (x[:, :: module.num_heads // module.num_kv_heads] for x in (key, value))
    own = None
    if alibi is None:
        query, key = _of_library(module, "apply_rotary_pos_emb")(query, key, *position_embeddings)
    else:
        own = functools.partial(_scaled_slopes, module, hidden_states.dtype)
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    dropout = max(module.attention_dropout.p, module.hidden_dropout)
    o = _attend(module, query, key, value, attention_mask, module.inv_norm_factor, dropout, own)
    return module.dense(o.flatten(2)), None


def _mpt(
    module: Any, hidden_states: torch.Tensor, position_bias: Any, past_key_values: Any = None, attention_mask: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (x.unflatten(2, (module.n_heads, module.head_dim)).transpose(1, 2) for x in mixed.chunk(3, 2))
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    own = functools.partial(_distances, module)
    o = _attend(module, query, key, value, attention_mask, module.softmax_scale, module.attn_dropout_p, own)
    return module.out_proj(o.flatten(2)), None


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: MaskRule,
    scale: float,
    dropout: float,
    alibi: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """``[batch, tokens, heads, dim]``."""
    o, _ = attention(module, query, key, value, mask, scale, dropout if module.training else 0.0, alibi=alibi)
    return o.to(value.dtype)


def _slopes(module: Any, dtype: torch.dtype, visible: torch.Tensor) -> torch.Tensor:
    return _of_library(module, "build_alibi_tensor")(visible, module.num_heads, dtype).view(len(visible), module.num_heads, -1)


def _scaled_slopes(module: Any, dtype: torch.dtype, visible: torch.Tensor) -> torch.Tensor:
    return _slopes(module, dtype, visible) / math.sqrt(module.head_dim)


def _distances(module: Any, visible: torch.Tensor) -> torch.Tensor:
    return _of_library(module, "build_mpt_alibi_tensor")(module.n_heads, visible.shape[1], device=visible.device).transpose(0, 1)


def _of_library(module: Any, name: str) -> Callable[..., Any]:
    """A function of the file that has the class of ``module``."""
    return getattr(sys.modules[type(module).__module__], name)


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "BloomAttention": _bloom,
    "CodeGenAttention": _attn,
    "FalconAttention": _falcon,
    "GPTJAttention": _attn,
    "GPTNeoSelfAttention": _attn,
    "MptAttention": _mpt,
}

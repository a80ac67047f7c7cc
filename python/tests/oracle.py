"""Attention in float64, written for clarity: the tests compare with it."""

import numpy as np


def attention(q, k, v, *, visible=None, scale=None, softcap=None, sinks=None, bias=None):
    """o and lse of ``[batch, tokens, heads, dim]`` arrays; ``visible`` and ``bias`` broadcast to ``[batch, heads, q, k]``."""
    q, k, v = (np.asarray(array, dtype=np.float64) for array in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) * (1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    if bias is not None:
        logits = logits + np.asarray(bias, dtype=np.float64)
    if visible is not None:
        logits = np.where(visible, logits, -np.inf)
    if sinks is not None:
        extra = np.broadcast_to(np.asarray(sinks, dtype=np.float64)[None, :, None, None], (*logits.shape[:3], 1))
        logits = np.concatenate([logits, extra], axis=-1)
        v = np.concatenate([v, np.zeros_like(v[:, :1])], axis=1)
    largest = logits.max(axis=-1, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0.0)
    weights = np.exp(logits - largest)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = (np.log(total) + largest)[..., 0]
        weights = np.where(total > 0, weights / total, 0.0)
    return np.einsum("bhqk,bkhd->bqhd", weights, v), lse.transpose(0, 2, 1)


def causal(queries, keys, offset=0):
    """``[queries, keys]``: a query at position ``offset + i`` sees keys up to its own."""
    return np.arange(keys)[None] <= np.arange(queries)[:, None] + offset


#: Error of an f32 computation: a few roundings of numbers of size 1 in o; lse sums up to some hundred terms of size 1.
F32 = 2e-6
#: Half the distance between neighbours of size 1 to 2, on inputs and on the output.
ROUNDED = {"float16": 3e-3, "bfloat16": 2.5e-2}

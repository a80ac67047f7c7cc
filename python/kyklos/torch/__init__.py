"""A PyTorch operator for attention over the tokens of all ranks.

::

    import kyklos, kyklos.torch

    with kyklos.Group.from_env() as group:
        o, lse = kyklos.torch.attention(q, k, v, group, mask="causal")

The operator ``torch.ops.kyklos.attention`` works in eager mode and under ``torch.compile(fullgraph=True)``, where ranks may have
different numbers of tokens. It has an ordered effect: compiled code neither drops nor reorders it, so all ranks make the same
calls. Tensors of the CPU are read in place, and so are those of the NVIDIA GPU on which the rank computes
(``device="cuda:0"``); those of other devices pass through host memory.

It has gradients of q, k, v, sinks and of a bias, computed on processors, wgpu devices and NVIDIA GPUs; a ``backward()`` is a
call of all ranks, too. Each rank's loss is a part of one loss, the sum over the ranks: nothing is divided by their number.
:func:`sum_gradients` adds the gradients of parameters over the ranks.

:func:`scaled_dot_product_attention` has the arguments of PyTorch's function, and within :func:`split_attention` models of one's own call it
instead.
"""

from __future__ import annotations

from ._gradients import sum_gradients
from ._operator import attention
from ._sdpa import scaled_dot_product_attention, split_attention

__all__ = ["attention", "scaled_dot_product_attention", "split_attention", "sum_gradients"]

"""Gradients of groups in which ranks on PyTorch's device stand beside ranks on others."""

import itertools

import numpy as np
import pytest
import torch
from test_torch_device import MASKS, PLANS, visible_pairs

import kyklos
import kyklos.torch
from kyklos import _kyklos


def other_devices():
    """What stands beside PyTorch's device: the cores, and a wgpu device if there is one."""
    return ["torch:cpu", "cpu", *(name for name, reason in _kyklos.devices() if name.startswith("wgpu:") and reason is None)]


def exact_gradients(tensors, visible, sinks, d_o, d_lse):
    """Of q, k, v and the sinks in float64, by PyTorch's derivatives of the plain formula."""
    q, k, v, sinks = (x.detach().double().requires_grad_() for x in (*tensors, sinks))
    wide = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)]
    logits = (q @ wide[0].mT * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    sink = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
    logits = torch.cat([logits, sink], -1)
    outputs = [logits.softmax(-1)[..., :-1] @ wide[1], logits.logsumexp(-1)]
    return torch.autograd.grad(outputs, [q, k, v, sinks], [d_o.double(), d_lse.double()])


@pytest.mark.parametrize("seed", range(28))
def test_gradients_of_random_groups(tensors, seed):
    random = np.random.default_rng(1000 + seed)
    (strategy, mesh), mask = PLANS[seed % len(PLANS)], MASKS[seed % len(MASKS)]
    dtype = [torch.float32, torch.bfloat16, torch.float16][seed // 2 % 3]
    ranks = 3 if mesh is None else int(mesh[0]) * int(mesh[2])
    cuts = [0, *np.sort(random.integers(0, 98, ranks - 1)).tolist(), 97]
    arrays = [torch.from_numpy(array).to(dtype).transpose(1, 2) for array in tensors(97, heads=6, kv_heads=3, dim=40)]
    generator = torch.Generator().manual_seed(seed)
    d_o = torch.randn(2, 6, 97, 40, generator=generator).to(dtype)
    d_lse, sinks = torch.randn(2, 6, 97, generator=generator), torch.randn(6, generator=generator)
    devices = ["torch:cpu", *random.choice(other_devices(), ranks - 1).tolist()]
    options = {name: value for name, value in (("strategy", strategy), ("mesh", mesh)) if value}

    def call(group):
        own = slice(cuts[group.rank], cuts[group.rank + 1])
        leaves = [x[:, :, own].clone().requires_grad_() for x in arrays] + [sinks.clone().requires_grad_()]
        outputs = kyklos.torch.attention(*leaves[:3], group, mask=mask, sinks=leaves[3], **options)
        return torch.autograd.grad(outputs, leaves, [d_o[:, :, own], d_lse[:, :, own]])

    parts = kyklos.run_local(ranks, call, device=devices)
    *found, of_sinks = zip(*parts, strict=True)
    found = [torch.cat(part, 2) for part in found] + [sum(of_sinks)]
    right = exact_gradients(arrays, torch.from_numpy(visible_pairs(mask)), sinks, d_o, d_lse)
    # Of float32 some roundings of sums over 100 rows and 3 heads; else of weights, of the result, and of each block on the wire.
    limit = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for own, other in zip(found, right, strict=True):
        assert (own - other).abs().max() <= limit * other.abs().max(), devices


def test_the_limits_of_gradients_find_a_wrong_sign_of_the_log_sum_exp(tensors):
    """The control: without it, gradients are far beyond the limits above."""
    arrays = [torch.from_numpy(array).transpose(1, 2) for array in tensors(97, heads=6, kv_heads=3, dim=40)]
    generator = torch.Generator().manual_seed(0)
    d_o, d_lse = torch.randn(2, 6, 97, 40, generator=generator), torch.randn(2, 6, 97, generator=generator)
    visible = torch.from_numpy(visible_pairs("causal"))
    right, wrong = (exact_gradients(arrays, visible, torch.zeros(6), d_o, sign * d_lse) for sign in (1, -1))
    for own, other in itertools.islice(zip(right, wrong, strict=True), 2):
        assert (own - other).abs().max() > 0.1 * own.abs().max()

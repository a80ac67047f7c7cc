"""The kernel that a device of another vendor brings: a stand-in with the conditions of Intel's, registered for the CPU."""

import pytest
import torch
from test_torch_device import states, visible_pairs
from test_torch_groups import exact_gradients

import kyklos
import kyklos.torch
from kyklos._device import _vendors

FORWARD = "_scaled_dot_product_fused_attention_overrideable"


@pytest.fixture
def calls(monkeypatch):
    """Calls of the stand-in, which is the kernel of the CPU for now: forward, and backward."""
    seen = {"forward": 0, "backward": 0, "masked": 0}

    def logits(q, k, bias, causal, scale):
        assert not (causal and bias is not None)
        found = q.float() @ k.float().mT * scale
        found = found if bias is None else found + bias.float()
        return found.masked_fill(torch.ones(found.shape[-2:], dtype=torch.bool).triu(1), -torch.inf) if causal else found

    def forward(q, k, v, bias=None, dropout=0.0, causal=False, debug=False, *, scale=None):
        needs = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        seen["forward"] += 1
        seen["masked"] += bias is not None
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        x = logits(q, k, bias, causal, scale)
        o, lse = (x.softmax(-1) @ v.float()).to(q.dtype), x.logsumexp(-1, keepdim=True)
        none = torch.empty((), dtype=torch.int64)
        return o, lse if needs else None, None, None, q.shape[2], k.shape[2], none, none, None

    def backward(d_o, q, k, v, bias, wanted, o, lse, _, __, rows, keys, dropout, causal, seed, offset, *, scale=None):
        seen["backward"] += 1
        assert q.shape[1] == k.shape[1] and lse.shape == (*q.shape[:3], 1) and list(wanted) == [True, True, True, False]
        weights = torch.exp(logits(q, k, bias, causal, scale) - lse)
        delta = (d_o.float() * o.float()).sum(-1, keepdim=True)
        inner = weights * (d_o.float() @ v.float().mT - delta) * scale
        found = inner @ k.float(), inner.mT @ q.float(), weights.mT @ d_o.float()
        return *(x.to(q.dtype) for x in found), None

    library = torch.library.Library("aten", "IMPL")
    library.impl(FORWARD, forward, "CPU")
    library.impl(FORWARD + "_backward", backward, "CPU")
    monkeypatch.setitem(_vendors._BY_DEVICE, "cpu", _vendors._OF_OTHERS)
    yield seen
    library._destroy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["full", "causal", "window:30,12"])
def test_its_conditions_are_met(calls, monkeypatch, tensors, dtype, mask):
    """Log-sum-exps, masks, grouped heads, and gradients, on two ranks."""
    from kyklos._device import _backward

    arrays = [torch.from_numpy(array).to(dtype).transpose(1, 2) for array in tensors(97, heads=6, kv_heads=3, dim=40)]
    generator = torch.Generator().manual_seed(1)
    d_o, d_lse = torch.randn(2, 6, 97, 40, generator=generator).to(dtype), torch.randn(2, 6, 97, generator=generator)
    sinks = torch.randn(6, generator=generator)
    with kyklos.Group.local(1, device="torch:cpu")[0] as group:
        assert group.kernel(40, str(dtype).removeprefix("torch.")) == "the vendor's"

    def call(group):
        own = slice(50 * group.rank, 50 + 47 * group.rank)
        leaves = [x[:, :, own].clone().requires_grad_() for x in arrays] + [sinks.clone().requires_grad_()]
        # The kernels are tried before.
        outputs = kyklos.torch.attention(*leaves[:3], group, mask=mask, sinks=leaves[3])
        torch.autograd.grad(outputs, leaves, [d_o[:, :, own], d_lse[:, :, own]], retain_graph=True)
        monkeypatch.setattr(_backward, "_chunk", None)
        return torch.autograd.grad(outputs, leaves, [d_o[:, :, own], d_lse[:, :, own]])

    *found, of_sinks = zip(*kyklos.run_local(2, call, device="torch:cpu"), strict=True)
    assert calls["forward"] and calls["backward"] and (calls["masked"] or not mask.startswith("window"))
    found = [torch.cat(part, 2) for part in found] + [sum(of_sinks)]
    right = exact_gradients(arrays, torch.from_numpy(visible_pairs(mask)), sinks, d_o, d_lse)
    for own, other in zip(found, right, strict=True):
        assert (own - other).abs().max() <= (1e-5 if dtype == torch.float32 else 4e-2) * other.abs().max()


def test_tensors_of_inference_mode(calls):
    with torch.inference_mode():
        given = [x.clone() for x in states()]
        with kyklos.Group.local(1, device="torch:cpu")[0] as group:
            assert group.kernel(24) == "the vendor's"
            before = calls["forward"]
            o, _ = group.attend(*given, layout="bshd", mask="causal")
    assert calls["forward"] > before
    want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in states()), is_causal=True)
    assert (o - want.transpose(1, 2)).abs().max() <= 3e-6

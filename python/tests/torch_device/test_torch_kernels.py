"""Which kernels of PyTorch are used, and what is computed again because they may have it wrong."""

import itertools

import numpy as np
import pytest
import torch
from oracle import attention, causal
from test_torch_device import alone, states  # noqa: F401

import kyklos
from kyklos._device._kernels import Inputs, Kernel
from kyklos._device._vendors import CuDnn, Efficient, Flash, FlashOnCpu, Kernels, Overrideable


def counted(monkeypatch):
    """Counts calls of the kernels of PyTorch and of matrix products."""
    from kyklos._device import _backward, _forward

    calls = {"run": 0, "run_backward": 0, "_products": 0, "_chunk": 0}

    def count(owner, name):
        own = getattr(owner, name)

        def call(*arguments):
            calls[name] += 1
            return own(*arguments)

        monkeypatch.setattr(owner, name, call)

    count(FlashOnCpu, "run")
    count(FlashOnCpu, "run_backward")
    count(_forward, "_products")
    count(_backward, "_chunk")
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", ["full", "causal", "window:20,5"])
def test_usual_calls_use_the_kernels_of_pytorch(alone, monkeypatch, dtype, mask):
    from kyklos.torch import attention as differentiable

    tensors = [x.to(dtype).requires_grad_() for x in states(heads_first=True, tokens=300, dim=32)]
    # The kernels are tried in the first call.
    differentiable(*tensors, group=alone, mask=mask)[0].sum().backward()
    calls = counted(monkeypatch)
    differentiable(*tensors, group=alone, mask=mask)[0].sum().backward()
    assert calls["run"] and calls["run_backward"] and not calls["_products"] and not calls["_chunk"]


def test_what_the_kernels_get_wrong_is_computed_by_products(alone, monkeypatch):
    """Large logits, softcaps, and hidden numbers that are not finite."""
    q, k, v = states()
    # The kernels are tried in the first call.
    alone.attend(q, k, v, mask="causal", layout="bshd")
    calls = counted(monkeypatch)

    def products(*arrays, **options):
        before = calls["_products"]
        o, _ = alone.attend(*arrays, layout="bshd", **options)
        return o, calls["_products"] - before

    plain, count = products(q, k, v, mask="causal")
    assert count == 0
    assert products(q * 1e4, k, v, mask="causal")[1] and products(q, k, v, softcap=3.0)[1]
    poisoned = v.clone()
    poisoned[:, 32] = float("nan")
    o, count = products(q, k, poisoned, mask="causal")
    # Rows before the NaN keep their bits, and its own row has it.
    assert count and torch.equal(o[:, :32], plain[:, :32]) and o[:, 32].isnan().all()


def on_ranks(device, call):
    parts = kyklos.run_local(2, call, device=device)
    return [torch.cat(part, 1) for part in zip(*parts, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dead", ["overflow", "minus infinity"])
def test_rows_whose_logits_are_all_minus_infinity_saw_nothing(dtype, dead):
    """Where another rank has keys with weight: PyTorch's kernel gives such rows the log-sum-exp 0."""
    generator = torch.Generator().manual_seed(3)
    q, v = torch.ones(1, 80, 1, 16), torch.randn(1, 80, 1, 16, generator=generator)
    k = -0.1 * torch.rand(1, 80, 1, 16, generator=generator)
    k[:, :40] = -3e38 if dead == "overflow" else k[:, :40]
    k[:, :40, :, 0] = -float("inf") if dead == "minus infinity" else k[:, :40, :, 0]
    q, k, v = (x.to(dtype) for x in (q, k, v))

    def call(group):
        own = slice(40 * group.rank, 40 * group.rank + 40)
        return group.attend(q[:, own], k[:, own], v[:, own], layout="bshd")

    o, lse = on_ranks("torch:cpu", call)
    want, want_lse = attention(*(x.double().numpy() for x in (q, k[:, 40:], v[:, 40:])))
    limit = 3e-6 if dtype == torch.float32 else 2e-2
    assert np.abs(o.double().numpy() - want).max() <= limit and np.abs(lse.numpy() - want_lse).max() <= limit
    with kyklos.Group.local(1, device="torch:cpu")[0] as group:
        o, lse = group.attend(q[:, :40], k[:, :40], v[:, :40], layout="bshd")
    assert not o.any() and torch.isneginf(lse).all()


@pytest.mark.parametrize("devices", [["torch:cpu", "torch:cpu"], ["torch:cpu", "cpu"], ["cpu", "torch:cpu"]])
@pytest.mark.parametrize("strategy", ["ring", "pass-q", "gather"])
def test_stand_ins_for_minus_infinity_weigh_the_same_everywhere(devices, strategy):
    q, k, v = states(tokens=24)
    bias = torch.full((1, 24, 1, 24), torch.finfo(torch.float32).min)
    bias[..., ::3] = -1e38

    def call(group):
        own = slice(12 * group.rank, 12 * group.rank + 12)
        return group.attend(q[:, own], k[:, own], v[:, own], layout="bshd", bias=bias[:, own], strategy=strategy)

    o, lse = on_ranks(devices, call)
    assert (o - v.mean(1, keepdim=True)).abs().max() <= 1e-6
    assert torch.equal(lse, torch.full_like(lse, -1e38))


def test_a_large_scale_makes_logits_of_minus_infinity(alone):
    """Products in range, logits beyond it: only the kernel's own 0 tells."""
    q, k, v = (torch.ones(1, 4, 1, 16) for _ in range(3))
    k = k * -1e30
    o, lse = alone.attend(q, k, v, layout="bshd", scale=1e9)
    assert not o.any() and torch.isneginf(lse).all()


@pytest.mark.parametrize(("heads", "hides"), [(1, True), (2, False)])
def test_masks_of_long_calls_go_piece_by_piece(alone, heads, hides):
    """More terms than a piece may have, in triangles and rectangles, with gradients."""
    from kyklos.torch import attention as differentiable

    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randn(1, 2, 4200, 8, generator=generator).requires_grad_() for _ in range(3)]
    visible = torch.rand(1, heads, 4200, 4200, generator=generator) > 0.3
    visible |= torch.eye(4200, dtype=torch.bool)
    term = visible if hides else torch.zeros(visible.shape).masked_fill_(~visible, -2.0)
    lower = torch.ones(4200, 4200, dtype=torch.bool).tril()
    for mask in ("causal", "full"):
        terms = term
        if mask == "causal":
            terms = term & lower if hides else term.masked_fill(~lower, -torch.inf)
        # A bool mask stands for the whole mask.
        o, _ = differentiable(*tokens, alone, mask=terms) if hides else differentiable(*tokens, alone, mask=mask, bias=term)
        want = torch.nn.functional.scaled_dot_product_attention(*tokens, attn_mask=terms)
        found = torch.autograd.grad(o.sum(), tokens)
        right = torch.autograd.grad(want.sum(), tokens)
        assert (o - want).abs().max() <= 5e-6
        for own, other in zip(found, right, strict=True):
            assert (own - other).abs().max() <= 1e-4 * other.abs().max()


def test_elements_of_other_types_are_refused_by_name(alone):
    q, k, v = states()
    with pytest.raises(kyklos.RequestError, match="k: elements of float64: use float32"):
        alone.attend(q, k.double(), v, layout="bshd")


def test_products_out_of_range_are_noticed(alone):
    """q·k is infinite, and scale · q·k is not."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 70, 1, 8, generator=generator) for _ in range(3))
    k[0, 20] = -3e38
    o, lse = alone.attend(q, k, v, mask="causal", layout="bshd")
    want, want_lse = attention(*(x.double().numpy() for x in (q, k, v)), visible=causal(70, 70))
    finite = want_lse < 3.4e38
    assert np.abs(lse.numpy() / want_lse - 1)[finite].max() <= 1e-6
    assert np.abs(o.numpy() - want)[finite].max() <= 3e-6


class Wrong(FlashOnCpu):
    """Kernels with the faults that kernels of PyTorch have had."""

    def __init__(self, fault):
        self.fault = fault

    def run(self, x):
        if self.fault == "hides NaN":
            x = x._replace(**{name: getattr(x, name).nan_to_num(0.0, 0.0, 0.0) for name in ("q", "k", "v")})
        o, lse = super().run(x)
        return {
            "base 2": lambda: (o, lse / np.log(2)),
            "ln 2 off": lambda: (o, lse + np.log(2)),
            "zero": lambda: (o, torch.zeros_like(lse)),
            "o": lambda: (o * 1.1, lse),
            "no group": lambda: (_ for _ in ()).throw(RuntimeError("heads")),
        }.get(self.fault, lambda: (o, lse))()

    def run_backward(self, *arguments):
        dq, dk, dv = super().run_backward(*arguments)
        return (dq, dk * 1.2, dv) if self.fault == "gradient" else (dq, dk, dv)


@pytest.mark.parametrize("fault", ["base 2", "ln 2 off", "zero", "o", "no group", "hides NaN", "gradient", ""])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_kernel_is_used_when_its_results_are_right(fault, dtype):
    kernels = Kernels(torch.device("cpu"))
    kernels._kernels = [Wrong(fault)]
    expected = ["flash for CPU"] * 2
    if fault:
        expected["gradient" in fault] = "matrix products"
    assert [kernels.names(dtype, 64, gradients) for gradients in (False, True)] == expected


def test_a_kernel_is_tried_again_when_the_program_chooses_another_flash_attention(monkeypatch):
    kernels = Kernels(torch.device("cpu"))
    kernels._kernels = [wrong := Wrong("")]
    assert kernels.names(torch.float32, 64, False) == "flash for CPU"
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA9")
    wrong.fault = "base 2"
    assert kernels.names(torch.float32, 64, False) == "matrix products"


class Narrow(FlashOnCpu):
    """Gradients in 16 bits, as kernels of GPUs compute them, with a key/value head for each query head."""

    name = "narrow"
    grouped = grouped_gradients = False
    gradient_dtypes = {torch.bfloat16: torch.bfloat16}


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_gradients_of_kernels_in_16_bits(alone, monkeypatch, size):
    """With grouped heads, and a gradient of the log-sum-exp. The limit is what rounding of weights, products and sums makes."""
    from kyklos._device import _vendors
    from kyklos.torch import attention as differentiable

    monkeypatch.setitem(_vendors._BY_DEVICE, "cpu", [Narrow])
    generator = torch.Generator().manual_seed(4)
    q, k, v, d_o = (torch.randn(2, heads, 200, 32, generator=generator).bfloat16() for heads in (4, 2, 2, 4))
    d_o, d_lse = d_o * size, torch.randn(2, 4, 200, generator=generator) * size
    calls = counted(monkeypatch)
    with kyklos.Group.local(1, device="torch:cpu")[0] as group:
        assert group.kernel(32, "bfloat16") == "narrow" and group.kernel(32) == "narrow; gradients: matrix products"
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        before = dict(calls)
        found = torch.autograd.grad(differentiable(*leaves, group, mask="causal"), leaves, [d_o, d_lse])
        assert calls["run_backward"] > before["run_backward"] and calls["_chunk"] == before["_chunk"]
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wide = [exact[0], *(x.repeat_interleave(2, 1) for x in exact[1:])]
    logits = (wide[0] @ wide[1].mT * 32**-0.5).masked_fill(torch.ones(200, 200, dtype=torch.bool).triu(1), -torch.inf)
    outputs = [logits.softmax(-1) @ wide[2], logits.logsumexp(-1)]
    right = torch.autograd.grad(outputs, exact, [d_o.double(), d_lse.double()])
    for own, other in zip(found, right, strict=True):
        assert (own - other).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * other.abs().max()
        assert (own - other).norm() <= 2**-7 * other.norm()


def test_kernels_whose_gradients_do_not_repeat_are_left_out_on_request(monkeypatch):
    from kyklos._device import _vendors

    monkeypatch.setattr(Narrow, "repeats_gradients", False)
    monkeypatch.setitem(_vendors._BY_DEVICE, "cpu", [Narrow])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    tokens = [x.bfloat16().requires_grad_() for x in states(heads_first=True)]
    calls = counted(monkeypatch)
    with kyklos.Group.local(1, device="torch:cpu")[0] as group:
        kyklos.torch.attention(*tokens, group)[0].sum().backward()
        assert calls["run"] and not calls["run_backward"] and calls["_chunk"]


def test_kernels_of_gpus_have_the_signatures_that_are_used():
    """On devices that are not there: that says nothing about their results, which are tried on the device itself."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        for kind, device in itertools.product((Flash, CuDnn, Efficient, Overrideable), ("cuda",)):
            kernel: Kernel = kind()
            q = torch.empty(2, 77, 4, 64, device=device, dtype=torch.bfloat16).transpose(1, 2)
            k = torch.empty(2, 143, 2 if kernel.grouped else 4, 64, device=device, dtype=torch.bfloat16).transpose(1, 2)
            terms = torch.empty(1, 1, 77, 143, device=device, dtype=torch.bfloat16) if kernel.masked else None
            given = Inputs(q, k, k, 0.125, False, terms)
            o, lse = kernel.run(given)
            assert o.shape == q.shape and lse.shape == (2, 4, 77) and lse.dtype == torch.float32
            if kernel.gradient_dtypes:
                gradients = kernel.run_backward(given, o, o, lse.contiguous())
                assert [x.shape for x in gradients] == [x.shape for x in (q, k, k)]


def test_long_calls_go_piece_by_piece(alone):
    """So long that pieces cut triangles and rectangles, against PyTorch's attention."""
    q, k, v = (torch.randn(1, 8000, 8, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    for mask in ("causal", "full"):
        o, _ = alone.attend(q, k, v, mask=mask, layout="bshd")
        again, _ = alone.attend(q, k, v, mask=mask, layout="bshd")
        assert torch.equal(o, again)
        want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=mask == "causal")
        assert (o - want.transpose(1, 2)).abs().max() <= 3e-6

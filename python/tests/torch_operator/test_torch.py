"""The PyTorch operator."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import attention as oracle
from oracle import causal

import kyklos
import kyklos.torch

CUTS = [0, 25, 40]


@pytest.fixture(scope="module")
def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 40, 32, generator=generator) for heads in (8, 2, 2)]


@pytest.fixture
def alone():
    with kyklos.Group.local(1, device="cpu")[0] as group:
        yield group


def on_two_ranks(tensors, **options):
    def call(group):
        s = slice(*CUTS[group.rank : group.rank + 2])
        of_rank = {name: value(s) if callable(value) else value for name, value in options.items()}
        return kyklos.torch.attention(*(tensor[:, :, s] for tensor in tensors), group, **of_rank)

    results = kyklos.run_local(2, call, device="cpu")
    return [torch.cat(parts, dim=2) for parts in zip(*results, strict=True)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 4e-6), (torch.bfloat16, 2.5e-2), (torch.float16, 3e-3)]
)
def test_types_equal_the_oracle(tensors, dtype, tolerance):
    rounded = [tensor.to(dtype) for tensor in tensors]
    o, lse = on_two_ranks(rounded, mask="causal")
    assert o.dtype == dtype and lse.dtype == torch.float32
    want = oracle(*(tensor.double().transpose(1, 2).numpy() for tensor in rounded), visible=causal(40, 40))
    assert np.abs(o.double().transpose(1, 2).numpy() - want[0]).max() < tolerance
    assert np.abs(lse.double().transpose(1, 2).numpy() - want[1]).max() < tolerance * 4


def test_masks_biases_and_sinks(tensors):
    generator = torch.Generator().manual_seed(1)
    keys = torch.rand(2, 40, generator=generator) > 0.3
    pairs = torch.rand(2, 1, 40, 40, generator=generator) > 0.3
    keys[:, 0], pairs[..., 0] = True, True
    bias = torch.randn(1, 8, 40, 40, generator=generator)
    sdpa = lambda mask: F.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)  # noqa: E731
    cases = [
        ({"mask": keys}, sdpa(keys[:, None, None])),
        ({"mask": lambda s: pairs[:, :, s]}, sdpa(pairs)),
        ({"bias": lambda s: bias[:, :, s]}, sdpa(bias)),
    ]
    for options, want in cases:
        assert (on_two_ranks(tensors, **options)[0] - want).abs().max() < 4e-6, options
    sinks = torch.linspace(-1, 1, 8)
    o, _ = on_two_ranks(tensors, sinks=sinks)
    want, _ = oracle(*(tensor.double().transpose(1, 2).numpy() for tensor in tensors), sinks=sinks.numpy())
    assert np.abs(o.transpose(1, 2).numpy() - want).max() < 4e-6
    assert (o - sdpa(None)).abs().max() > 1e-3


def test_opcheck(tensors, alone):
    for layout in ("bhsd", "bshd"):
        number = kyklos.torch._operator._number(alone, "causal", layout)
        local = tensors if layout == "bhsd" else [tensor.transpose(1, 2) for tensor in tensors]
        scale = torch.tensor(0.3, dtype=torch.float64)
        arguments = (*local, None, None, None, scale, None, 0, number, layout == "bhsd")
        results = torch.library.opcheck(torch.ops.kyklos.attention, arguments)
        assert set(results.values()) == {"SUCCESS"}


def peer_gradients(tensors, d_o, sinks=None):
    """PyTorch's own gradients of causal attention in float64; a sink is a key with this logit and the value 0."""
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in tensors)
    sinks = None if sinks is None else sinks.detach().double().requires_grad_()
    group = q.shape[1] // k.shape[1]
    x = q @ k.repeat_interleave(group, 1).transpose(2, 3) / q.shape[3] ** 0.5
    x = x.masked_fill(~torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(), -torch.inf)
    if sinks is not None:
        x = torch.cat([x, sinks[None, :, None, None].expand(*x.shape[:3], 1)], 3)
    p = x.softmax(3)[..., : k.shape[2]]
    (p @ v.repeat_interleave(group, 1)).backward(d_o.double())
    return [tensor.grad for tensor in (q, k, v, sinks) if tensor is not None]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 1.5e-2)]
)
def test_gradients_equal_those_of_pytorch(tensors, dtype, tolerance):
    rounded = [tensor.to(dtype) for tensor in tensors]
    d_o = torch.randn(rounded[0].shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    sinks = torch.randn(8, generator=torch.Generator().manual_seed(4))

    def call(group):
        rows = slice(*CUTS[group.rank : group.rank + 2])
        own = [tensor[:, :, rows].clone().requires_grad_() for tensor in rounded]
        own_sinks = sinks.clone().requires_grad_()
        o, _ = kyklos.torch.attention(*own, group, mask="causal", sinks=own_sinks)
        o.backward(d_o[:, :, rows])
        return *(tensor.grad for tensor in own), own_sinks.grad

    *parts, d_sinks = zip(*kyklos.run_local(2, call, device="cpu"), strict=True)
    found = [*(torch.cat(part, dim=2) for part in parts), sum(d_sinks)]
    for ours, right in zip(found, peer_gradients(rounded, d_o, sinks), strict=True):
        assert (ours.double() - right).abs().max() < tolerance * max(1, right.abs().max())


def test_rows_of_finite_numbers_in_the_place_of_minus_infinity_are_means(tensors, alone):
    """Padding of models: all keys of a row are hidden with the lowest number of its type."""
    bias = torch.zeros(1, 1, 40, 40).masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), torch.finfo(torch.float32).min)
    bias[..., :7, :] = torch.finfo(torch.float32).min
    d_o = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(3))

    def gradients(attention):
        own = [tensor.clone().requires_grad_() for tensor in tensors]
        attention(*own).backward(d_o)
        return [tensor.grad for tensor in own]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        right = gradients(lambda *own: F.scaled_dot_product_attention(*own, attn_mask=bias, enable_gqa=True))
    found = gradients(lambda *own: kyklos.torch.attention(*own, alone, bias=bias)[0])
    for ours, theirs in zip(found, right, strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * max(1, theirs.abs().max())


def test_gradients_through_lse_and_of_unused_outputs(tensors, alone):
    q, k, v = (tensor.clone().requires_grad_() for tensor in tensors)
    _, lse = kyklos.torch.attention(q, k, v, alone)
    lse.sum().backward()
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    x = wide[0] @ wide[1].repeat_interleave(4, 1).transpose(2, 3) / 32**0.5
    x.logsumexp(3).sum().backward()
    assert (q.grad - wide[0].grad).abs().max() < 1e-5 and (k.grad - wide[1].grad).abs().max() < 1e-5
    assert v.grad.abs().max() == 0


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_steps_equal_eager_ones(tensors, alone, backend):
    def loss(q, k, v):
        first, _ = kyklos.torch.attention(q, k, v, alone, mask="causal")
        second, _ = kyklos.torch.attention(first, k, v, alone, softcap=5.0)
        return second.square().sum()

    def gradients(step):
        own = [tensor.clone().requires_grad_() for tensor in tensors]
        step(*own).backward()
        return [tensor.grad for tensor in own]

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for ours, eager in zip(gradients(compiled), gradients(loss), strict=True):
        assert (ours - eager).abs().max() <= 1e-5 * eager.abs().max()


def test_gradcheck_of_the_registration(tensors, alone):
    own = [tensor[:1, :, :5].clone().requires_grad_() for tensor in tensors]
    number = kyklos.torch._operator._number(alone, "full", "bhsd")
    results = torch.library.opcheck(
        torch.ops.kyklos.attention.default,
        (*own, None, None, None, None, torch.tensor(5.0, dtype=torch.float64), 0, number, True),
        test_utils=("test_autograd_registration", "test_faketensor"),
    )
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 8, 40, 40), (1, 1, 40, 40), (1, 8, 40, 40), (2, 40), (1, 8, 40)])
def test_a_bias_has_its_gradient(tensors, alone, shape, dtype):
    """A T5 bias ``[1, heads, queries, keys]`` and others. In compiled code as well."""
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    q, k, v = (tensor.to(dtype) for tensor in tensors)
    name = "bias" if len(shape) == 4 else "key_bias"

    def step(bias, call=lambda bias: kyklos.torch.attention(q, k, v, alone, mask="causal", **{name: bias})[0]):
        call(bias).float().square().sum().backward()
        return bias.grad

    def right(bias):
        whole = bias if bias.dim() == 4 else bias[:, None, None] if bias.dim() == 2 else bias[:, :, None]
        hidden = torch.zeros(40, 40).masked_fill(torch.ones(40, 40).tril() == 0, float("-inf"))
        keys, values = (tensor.float().repeat_interleave(4, 1) for tensor in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q.float(), keys, values, attn_mask=whole.float() + hidden)

    wanted = step(bias.clone().requires_grad_(), right)
    found = step(bias.clone().requires_grad_())
    assert found.dtype == dtype and found.shape == shape
    assert (found.float() - wanted.float()).abs().max() <= (1e-5 if dtype == torch.float32 else 3e-2) * wanted.float().abs().max()
    compiled = torch.compile(lambda bias: kyklos.torch.attention(q, k, v, alone, mask="causal", **{name: bias})[0], backend="aot_eager")
    assert torch.equal(step(bias.clone().requires_grad_(), compiled), found)


def test_a_call_of_a_group_does_not_drop_gradients(tensors, alone):
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
    recorded = q.clone().requires_grad_()
    with pytest.raises(kyklos.RequestError, match="requires a gradient"):
        alone.attend(recorded, k, v, layout="bshd")
    with torch.no_grad():
        alone.attend(recorded, k, v, layout="bshd")
    alone.attend(recorded.detach(), k, v, layout="bshd")


def test_autocast_converts(tensors, alone):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, lse = kyklos.torch.attention(*tensors, alone)
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_makes_all_calls_in_order_with_any_length(tensors, alone, backend, monkeypatch):
    calls = []
    attend = kyklos.Group.attend

    def counted(group, q, k, v, **options):
        calls.append((options["label"], q.shape[2]))
        return attend(group, q, k, v, **options)

    monkeypatch.setattr(kyklos.Group, "attend", counted)

    def step(q, k, v):
        kyklos.torch.attention(q, k, v, alone, mask="causal", label="unused")
        o, _ = kyklos.torch.attention(q * 2, k, v, alone, mask="causal", label="first")
        return kyklos.torch.attention(o, k, v, alone, mask="causal", label="second")[0]

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for tokens in (23, 9, 14, 17):
        local = [tensor[:, :, :tokens] for tensor in tensors]
        want = step(*local)
        calls.clear()
        assert (compiled(*local) - want).abs().max() < 4e-6
        assert calls == [(label, tokens) for label in ("unused", "first", "second")]
    # One graph for the first length, one for all others.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_a_call_of_a_group_that_is_gone_is_refused(tensors):
    group = kyklos.Group.local(1, device="cpu")[0]
    number = kyklos.torch._operator._number(group, "full", "bhsd")
    group.close()
    del group
    with pytest.raises(kyklos.RequestError, match="gone"):
        torch.ops.kyklos.attention(*tensors, None, None, None, None, None, 0, number, True)


def test_wrong_arguments(tensors, alone):
    """All of them are ``ValueError``, as RequestError is, or ``TypeError``, and the other ranks learn of each."""
    with pytest.raises(ValueError, match="layout"):
        kyklos.torch.attention(*tensors, alone, layout="hbsd")
    with pytest.raises(ValueError, match="use bool"):
        kyklos.torch.attention(*tensors, alone, mask=torch.ones(2, 40))
    with pytest.raises(ValueError, match="owner"):
        kyklos.torch.attention(*tensors, alone, results="all")
    with pytest.raises(ValueError, match="beside a bias"):
        kyklos.torch.attention(*tensors, alone, mask=torch.ones(2, 40) > 0, bias=torch.ones(1, 1, 40, 40))
    with pytest.raises((TypeError, kyklos.RequestError), match="colour"):
        kyklos.torch.attention(*tensors, alone, colour="red")


def test_a_group_of_a_process_group(tmp_path):
    script = f"""
import sys, torch, torch.distributed as dist, kyklos, kyklos.torch
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://{tmp_path}/rendezvous", rank=rank, world_size=2)
with kyklos.Group.from_torch(device="cpu") as group:
    assert (group.rank, group.size) == (rank, 2)
    torch.manual_seed(0)
    q = torch.randn(1, 4, 20, 16)
    s = [slice(0, 7), slice(7, 20)][rank]
    o, _ = kyklos.torch.attention(q[:, :, s], q[:, :, s], q[:, :, s], group, mask="causal")
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)[:, :, s]
    assert (o - want).abs().max() < 4e-6
    print("equal")
dist.destroy_process_group()
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for process in processes:
        try:
            out, err = process.communicate(timeout=90)
        finally:
            process.kill()
        assert process.returncode == 0 and "equal" in out, out + err


def test_tensors_of_the_gpu_of_a_rank_stay_there():
    from types import SimpleNamespace

    from torch._subclasses.fake_tensor import FakeTensorMode

    from kyklos._arrays.torch import readable

    own, other = (SimpleNamespace(gpu=gpu, torch_device=None) for gpu in (1, None))
    with FakeTensorMode():
        x = torch.empty(2, 9, 4, 32, dtype=torch.float16, device="cuda:1")
        packed = torch.empty(2, 9, 12, 32, dtype=torch.float16, device="cuda:1")
        for same in (x, x.transpose(1, 2), packed[:, :, 4:8], x[:, :0], x[:, ::2], x[:1]):
            assert readable(own, x, same)[1] is same
        # Elements that kernels cannot read there are copied on the device.
        for odd in (x[..., ::2], x.transpose(2, 3), x[:, :1].expand(2, 9, 4, 32), x[..., 1:]):
            (copy,) = readable(own, odd)
            assert copy.device == x.device and copy.is_contiguous() and copy.shape == odd.shape
        for group, tensors in ((other, [x]), (own, [x, x.to("cpu")]), (own, [x.to("cuda:0")])):
            assert all(tensor.device.type == "cpu" for tensor in readable(group, *tensors))
    assert kyklos.Group.local(1, device="cpu")[0].gpu is None

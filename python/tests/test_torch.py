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
        number = kyklos.torch._number(alone, None, None, "causal", layout)
        local = tensors if layout == "bhsd" else [tensor.transpose(1, 2) for tensor in tensors]
        arguments = (*local, None, None, None, number, layout == "bhsd")
        results = torch.library.opcheck(torch.ops.kyklos.attention, arguments)
        assert set(results.values()) == {"SUCCESS"}


def test_backward_raises(tensors, alone):
    q, k, v = tensors
    o, _ = kyklos.torch.attention(q.clone().requires_grad_(), k, v, alone)
    with pytest.raises(NotImplementedError, match="no backward pass"):
        o.sum().backward()


def test_a_call_of_a_group_does_not_drop_gradients(tensors, alone):
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
    recorded = q.clone().requires_grad_()
    with pytest.raises(kyklos.RequestError, match="requires a gradient"):
        alone.attend(recorded, k, v)
    with torch.no_grad():
        alone.attend(recorded, k, v)
    alone.attend(recorded.detach(), k, v)


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
    number = kyklos.torch._number(group, None, None, "full", "bhsd")
    group.close()
    del group
    with pytest.raises(kyklos.RequestError, match="gone"):
        torch.ops.kyklos.attention(*tensors, None, None, None, number, True)


def test_wrong_arguments(tensors, alone):
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
    assert (group.rank, group.world) == (rank, 2)
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

"""PyTorch as a device: the contract of backends, groups of unlike devices, tensors in place, and which kernels are trusted."""

import itertools
import os

import numpy as np
import pytest
import torch
from oracle import attention, causal

import kyklos
from kyklos import _kyklos
from kyklos._device._device import Device
from kyklos._device._kernels import Kernel
from kyklos._device._vendors import CuDnn, Efficient, Flash, FlashOnCpu, Kernels, Overrideable

CLAIMS = getattr(_kyklos, "claims", list)()
# scripts/test-python.sh has built it with them.
assert CLAIMS or not os.environ.get("KYKLOS_REQUIRE_CLAIMS")


@pytest.mark.skipif(not CLAIMS, reason="the extension module is built without the feature suite")
@pytest.mark.parametrize("claim", CLAIMS)
def test_the_contract_of_backends(claim):
    _kyklos.check(os.environ.get("KYKLOS_TORCH_DEVICE", "cpu"), claim)


def visible_pairs(mask):
    """Of 97 tokens, by batch entry."""
    pairs = {
        "full": np.ones((97, 97), bool),
        "causal": causal(97, 97),
        "window:9,0": causal(97, 97) & ~causal(97, 97, -10),
        "window:30,12": causal(97, 97, 12) & ~causal(97, 97, -31),
        "causal+documents:0,20,61,97": causal(97, 97) & np.equal.outer(*2 * [np.searchsorted([20, 61], np.arange(97), "right")]),
        "valid:70,97": np.ones((97, 97), bool),
    }[mask]
    both = np.stack([pairs, pairs])[:, None]
    if mask.startswith("valid"):
        both[0, :, :, 70:] = False
    return both


PLANS = [("ring", "1x3"), ("bidirectional", "1x3"), ("gather", "1x3"), ("unified", "2x2"), ("ulysses", "3x1"), (None, None)]
MASKS = ["full", "causal", "window:9,0", "causal+documents:0,20,61,97", "window:30,12", "valid:70,97", "causal"]


@pytest.mark.parametrize("seed", range(42))
def test_random_groups_equal_the_oracle(tensors, seed):
    """Unlike devices in one group; plans, masks, types; shares of any size, of consecutive tokens or of scattered ones."""
    random = np.random.default_rng(seed)
    (strategy, mesh), mask = PLANS[seed % len(PLANS)], MASKS[seed % len(MASKS)]
    dtype = [torch.float32, torch.bfloat16, torch.float16][seed // 2 % 3]
    ranks = 3 if mesh is None else int(mesh[0]) * int(mesh[2])
    cuts = [0, *np.sort(random.integers(0, 98, ranks - 1)).tolist(), 97]
    arrays = [torch.from_numpy(array).to(dtype) for array in tensors(97, heads=6, kv_heads=3, dim=40)]
    devices = ["torch:cpu", *random.choice(["torch:cpu", "cpu"], ranks - 1).tolist()]
    options = {name: value for name, value in (("strategy", strategy), ("mesh", mesh)) if value}
    order = np.arange(97)
    if seed % 2 and mesh in (None, "1x3"):
        # Blocks of 9 tokens in any order.
        pieces = np.array_split(order, 11)
        order = np.concatenate([pieces[index] for index in random.permutation(11)])
        lists = [ranges(order[first:end]) for first, end in itertools.pairwise(cuts)]
        options |= {"q_tokens": lists, "kv_tokens": lists}

    def call(group):
        own = order[cuts[group.rank] : cuts[group.rank + 1]].tolist()
        return group.attend(*(array[:, own] for array in arrays), layout="bshd", mask=mask, **options)

    parts = kyklos.run_local(ranks, call, device=devices)
    o, lse = (torch.cat(part, 1).double().numpy()[:, np.argsort(order)] for part in zip(*parts, strict=True))
    want_o, want_lse = attention(*(array.double().numpy() for array in arrays), visible=visible_pairs(mask))
    limits = {torch.float32: (3e-6, 3e-6), torch.float16: (4e-3, 1e-4), torch.bfloat16: (3e-2, 4e-4)}[dtype]
    assert np.abs(o - want_o).max() <= limits[0]
    assert np.abs(lse - want_lse).max() <= limits[1]


def ranges(tokens):
    """Half-open ranges of consecutive tokens."""
    if len(tokens) == 0:
        return []
    parts = np.split(tokens, np.flatnonzero(np.diff(tokens) != 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]


@pytest.fixture
def alone():
    with kyklos.Group.local(1, device="torch:cpu")[0] as group:
        yield group


def states(heads_first=False, tokens=33, dim=24):
    generator = torch.Generator().manual_seed(5)
    shape = (2, 4, tokens, dim) if heads_first else (2, tokens, 4, dim)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def test_tensors_are_read_and_written_in_place(alone, monkeypatch):
    """No tensor goes through the host, whatever its strides; others do. Dense ones are not even copied."""
    through_host, copies = [], []
    for name, calls in (("upload", through_host), ("on_host", through_host), ("repack", copies), ("clone", copies)):
        own = getattr(Device, name)
        monkeypatch.setattr(Device, name, lambda *a, name=name, own=own, calls=calls: calls.append(name) or own(*a))
    plain = states()
    want, _ = alone.attend(*plain, mask="causal", layout="bshd")
    assert isinstance(want, torch.Tensor) and want.shape == plain[0].shape and not through_host
    # The log-sum-exp is a part of a pair.
    assert copies == ["repack"]
    packed = torch.cat(plain, 2)
    for given in (
        packed.chunk(3, 2),
        [x.flip(0).flip(0) for x in plain],
        [x.transpose(1, 3).contiguous().transpose(1, 3) for x in plain],
        [torch.cat([x, x], 1)[:, :33] for x in plain],
    ):
        o, _ = alone.attend(*given, mask="causal", layout="bshd")
        assert torch.equal(o, want)
    copies.clear()
    o, lse = alone.attend(*(x.transpose(1, 2).contiguous() for x in plain), mask="causal", layout="bhsd")
    assert copies == 4 * ["repack"]
    assert torch.equal(o.transpose(1, 2), want) and lse.shape == (2, 4, 33)
    q, k, v = plain
    o, _ = alone.attend(q, k[:, :, :1].expand(-1, -1, 4, -1), v, mask="causal", layout="bshd")
    same, _ = alone.attend(q, k[:, :, :1].repeat(1, 1, 4, 1), v, mask="causal", layout="bshd")
    assert torch.equal(o, same) and not through_host
    found, _ = alone.attend(*(x.numpy() for x in plain), mask="causal")
    assert isinstance(found, np.ndarray) and np.array_equal(found, want.numpy())
    assert {"upload", "on_host"} <= set(through_host)


def test_inputs_are_not_changed_and_outputs_are_the_callers(alone):
    given = states()
    before = [x.clone() for x in given]
    o, _ = alone.attend(*given, mask="full", layout="bshd")
    kept = o.clone()
    alone.attend(*given, mask="causal", layout="bshd")
    assert torch.equal(o, kept) and all(map(torch.equal, given, before))
    o.zero_()
    again, _ = alone.attend(*given, mask="full", layout="bshd")
    assert torch.equal(again, kept)


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
    # The kernels are tried before.
    alone.kernel(32, str(dtype).removeprefix("torch."))
    calls = counted(monkeypatch)
    differentiable(*tensors, group=alone, mask=mask)[0].sum().backward()
    assert calls["run"] and calls["run_backward"] and not calls["_products"] and not calls["_chunk"]


def test_what_the_kernels_get_wrong_is_computed_by_products(alone, monkeypatch):
    """Large logits, softcaps, and hidden numbers that are not finite."""
    q, k, v = states()
    alone.kernel(24)
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

    def run(self, q, k, v, *others):
        if self.fault == "hides NaN":
            q, k, v = (x.nan_to_num(0.0, 0.0, 0.0) for x in (q, k, v))
        o, lse = super().run(q, k, v, *others)
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
    expected = "matrix products" if fault else "flash for CPU"
    assert kernels.names(dtype, 64) == expected


def test_kernels_of_gpus_have_the_signatures_that_are_used():
    """On devices that are not there: that says nothing about their results, which are tried on the device itself."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        for kind, device in itertools.product((Flash, CuDnn, Efficient, Overrideable), ("cuda",)):
            kernel: Kernel = kind()
            q = torch.empty(2, 77, 4, 64, device=device, dtype=torch.bfloat16).transpose(1, 2)
            k = torch.empty(2, 143, 2 if kernel.grouped else 4, 64, device=device, dtype=torch.bfloat16).transpose(1, 2)
            terms = torch.empty(1, 1, 77, 143, device=device, dtype=torch.bfloat16) if kernel.masked else None
            o, lse = kernel.run(q, k, k, False, terms, 0.125)
            assert o.shape == q.shape and lse.shape == (2, 4, 77) and lse.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_types_and_modes_of_the_caller_change_nothing(dtype):
    q, k, v = states()
    options = {"layout": "bshd", "mask": "causal"}

    def both(group):
        return [*group.attend(q, k, v, **options), *group.attend(q * 1e4, k, v, softcap=3.0, **options)]

    with kyklos.Group.local(1, device="torch:cpu")[0] as group:
        want = both(group)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"), torch.inference_mode():
            with kyklos.Group.local(1, device="torch:cpu")[0] as group:
                got = both(group)
                assert group.kernel(24) == "flash for CPU"
    finally:
        torch.set_default_dtype(default)
    assert all(map(torch.equal, got, want))


def test_refusals(alone, monkeypatch):
    with pytest.raises(kyklos.RequestError, match="fixed order on torch:cpu"):
        alone.attend(*states(), layout="bshd", fixed_order=True)
    # The group is usable afterwards.
    alone.attend(*states(), layout="bshd")
    with pytest.raises(kyklos.RequestError, match="torch:nonsense does not open"):
        kyklos.Group.local(1, device="torch:nonsense")
    with pytest.raises(kyklos.RequestError, match="does not open"):
        kyklos.Group.local(1, device="torch:cuda:99")
    monkeypatch.setenv("KYKLOS_TORCH_KERNEL", "fastest")
    with pytest.raises(kyklos.RequestError, match="flash for CPU, products"):
        kyklos.Group.local(1, device="torch:cpu")


def test_the_kernel_is_said_and_chosen(monkeypatch):
    with kyklos.Group.local(1, device="torch")[0] as group:
        assert group.torch_device == "cpu" and group.device == "torch:cpu"
        assert group.kernel(64, "bfloat16") == "flash for CPU"
        want, _ = group.attend(*states(), layout="bshd", mask="causal")
    monkeypatch.setenv("KYKLOS_TORCH_KERNEL", "products")
    with kyklos.Group.local(1, device="torch:cpu")[0] as group:
        assert group.kernel(64) == "matrix products"
        o, _ = group.attend(*states(), layout="bshd", mask="causal")
    assert (o - want).abs().max() <= 3e-6


@pytest.mark.kyklos_cpu
def test_other_devices_are_none_of_pytorch():
    with kyklos.Group.local(1, device="cpu")[0] as group:
        assert group.torch_device is None and group.kernel(64) == "rows in lanes"


def test_long_calls_go_piece_by_piece(alone):
    """So long that pieces of 100 ms cut triangles and rectangles, against PyTorch's attention."""
    q, k, v = (torch.randn(1, 6000, 8, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    for mask in ("causal", "full"):
        o, _ = alone.attend(q, k, v, mask=mask, layout="bshd")
        again, _ = alone.attend(q, k, v, mask=mask, layout="bshd")
        assert torch.equal(o, again)
        want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=mask == "causal")
        assert (o - want.transpose(1, 2)).abs().max() <= 3e-6

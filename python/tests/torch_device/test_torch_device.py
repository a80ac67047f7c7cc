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
    with pytest.raises(kyklos.RequestError, match='fixed order on torch:cpu: .* form the group with device="cpu", "wgpu"'):
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


def test_what_a_device_with_streams_is_given_goes_through_memory_of_its_own(monkeypatch):
    """Pinned where there is an accelerator; here the way without it."""
    from kyklos._device import _device

    device = Device("cpu")
    given = np.arange(300, dtype=np.uint8)
    monkeypatch.setattr(_device, "STREAMS", ("cpu",))
    found = device.upload(given, 299)
    given[:] = 0
    assert torch.equal(found, torch.arange(299, dtype=torch.uint8))

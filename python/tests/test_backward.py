"""Gradients of a group's calls, with NumPy alone."""

import os

import numpy as np
import pytest

import kyklos

CUTS = [0, 9, 9, 23]


def made(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def tensors():
    return [made((2, 23, heads, 16), seed) for seed, heads in enumerate((4, 2, 2, 4))]


def reference(q, k, v, d_o, d_lse, sinks, causal=True):
    """dq, dk, dv and d_sinks in float64, by their formulas."""
    q, k, v, d_o, d_lse = (array.astype(np.float64) for array in (q, k, v, d_o, d_lse))
    group, scale = q.shape[2] // k.shape[2], 1 / np.sqrt(q.shape[3])
    k_of, v_of = (array.repeat(group, axis=2) for array in (k, v))
    x = scale * np.einsum("bqhd,bkhd->bhqk", q, k_of)
    if causal:
        x = np.where(np.tri(q.shape[1], k.shape[1], dtype=bool), x, -np.inf)
    s = np.broadcast_to(np.asarray(sinks, np.float64)[None, :, None, None], (*x.shape[:3], 1))
    lse = np.log(np.exp(x).sum(-1, keepdims=True) + np.exp(s))
    p = np.exp(x - lse)
    o = np.einsum("bhqk,bkhd->bqhd", p, v_of)
    delta = (d_o * o).sum(-1).transpose(0, 2, 1)[..., None] - d_lse.transpose(0, 2, 1)[..., None]
    ds = p * (np.einsum("bqhd,bkhd->bhqk", d_o, v_of) - delta)
    shared = lambda full: full.reshape(*k.shape[:3], group, -1).sum(3)  # noqa: E731
    dq = scale * np.einsum("bhqk,bkhd->bqhd", ds, k_of)
    dk = shared(scale * np.einsum("bhqk,bqhd->bkhd", ds, q))
    dv = shared(np.einsum("bhqk,bqhd->bkhd", p, d_o))
    return dq, dk, dv, -(np.exp(s - lse) * delta).sum((0, 2, 3))


@pytest.mark.parametrize("options", [{"strategy": "ring"}, {"mesh": "3x1"}, {"strategy": "gather"}, {"strategy": "pass-q"}])
def test_three_ranks_equal_the_formulas(tensors, options):
    sinks, d_lse = [0.5, -0.25, 1.0, 0.0], made((2, 23, 4), 9)

    def call(group):
        rows = slice(*CUTS[group.rank : group.rank + 2])
        q, k, v, d_o = (tensor[:, rows] for tensor in tensors)
        asked = {"mask": "causal", "sinks": sinks, **options}
        o, lse = group.attend(q, k, v, **asked)
        return group.backward(q, k, v, o, lse, d_o, d_lse[:, rows], **asked)

    parts = kyklos.run_local(3, call, device="cpu")
    joined = [np.concatenate([getattr(part, name) for part in parts], axis=1) for name in ("dq", "dk", "dv")]
    d_sinks = np.sum([part.d_sinks_part for part in parts], axis=0)
    q, k, v, d_o = tensors
    for found, right in zip([*joined, d_sinks], reference(q, k, v, d_o, d_lse, sinks), strict=True):
        assert np.abs(found - right).max() < 1e-5


def test_heads_first_and_no_gradient_of_lse(tensors):
    q, k, v, d_o = tensors
    with kyklos.Group.local(1, device="cpu")[0] as group:
        o, lse = group.attend(q, k, v)
        plain = group.backward(q, k, v, o, lse, d_o)
        first = [array.swapaxes(1, 2) for array in (q, k, v)]
        o, lse = group.attend(*first, layout="bhsd")
        swapped = group.backward(*first, o, lse, d_o.swapaxes(1, 2), layout="bhsd")
    assert plain.d_sinks_part == []
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(getattr(plain, name), getattr(swapped, name).swapaxes(1, 2))


def require_gpu():
    """Skips where there is no GPU, unless KYKLOS_REQUIRE_GPU says that there is one. A software GPU will do."""
    try:
        kyklos.Group.local(1, device="wgpu")[0].close()
    except (kyklos.DeviceError, kyklos.RequestError) as fault:
        if os.environ.get("KYKLOS_REQUIRE_GPU") == "1":
            raise
        pytest.skip(f"no GPU: {fault}")


@pytest.mark.parametrize("options", [{"strategy": "ring"}, {"mesh": "3x1"}, {"strategy": "pass-q"}])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("device", ["cpu", "wgpu"])
def test_a_bias_has_its_gradient(tensors, options, heads, device):
    """Against differences of ``Σ d_o · o`` along one direction."""
    if device == "wgpu":
        require_gpu()
    q, k, v, d_o = tensors
    bias, along = made((1, 23, heads, 23), 5), made((1, 23, heads, 23), 6)
    key_bias, key_along = made((2, 23), 7), made((2, 23), 8)

    def product(**asked):
        with kyklos.Group.local(1, device="cpu")[0] as group:
            return float((group.attend(q, k, v, **asked)[0].astype(np.float64) * d_o).sum())

    def run(name, whole):
        def call(group):
            rows = slice(*CUTS[group.rank : group.rank + 2])
            own = [tensor[:, rows] for tensor in tensors[:3]]
            asked = {name: whole[:, rows] if name == "bias" else whole, **options}
            o, lse = group.attend(*own, **asked)
            return group.backward(*own, o, lse, d_o[:, rows], bias_gradient=True, **asked).d_bias

        return kyklos.run_local(3, call, device=device)

    for name, value, direction, join in [
        ("bias", bias, along, lambda parts: np.concatenate(parts, axis=1)),
        ("key_bias", key_bias, key_along, lambda parts: np.sum(parts, axis=0)),
    ]:
        found = join(run(name, value))
        assert found.dtype == np.float32 and found.shape == value.shape
        step = 1e-2
        ahead, behind = (product(**{name: value + sign * step * direction}) for sign in (1, -1))
        right = (ahead - behind) / (2 * step)
        assert abs(float((found * direction).sum()) - right) < 1e-2 * max(1, abs(right))


def test_a_gradient_without_a_bias_is_refused(tensors):
    q, k, v, d_o = tensors
    with kyklos.Group.local(1, device="cpu")[0] as group:
        o, lse = group.attend(q, k, v)
        with pytest.raises(kyklos.RequestError, match="without an additive bias"):
            group.backward(q, k, v, o, lse, d_o, bias_gradient=True)
        assert group.backward(q, k, v, o, lse, d_o).d_bias is None


def test_wrong_requests_are_refused_and_the_group_stays_usable(tensors):
    q, k, v, d_o = tensors
    with kyklos.Group.local(1, device="cpu")[0] as group:
        o, lse = group.attend(q, k, v)
        with pytest.raises(kyklos.RequestError, match="d_o of shape .* has tokens 5, q of shape"):
            group.backward(q, k, v, o, lse, d_o[:, :5])
        with pytest.raises(kyklos.RequestError, match="in a fixed order"):
            group.backward(q, k, v, o, lse, d_o, fixed_order=True)
        assert group.backward(q, k, v, o, lse, d_o).dq.shape == q.shape


@pytest.mark.parametrize("logit", [-1e4, 3e6, -1e20, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_equal_logits_of_any_size_have_equal_shares(logit, layout):
    v, d_o = made((1, 12, 2, 16), 1), made((1, 12, 2, 16), 2)
    q = np.zeros_like(v)
    bias = np.full((1, 6, 1, 12), logit, np.float32)
    shown = lambda array: np.ascontiguousarray(array.transpose(0, 2, 1, 3)) if layout == "bhsd" else array  # noqa: E731

    def call(group):
        rows = slice(6 * group.rank, 6 * group.rank + 6)
        own_q, own_v, own_d_o = (shown(array[:, rows]) for array in (q, v, d_o))
        asked = {"bias": shown(bias), "layout": layout}
        o, lse = group.attend(own_q, own_q, own_v, lse_pair=True, **asked)
        assert lse.shape == (*own_q.shape[:3], 2)
        return group.backward(own_q, own_q, own_v, o, lse, own_d_o, **asked).dv

    found = np.concatenate([shown(dv) for dv in kyklos.run_local(2, call, device="cpu")], axis=1)
    assert np.abs(found - d_o.mean(1, keepdims=True)).max() < 1e-6

"""Attention that helpers share is PyTorch's, whatever its arguments; what they do not understand stays with PyTorch."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import kyklos

ROWS, KEYS = 520, 600


@pytest.fixture
def one():
    """A helper of this process, which gets a share of every call that it can."""
    helpers = kyklos.helpers([], devices=["cpu"], _always=True)
    yield helpers
    helpers.close()


def calls(helpers):
    return helpers.status()[0]["calls"]


def states(dtype=torch.float32, heads=6, kv_heads=6, dim=64, value_dim=None, batch=2, rows=ROWS, keys=KEYS, **given):
    random = torch.Generator().manual_seed(heads * 100 + dim)
    normal = lambda *shape: torch.randn(shape, generator=random).to(dtype)  # noqa: E731
    q, k = normal(batch, heads, rows, dim), normal(batch, kv_heads, keys, dim)
    return (q, k, normal(batch, kv_heads, keys, value_dim or dim)), given


def exact(q, k, v, **given):
    """In float64, whose rounding is nothing beside that of the others."""
    mask = given.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        given["attn_mask"] = mask.double()
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **given)


def check(helpers, q, k, v, **given):
    """The shared call is as near to the exact result as PyTorch's own call is; and it is shared."""
    want = exact(q, k, v, **given)
    alone = (F.scaled_dot_product_attention(q, k, v, **given).double() - want).abs().max().item()
    before = calls(helpers)
    with helpers:
        for _ in range(3):
            o = F.scaled_dot_product_attention(q, k, v, **given)
            helpers.settle()
    assert calls(helpers) > before, helpers.status()
    assert (o.shape, o.dtype) == (want.shape, q.dtype)
    # Both round as often, in another order: by less than 4 apart for this many elements, and by a unit in the last place of the largest
    # result where PyTorch's own error happens to be less.
    assert (o.double() - want).abs().max().item() <= 4 * alone + torch.finfo(q.dtype).eps * want.abs().max().item()


def masks():
    bits = torch.rand(2, 6, ROWS, KEYS, generator=torch.Generator().manual_seed(1)) > 0.4
    bits[..., 0] = True
    numbers = torch.randn(2, 6, ROWS, KEYS, generator=torch.Generator().manual_seed(2))
    yield from (bits[0, 0], bits[:, :1], bits[:1], bits, bits[:, :1, :1], bits[:, :, :1], bits[0, 0, :1])
    yield from (numbers[0, 0], numbers[:, :1, :1], numbers, numbers.masked_fill(~bits, -torch.inf))
    yield numbers.masked_fill(~bits, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_type_and_form(one, dtype):
    for (q, k, v), given in (
        states(dtype),
        states(dtype, is_causal=True),
        states(dtype, kv_heads=2, enable_gqa=True),
        states(dtype, kv_heads=1, rows=1200, keys=1200, enable_gqa=True, is_causal=True),
        states(dtype, dim=40, value_dim=72, scale=0.05),
        states(dtype, heads=2, kv_heads=2, batch=1, rows=700, keys=300, is_causal=True),
    ):
        check(one, q, k, v, **given)


@pytest.mark.parametrize("index", range(len(list(masks()))))
def test_masks(one, index):
    (q, k, v), _ = states()
    check(one, q, k, v, attn_mask=list(masks())[index])


def test_rows_without_a_key_are_as_pytorchs(one):
    (q, k, v), _ = states()
    mask = torch.ones(ROWS, KEYS, dtype=torch.bool)
    mask[::3] = False
    check(one, q, k, v, attn_mask=mask)


def test_large_and_tiny_values(one):
    (q, k, v), _ = states()
    for factor in (1e-30, 30.0, 1e15):
        check(one, q, k, v * factor)
    check(one, q * 30, k, v)


def test_arrangements_in_memory_do_not_matter(one):
    (q, k, v), _ = states()
    tokens_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    check(one, *tokens_first)
    check(one, q, k, v, attn_mask=torch.rand(KEYS, ROWS).T > 0.2)
    check(one, q.flip(2)[:, :, ::1], k[:, :, :], v.expand_as(v))


@pytest.mark.parametrize("given", [{}, {"is_causal": True}, {"attn_mask": torch.rand(ROWS, KEYS) > 0.3}, {"enable_gqa": True}])
def test_gradients(one, given):
    (q, k, v), _ = states(kv_heads=2 if "enable_gqa" in given else 6)
    d_o = torch.randn(q.shape, generator=torch.Generator().manual_seed(7))

    def gradients(attend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attend(*leaves, **given), leaves, d_o.to(dtype))

    want = gradients(F.scaled_dot_product_attention, torch.float64)
    alone = gradients(F.scaled_dot_product_attention, torch.float32)
    before = calls(one)
    with one:
        for _ in range(3):
            shared = gradients(F.scaled_dot_product_attention, torch.float32)
            one.settle()
    # A call and its gradients.
    assert calls(one) >= before + 2, one.status()
    for got, own, right in zip(shared, alone, want, strict=True):
        own = (own.double() - right).abs().max().item()
        assert (got.double() - right).abs().max().item() <= 4 * own + 2 ** -23 * right.abs().max().item()


def test_what_pytorch_refuses_is_refused_in_its_words(one):
    (q, k, v), _ = states()
    wrong = [
        (q, k[:, :2], v[:, :2], {}),
        (q, k[..., :32], v, {}),
        (q, k.half(), v, {}),
        (q, k, v, {"attn_mask": torch.ones(ROWS, KEYS - 1, dtype=torch.bool)}),
        (q, k, v, {"attn_mask": torch.ones(ROWS, KEYS, dtype=torch.bool), "is_causal": True}),
        (q, k[:1], v[:1, :, :3], {}),
    ]
    for *tensors, given in wrong:
        alone = outcome(tensors, given)
        with one:
            assert outcome(tensors, given) == alone


def outcome(tensors, given):
    """The error of PyTorch, or the sum of what it computes where it has another idea."""
    try:
        return F.scaled_dot_product_attention(*tensors, **given).double().sum().item()
    except RuntimeError as error:
        return str(error)


def test_what_is_not_understood_stays_here(one):
    (q, k, v), _ = states()
    before = calls(one)
    with one:
        assert F.scaled_dot_product_attention(q.double(), k.double(), v.double()).dtype == torch.float64
        torch.manual_seed(3)
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        assert F.scaled_dot_product_attention(q[0], k[0], v[0]).shape == q[0].shape
        assert F.scaled_dot_product_attention(q[:, :, :0], k, v).shape[2] == 0
        bias = torch.zeros(ROWS, KEYS, requires_grad=True)
        F.scaled_dot_product_attention(q, k, v, bias).sum().backward()
        assert bias.grad is not None
        one.settle()
    torch.manual_seed(3)
    assert torch.equal(dropped, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert calls(one) == before


def test_not_numbers_spread_as_they_do_alone(one):
    (q, k, v), _ = states()
    v[0, 0, 5, 3], q[1, 4, 7, 0] = torch.nan, torch.inf
    want = F.scaled_dot_product_attention(q, k, v)
    with one:
        for _ in range(2):
            o = F.scaled_dot_product_attention(q, k, v)
            one.settle()
    assert torch.equal(o.isnan(), want.isnan())
    assert one.status()[0]["state"] == "ready"


def test_functions_that_were_imported_by_name_and_modules_are_shared_too(one):
    import torch.nn.functional as functional

    attention = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x = torch.randn(1, 800, 64, generator=torch.Generator().manual_seed(5), requires_grad=True)
    want = attention(x, x, x, need_weights=False)[0]
    with one:
        assert functional.scaled_dot_product_attention is not _BEFORE
        for _ in range(3):
            o = attention(x, x, x, need_weights=False)[0]
            one.settle()
    assert functional.scaled_dot_product_attention is _BEFORE
    assert calls(one) > 0
    torch.testing.assert_close(o, want)


_BEFORE = F.scaled_dot_product_attention


def test_blocks_may_nest_and_fail(one):
    with pytest.raises(ZeroDivisionError), one, one:
        1 / 0  # noqa: B018
    assert F.scaled_dot_product_attention is _BEFORE


def test_any_thread_may_call(one):
    (q, k, v), _ = states()
    want = F.scaled_dot_product_attention(q, k, v)
    barrier = threading.Barrier(4)

    def run(_):
        barrier.wait(60)
        return [F.scaled_dot_product_attention(q, k, v) for _ in range(4)]

    with one, ThreadPoolExecutor(4) as pool:
        F.scaled_dot_product_attention(q, k, v)
        one.settle()
        results = [o for each in pool.map(run, range(4)) for o in each]
    assert calls(one) > 0
    for o in results:
        torch.testing.assert_close(o, want, rtol=1e-5, atol=1e-5)


def test_compiled_code_attends_by_itself(one):
    (q, k, v), _ = states()

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q * 2, k, v) + 1

    want = attend(q, k, v)
    with one:
        o = torch.compile(attend, backend="eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(o, want)
    torch.compiler.reset()


def test_autocast_decides_the_type_as_for_pytorch(one):
    (q, k, v), _ = states()
    with torch.autocast("cpu", torch.bfloat16):
        want = F.scaled_dot_product_attention(q, k, v)
        with one:
            for _ in range(3):
                o = F.scaled_dot_product_attention(q, k, v)
                one.settle()
    assert calls(one) > 0 and o.dtype == want.dtype
    # Two results that are each rounded once to bfloat16, of sums that differ less than that.
    assert (o - want).abs().max() <= 2 * torch.finfo(want.dtype).eps * want.abs().max()


def test_function_transforms_stay_here(one):
    (q, k, v), _ = states(batch=1)
    want = F.scaled_dot_product_attention(q, k, v)
    many = [torch.stack([x, x]) for x in (q, k, v)]
    with one:
        o = torch.vmap(F.scaled_dot_product_attention)(*many)
        gradient = torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k, v).sum())(q)
    torch.testing.assert_close(o[1], want)
    assert gradient.shape == q.shape


def shared_before(one, *tensors, **given):
    """Such calls are shared from now on."""
    with one:
        for _ in range(2):
            F.scaled_dot_product_attention(*tensors, **given)
            one.settle()


def test_only_named_helpers_have_a_share(one):
    (q, k, v), _ = states()
    shared_before(one, q, k, v)
    before = calls(one)
    nobody = kyklos.helpers([], _always=True)
    assert nobody.status() == []
    with nobody:
        F.scaled_dot_product_attention(q, k, v)
    assert calls(one) == before
    nobody.close()


def test_settings_that_do_not_fit_are_refused(one):
    for settings in ({"wire": "f64"}, {"check": False}, {"names": ["nobody"]}, {"devices": ["toaster"]}):
        given = {"names": [], "_always": True, **settings}
        with pytest.raises(kyklos.RequestError):
            kyklos.helpers(given.pop("names"), **given)
    other = kyklos.helpers([], _always=True)
    other.close()
    other.close()


def test_rounded_messages(one):
    rounded = kyklos.helpers([], devices=["cpu"], wire="int8", _always=True)
    (q, k, v), _ = states()
    want = F.scaled_dot_product_attention(q, k, v)
    with rounded:
        for _ in range(2):
            o = F.scaled_dot_product_attention(q, k, v)
            rounded.settle()
    # Of four roundings to 8 bits each is at most 1/127 of what it rounds.
    error = (o - want).norm() / want.norm()
    assert 0 < error < 4 / 127
    rounded.close()

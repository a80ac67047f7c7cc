"""The arguments of the PyTorch operator: numbers, masks and biases of all shapes, layouts, and what is refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_torch import CUTS, alone, on_two_ranks, tensors  # noqa: F401

import kyklos
import kyklos.torch

NUMBERS = [torch.tensor(0.3), torch.nn.Parameter(torch.tensor(0.3)), np.array(0.3), np.ones(2000), "0.3", [0.3]]


@pytest.mark.parametrize("name", ["scale", "softcap", "q_offset"])
def test_a_tensor_is_no_number(tensors, alone, name):
    for value in NUMBERS:
        with pytest.raises(TypeError, match=f"a {name} of type {type(value).__name__}"):
            kyklos.torch.attention(*tensors, alone, **{name: value})
    for name, value in {"replicated": torch.zeros(2), "q_tokens": np.zeros((1, 2000, 2)), "kv_tokens": [torch.zeros(1, 2)]}.items():
        with pytest.raises(TypeError, match=f"an option {name} with a (Tensor|ndarray)"):
            kyklos.torch.attention(*tensors, alone, **{name: value})
    scalar = kyklos.torch.attention(*tensors, alone, scale=np.float32(0.25), softcap=np.float64(5))[0]
    assert torch.equal(scalar, kyklos.torch.attention(*tensors, alone, scale=0.25, softcap=5)[0])


def test_options_that_look_alike_are_not_mixed_up(tensors, alone):
    """Numbers whose first digits are equal, and lists that are long."""
    q, k, v = tensors
    for name, values in {"scale": (0.3, 0.3 + 1e-7), "softcap": (5.12346, 5.12352)}.items():
        first, second = (kyklos.torch.attention(q * 100, k, v, alone, **{name: value})[0] for value in values)
        assert not torch.equal(first, second), name
    # One range for each token; the second list has the last two tokens the other way round.
    tokens = torch.randn(1, 1, 1500, 8, generator=torch.Generator().manual_seed(2))
    lists = [[(token, token + 1) for token in range(1500)] for _ in range(2)]
    lists[1][-2:] = lists[1][:-3:-1]
    results = [kyklos.torch.attention(tokens, tokens, tokens, alone, mask="causal", q_tokens=[each], kv_tokens=[each])[0] for each in lists]
    assert torch.equal(results[0][:, :, :1498], results[1][:, :, :1498])
    assert (results[0] - results[1]).abs().max() > 1e-3


def fault(options, tensors):
    """The errors of two ranks where rank 1 has these options, and whether their next call pairs up."""

    def call(group):
        s = slice(*CUTS[group.rank : group.rank + 2])
        own = [tensor[:, :, s] for tensor in tensors]
        error = None
        try:
            kyklos.torch.attention(*own, group, **(options if group.rank == 1 else {}))
        except (ValueError, TypeError) as raised:
            error = raised
        return error, kyklos.torch.attention(*own, group, label="the next call")[0]

    return kyklos.run_local(2, call, device="cpu")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scale": torch.tensor(0.3)}, "a scale of type Tensor"),
        ({"layout": "hbsd"}, "layout"),
        ({"mask": torch.ones(2, 40)}, "use bool"),
        ({"mask": np.ones((2, 40), bool)}, "not a ndarray"),
        ({"results": "all"}, "owner"),
        ({"is_causal": True}, 'pass mask="causal"'),
        ({"mask": torch.ones(3, 40, dtype=torch.bool)}, "two axes"),
    ],
)
def test_a_wrong_argument_of_one_rank_is_an_error_of_all(tensors, options, text):
    want = F.scaled_dot_product_attention(*tensors, enable_gqa=True)
    ranks = fault(options, tensors)
    assert all(text in str(error) for error, _ in ranks), ranks
    assert (torch.cat([o for _, o in ranks], 2) - want).abs().max() < 4e-6


def test_a_mask_of_two_axes_that_may_be_of_queries_is_refused(alone):
    q = torch.randn(3, 2, 3, 8, generator=torch.Generator().manual_seed(5))
    mask = torch.ones(3, 3).tril() > 0
    with pytest.raises(ValueError, match=r"3 batch entries and 3 tokens, is ambiguous: pass \[batch, keys\] as key_bias"):
        kyklos.torch.attention(q, q, q, alone, mask=mask)
    of_queries = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert (kyklos.torch.attention(q, q, q, alone, mask=mask[None, None])[0] - of_queries).abs().max() < 4e-6
    of_keys = F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None])
    assert (kyklos.torch.attention(q, q, q, alone, key_bias=mask)[0] - of_keys).abs().max() < 4e-6
    rows = q.transpose(1, 2)
    found = kyklos.torch.attention(rows, rows, rows, alone, layout="bshd", mask=mask[None, :, None])[0]
    assert (found.transpose(1, 2) - of_queries).abs().max() < 4e-6
    with pytest.raises(ValueError, match="is ambiguous"):
        kyklos.torch.attention(rows, rows, rows, alone, layout="bshd", mask=mask)
    with pytest.raises(ValueError, match=r"\[batch, keys\], and has 2 rows for 3 batch entries"):
        kyklos.torch.attention(q[:, :, :2], q, q, alone, mask=mask[:2])
    # A row for one token is the same in both readings.
    one = q[:1, :, :1]
    assert (kyklos.torch.attention(one, q[:1], q[:1], alone, mask=mask[:1])[0] - q[:1, :, :1]).abs().max() < 4e-6


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("rows", [1, 40])
def test_four_axes_are_shared_as_by_pytorch(tensors, kind, batch, heads, rows):
    mask = torch.randn(batch, heads, rows, 40, generator=torch.Generator().manual_seed(6))
    mask = mask if kind == torch.float32 else mask > -0.5
    want = F.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)
    part = mask if rows == 1 else lambda s: mask[:, :, s]
    found = on_two_ranks(tensors, **{"mask" if kind == torch.bool else "bias": part})[0]
    assert (found - want).abs().max() < 4e-6
    whole = on_two_ranks(tensors, **{"bias": lambda s: mask.expand(2, 8, 40, 40)[:, :, s]})[0]
    assert (whole - want).abs().max() < 4e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_of_other_keys_or_queries_are_refused_by_name(alone, dtype):
    """Shapes whose bytes fit, in rows of bits and of 2 bytes."""
    q = torch.randn(1, 4, 100, 16, generator=torch.Generator().manual_seed(7)).to(dtype)
    for kind in (torch.bool, dtype):
        for shape, text in [
            ((1, 1, 100, 99), "99 keys, and the call has 100"),
            ((1, 1, 100, 101), "101 keys, and the call has 100"),
            ((1, 1, 100, 128), "128 keys, and the call has 100"),
            ((1, 1, 99, 100), "tokens 99, q of shape .* has tokens 100"),
            ((1, 1, 50, 200), "tokens 50, q of shape .* has tokens 100"),
            ((1, 100, 4, 100), "has heads 100, q of shape .* has heads 4"),
            ((2, 1, 100, 100), "has batch 2, q of shape .* has batch 1"),
            ((100, 1, 100), "give it the axes"),
        ]:
            with pytest.raises(kyklos.RequestError, match=text):
                kyklos.torch.attention(q, q, q, alone, **{"mask" if kind == torch.bool else "bias": torch.ones(shape, dtype=kind)})
        for keys in (99, 101, 128):
            with pytest.raises(kyklos.RequestError, match=f"{keys} keys, and the call has 100"):
                kyklos.torch.attention(q, q, q, alone, key_bias=torch.ones(1, keys, dtype=kind))


def test_a_row_for_all_queries_has_its_gradient(tensors, alone):
    bias = torch.randn(2, 8, 1, 40, generator=torch.Generator().manual_seed(8))
    gradients = []
    for attend in (
        lambda mask: F.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True),
        lambda mask: kyklos.torch.attention(*tensors, alone, bias=mask)[0],
    ):
        own = bias.clone().requires_grad_()
        attend(own).square().sum().backward()
        gradients.append(own.grad)
    assert (gradients[0] - gradients[1]).abs().max() < 1e-5 * gradients[0].abs().max()


def test_autocast_converts_a_bias(tensors, alone):
    bias = torch.randn(1, 8, 40, 40, generator=torch.Generator().manual_seed(9))
    rounded = [tensor.bfloat16() for tensor in tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [kyklos.torch.attention(*tensors, alone, **{name: given})[0] for name, given in (("bias", bias), ("key_bias", bias[0, :1, 0]))]
    for o, mask in zip(found, (bias, bias[:, :1, :1]), strict=True):
        want = F.scaled_dot_product_attention(*rounded, attn_mask=mask.bfloat16(), enable_gqa=True)
        assert o.dtype == torch.bfloat16 and (o.float() - want.float()).abs().max() < 2.5e-2
    with pytest.raises(kyklos.RequestError, match="bias of f32 for q of bf16: convert it"):
        kyklos.torch.attention(*rounded, alone, bias=bias)


def test_tensors_without_a_layout_are_refused_where_the_default_is_another_than_that_of_pytorch():
    """Heads before tokens, read as tokens before heads, would be a plausible number."""
    x = torch.randn(1, 8, 128, 32, generator=torch.Generator().manual_seed(10))
    want = F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def call(group):
        own = x[:, :, 64 * group.rank : 64 * group.rank + 64]
        cache = group.kv_cache(heads=8, dim=32)
        o, lse = (array.detach() for array in kyklos.torch.attention(own, own, own, group, mask="causal"))
        for refused in (
            lambda: group.attend(own, own, own, mask="causal"),
            lambda: group.attend(own.numpy(), own, own, mask="causal"),
            lambda: group.attend_cached(cache, own, own, own, mask="causal"),
            lambda: group.cached_calls([cache], own, own, own, mask="causal"),
            lambda: group.backward(own, own, own, o, lse, o, mask="causal"),
        ):
            with pytest.raises(kyklos.RequestError, match='pass layout="bshd" if they are'):
                refused()
        return group.attend(own, own, own, mask="causal", layout="bhsd")[0]

    found = torch.cat(kyklos.run_local(2, call, device="cpu"), 2)
    assert (found - want).abs().max() < 4e-6


def test_forward_mode_is_refused(tensors, alone):
    def attend(q):
        return kyklos.torch.attention(q, *tensors[1:], alone)[0]

    for derivative in (
        lambda: torch.func.jvp(attend, (tensors[0],), (tensors[0],)),
        lambda: torch.func.jacfwd(lambda s: attend(tensors[0] * s).sum())(torch.ones(())),
        lambda: torch.func.hessian(lambda s: attend(tensors[0] * s).sum())(torch.ones(())),
    ):
        with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
            derivative()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        attend(torch.autograd.forward_ad.make_dual(tensors[0], tensors[0]))
    attend(tensors[0])


@pytest.mark.parametrize("name", ["scale", "softcap", "q_offset"])
@pytest.mark.parametrize("backward", [False, True])
def test_compiled_code_takes_other_numbers(tensors, alone, name, backward):
    """As an argument, and as an attribute of one class in several layers."""
    values = [0, 5, 9, 13, 2, 7] if name == "q_offset" else [0.1 + 0.2 * i for i in range(6)]

    def attend(q, k, v, value):
        return kyklos.torch.attention(q, k, v, alone, mask="causal", **{name: value})[0]

    class Layer(torch.nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def forward(self, q, k, v):
            return attend(q, k, v, self.value)

    def found(call, *value):
        own = [tensor.clone().requires_grad_(backward) for tensor in tensors]
        o = call(*own, *value)
        if not backward:
            return [o]
        o.square().sum().backward()
        return [o.detach(), *(tensor.grad for tensor in own)]

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    layers = [Layer(value) for value in values]
    for layer in layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for value, layer in zip(values, layers, strict=True):
        want = found(attend, value)
        for one in (found(compiled, value), found(layer)):
            for ours, eager in zip(one, want, strict=True):
                assert torch.equal(ours, eager), value
    assert not torch.equal(found(compiled, values[0])[0], found(compiled, values[1])[0])
    # For each of the two: the first value and all others. An int of a module is a constant to PyTorch: a graph for each layer.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= (2 + len(layers) if name == "q_offset" else 4)


def test_a_call_that_no_vote_knew_of_is_not_paired_with_the_next(tensors):
    """Rank 1 fails before the operator runs, and goes on with its next call."""

    def work(group):
        x = torch.randn(1, 2, 16, 32, generator=torch.Generator().manual_seed(group.rank))
        errors = []
        for v in (x if group.rank == 0 else None, x + 100, x + 200):
            try:
                kyklos.torch.attention(x, x, v, group)
            except Exception as error:  # PyTorch's own for None.
                errors.append(str(error))
        return errors

    of_rank_0, of_rank_1 = kyklos.run_local(2, work, device="cpu")
    words = "rank 1 is at call {} of its session, rank 0 at call {}"
    for n, errors in enumerate(zip(of_rank_0, of_rank_1[1:], strict=False)):
        assert all(words.format(n + 1, n) in error for error in errors), errors


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"mask": torch.ones(2, 40)}, ValueError, "use bool"),
        ({"scale": torch.tensor(0.3)}, TypeError, "a scale of type Tensor"),
        ({"is_causal": True}, TypeError, 'pass mask="causal"'),
    ],
)
def test_a_wrong_argument_in_compiled_code_of_one_rank_is_an_error_of_all(tensors, backend, options, kind, text):
    torch._dynamo.reset()

    def work(group):
        own = [tensor[:, :, slice(*CUTS[group.rank : group.rank + 2])] for tensor in tensors]
        call = lambda *states: kyklos.torch.attention(*states, group, **(options if group.rank == 1 else {}))[0] * 1  # noqa: E731
        if group.rank == 1:
            call = torch.compile(call, fullgraph=True, backend=backend)
        with pytest.raises(kind if group.rank == 1 else ValueError) as raised:
            call(*own)
        return str(raised.value), kyklos.torch.attention(*own, group)[0]

    ranks = kyklos.run_local(2, work, device="cpu")
    assert all(text in error for error, _ in ranks), ranks
    want = F.scaled_dot_product_attention(*tensors, enable_gqa=True)
    assert (torch.cat([o for _, o in ranks], 2) - want).abs().max() < 4e-6


@pytest.mark.parametrize(("dim", "width"), [(24, 16), (16, 40), (20, 20), (12, 7)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_values_may_have_heads_of_another_size(dim, width, layout):
    """Outputs and gradients against float64, on two ranks."""
    generator = torch.Generator().manual_seed(dim)
    q, k, v = (torch.randn(2, heads, 30, size, generator=generator) for heads, size in ((4, dim), (2, dim), (2, width)))
    d_o = torch.randn(2, 4, 30, width, generator=generator)
    turned = (lambda x: x.transpose(1, 2)) if layout == "bshd" else lambda x: x

    def rank(group):
        own = slice(15 * group.rank, 15 * group.rank + 15)
        leaves = [x[:, :, own].clone().requires_grad_() for x in (q, k, v)]
        o, lse = kyklos.torch.attention(*(turned(x) for x in leaves), group, mask="causal", layout=layout, label="a layer")
        o, lse = turned(o), turned(lse)
        return o, lse, *torch.autograd.grad(o, leaves, d_o[:, :, own])

    found = [torch.cat(parts, 2) for parts in zip(*kyklos.run_local(2, rank, device="cpu"), strict=True)]
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    logits = exact[0] @ exact[1].repeat_interleave(2, 1).mT * dim**-0.5
    logits = logits.masked_fill(torch.ones(30, 30, dtype=torch.bool).triu(1), -torch.inf)
    o = logits.softmax(-1) @ exact[2].repeat_interleave(2, 1)
    right = [o, logits.logsumexp(-1), *torch.autograd.grad(o, exact, d_o.double())]
    assert found[0].shape == d_o.shape
    for own, other in zip(found, right, strict=True):
        assert own.shape == other.shape and (own - other).abs().max() <= 5e-6


def test_ranks_must_agree_on_the_sizes_of_heads():
    def rank(group):
        q = torch.randn(1, 2, 4, 16)
        # Zeros would make both 16.
        with pytest.raises(kyklos.RequestError, match=r"heads of 16 and (8|12)"):
            kyklos.torch.attention(q, q, torch.randn(1, 2, 4, 8 + 4 * group.rank), group)
        # The group is usable afterwards.
        return kyklos.torch.attention(q, q, q, group)[0].shape

    assert kyklos.run_local(2, rank, device="cpu") == [(1, 2, 4, 16)] * 2

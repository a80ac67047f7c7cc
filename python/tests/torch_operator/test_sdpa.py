"""The function with PyTorch's arguments, and blocks in which it takes the place of PyTorch's, against one process in float64."""

import copy

import pytest
import torch
import torch.utils.checkpoint
from torch.nn import functional as F

import kyklos
from kyklos.torch import scaled_dot_product_attention, split_attention, sum_gradients

TOKENS = (7, 12, 1)
ENDS = [sum(TOKENS[:rank]) for rank in range(len(TOKENS) + 1)]


def rows(group):
    return slice(ENDS[group.rank], ENDS[group.rank + 1])


def states(heads=4, kv_heads=4, dim=16, width=16, batch=2):
    make = torch.Generator().manual_seed(3)
    shapes = [(batch, heads, ENDS[-1], dim), (batch, kv_heads, ENDS[-1], dim), (batch, kv_heads, ENDS[-1], width)]
    return [torch.randn(shape, generator=make) for shape in shapes]


def masks():
    make = torch.Generator().manual_seed(4)
    keys = ENDS[-1]
    seen = torch.rand(keys, keys, generator=make) < 0.6
    return {
        "none": None,
        "bool [tokens, keys]": seen | torch.eye(keys, dtype=torch.bool),
        "numbers [tokens, keys]": torch.randn(keys, keys, generator=make),
        "numbers [heads, tokens, keys]": torch.randn(4, keys, keys, generator=make),
        "bool [batch, 1, 1, keys]": torch.cat([torch.ones(2, 1, 1, 15, dtype=torch.bool), torch.rand(2, 1, 1, 5, generator=make) < 0.5], -1),
        "numbers [batch, heads, tokens, keys]": torch.randn(2, 4, keys, keys, generator=make),
        "rows that see nothing": seen & (torch.arange(keys)[:, None] != 9),
    }


def cut(mask, group):
    """The rows of this rank."""
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., rows(group), :]


@pytest.mark.parametrize("name", masks())
def test_masks(name):
    arrays, mask = states(), masks()[name]
    exact = F.scaled_dot_product_attention(*(x.double() for x in arrays), attn_mask=mask if mask is None or mask.dtype == torch.bool else mask.double())
    exact = exact.nan_to_num()

    def work(group):
        own = [x[:, :, rows(group)] for x in arrays]
        return scaled_dot_product_attention(*own, attn_mask=cut(mask, group), group=group)

    got = torch.cat(kyklos.run_local(3, work, device="cpu"), 2)
    assert (got - exact).abs().max() < 2e-6


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {"is_causal": True}),
        ({}, {"is_causal": True, "scale": 0.5}),
        ({"kv_heads": 2}, {"enable_gqa": True}),
        ({"dim": 20, "width": 20}, {}),
        ({"dim": 24, "width": 9}, {"is_causal": True}),
        ({"dim": 8, "width": 40}, {}),
    ],
    ids=str,
)
def test_shapes_options_and_gradients(shape, options):
    arrays = states(**shape)
    alone = [x.double().requires_grad_() for x in arrays]
    exact = F.scaled_dot_product_attention(*alone, **options)
    exact.square().sum().backward()

    def work(group):
        own = [x[:, :, rows(group)].clone().requires_grad_() for x in arrays]
        o = scaled_dot_product_attention(*own, **options, group=group)
        o.square().sum().backward()
        return [o.detach(), *(x.grad for x in own)]

    results = kyklos.run_local(3, work, device="cpu")
    for part, want in enumerate([exact.detach(), *(x.grad for x in alone)]):
        got = torch.cat([result[part] for result in results], 2)
        assert got.shape == want.shape and (got - want).abs().max() < 1e-5 * max(1, want.abs().max())


def test_without_the_axis_of_the_batch():
    arrays = [x[0] for x in states()]
    exact = F.scaled_dot_product_attention(*(x.double() for x in arrays))
    got = kyklos.run_local(3, lambda group: scaled_dot_product_attention(*(x[:, rows(group)] for x in arrays), group=group), device="cpu")
    assert (torch.cat(got, 1) - exact).abs().max() < 2e-6


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"dropout_p": 0.1}, "there is no dropout"),
        ({"is_causal": True, "attn_mask": torch.ones(1, 1, dtype=torch.bool)}, "attn_mask beside is_causal"),
        ({"attn_mask": torch.ones(3, 4, 5, 6, 7)}, "axes|shape|extent"),
        ({"scale": torch.tensor(1.0)}, "pass a number"),
        ({"heads": 2}, "pass enable_gqa=True"),
        ({"axes": 2}, "axes"),
    ],
    ids=str,
)
@pytest.mark.parametrize("wrong_rank", [None, 1])
def test_wrong_arguments_are_an_error_of_all_ranks(wrong, says, wrong_rank):
    q, k, v = states()

    def work(group):
        own = [x[:, :, rows(group)] for x in (q, k, v)]
        given = dict(wrong) if wrong_rank in (None, group.rank) else {}
        if given.pop("heads", None):
            own[1:] = [x[:, :2] for x in own[1:]]
        if given.pop("axes", None):
            own = [x[0, 0] for x in own]
        with pytest.raises((kyklos.RequestError, TypeError), match=says):
            scaled_dot_product_attention(*own, **given, group=group)
        return scaled_dot_product_attention(*(x[:, :, rows(group)] for x in (q, k, v)), group=group)

    exact = F.scaled_dot_product_attention(q, k, v)
    assert (torch.cat(kyklos.run_local(3, work, device="cpu"), 2) - exact).abs().max() < 2e-6


def encoder():
    torch.manual_seed(5)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("training", [False, True])
def test_a_model_of_pytorchs_own_modules(training):
    model = encoder().train(training)
    x = torch.randn(2, ENDS[-1], 32, generator=torch.Generator().manual_seed(6))
    alone = copy.deepcopy(model).double()
    exact = alone(x.double())
    exact.square().sum().backward()
    copies = [copy.deepcopy(model) for _ in TOKENS]

    def work(group):
        own = copies[group.rank]
        with split_attention(group):
            y = own(x[:, rows(group)])
        y.square().sum().backward()
        sum_gradients(own.parameters(), group)
        return y.detach(), [parameter.grad for parameter in own.parameters()]

    results = kyklos.run_local(3, work, device="cpu")
    assert (torch.cat([y for y, _ in results], 1) - exact).abs().max() < 1e-5
    for _, gradients in results:
        for got, parameter in zip(gradients, alone.parameters(), strict=True):
            assert (got - parameter.grad).abs().max() < 1e-5 * max(1, parameter.grad.abs().max())


class Checkpointed(torch.nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layer, self.reentrant = encoder(), reentrant

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("within", [False, True])
def test_blocks_that_are_computed_again(reentrant, within):
    model = Checkpointed(reentrant).train()
    x = torch.randn(2, ENDS[-1], 32, generator=torch.Generator().manual_seed(6))
    alone = copy.deepcopy(model.layer).double()
    alone(x.double()).square().sum().backward()
    copies = [copy.deepcopy(model) for _ in TOKENS]

    def work(group):
        own = copies[group.rank]
        with split_attention(group):
            loss = own(x[:, rows(group)].clone().requires_grad_()).square().sum()
            if within:
                loss.backward()
        if not within:
            loss.backward()
        sum_gradients(own.parameters(), group)
        return [parameter.grad for parameter in own.parameters()]

    for gradients in kyklos.run_local(3, work, device="cpu"):
        for got, parameter in zip(gradients, alone.parameters(), strict=True):
            assert (got - parameter.grad).abs().max() < 1e-5 * max(1, parameter.grad.abs().max())


def test_beside_another_mode():
    model = encoder().eval()
    x = torch.randn(2, ENDS[-1], 32, generator=torch.Generator().manual_seed(6))

    def work(group):
        with torch.device("cpu"), split_attention(group), torch.no_grad():
            return model(x[:, rows(group)])

    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
    assert (torch.cat(kyklos.run_local(3, work, device="cpu"), 1) - exact).abs().max() < 1e-5


def test_without_gradients_no_fast_path_of_pytorch_passes_by():
    model = encoder().eval()
    x = torch.randn(2, ENDS[-1], 32, generator=torch.Generator().manual_seed(6))

    def work(group):
        with torch.no_grad(), split_attention(group):
            return model(x[:, rows(group)])

    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
    assert (torch.cat(kyklos.run_local(3, work, device="cpu"), 1) - exact).abs().max() < 1e-5


def test_calls_that_are_local():
    q, k, v = states()
    prompt = torch.randn(2, 4, 5, 16, generator=torch.Generator().manual_seed(7))

    def work(group):
        own = [x[:, :, rows(group)] for x in (q, k, v)]
        with split_attention(group, local=lambda query, key, value: key.shape[2] == 5):
            inner = F.scaled_dot_product_attention(*own)
            return F.scaled_dot_product_attention(query=inner, key=prompt, value=prompt)

    exact = F.scaled_dot_product_attention(F.scaled_dot_product_attention(q, k, v), prompt, prompt)
    assert (torch.cat(kyklos.run_local(3, work, device="cpu"), 2) - exact).abs().max() < 2e-6
    # After the block it is PyTorch's again.
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q, q, q))


def test_attention_that_is_not_seen_is_refused():
    attend = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(1, 4, 16)

    more = [torch.nn.MultiheadAttention(16, 2, batch_first=True, **{name: True}) for name in ("add_bias_kv", "add_zero_attn")]

    def work(group):
        for each in more:
            with pytest.raises(kyklos.RequestError, match="add_bias_kv or add_zero_attn"), split_attention(group):
                each(x, x, x, need_weights=False)
        with pytest.raises(kyklos.RequestError, match="need_weights=False"), split_attention(group):
            attend(x, x, x)
        with pytest.raises(kyklos.RequestError, match="nothing calls"), split_attention(group):
            (x @ x.mT).softmax(-1) @ x
        with split_attention(group):
            return attend(x, x, x, need_weights=False)[0]

    first, second = kyklos.run_local(2, work, device="cpu")
    # Both ranks have the same tokens, so that each is there twice.
    assert torch.allclose(first, attend(x, x, x)[0], atol=1e-6) and torch.equal(first, second)


def test_compiled_code():
    arrays = states()
    exact = F.scaled_dot_product_attention(*(x.double() for x in arrays), is_causal=True)

    def work(group):
        @torch.compile(backend="aot_eager", fullgraph=True)
        def run(q, k, v):
            return scaled_dot_product_attention(2 * q, k, v, is_causal=True, scale=0.125, group=group)

        return run(*(x[:, :, rows(group)] for x in arrays))

    got = torch.cat(kyklos.run_local(3, work, device="cpu"), 2)
    assert (got - exact).abs().max() < 2e-6


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((1, 1, 5, 9), "attn_mask of rank 0, .* has 9 keys, and the call has 10 keys"),
        ((1, 1, 4, 10), "attn_mask of shape .1, 1, 4, 10. for queries of shape"),
        ((3, 5, 10), "attn_mask of shape .1, 3, 5, 10. for queries of shape"),
        ((1, 1, 1, 5, 10), "attn_mask of shape .1, 1, 1, 5, 10. for queries of shape"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_a_mask_that_does_not_fit_is_refused_by_its_name(shape, says, dtype):
    q = torch.randn(1, 2, 5, 8)

    def run(group):
        with pytest.raises(kyklos.RequestError, match=says) as error:
            kyklos.torch.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(shape, dtype=dtype), group=group)
        # The group is usable afterwards.
        kyklos.torch.scaled_dot_product_attention(q, q, q, group=group)
        return str(error.value)

    assert not any("bias" in text for text in kyklos.run_local(2, run, device="cpu"))


def test_a_mask_on_one_rank_alone_and_one_of_float64_are_refused_by_their_name():
    q = torch.randn(1, 2, 5, 8)

    def run(group, mask, says):
        with pytest.raises(kyklos.RequestError, match=says):
            kyklos.torch.scaled_dot_product_attention(q, q, q, attn_mask=mask, group=group)

    kyklos.run_local(2, lambda group: run(group, torch.zeros(5, 10).double(), "attn_mask of torch.float64"), device="cpu")
    kyklos.run_local(2, lambda group: run(group, torch.zeros(5, 10) if group.rank else None, "another attn_mask"), device="cpu")

"""Gradients of split transformers of diffusers against those of the unsplit ones."""

import copy
import logging

import pytest
import tiny_transformers as tiny
import torch
from split_models import case

import kyklos
import kyklos.torch
from kyklos.diffusers import _attention, parallelize
from kyklos.diffusers._calls import Calls
from kyklos.diffusers._ways.shares import Shares


def loss_of(model, inputs):
    """A number that depends on all outputs, in float64 so that its own rounding does not count."""
    total = 0.0
    for output in tiny.outputs_of(model, inputs):
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(7)).double()
        total = total + (weights * output.double()).sum() + output.double().square().mean()
    return total


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def unsplit(model, inputs):
    own = copy.deepcopy(model)
    loss_of(own, inputs).backward()
    return gradients(own)


def split(case, size, between=lambda model, group: None, **options):
    """Gradients on each rank, summed over the ranks."""
    models = case.copies(size)

    def run(group):
        model = models[group.rank]
        with parallelize(model, group, **options):
            between(model, group)
            # Each rank has the whole loss.
            (loss_of(model, case.inputs) / size).backward()
            kyklos.torch.sum_gradients(model.parameters(), group)
        return gradients(model)

    return kyklos.run_local(size, run, device="cpu")


def check(results, case):
    """As for outputs (tiny_transformers.py): twice the error of the unsplit model in float32, and 3e-6 of the largest gradient of the
    parameter, where that error happens to be nearly 0."""
    exact = unsplit(copy.deepcopy(case.model).double(), tiny._double(case.inputs))
    plain = unsplit(case.model, case.inputs)
    largest = max(gradient.abs().max() for gradient in exact.values())
    for found in results:
        # Of what changes no output compiled code has a gradient of zeros, and eager code none.
        assert found.keys() >= exact.keys() and not any(found[name].any() for name in found.keys() - exact.keys())
        for name, right in exact.items():
            assert torch.equal(found[name], results[0][name]), name
            bound = 2 * (plain[name] - right).abs().max() + 3e-6 * right.abs().max() + 1e-8 * largest
            assert (found[name] - right).abs().max() <= bound, name


@pytest.mark.parametrize("name", tiny.CASES)
def test_gradients_are_those_of_the_unsplit_transformer(name):
    check(split(case(name), 2, shares=(3, 7)), case(name))


@pytest.mark.parametrize("name", ["Wan", "QwenImage, text masks", "LTX 2"])
def test_three_ranks_and_a_mesh(name):
    check(split(case(name), 3, shares=(2, 1, 5)), case(name))
    check(split(case(name), 2, mesh="2x1"), case(name))


def test_blocks_that_are_computed_again():
    one = case("QwenImage, text masks")
    check(split(one, 2, lambda model, _: model.train().enable_gradient_checkpointing(), shares=(3, 7)), one)


@pytest.mark.parametrize("name", ["Wan", "QwenImage, text masks"])
def test_compiled_blocks_of_one_rank(name, monkeypatch):
    # pytest's log capture would have dynamo print every guard.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()

    def compile_one(model, group):
        if group.rank == 0:
            model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")

    check(split(case(name), 2, compile_one, shares=(3, 7)), case(name))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_masks_that_were_not_kept():
    def forget(model, group):
        for module in model.modules():
            config = getattr(getattr(module, "processor", None), "_parallel_config", None)
            if config is not None:
                config._reuse = False

    check(split(case("QwenImage, text masks"), 2, forget, shares=(3, 7)), case("QwenImage, text masks"))


def test_a_step_of_fine_tuning():
    model, inputs = case("Flux").model, case("Flux").inputs
    models = [copy.deepcopy(model) for _ in range(2)]
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)

    def step(model, inputs, group=None):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loss = loss_of(model, inputs)
        (loss if group is None else loss / group.size).backward()
        if group is not None:
            kyklos.torch.sum_gradients(model.parameters(), group)
        optimizer.step()
        with torch.no_grad():
            return loss.item(), loss_of(model, inputs).item()

    def run(group):
        with parallelize(models[group.rank], group, shares=(3, 7)):
            return step(models[group.rank], inputs, group)

    ranks = kyklos.run_local(2, run, device="cpu")
    want, alone = step(exact, tiny._double(inputs)), step(plain, inputs)
    assert ranks[0] == ranks[1]
    assert want[1] < want[0], "the step did not lower the loss"
    for ours, right, one in zip(ranks[0], want, alone, strict=True):
        assert abs(ours - right) <= 2 * abs(one - right) + 1e-6 * abs(right)
    for (name, right), one, ours, other in zip(
        exact.named_parameters(), plain.parameters(), models[0].parameters(), models[1].parameters(), strict=True
    ):
        assert torch.equal(ours, other), name
        assert (ours - right).abs().max() <= 2 * (one - right).abs().max() + 3e-7 * right.abs().max().clamp(min=1), name


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 30), (2, 1, 1, 30), (1, 1, 1, 30), (2, 4, 1, 30), (1, 4, 30, 30), (2, 1, 30, 30), (2, 30, 30)]
)
def test_a_mask_has_its_gradient(shape, compiled, monkeypatch):
    """Of the queries of all ranks, against one call of PyTorch. Key masks, and rows of this rank's queries."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    generator = torch.Generator().manual_seed(11)
    q, k, v, weights = torch.randn(4, 2, 30, 4, 16, generator=generator)
    mask = torch.randn(shape, generator=generator)
    mask[0, ..., 20] = float("-inf")
    of_keys = len(shape) == 2 or shape[-2] == 1

    def run(group):
        own = slice(0, 17) if group.rank == 0 else slice(17, 30)
        part = (mask[..., own] if of_keys else mask[..., own, :]).clone().requires_grad_()
        split = _attention.Split(group, "Model", Shares(group, (17, 13), {}), Calls("Model", 1))
        _attention.register(split)
        call = lambda part: _attention.attention(split, q[:, own], k[:, own], v[:, own], part)
        try:
            split.begin(torch.nn.Module(), {})
            o = (torch.compile(call, backend="aot_eager") if compiled and group.rank == 0 else call)(part)
            split.end()
            (o * weights[:, own]).sum().backward()
        finally:
            _attention.unregister(split)
        return part.grad

    found = torch.cat(kyklos.run_local(2, run, device="cpu"), -1 if of_keys else -2)
    right = mask.double().requires_grad_()
    whole = right[:, None, None] if len(shape) == 2 else right[:, None] if len(shape) == 3 else right
    heads_first = (x.double().transpose(1, 2) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=whole)
    (o.transpose(1, 2) * weights).sum().backward()
    assert found.shape == shape and found[0, ..., 20].eq(0).all()
    assert (found - right.grad).abs().max() <= 2e-6 * right.grad.abs().max()


def test_dropout_is_refused():
    model = tiny.flux().train()
    inputs = tiny.flux_inputs()
    next(part for part in model.modules() if isinstance(part, torch.nn.Dropout)).p = 0.1
    with kyklos.Group.local(1, device="cpu")[0] as group, parallelize(model, group):
        with pytest.raises(kyklos.RequestError, match="dropout, which would differ between ranks"):
            model(**inputs)
        model.eval()(**inputs)

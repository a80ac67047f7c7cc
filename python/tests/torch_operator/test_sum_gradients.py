"""Sums of the gradients of parameters over ranks."""

import pytest
import torch

import kyklos
import kyklos.torch
from kyklos.torch import _gradients

SHAPES = [(7, 130), (), (3000,), (5, 4, 3)]


def parameters(rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    made = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return made


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_rounded_once_and_equal_on_all_ranks(size, dtype, monkeypatch):
    # Several exchanges, and one parameter in two of them.
    monkeypatch.setattr(_gradients, "_ROWS", 2)

    def work(group):
        own = parameters(group.rank, dtype)
        kyklos.torch.sum_gradients(own, group)
        return [parameter.grad for parameter in own]

    want = [sum(parts).to(dtype) for parts in zip(*([p.grad.double() for p in parameters(r, dtype)] for r in range(size)))]
    for got in kyklos.run_local(size, work, device="cpu"):
        assert all(torch.equal(ours, right) for ours, right in zip(got, want, strict=True))


def test_missing_transposed_and_special_gradients():
    def work(group):
        frozen, nowhere, somewhere, transposed, special = (torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(5))
        frozen.requires_grad_(False)
        if group.rank == 1:
            somewhere.grad = torch.ones(2, 3)
        transposed.grad = torch.arange(6.0).view(3, 2).T
        special.grad = torch.tensor([[torch.inf, torch.nan, 1], [-torch.inf if group.rank else torch.inf, 2, -torch.inf]])
        kyklos.torch.sum_gradients([frozen, nowhere, somewhere, transposed, special], group)
        return frozen.grad, nowhere.grad, somewhere.grad, transposed.grad, special.grad

    for frozen, nowhere, somewhere, transposed, special in kyklos.run_local(2, work, device="cpu"):
        assert frozen is None and nowhere is None
        assert torch.equal(somewhere, torch.ones(2, 3))
        assert torch.equal(transposed, 2 * torch.arange(6.0).view(3, 2).T)
        want = torch.tensor([[torch.inf, torch.nan, 2], [torch.nan, 4, -torch.inf]])
        assert torch.equal(special.nan_to_num(5e5), want.nan_to_num(5e5))


def test_other_parameters_on_a_rank_are_refused_on_all():
    def work(group):
        own = parameters(0)[: 3 + group.rank]
        with pytest.raises(kyklos.RequestError, match="gradients of"):
            kyklos.torch.sum_gradients(own, group)
        kyklos.torch.sum_gradients(own[:2], group)
        assert torch.equal(own[0].grad, 2 * parameters(0)[0].grad)

    kyklos.run_local(2, work, device="cpu")


def test_types_that_do_not_travel_are_refused_on_all():
    def work(group):
        own = parameters(0)
        if group.rank == 1:
            own[0] = torch.nn.Parameter(own[0].double())
        with pytest.raises(kyklos.RequestError, match="parameters of torch.float64: use float32"):
            kyklos.torch.sum_gradients(own, group)

    kyklos.run_local(2, work, device="cpu")

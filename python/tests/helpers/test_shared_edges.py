"""Calls that are recorded, derived in other ways, of unusual tensors or in other processes: they are PyTorch's, also where calls like them are shared."""

import multiprocessing

import pytest
import torch
import torch.nn.functional as F
from test_shared_attention import KEYS, ROWS, check, one, shared_before, states  # noqa: F401

_BEFORE = F.scaled_dot_product_attention


def test_what_is_recorded_is_pytorchs(one):
    (q, k, v), _ = states()
    shared_before(one, q, k, v)
    other = [x.flip(2) for x in (q, k, v)]
    want = F.scaled_dot_product_attention(*other)
    with one:
        traced = torch.jit.trace(lambda *x: F.scaled_dot_product_attention(*x), (q, k, v))
        exported = torch.export.export(Attend(), (q, k, v))
        graph = torch.fx.experimental.proxy_tensor.make_fx(Attend())(q, k, v)
    for function in (traced, exported.module(), graph):
        torch.testing.assert_close(function(*other), want)


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


def test_forward_derivatives_and_second_ones_are_pytorchs(one):
    (q, k, v), _ = states(batch=1, heads=2, kv_heads=2)
    shared_before(one, q, k, v)
    leaf = q.clone().requires_grad_()
    shared_before(one, leaf, k, v)
    forward_ad = torch.autograd.forward_ad

    def tangent():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), forward_ad.dual_level():
            o = F.scaled_dot_product_attention(forward_ad.make_dual(q, k[:, :, :ROWS]), k, v)
            return forward_ad.unpack_dual(o).tangent

    def second():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            o = F.scaled_dot_product_attention(leaf, k, v)
            (first,) = torch.autograd.grad(o.square().sum(), leaf, create_graph=True)
            return torch.autograd.grad(first.square().sum(), leaf)[0]

    for derivative in (tangent, second):
        want = derivative()
        with one:
            torch.testing.assert_close(derivative(), want)


def test_a_mask_that_is_changed_afterwards_changes_no_gradient(one):
    (q, k, v), _ = states()
    mask = torch.rand(ROWS, KEYS, generator=torch.Generator().manual_seed(3)) > 0.5
    leaves = [x.requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(F.scaled_dot_product_attention(*leaves, mask).sum(), leaves)
    shared_before(one, *leaves, attn_mask=mask)
    with one:
        o = F.scaled_dot_product_attention(*leaves, mask)
        mask.fill_(True)
        got = torch.autograd.grad(o.sum(), leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_memory_is_as_pytorch_has_it(one):
    (q, k, v), _ = states()
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    shared_before(one, q, k, v)
    with one:
        o = F.scaled_dot_product_attention(q, k, v)
    assert o.stride() == F.scaled_dot_product_attention(q, k, v).stride()
    imaginary = torch.complex(torch.zeros(ROWS, KEYS), torch.randn(ROWS, KEYS)).conj().imag
    check(one, q, k, v, attn_mask=imaginary)


def test_unusual_tensors_stay_here(one):
    (q, k, v), _ = states()
    shared_before(one, q, k, v)
    with one:
        strided = torch.nested.nested_tensor([q[0], q[1, :, :300]])
        assert F.scaled_dot_product_attention(strided, strided, strided).is_nested
        meta = [x.to("meta") for x in (q, k, v)]
        assert F.scaled_dot_product_attention(*meta).device.type == "meta"
        with pytest.raises(TypeError):
            F.scaled_dot_product_attention(q, k, None)


def test_what_others_replace_in_a_block_stays(one):
    theirs = lambda *given, **options: _BEFORE(*given, **options)  # noqa: E731
    try:
        with one:
            F.scaled_dot_product_attention = theirs
        assert F.scaled_dot_product_attention is theirs
    finally:
        F.scaled_dot_product_attention = _BEFORE


def test_a_forked_child_attends_by_itself_and_ends(one):
    (q, k, v), _ = states()
    shared_before(one, q, k, v)
    context = multiprocessing.get_context("fork")
    with one:
        child = context.Process(target=_attend_in_child)
        child.start()
        child.join(120)
    assert child.exitcode == 0


def _attend_in_child():
    torch.set_num_threads(1)
    (q, k, v), _ = states(batch=1, heads=2, kv_heads=2)
    assert F.scaled_dot_product_attention is _BEFORE
    F.scaled_dot_product_attention(q, k, v)

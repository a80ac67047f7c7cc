"""Llama 4: layers whose tokens see their own chunk only, layers without RoPE, and queries that are scaled by the number of their token."""

import pytest
import torch
from test_transformers_training import check, step
from tiny_models import COMMON, build_class, error, in_float64, on_ranks, output, texts

import kyklos
from kyklos.transformers import _masks

SETTINGS = {
    **COMMON,
    "head_dim": 16,
    "intermediate_size_mlp": 32,
    "num_local_experts": 2,
    "num_hidden_layers": 4,
    "attention_chunk_size": 8,
    "no_rope_layers": [1, 1, 0, 1],
    # The scale of a query changes with every third token.
    "floor_scale": 3,
    "attn_scale": 0.5,
}


def build():
    return build_class("Llama4ForCausalLM", "Llama4TextConfig", SETTINGS)


def padded():
    ids = texts(2, 37)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


PLAIN = {"input_ids": texts(2, 37)}
# Documents that are longer than a chunk.
PACKED = {"input_ids": texts(1, 37), "position_ids": torch.cat([torch.arange(count) for count in (11, 20, 6)])[None]}


def expected(model, **inputs):
    """In float64, and the error that a split model may have."""
    seen = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    exact = output(in_float64(model), **inputs, use_cache=False)
    return exact, 2 * error(output(model, **inputs, use_cache=False), exact, seen) + 1e-6 * float(exact.abs().max()), seen


@pytest.mark.parametrize("shares", [[3, 7], [2, 1, 5]], ids=str)
def test_a_pass_and_a_text(shares):
    model = build()
    cases = [PLAIN, padded(), PACKED]
    whole = [expected(model, **inputs) for inputs in cases]
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    written = [in_float64(model).generate(**inputs, **options) for inputs in cases[:2]]

    def work(split, handle, group):
        passes = [output(split, **inputs, use_cache=False) for inputs in cases]
        cached = [output(split, **inputs, use_cache=True) for inputs in cases[:2]]
        return passes, cached, [split.generate(**inputs, **options) for inputs in cases[:2]]

    for passes, cached, text in on_ranks(model, len(shares), work, shares=shares):
        for got, (exact, bound, seen) in zip(passes + cached, whole + whole[:2], strict=True):
            assert error(got, exact, seen) <= bound
        for got, want, (_, bound, _) in zip(text, written, whole, strict=False):
            assert torch.equal(got.sequences, want.sequences)
            assert (torch.stack(got.logits) - torch.stack(want.logits).double()).abs().max() <= 2 * bound


@pytest.mark.parametrize("shares", [[3, 7], [2, 1, 5]], ids=str)
def test_gradients(shares):
    model, ids = build(), PLAIN["input_ids"]
    results = on_ranks(model, len(shares), step(input_ids=ids, labels=ids), shares=shares, gather="none")
    check(results, model, input_ids=ids, labels=ids)


def test_chunks_and_scales_matter(monkeypatch):
    """The control of the tests above."""
    model = build()
    exact, bound, seen = expected(model, **PLAIN)
    run = lambda split, *_: output(split, **PLAIN, use_cache=False)
    with monkeypatch.context() as patch:
        patch.setattr(_masks, "chunks", lambda size, places, boundaries: boundaries)
        for got in on_ranks(model, 2, run, check=False):
            assert error(got, exact, seen) > 100 * bound
    from kyklos.transformers import _hooks

    monkeypatch.setattr(_hooks, "first_token", lambda base, undo: None)
    for got in on_ranks(model, 2, run, check=False):
        assert error(got, exact, seen) > 100 * bound
    with pytest.raises(kyklos.RequestError, match="does not compute the same when it is split"):
        on_ranks(model, 2, run)


def test_boundaries_of_chunks():
    mask = torch.tensor([[1] * 10, [0] * 3 + [1] * 7])
    places = _masks.places(mask, 2, 10)
    assert _masks.chunks(4, places, None) == [[0, 4, 8, 10], [0, 3, 7, 10]]
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])
    assert _masks.chunks(4, positions, _masks.documents(positions)) == [[0, 4, 6, 10]]

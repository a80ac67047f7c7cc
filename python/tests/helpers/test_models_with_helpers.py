"""Unmodified models in a block of helpers compute what they do alone."""

import pytest
import tiny_transformers as tiny
import torch

import kyklos


@pytest.fixture
def one():
    helpers = kyklos.helpers([], devices=["cpu"], _always=True)
    yield helpers
    helpers.close()


@pytest.mark.parametrize("name", ["Wan", "Wan I2V", "Flux", "QwenImage", "QwenImage, text masks"])
def test_diffusion_transformers(one, name):
    case = tiny.CASES[name]()
    with one:
        for _ in range(2):
            output = tiny.call(case.model, case.inputs)
            one.settle()
    assert one.status()[0]["calls"] > 0
    assert case.error(output) <= case.tolerance


def llama(attention):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=attention).eval()


def test_a_prompt_of_llama(one):
    model, ids = llama("sdpa"), torch.arange(700)[None] % 64
    with torch.no_grad():
        want, right = model(ids).logits, model.double()(ids).logits
        model.float()
        with one:
            for _ in range(2):
                got = model(ids).logits
                one.settle()
            text = model.generate(ids[:, :600], max_new_tokens=4, do_sample=False)
    assert one.status()[0]["calls"] > 0
    assert (got.double() - right).abs().max() <= 4 * (want.double() - right).abs().max() + 1e-6
    with torch.no_grad():
        assert torch.equal(text, model.generate(ids[:, :600], max_new_tokens=4, do_sample=False))


def test_functions_of_transformers_that_helpers_do_not_know_are_left_alone(one):
    from transformers import AttentionInterface

    def eager_like(module, query, key, value, attention_mask, scaling=None, **given):
        # It sees a whole prompt, and is causal by nothing that can be seen from outside.
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        weights = (query @ key.transpose(2, 3) * scaling).softmax(-1)
        return (weights @ value).transpose(1, 2), weights

    AttentionInterface.register("eager_like", eager_like)
    try:
        model, ids = llama("eager_like"), torch.arange(700)[None] % 64
        with torch.no_grad():
            want = model(ids).logits
            with one:
                assert AttentionInterface()["eager_like"] is eager_like
                assert torch.equal(model(ids).logits, want)
    finally:
        AttentionInterface._global_mapping.pop("eager_like")


def test_a_backend_of_diffusers(one):
    from diffusers.models import attention_dispatch

    registry, name = attention_dispatch._AttentionBackendRegistry, attention_dispatch.AttentionBackendName.FLASH
    had, seen = registry._backends[name], []

    def vendors(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, return_lse=False, _parallel_config=None):
        seen.append(query.shape[2])
        q, k, v = (x.transpose(1, 2).double() for x in (query, key, value))
        weights = (q @ k.transpose(2, 3) * (scale or q.shape[-1] ** -0.5)).softmax(-1)
        return (weights @ v).transpose(1, 2).to(query.dtype)

    registry._backends[name] = vendors
    names = registry._supported_arg_names[name]
    registry._supported_arg_names[name] = {"query", "key", "value", "scale"}
    try:
        q, k, v = torch.randn(3, 1, 600, 4, 32, generator=torch.Generator().manual_seed(1))
        want = attention_dispatch.dispatch_attention_fn(q, k, v, backend=name)
        with one:
            for _ in range(3):
                got = attention_dispatch.dispatch_attention_fn(q, k, v, backend=name)
                one.settle()
        assert one.status()[0]["calls"] > 0 and min(seen) < 4
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        with one, pytest.raises(TypeError, match="value"):
            registry._backends[name](query=q, key=k)
    finally:
        registry._backends[name], registry._supported_arg_names[name] = had, names

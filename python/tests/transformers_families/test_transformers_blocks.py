"""Images and prompts whose tokens see each other, in models that else see earlier tokens only."""

import copy

import pytest
import torch
from test_transformers_images import exact_of
from tiny_models import COMMON, WINDOW, build_class, error, on_ranks, output
from tiny_vision import image_inputs, vision
from transformers import masking_utils

import kyklos
import kyklos.torch
import kyklos.transformers
from kyklos.transformers import _masks

NAMES = ["Gemma3", "PaliGemma", "PaliGemma2"]
SHARES = [[3, 7], [2, 1, 5]]


def prompt(name):
    """Inputs that end before the answer."""
    inputs = image_inputs(name)
    cut = {"input_ids", "attention_mask", "token_type_ids"} if name.startswith("PaliGemma") else ()
    return {each: x[:, :26] if each in cut else x for each, x in inputs.items()}


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_pass_and_a_text(name, shares):
    model, inputs, given = vision(name), image_inputs(name), prompt(name)
    exact, bound, seen = exact_of(model, inputs)
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    double = {each: x.double() if x.is_floating_point() else x for each, x in given.items()}
    # PaliGemma does not see what follows in the next part of a prompt, so its text is another one.
    ways = [{}, {"use_cache": False}, {"prefill_chunk_size": 9}]
    written = [copy.deepcopy(model).double().generate(**double, **options, **way) for way in ways]

    def work(split, handle, group):
        return (
            output(split, **inputs, use_cache=False),
            output(split, **inputs, use_cache=True),
            *(split.generate(**given, **options, **way) for way in ways),
        )

    for alone, cached, *texts in on_ranks(model, len(shares), work, shares=shares):
        assert error(alone, exact, seen) <= bound and error(cached, exact, seen) <= bound
        for text, want in zip(texts, written, strict=True):
            assert torch.equal(text.sequences, want.sequences)
            assert (torch.stack(text.logits) - torch.stack(want.logits).double()).abs().max() <= 2 * bound


def test_gemma_4_whose_blocks_need_no_pixels():
    text = {**COMMON, **WINDOW, "global_head_dim": 16, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    text |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "use_bidirectional_attention": "vision"}
    image = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16, "patch_size": 4}
    config = {"text_config": text, "vision_config": {**image, "num_key_value_heads": 2}, "audio_config": None}
    model, inputs = build_class("Gemma4ForConditionalGeneration", "Gemma4Config", config), image_inputs("Gemma4", False)
    # The second kind is a video.
    inputs["mm_token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    inputs["mm_token_type_ids"][:, 4:20], inputs["mm_token_type_ids"][1, 22:26] = 1, 2
    exact, bound, seen = exact_of(model, inputs)
    assert error(output(model, **{**inputs, "mm_token_type_ids": torch.zeros_like(inputs["input_ids"])}), exact, seen) > 100 * bound
    with torch.no_grad():
        written = model.generate(**inputs, max_new_tokens=6, do_sample=False)

    def work(split, handle, group):
        return output(split, **inputs, use_cache=False), split.generate(**inputs, max_new_tokens=6, do_sample=False)

    for got, text in on_ranks(model, 3, work, shares=[2, 1, 5]):
        assert error(got, exact, seen) <= bound and torch.equal(text, written)


@pytest.mark.parametrize("mesh", ["2x1", "1x2"])
def test_meshes_without_padding(mesh):
    model, inputs = vision("Gemma3"), image_inputs("Gemma3")
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    exact, bound, seen = exact_of(model, inputs)
    options = {"max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        written = model.generate(**inputs, **options)

    def work(split, handle, group):
        return output(split, **inputs), split.generate(**inputs, **options)

    for got, text in on_ranks(model, 2, work, shares=[3, 7], mesh=mesh):
        assert error(got, exact, seen) <= bound and torch.equal(text, written)


@pytest.mark.parametrize("gather", ["auto", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, gather):
    model, inputs = vision(name), image_inputs(name)
    labels = inputs["input_ids"].masked_fill((inputs["attention_mask"] == 0) | (inputs["input_ids"] >= 90), -100)

    def alone(model, **inputs):
        model.train()
        model(**inputs, labels=labels, use_cache=False).loss.backward()
        return {each: parameter.grad for each, parameter in model.named_parameters() if parameter.grad is not None}

    double = {each: x.double() if x.is_floating_point() else x for each, x in inputs.items()}
    exact, plain = alone(copy.deepcopy(model).double(), **double), alone(copy.deepcopy(model), **inputs)

    def work(split, handle, group):
        split.train()
        loss = split(**inputs, labels=labels, use_cache=False).loss
        (loss / (group.size if gather == "auto" else 1)).backward()
        kyklos.torch.sum_gradients(split.parameters(), group)
        return {each: parameter.grad for each, parameter in split.named_parameters() if parameter.grad is not None}

    shares = SHARES[gather == "none"]
    for found in on_ranks(model, len(shares), work, shares=shares, gather=gather):
        assert found.keys() == exact.keys()
        for each, ours in found.items():
            bound = 2 * (plain[each] - exact[each]).abs().max() + 3e-6 * exact[each].abs().max()
            assert (ours - exact[each]).abs().max() <= bound, each


@pytest.mark.parametrize("name", NAMES)
def test_blocks_matter(name, monkeypatch):
    """The control of the tests above: causal images are far off, and so are rows of other queries."""
    model, inputs = vision(name), image_inputs(name)
    exact, bound, seen = exact_of(model, inputs)
    assert error(output(model, **{**inputs, "pixel_values": inputs["pixel_values"].flip(0)}), exact, seen) > 100 * bound
    rule_of = _masks.rule_of

    def causal(**given):
        rule = rule_of(**given)
        return rule if rule.rows is None else _masks.replace(rule, rows=lambda first, end: rule.rows(first, end).tril(first))

    def shifted(**given):
        rule = rule_of(**given)
        return rule if rule.rows is None else _masks.replace(rule, rows=lambda first, end: rule.rows(0, end - first))

    for wrong in (causal, shifted):
        monkeypatch.setattr(_masks, "rule_of", wrong)
        for got in on_ranks(model, 2, lambda split, *_: output(split, **inputs), shares=[3, 7]):
            assert error(got, exact, seen) > 100 * bound


def test_another_image_later_in_a_text():
    """Layers with windows keep their keys if images come first, and cannot see images later if they have dropped some."""
    model, inputs = vision("Gemma3"), image_inputs("Gemma3")
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    first = {"input_ids": inputs["input_ids"][:1, :4].repeat(1, 5)}
    more = {**{each: x[:1] for each, x in inputs.items()}}
    more["attention_mask"] = torch.ones(1, 54, dtype=torch.long)

    def work(split, handle, group):
        cache = handle.cache()
        output(split, **first, past_key_values=cache)
        types = torch.cat([torch.zeros(1, 20, dtype=torch.long), more["token_type_ids"]], 1)
        with pytest.raises(kyklos.RequestError, match="tokens that see each other, for a cache that has dropped the keys"):
            output(split, **{**more, "token_type_ids": types}, past_key_values=cache)

    on_ranks(model, 2, work)


def test_ranks_with_other_images_are_told():
    model, inputs = vision("Gemma3"), image_inputs("Gemma3")

    def work(split, handle, group):
        types = inputs["token_type_ids"].clone()
        if group.rank == 1:
            # The longest image is as long.
            types[1, 22:25] = 0
        with pytest.raises(kyklos.RequestError, match="label"):
            output(split, **{**inputs, "token_type_ids": types})
        return output(split, **inputs)

    exact, bound, seen = exact_of(model, inputs)
    for got in on_ranks(model, 2, work):
        assert error(got, exact, seen) <= bound


def test_distances_of_blocks_bound_what_a_query_sees():
    blocks = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1], [0, 0, -1, 0, 0, -1, 1, -1, 2]])
    overlay = masking_utils.blockwise_overlay(blocks)
    given = {"whole": True, "batch_size": 2, "q_offset": 0, "kv_length": 9}
    causal, window = masking_utils.causal_mask_function, masking_utils.sliding_window_overlay(3)
    rules = {
        "window:-1,4": masking_utils.or_masks(causal, overlay),
        "window:2,4": masking_utils.and_masks(window, masking_utils.or_masks(causal, overlay)),
        "window:4,4": masking_utils.or_masks(masking_utils.and_masks(window, causal), overlay),
    }
    for text, function in rules.items():
        rule = _masks.rule_of(mask_function=function, **given)
        rows = torch.cat([rule.rows(0, 4), rule.rows(4, 9)], 2)
        whole = masking_utils.sdpa_mask(2, 9, 9, mask_function=function, allow_is_causal_skip=False)
        assert str(rule) == text and torch.equal(rows, whole)
        for _, _, query, key in whole.nonzero().tolist():
            assert (rule.left is None or query - key <= rule.left) and key - query <= rule.right
        with pytest.raises(kyklos.RequestError, match="made from the tokens of one rank"):
            _masks.rule_of(mask_function=function, **{**given, "whole": False})
    none = masking_utils.or_masks(causal, masking_utils.blockwise_overlay(torch.full((2, 9), -1)))
    assert _masks.rule_of(mask_function=none, **given) is _masks.CAUSAL

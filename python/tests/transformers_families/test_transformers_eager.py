"""Decoders that compute attention themselves, without ``AttentionInterface``: RoPE, learned positions, and ALiBi."""

import copy

import pytest
import torch
from test_transformers_training import check, gradients, step
from tiny_models import GPTJ_IS_SPLIT, build_class, error, in_float64, on_ranks, output, reference, texts

import kyklos
import kyklos.transformers

_COMMON = {"vocab_size": 97, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_FALCON = {**_COMMON, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8}
_GPT = {**_COMMON, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "rotary_dim": 8, "resid_pdrop": 0.0}
_NEO = {"max_position_embeddings": 128, "attention_types": [[["global", "local"], 2]], "window_size": 6, "num_heads": 4}

MODELS = {
    "Falcon": ("Falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "Falcon with one head of keys": ("Falcon", _FALCON),
    "Falcon with ALiBi": ("Falcon", {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    # The slopes of heads that are no power of two are made in another way.
    "Bloom": ("Bloom", {**_COMMON, "hidden_size": 48, "n_layer": 3, "n_head": 6}),
    "Mpt": ("Mpt", {**_COMMON, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 512, "expansion_ratio": 4}),
    "GPTNeo": ("GPTNeo", {**_COMMON, **_NEO, "hidden_size": 64, "num_layers": 4}),
    "CodeGen": ("CodeGen", _GPT),
}
if not GPTJ_IS_SPLIT:
    MODELS["GPTJ"] = ("GPTJ", _GPT)
SHARES = [[3, 7], [2, 1, 5]]


def build(name):
    family, settings = MODELS[name]
    # The only one that PyTorch's own function computes is Falcon.
    return build_class(f"{family}ForCausalLM", f"{family}Config", settings, implementation="sdpa" if family == "Falcon" else "eager")


def padded(ids):
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_pass_and_a_text(name, shares):
    model, plain, holes = build(name), {"input_ids": texts(2, 31)}, padded(texts(2, 31))
    right = {each: x.flip(1) for each, x in holes.items()}
    whole = [reference(model, **inputs) for inputs in (plain, holes)]
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    # Of padded batches some of these models make no numbers in float64, so each text is alone.
    exact_model = in_float64(model)
    written = [
        [exact_model.generate(ids[seen.bool()][None], **options) for ids, seen in zip(inputs["input_ids"], mask, strict=True)]
        for inputs, mask in ((plain, torch.ones(2, 31)), (holes, holes["attention_mask"]))
    ]

    def work(split, handle, group):
        passes = [output(split, **inputs, use_cache=False) for inputs in (plain, holes)]
        passes += [output(split, **inputs) for inputs in (plain, holes)]
        return passes, output(split, **right, use_cache=False), [split.generate(**inputs, **options) for inputs in (plain, holes)]

    exact_right = output(model, **right)
    for passes, on_the_right, text in on_ranks(model, len(shares), work, shares=shares):
        for got, (exact, bound, seen) in zip(passes, whole * 2, strict=True):
            assert error(got, exact, seen) <= bound
        assert error(on_the_right, exact_right.double(), right["attention_mask"].bool()) <= 3 * whole[0][1]
        for got, want in zip(text, written, strict=True):
            assert torch.equal(got.sequences[:, -12:], torch.cat([one.sequences[:, -12:] for one in want]))
            steps = torch.stack([torch.cat(one.logits) for one in want], 1).double()
            assert (torch.stack(got.logits) - steps).abs().max() <= 3 * whole[0][1]


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name):
    model, ids = build(name), texts(2, 31)
    check(on_ranks(model, 2, step(input_ids=ids, labels=ids), shares=[3, 7], gather="none"), model, input_ids=ids, labels=ids)


@pytest.mark.parametrize("name", ["Bloom", "Falcon with ALiBi"])
def test_gradients_with_padding_on_three_ranks(name):
    model, inputs = build(name), padded(texts(2, 31))
    ids, seen = inputs["input_ids"], inputs["attention_mask"].bool()
    # The first token of a text is no target: what is before it has no meaning.
    labels = ids.masked_fill(~seen, -100)
    labels[1, 9] = -100

    def alone(model):
        targets = [text[visible][None] for text, visible in zip(ids, seen, strict=True)]
        sums = [model(input_ids=one, labels=one, use_cache=False).loss * (one.shape[1] - 1) for one in targets]
        (sum(sums) / (seen.sum() - 2)).backward()
        return gradients(model)

    exact, plain = alone(in_float64(model)), alone(copy.deepcopy(model))
    results = on_ranks(model, 3, step(**inputs, labels=labels), shares=[2, 1, 5], gather="none")
    for _, found in results:
        assert found.keys() == exact.keys()
        for each, ours in found.items():
            bound = 2 * (plain[each] - exact[each]).abs().max() + 3e-6 * exact[each].abs().max()
            assert (ours - exact[each]).abs().max() <= bound, each


@pytest.mark.parametrize("name", ["Bloom", "Falcon with ALiBi", "Mpt"])
def test_slopes_matter(name, monkeypatch):
    """The control of the tests above: without its numbers a model is far off, and so is one whose ranks count from their own first token."""
    from kyklos.transformers import _attention as seam

    model, inputs = build(name), {"input_ids": texts(2, 31)}
    exact, bound, seen = reference(model, **inputs)
    whole = seam.Forward._alibi
    own = lambda forward, alibi, query: whole(forward, alibi, query).roll(forward.group.size, 2)
    for wrong in (lambda *given: whole(*given) * 0, own):
        monkeypatch.setattr(seam.Forward, "_alibi", wrong)
        for got in on_ranks(model, 2, lambda split, *_: output(split, **inputs), shares=[3, 7], check=False):
            assert error(got, exact, seen) > 100 * bound
        with pytest.raises(kyklos.RequestError, match="does not compute the same when it is split"):
            on_ranks(model, 2, lambda *_: None)


def test_local_layers_matter():
    model, inputs = build("GPTNeo"), {"input_ids": texts(2, 31)}
    exact, bound, seen = reference(model, **inputs)
    for layer in model.transformer.h:
        layer.attn.attention.attention_type = "global"
    for got in on_ranks(model, 2, lambda split, *_: output(split, **inputs), check=False):
        assert error(got, exact, seen) > 100 * bound


@pytest.mark.parametrize("name", ["Bloom", "Mpt", "Falcon with ALiBi"])
def test_numbers_of_keys_are_rounded_as_in_one_process(name):
    """Numbers of 300 keys do not fit into bfloat16. BLOOM and Falcon round them, MPT has them in float32."""
    model, ids = build(name).bfloat16(), texts(1, 300)
    exact, plain = output(in_float64(model), input_ids=ids), output(model, input_ids=ids)
    rounding = (plain.double() - exact).abs().mean()
    for got in on_ranks(model, 2, lambda split, *_: output(split, input_ids=ids), shares=[3, 7]):
        assert (got.double() - exact).abs().mean() <= 1.2 * rounding


def test_a_model_is_restored():
    model, inputs = build("Bloom"), {"input_ids": texts(2, 31)}
    want = output(model, **inputs)

    def work(split, handle, group):
        handle.remove()
        assert split.config._attn_implementation == "eager"
        assert not any("forward" in module.__dict__ for module in split.modules())
        return output(split, **inputs)

    for got in on_ranks(model, 2, work):
        assert torch.equal(got, want)


def test_dropout_is_refused():
    model = build("Bloom")
    for block in model.transformer.h:
        block.self_attention.hidden_dropout = 0.1
    model.train()

    def refused(split, handle, group):
        with pytest.raises(kyklos.RequestError, match="call model.eval"):
            split(texts(1, 12))

    on_ranks(model, 2, refused)

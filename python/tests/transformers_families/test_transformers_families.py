"""The table of models in the documentation: each family once, as a tiny random model."""

import pytest
import torch
from tiny_models import COMMON, ENCODER, GPTJ_IS_SPLIT, WINDOW, build_class, error, on_ranks, output, reference, texts

import kyklos

_HEADS = {"head_dim": 16}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
_BIG_CODE = {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2}

DECODERS = {
    "Afmoe": {**_EXPERTS, **WINDOW},
    "Apertus": {},
    "Arcee": {},
    "Cohere": {},
    "Cohere2": WINDOW,
    "Ernie4_5": _HEADS,
    "Exaone4": {"sliding_window": 6, "sliding_window_pattern": 3},
    "GPTBigCode": {**_BIG_CODE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
    "GPTNeoX": {},
    "Gemma": _HEADS,
    "Gemma4": {
        **WINDOW,
        "global_head_dim": 16,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
    },
    "Glm": _HEADS,
    "Glm4": _HEADS,
    "Glm4Moe": {**_HEADS, **_ROUTED},
    "Granite": {},
    "GraniteMoe": _EXPERTS,
    "HunYuanDenseV1": _HEADS,
    "Ministral": WINDOW,
    "Mixtral": _EXPERTS,
    "NanoChat": {},
    "Nemotron": {},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 6},
    "Olmoe": _EXPERTS,
    "Persimmon": {},
    "Phi": {"num_key_value_heads": 8},
    "Phi3": {},
    "Qwen2": {},
    "Qwen3Moe": {**_HEADS, **_EXPERTS},
    "SeedOss": _HEADS,
    "SmolLM3": {},
    "StableLm": {},
    "Starcoder2": {},
    "VaultGemma": WINDOW,
}
if GPTJ_IS_SPLIT:
    DECODERS["GPTJ"] = {**DECODERS["GPTBigCode"], "rotary_dim": 8}
ENCODERS = [
    "Camembert",
    "DistilBert",
    "Electra",
    "Ernie",
    "EuroBert",
    "JinaEmbeddingsV3",
    "NomicBert",
    "Roberta",
    "RoCBert",
    "XLMRobertaXL",
]


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_write_the_text_of_one_process(name):
    settings = DECODERS[name]
    settings = settings if "n_embd" in settings else {**COMMON, **settings}
    # PyTorch's own attention function has no softcap.
    implementation = "eager" if name == "VaultGemma" else "sdpa"
    config = "Gemma4TextConfig" if name == "Gemma4" else f"{name}Config"
    model = build_class(f"{name}ForCausalLM", config, settings, implementation=implementation)
    ids = texts(2, 17)
    options = {"max_new_tokens": 12, "do_sample": False}
    want = model.generate(ids, **options)
    for got in on_ranks(model, 2, lambda model, *_: model.generate(ids, **options), shares=[3, 7]):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_give_the_states_of_one_process(name):
    model = build_class(f"{name}Model", f"{name}Config", ENCODER)
    inputs = {"input_ids": texts(2, 31)}
    exact, bound, seen = reference(model, **inputs)
    for got in on_ranks(model, 3, lambda model, *_: output(model, **inputs), shares=[2, 1, 5]):
        assert error(got, exact, seen) <= bound


def test_an_encoder_that_lets_all_tokens_of_a_decoder_see_each_other():
    """EmbeddingGemma."""
    settings = {**COMMON, **WINDOW, "query_pre_attn_scalar": 16, "use_bidirectional_attention": True}
    model = build_class("Gemma3TextModel", "Gemma3TextConfig", settings)
    inputs = {"input_ids": texts(2, 31), "use_cache": False}
    exact, bound, seen = reference(model, **inputs)
    for got in on_ranks(model, 3, lambda model, *_: output(model, **inputs), shares=[2, 1, 5]):
        assert error(got, exact, seen) <= bound


def test_doge_is_refused_since_it_changes_its_mask():
    model = build_class("DogeForCausalLM", "DogeConfig", COMMON)
    with pytest.raises(
        kyklos.RequestError, match="a trial pass, whose masks are rules instead of tensors, ends with AttributeError"
    ):
        on_ranks(model, 2, lambda *_: None)

"""Models and inputs that cannot be split, by name; ranks that fail; and the private parts of transformers that the seam uses."""

import inspect
import warnings

import pytest
import torch
import transformers
from tiny_models import FAMILIES, build, build_class, on_ranks, output, texts
from transformers import masking_utils

import kyklos
import kyklos.transformers
from kyklos.transformers import _masks
from kyklos.transformers._split import share_out

SMALL = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
XGLM = {**SMALL, "d_model": 32, "ffn_dim": 32, "num_layers": 2, "attention_heads": 2}
LED = {**SMALL, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "attention_window": 4}
MAMBA = {**SMALL, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
BLOOM = {**SMALL, "hidden_size": 32, "n_layer": 2, "n_head": 2}
LLAMA = FAMILIES["llama"][2]
GEMMA3N = {
    **LLAMA, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["full_attention"] * 4, "head_dim": 16,
    "activation_sparsity_pattern": [0.0] * 4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
    "altup_num_inputs": 2, "laurel_rank": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "config", "settings", "says"),
    [
        ("XGLMForCausalLM", "XGLMConfig", XGLM, "does not go through AttentionInterface"),
        ("LEDForConditionalGeneration", "LEDConfig", LED, "does not go through AttentionInterface"),
        ("MambaForCausalLM", "MambaConfig", MAMBA, "layers of the kinds linear_attention"),
        ("Gemma3nForCausalLM", "Gemma3nTextConfig", GEMMA3N, "layers share the keys of other layers"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(("LM", "Generation")) else "",
)
def test_models_outside_of_the_seam_are_refused_by_name(cls, config, settings, says):
    model = build_class(cls, config, settings, implementation="eager")
    before = dict(model.__dict__)

    def work(group):
        for _ in range(2):
            with pytest.raises(kyklos.RequestError, match=f"{cls}.*({says})"):
                kyklos.transformers.parallelize(model, group)
        assert model.config._attn_implementation == "eager"

    kyklos.run_local(1, work, device="cpu")
    assert model.__dict__.keys() == before.keys()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shares": [1, 1, 1]}, "3 shares for 2 ranks: give each rank one"),
        ({"shares": [1, 0]}, "each rank needs a positive one"),
        ({"gather": "rank 0"}, 'use "auto" or "none"'),
    ],
    ids=str,
)
def test_wrong_options(options, says):
    with pytest.raises(kyklos.RequestError, match=says):
        on_ranks(build("llama"), 2, lambda *_: None, **options)


def test_a_model_is_split_once():
    def work(model, handle, group):
        with pytest.raises(kyklos.RequestError, match="it is split already; call remove"):
            kyklos.transformers.parallelize(model, group)
        with pytest.raises(kyklos.RequestError, match="outside of a split model"):
            handle._split._run(texts(1, 9))
        return output(model, input_ids=texts(1, 9))

    on_ranks(build("llama"), 2, work)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"output_attentions": True}, "output_attentions of a split model"),
        ({"attention_mask": torch.ones(2, 1, 12, 12)}, r"attention_mask of shape \(2, 1, 12, 12\) for 12 tokens"),
        ({"attention_mask": torch.ones(2, 11)}, r"attention_mask of shape \(2, 11\) for 12 tokens"),
        ({"position_ids": torch.zeros(3, 2, 12, dtype=torch.long)}, r"position_ids of shape \(3, 2, 12\)"),
        ({"past_key_values": transformers.DynamicCache()}, "a DynamicCache as past_key_values"),
        ({"cu_seq_lens_q": torch.tensor([0, 12])}, "how to split the input cu_seq_lens_q"),
        ({"indices": torch.tensor([0, 12])}, "how to split the input indices"),
        ({"surprise": 3}, r"layers\.0\.self_attn gets the argument surprise"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_inputs_that_would_have_no_effect_are_refused(inputs, says):
    model = build("llama")
    ids = texts(2, 12)
    want = output(model, input_ids=ids)

    def work(model, handle, group):
        with pytest.raises(kyklos.RequestError, match=says):
            output(model, input_ids=ids, **inputs)
        return output(model, input_ids=ids)

    assert all(torch.allclose(got, want, atol=1e-4) for got in on_ranks(model, 2, work))


def test_dropout_is_refused():
    def work(model, handle, group):
        model.train()
        with pytest.raises(kyklos.RequestError, match="call model.eval"):
            model(texts(1, 12))
        model.eval()
        return output(model, input_ids=texts(1, 12))

    on_ranks(build("llama", attention_dropout=0.1), 2, work)

    def hidden(model, handle, group):
        model.train()
        with pytest.raises(kyklos.RequestError, match="dropout in a split model would differ between ranks"):
            model(texts(1, 12))

    # By modules, and by PyTorch's function with a number that modules hold.
    on_ranks(build("bert"), 2, hidden)
    on_ranks(build("opt", dropout=0.1), 2, hidden)
    on_ranks(build("opt", layerdrop=0.1), 2, hidden)
    # Noise of a router, and what is behind the body.
    mixtral = {**LLAMA, "num_local_experts": 2, "router_jitter_noise": 0.3}
    on_ranks(build_class("MixtralForCausalLM", "MixtralConfig", {name: x for name, x in mixtral.items() if name != "mlp_bias"}), 2, hidden)
    config = {**FAMILIES["bert"][2], "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.3}
    on_ranks(build_class("BertForSequenceClassification", "BertConfig", config), 2, hidden)


def test_other_inputs_on_a_rank_are_an_error_on_all():
    def work(model, handle, group):
        with pytest.raises((kyklos.RequestError, kyklos.GroupError), match="label"):
            output(model, input_ids=texts(1, 12, seed=group.rank))
        return output(model, input_ids=texts(1, 12))

    on_ranks(build("llama"), 3, work)


def test_a_rank_that_raises_is_named_by_the_others_and_the_group_forms_again():
    model = build("llama")
    ids = texts(1, 24)
    want = output(model, input_ids=ids)
    seen = []

    def work(model, handle, group):
        def broken(module, args):
            raise OSError("the weights of layer 1 are gone")

        if group.rank == 1:
            model.model.layers[1].register_forward_pre_hook(broken)
        try:
            output(model, input_ids=ids)
        except kyklos.GroupError as error:
            seen.append((group.rank, error.peer, str(error)))
            raise

    with pytest.raises(OSError, match="the weights of layer 1 are gone"):
        on_ranks(model, 3, work)
    assert sorted(rank for rank, _, _ in seen) == [0, 2]
    assert all(peer == 1 and "OSError in the model: the weights of layer 1 are gone" in text for _, peer, text in seen)
    for got in on_ranks(model, 3, lambda model, *_: output(model, input_ids=ids)):
        assert torch.allclose(got, want, atol=1e-4)


def test_tokens_are_shared_out_in_proportion_and_each_rank_gets_one():
    assert share_out(24, [2, 1, 5]) == [6, 4, 14]
    assert share_out(3, [1, 30, 1]) == [1, 1, 1]
    for tokens in range(3, 200):
        counts = share_out(tokens, [1, 30, 2.5])
        assert sum(counts) == tokens and min(counts) >= 1


# -- private parts of transformers: if one of these fails, read the new release before the range of versions is widened ---------


def rule(make, config="MistralConfig", **options):
    """The rule that attention gets from a mask function of the library."""
    made = getattr(transformers, config)(**{**LLAMA, "sliding_window": 6, "attention_chunk_size": 4})
    made._attn_implementation = "kyklos"
    embeds = torch.zeros(1, 8, 4)
    return make(config=made, inputs_embeds=embeds, attention_mask=torch.ones(1, 8), past_key_values=None, **options)


def test_masks_of_the_library_are_recognised():
    assert str(rule(masking_utils.create_causal_mask)) == "causal"
    assert str(rule(masking_utils.create_bidirectional_mask)) == "full"
    assert str(rule(masking_utils.create_sliding_window_causal_mask)) == "window:5,0"
    assert str(rule(masking_utils.create_bidirectional_sliding_window_mask)) == "window:6,6"
    packed = rule(
        lambda **options: masking_utils.create_sliding_window_causal_mask(**{**options, "attention_mask": None}),
        position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]),
    )
    assert packed.packed and str(packed) == "window:5,0"
    chunked = rule(masking_utils.create_chunked_causal_mask, "Llama4TextConfig")
    assert chunked.chunk == 4 and str(chunked) == "window:3,0"
    blocks = rule(masking_utils.create_causal_mask, block_sequence_ids=torch.tensor([[-1, 0, 0, 0, -1, 1, 1, 1]]))
    assert str(blocks) == "window:-1,2" and blocks.rows(2, 5).shape == (1, 1, 3, 8)


@pytest.mark.parametrize(
    "options",
    [
        {"or_mask_function": lambda *_: torch.tensor(True)},
        {"and_mask_function": lambda *_: torch.tensor(True)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_masks_of_other_kinds_are_refused(options):
    with pytest.raises(kyklos.RequestError, match="the model's mask has the part"):
        rule(masking_utils.create_causal_mask, **options)


def test_private_names():
    model = build("llama")
    assert model._can_set_attn_implementation() is True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bloom = build_class("BloomForCausalLM", "BloomConfig", BLOOM, implementation="eager")
    assert bloom._can_set_attn_implementation() is False
    prepare = list(inspect.signature(model._prepare_cache_for_generation).parameters)
    assert prepare == ["generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length"]
    assert "stopping_criteria" in inspect.signature(model._get_stopping_criteria).parameters
    assert model.base_model is model.model
    assert transformers.cache_utils.CacheLayerMixin.__abstractmethods__ == {
        "lazy_initialization",
        "update",
        "get_mask_sizes",
        "get_seq_length",
        "get_max_length",
    }


def test_padding_and_documents():
    padding, documents = _masks.padding, _masks.documents
    assert padding(None, 4) is None and padding(torch.ones(2, 4), 4) is None
    assert padding(torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]), 4) == "valid:2,4"
    holes = padding(torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]]), 4)
    assert holes.dtype == torch.bool and holes.tolist()[0] == [False, True, True, False]
    assert documents(torch.arange(5)[None]) is None
    assert documents(torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]])) == [[0, 2, 5], [0, 5]]


def test_weights_that_differ_between_ranks_are_refused():
    models = [build("llama"), build("llama")]
    with torch.no_grad():
        next(models[1].parameters()).mul_(2.0)

    def work(group):
        with pytest.raises(kyklos.RequestError, match="rank 1 has other weights of Llama.*same checkpoint"):
            kyklos.transformers.parallelize(models[group.rank], group)

    kyklos.run_local(2, work, device="cpu")


def test_models_in_another_order_are_refused_and_work_afterwards():
    pairs = [(build("llama"), build("llama")) for _ in range(2)]
    for _, second in pairs:
        with torch.no_grad():
            for parameter in second.parameters():
                parameter.mul_(1.5)
    ids = torch.arange(1, 21)[None]
    with torch.no_grad():
        want = pairs[0][0](input_ids=ids).logits

    def work(group):
        first, second = pairs[group.rank]
        with (
            torch.no_grad(),
            kyklos.transformers.parallelize(first, group),
            kyklos.transformers.parallelize(second, group),
        ):
            for model in (first, second) if group.rank == 0 else (second, first):
                with pytest.raises(kyklos.RequestError, match="model 1.*model 2|model 2.*model 1"):
                    model(input_ids=ids)
            with pytest.raises(kyklos.RequestError):
                (first if group.rank == 0 else second)(input_ids=ids)
            return first(input_ids=ids).logits

    for got in kyklos.run_local(2, work, device="cpu"):
        assert (got - want).abs().max() < 1e-4

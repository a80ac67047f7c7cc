"""Tiny random models of transformers, and what their own rounding is."""

import copy
import warnings

import torch
import transformers

import kyklos
import kyklos.transformers

if not torch.cuda.is_available():
    # Where the CUDA libraries are stand-ins, PyTorch's own function crashes.
    torch.cuda.is_current_stream_capturing = lambda: False

# From 5.24 of transformers on GPT-J attends through AttentionInterface. Before, it cannot be split.
GPTJ_IS_SPLIT = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24)
VOCABULARY = 97
# At the default range of 0.02 attention hardly matters: forgotten positions cost 4.6e-3, here 7.8.
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW = {"head_dim": 16, "sliding_window": 6}
ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", COMMON),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**COMMON, "head_dim": 16}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**COMMON, "sliding_window": 6}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**COMMON, **WINDOW, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**COMMON, **WINDOW, "query_pre_attn_scalar": 16}),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**COMMON, **WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _DEFAULT_ROPE},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 512,
            "initializer_range": 0.2,
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **COMMON,
            "num_key_value_heads": 8,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "rope_parameters": _DEFAULT_ROPE,
        },
    ),
    "opt": ("OPTForCausalLM", "OPTConfig", {**COMMON, "ffn_dim": 64, "word_embed_proj_dim": 64, "init_std": 0.2}),
    "bert": ("BertModel", "BertConfig", ENCODER),
    "albert": ("AlbertModel", "AlbertConfig", {**ENCODER, "embedding_size": 32}),
    "modernbert": ("ModernBertModel", "ModernBertConfig", {**ENCODER, "local_attention": 8}),
    "xlm-roberta": (
        "XLMRobertaModel",
        "XLMRobertaConfig",
        {**ENCODER, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    ),
}
# Those whose attention PyTorch's own function does not compute exactly: softcap and sinks.
_EAGER = {"gemma2", "gpt-oss"}


def build(family, seed=0, **changes):
    """A model of the family in evaluation mode, the same for the same seed. Built before the ranks' threads: the seed is global."""
    cls, config, settings = FAMILIES[family]
    return build_class(cls, config, {**settings, **changes}, seed, "eager" if family in _EAGER else "sdpa")


def build_class(cls, config, settings, seed=0, implementation="sdpa"):
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = getattr(transformers, config)(**settings)
    made._attn_implementation = implementation
    return getattr(transformers, cls)(made).eval()


def texts(batch, tokens, seed=1):
    """Random input_ids without padding."""
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def output(model, **inputs):
    """Logits, or hidden states of models without a head."""
    with torch.no_grad():
        out = model(**inputs)
    return out.logits if "logits" in out else out.last_hidden_state


def on_ranks(model, size, work, **options):
    """``work(model, handle, group)`` on each rank of this process with a split copy of the model; values by rank."""
    copies = [copy.deepcopy(model) for _ in range(size)]

    def rank(group):
        handle = kyklos.transformers.parallelize(copies[group.rank], group, **options)
        return work(copies[group.rank], handle, group)

    return kyklos.run_local(size, rank, device="cpu")


def reference(model, **inputs):
    """The output of the unsplit model in float64, and the error that a split one may have: twice that of the unsplit model in
    float32, and one millionth of the largest value, since the largest of some thousand rounding errors varies."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    seen = torch.ones(ids.shape, dtype=torch.bool) if mask is None else mask.bool()
    exact, plain = (_each_alone(one, inputs, seen) for one in (in_float64(model), model))
    rounding = (plain - exact)[seen].abs().max()
    return exact, float(2 * rounding + 1e-6 * exact[seen].abs().max()), seen


def _each_alone(model, inputs, seen):
    """The output in float64. Texts of a padded batch are computed alone, without the padding, at their positions."""
    if seen.all():
        return output(model, **inputs).double()
    outputs = []
    for ids, visible in zip(inputs["input_ids"], seen, strict=True):
        # XLM-RoBERTa counts its positions without the padding; BERT and the decoders with it.
        own = {} if model.config.model_type == "xlm-roberta" else {"position_ids": visible.nonzero().T}
        alone = output(model, input_ids=ids[visible][None], **own)[0].double()
        outputs.append(alone.new_zeros(len(ids), alone.shape[-1]).masked_scatter(visible[:, None], alone))
    return torch.stack(outputs)


def in_float64(model):
    exact = copy.deepcopy(model).double()
    # The fast one takes no float64.
    exact.set_experts_implementation("eager")
    return exact


def error(got, exact, seen):
    """The largest error where there is no padding."""
    return float((got.double() - exact)[seen].abs().max())

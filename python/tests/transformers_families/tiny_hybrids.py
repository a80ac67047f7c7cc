"""Tiny random hybrid models: attention beside recurrences or convolutions."""

from tiny_models import COMMON, build_class

_SMALL = {**COMMON, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
_LINEAR, _CONV = ({"layer_types": [kind, "full_attention"] * 2} for kind in ("linear_attention", "conv"))
_ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "num_key_value_heads": 4,
    "mamba_d_state": 8,
    "mamba_d_conv": 3,
    "use_long_context": False,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_DELTA = {
    **_LINEAR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "head_dim": 8,
}
_LATENT = {
    **_LINEAR,
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}

HYBRIDS = {
    "BailingHybrid": {**_LATENT, "first_k_dense_replace": 1},
    "Bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "FalconH1": {**_MAMBA, "mamba_d_ssm": 64, "num_hidden_layers": 2, "head_dim": 8},
    "GraniteMoeHybrid": {**_MAMBA, **_EXPERTS, **_LINEAR},
    "Jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_d_conv": 3,
        "mamba_dt_rank": 4,
    },
    "KimiLinear": {**_LATENT, "linear_head_dim": 8, "linear_num_heads": 4, "mlp_layer_types": ["dense", "sparse"] * 2},
    "Lfm2": {**_CONV, "conv_L_cache": 3},
    "Lfm2Moe": {**_CONV, **_EXPERTS, "conv_L_cache": 3, "num_dense_layers": 1},
    "Lfm3": {
        "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
        "conv_L_cache": 3,
        "sliding_window": 6,
        "head_dim": 8,
    },
    "MiniMax": {**_LINEAR, **_EXPERTS, "head_dim": 8, "block_size": 4},
    "NemotronH": {
        "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention", "mlp", "full_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "conv_kernel": 3,
        "n_groups": 2,
        "chunk_size": 8,
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "OlmoHybrid": _DELTA,
    "Qwen3Next": {**_DELTA, **_EXPERTS},
    "Qwen3_5": _DELTA,
    "Qwen3_5Moe": {**_DELTA, **_EXPERTS},
    "RecurrentGemma": {
        "block_types": ["recurrent", "attention"],
        "attention_window_size": 6,
        "lru_width": 32,
        "conv1d_width": 3,
        "head_dim": 8,
    },
    "Zamba": {**_ZAMBA, "mamba_dt_rank": 4, "n_mamba_heads": 2, "attention_head_dim": 16},
    "Zamba2": {**_ZAMBA, "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1},
}


def build(name, **changes):
    config = f"{name}TextConfig" if name.startswith("Qwen3_5") else f"{name}Config"
    return build_class(f"{name}ForCausalLM", config, {**_SMALL, **HYBRIDS[name], **changes})

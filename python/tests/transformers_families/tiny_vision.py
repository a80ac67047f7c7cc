"""Tiny models that take images or sounds beside text, with random weights, and inputs for them."""

import torch
from tiny_models import VOCABULARY, build_class

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
_IMAGE, _START, _END, _VIDEO = 90, 91, 92, 93
_QWEN = {"image_token_id": _IMAGE, "video_token_id": _VIDEO, "vision_start_token_id": _START, "vision_end_token_id": _END}
_QWEN_VISION = {"num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}


def _rope(**more):
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], **more}


SETTINGS = {
    "Llava": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "clip_vision_model", **_VISION},
        "image_token_id": _IMAGE,
    },
    "Qwen2VL": {
        "text_config": {**_TEXT, "rope_parameters": _rope()},
        "vision_config": {**_QWEN_VISION, "depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 1},
        **_QWEN,
    },
    "Qwen2_5_VL": {
        "text_config": {**_TEXT, "rope_parameters": _rope()},
        "vision_config": {
            **_QWEN_VISION,
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 32,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        **_QWEN,
    },
    # Adds states of images in two layers.
    "Qwen3VL": {
        "text_config": {**_TEXT, "head_dim": 16, "rope_parameters": _rope(mrope_interleaved=True)},
        "vision_config": {
            **_QWEN_VISION,
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 32,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        **_QWEN,
    },
    # A hybrid.
    "Qwen3_5": {
        "text_config": {
            **_TEXT,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "head_dim": 16,
            "rope_parameters": _rope(mrope_interleaved=True),
        },
        "vision_config": {
            **_QWEN_VISION,
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 32,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
        },
        **_QWEN,
    },
    "Mistral3": {
        "text_config": {"model_type": "mistral", "head_dim": 16, **_TEXT},
        "vision_config": {"model_type": "pixtral", **_VISION, "image_size": 32},
        "image_token_id": _IMAGE,
        "spatial_merge_size": 2,
    },
    "InternVL": {
        "text_config": {"model_type": "qwen2", **_TEXT},
        "vision_config": {**_VISION, "image_size": [32, 32], "patch_size": [4, 4]},
        "image_token_id": _IMAGE,
        "image_seq_length": 16,
        "downsample_ratio": 0.5,
    },
    "SmolVLM": {
        "text_config": {"model_type": "llama", "pad_token_id": 2, **_TEXT},
        "vision_config": _VISION,
        "image_token_id": _IMAGE,
        "scale_factor": 1,
    },
    # Its language model has layers with chunks, and queries that are scaled by the number of their token.
    "Llama4": {
        "text_config": {
            **_TEXT,
            "head_dim": 16,
            "intermediate_size_mlp": 32,
            "num_local_experts": 2,
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 0, 1],
            "floor_scale": 3,
            "pad_token_id": 0,
        },
        "vision_config": {
            **_VISION,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "pixel_shuffle_ratio": 1.0,
        },
        "image_token_index": _IMAGE,
    },
    # Its masks are made by the model around the language model.
    "Gemma3": {
        "text_config": {**_TEXT, "head_dim": 16, "sliding_window": 8},
        "vision_config": _VISION,
        "image_token_id": _IMAGE,
        "boi_token_id": _START,
        "eoi_token_id": _END,
        "mm_tokens_per_image": 16,
    },
    "PaliGemma": {
        "text_config": {"model_type": "gemma", "head_dim": 16, **_TEXT},
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "image_token_id": _IMAGE,
        "projection_dim": 64,
    },
}


# With windows, and so with a mask for each kind of layers.
SETTINGS["PaliGemma2"] = {
    **SETTINGS["PaliGemma"],
    "text_config": {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, **_TEXT},
}


def vision(name):
    family, implementation = ("PaliGemma", "eager") if name == "PaliGemma2" else (name, "sdpa")
    model = build_class(f"{family}ForConditionalGeneration", f"{family}Config", SETTINGS[name], implementation=implementation)
    if name == "Gemma3":
        # Zeros, if it is made at random: images would be equal.
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    return model


def image_inputs(name, images=True):
    """Two texts, one of them padded on the left; with an image of 16 tokens in each (Qwen: 6 tokens)."""
    make = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 80, (2, 34), generator=make)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    if not images:
        return {"input_ids": ids, "attention_mask": mask}
    if name.startswith("Qwen"):
        ids[:, 4], ids[:, 5:11], ids[:, 11] = _START, _IMAGE, _END
        patches = torch.randn(2 * 24, 3 * 2 * 4 * 4, generator=make)
        grids = torch.tensor([[1, 6, 4], [1, 4, 6]])
        inputs = {"pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": (ids == _IMAGE).long()}
    else:
        ids[:, 4:20] = _IMAGE
        size = 32 if name in ("Mistral3", "InternVL") else 16
        pixels = torch.randn(2, 3, size, size, generator=make)
        inputs = {"pixel_values": pixels[:, None] if name == "SmolVLM" else pixels}
        if name == "Mistral3":
            inputs["image_sizes"] = torch.tensor([[32, 32], [32, 32]])
        if name == "Gemma3":
            # The second text has an image of other size, and one after another.
            ids[1, 4:20] = torch.where(torch.arange(16) % 5 == 4, 7, ids[1, 4:20])
            ids[1, 22:25] = _IMAGE
            inputs["token_type_ids"] = (ids == _IMAGE).long()
        if name.startswith("PaliGemma"):
            # What comes before the answer sees each other.
            inputs["token_type_ids"] = (torch.arange(34) >= 26).long().expand(2, -1).clone()
    return {"input_ids": ids, "attention_mask": mask, **inputs}

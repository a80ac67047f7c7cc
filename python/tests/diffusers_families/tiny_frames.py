"""More tiny transformers of video, and inputs for them."""

import torch
from diffusers import (
    AnyFlowTransformer3DModel,
    ConsisIDTransformer3DModel,
    HunyuanVideoFramepackTransformer3DModel,
    Kandinsky6Transformer3DModel,
)
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from tiny_single import mask_of
from tiny_transformers import Case

_BLOCKS = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}


def framepack():
    torch.manual_seed(1)
    return HunyuanVideoFramepackTransformer3DModel(
        **_BLOCKS,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=24,
        pooled_projection_dim=20,
        rope_axes_dim=(4, 4, 8),
        has_image_proj=True,
        image_proj_dim=10,
        has_clean_x_embedder=True,
    )


def framepack_inputs(lengths=(20, 7), height=16, width=24, frames=3):
    torch.manual_seed(2)
    batch = len(lengths)
    return {
        "hidden_states": torch.randn(batch, 4, frames, height, width),
        "timestep": torch.full((batch,), 700),
        "encoder_hidden_states": torch.randn(batch, 33, 24),
        "encoder_attention_mask": mask_of(33, *lengths),
        "pooled_projections": torch.randn(batch, 20),
        "guidance": torch.full((batch,), 6000.0),
        "image_embeds": torch.randn(batch, 5, 10),
        "indices_latents": torch.arange(frames) + 9,
        "latents_clean": torch.randn(batch, 4, 2, height, width),
        "indices_latents_clean": torch.tensor([0, 8]),
        "latents_history_2x": torch.randn(batch, 4, 2, height, width),
        "indices_latents_history_2x": torch.tensor([6, 7]),
        "latents_history_4x": torch.randn(batch, 4, 4, height, width),
        "indices_latents_history_4x": torch.tensor([2, 3, 4, 5]),
    }


def kandinsky6(**config):
    torch.manual_seed(1)
    return Kandinsky6Transformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=12,
        in_text_dim2=8,
        time_dim=16,
        model_dim=32,
        ff_dim=48,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
        in_audio_dim=6,
        out_audio_dim=6,
        model_dim_a=32,
        time_dim_a=16,
        ff_dim_a=24,
        axes_dims_a=(4, 6, 6),
        **config,
    )


def kandinsky6_inputs(sound=9, frames=3, height=10, width=14, text=13, batch=2):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(batch, frames, height, width, 9),
        "encoder_hidden_states": torch.randn(batch, text, 12),
        "pooled_projections": torch.randn(batch, 8),
        "timestep": torch.full((batch,), 700.0),
        "audio_hidden_states": None if sound is None else torch.randn(batch, sound, 6),
    }


def anyflow():
    torch.manual_seed(1)
    return AnyFlowTransformer3DModel(**_BLOCKS, text_dim=12, freq_dim=16, ffn_dim=48, rope_max_seq_len=32)


def anyflow_inputs(frames=3, height=10, width=14, text=13, batch=2):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(batch, frames, 4, height, width),
        "timestep": torch.randint(0, 999, (batch, frames)).float(),
        "r_timestep": torch.randint(0, 999, (batch, frames)).float(),
        "encoder_hidden_states": torch.randn(batch, text, 12),
    }


def consisid(**config):
    torch.manual_seed(1)
    return ConsisIDTransformer3DModel(
        **{**_BLOCKS, "num_attention_heads": 3},
        time_embed_dim=16,
        text_embed_dim=12,
        sample_width=14,
        sample_height=10,
        sample_frames=9,
        max_text_seq_length=13,
        use_rotary_positional_embeddings=True,
        is_train_face=True,
        cross_attn_interval=1,
        cross_attn_dim_head=8,
        cross_attn_num_heads=2,
        LFE_id_dim=10,
        LFE_vit_dim=16,
        LFE_depth=2,
        LFE_dim_head=8,
        LFE_num_heads=2,
        LFE_num_id_token=2,
        LFE_num_querie=3,
        LFE_output_dim=32,
        LFE_num_scale=2,
        **config,
    )


def consisid_inputs(frames=3, height=10, width=14, batch=2):
    torch.manual_seed(2)
    grid = (height // 2, width // 2)
    return {
        "hidden_states": torch.randn(batch, frames, 4, height, width),
        "encoder_hidden_states": torch.randn(batch, 13, 12),
        "timestep": torch.full((batch,), 700),
        "image_rotary_emb": get_3d_rotary_pos_embed(16, ((0, 0), grid), grid, frames),
        "id_cond": torch.randn(batch, 10),
        "id_vit_hidden": [torch.randn(batch, 4, 16) for _ in range(2)],
    }


#: As in tiny_transformers.py.
CASES = {
    "HunyuanVideo Framepack": lambda: Case(framepack(), framepack_inputs((20,))),
    "HunyuanVideo Framepack, text masks": lambda: Case(framepack(), framepack_inputs()),
    "Kandinsky 6": lambda: Case(kandinsky6(ca_rope=True, cross_gates=True), kandinsky6_inputs()),
    "Kandinsky 6 without sound": lambda: Case(kandinsky6(), kandinsky6_inputs(sound=None)),
    "AnyFlow": lambda: Case(anyflow(), anyflow_inputs()),
    "ConsisID": lambda: Case(consisid(), consisid_inputs()),
}

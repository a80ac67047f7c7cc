"""Tiny transformers with linear attention and convolutions over the grid of tokens, and inputs for them."""

import torch
from diffusers import SanaTransformer2DModel, SanaVideoTransformer3DModel
from tiny_transformers import Case

_SANA = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 12,
}


def sana(**config):
    torch.manual_seed(1)
    return SanaTransformer2DModel(**_SANA, sample_size=8, **config)


def sana_inputs(height=9, width=7, batch=2, controlnet=False, guidance=False):
    torch.manual_seed(2)
    mask = torch.ones(batch, 13)
    mask[-1, 6:] = 0
    return {
        "hidden_states": torch.randn(batch, 4, height, width),
        "encoder_hidden_states": torch.randn(batch, 13, 12),
        "timestep": torch.full((batch,), 700.0),
        "encoder_attention_mask": mask,
        "guidance": torch.full((batch,), 0.45) if guidance else None,
        "controlnet_block_samples": [torch.randn(batch, height * width, 32)] if controlnet else None,
    }


def sana_video(**config):
    torch.manual_seed(1)
    return SanaVideoTransformer3DModel(**{**_SANA, "attention_head_dim": 24, "cross_attention_head_dim": 24, "cross_attention_dim": 48}, **config)


def sana_video_inputs(frames=4, height=10, width=6, batch=2, per_token_time=False):
    torch.manual_seed(2)
    mask = torch.ones(batch, 13)
    mask[-1, 6:] = 0
    tokens = frames * height // 2 * width // 2
    return {
        "hidden_states": torch.randn(batch, 4, frames, height, width),
        "encoder_hidden_states": torch.randn(batch, 13, 12),
        "timestep": torch.randint(0, 999, (batch, tokens)) if per_token_time else torch.full((batch,), 700),
        "encoder_attention_mask": mask,
    }


#: As in tiny_transformers.py.
CASES = {
    "Sana": lambda: Case(sana(), sana_inputs()),
    "Sana with ControlNet": lambda: Case(sana(interpolation_scale=1.0), sana_inputs(controlnet=True)),
    "Sana Sprint": lambda: Case(sana(guidance_embeds=True, qk_norm="rms_norm_across_heads"), sana_inputs(guidance=True)),
    "Sana Video": lambda: Case(sana_video(), sana_video_inputs()),
    "Sana Video, a time for each token": lambda: Case(sana_video(), sana_video_inputs(per_token_time=True)),
}

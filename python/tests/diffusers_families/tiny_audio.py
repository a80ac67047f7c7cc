"""Tiny transformers of sound, and inputs for them."""

import torch
from diffusers import AceStepTransformer1DModel, LongCatAudioDiTTransformer, MiniMaxMusic3Transformer1DModel, StableAudioDiTModel
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from tiny_single import mask_of
from tiny_transformers import Case
from tiny_video import disturbed


def stable_audio():
    torch.manual_seed(1)
    return StableAudioDiTModel(
        in_channels=8,
        out_channels=8,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_attention_heads=1,
        cross_attention_dim=16,
        time_proj_dim=16,
        global_states_input_dim=12,
        cross_attention_input_dim=16,
    )


def stable_audio_inputs(tokens=37, masked=False, batch=2):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(batch, 8, tokens),
        "timestep": torch.full((batch,), 0.7),
        "encoder_hidden_states": torch.randn(batch, 9, 16),
        "global_hidden_states": torch.randn(batch, 1, 12),
        # Of half of each head, and of the token of the global states, too.
        "rotary_embedding": get_1d_rotary_pos_embed(8, tokens + 1, use_real=True, repeat_interleave_real=False),
        "attention_mask": mask_of(tokens, *[tokens - 11] * (batch - 1), tokens).bool() if masked else None,
    }


def ace_step(**config):
    torch.manual_seed(1)
    return AceStepTransformer1DModel(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        in_channels=12,
        audio_acoustic_hidden_dim=4,
        sliding_window=5,
        encoder_hidden_size=20,
        **config,
    )


def ace_step_inputs(tokens=53, batch=2):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(batch, tokens, 4),
        "context_latents": torch.randn(batch, tokens, 8),
        "timestep": torch.full((batch,), 0.7),
        "timestep_r": torch.full((batch,), 0.3),
        "encoder_hidden_states": torch.randn(batch, 9, 20),
    }


def minimax_music():
    torch.manual_seed(1)
    return MiniMaxMusic3Transformer1DModel(
        in_channels=4, condition_dim=12, num_layers=2, num_attention_heads=2, attention_head_dim=16, ff_inner_dim=48, rotary_dim=8
    )


def minimax_music_inputs(tokens=37, batch=2):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(batch, 4, tokens),
        "timestep": torch.full((batch,), 0.7),
        "encoder_hidden_states": torch.randn(batch, tokens, 12),
    }


def longcat_audio(**config):
    torch.manual_seed(1)
    return disturbed(
        LongCatAudioDiTTransformer(dit_dim=32, dit_depth=2, dit_heads=2, dit_text_dim=12, latent_dim=6, **config),
    )


def longcat_audio_inputs(tokens=37, masked=False, batch=2):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(batch, tokens, 6),
        "encoder_hidden_states": torch.randn(batch, 13, 12),
        "encoder_attention_mask": mask_of(13, *[13] * (batch - 1), 5).bool(),
        "timestep": torch.full((batch,), 0.7),
        "attention_mask": mask_of(tokens, *[tokens - 11] * (batch - 1), tokens).bool() if masked else None,
        "latent_cond": torch.randn(batch, tokens, 6),
    }


#: As in tiny_transformers.py.
CASES = {
    "Stable Audio": lambda: Case(stable_audio(), stable_audio_inputs()),
    "Stable Audio, a mask of the sound": lambda: Case(stable_audio(), stable_audio_inputs(masked=True)),
    "ACE-Step": lambda: Case(ace_step(), ace_step_inputs()),
    "MiniMax Music": lambda: Case(minimax_music(), minimax_music_inputs()),
    "LongCat Audio": lambda: Case(longcat_audio(), longcat_audio_inputs()),
    "LongCat Audio, a mask of the sound": lambda: Case(longcat_audio(adaln_type="local"), longcat_audio_inputs(masked=True)),
}

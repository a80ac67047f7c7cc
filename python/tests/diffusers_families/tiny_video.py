"""Tiny transformers of packed and joint sequences, as tiny_transformers.py."""

import importlib.util

import torch
from diffusers import (
    Cosmos3OmniTransformer,
    CosmosTransformer3DModel,
    HeliosTransformer3DModel,
    Krea2Transformer2DModel,
    MiniMaxH3Transformer3DModel,
    WanAnimateTransformer3DModel,
    WanVACETransformer3DModel,
)
from diffusers.models.transformers.transformer_cosmos import CosmosLearnablePositionalEmbed
from tiny_transformers import Case, wan, wan_inputs


def disturbed(model):
    """With other values where a fresh model has zeros or ones, which would hide an error."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and (parameter == parameter.flatten()[0]).all():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def minimax():
    torch.manual_seed(1)
    return disturbed(
        MiniMaxH3Transformer3DModel(
            num_attention_heads=3,
            attention_head_dim=16,
            hidden_size=32,
            num_layers=2,
            num_refiner_layers=1,
            ffn_dim=48,
            in_channels=4,
            audio_in_channels=8,
            text_dim=24,
            freq_dim=16,
            time_embed_hidden_dim=32,
            time_embed_dim=16,
            rope_freq_dim=2,
        )
    )


def minimax_inputs(rows=(7, 11, 14), text=13, batch=2, mixed=False):
    """Text, a picture as condition, sound, then video: rows of (condition, sound, video). The tokens of a picture within the text have the tag of
    video. ``mixed``: a reference with its sound between text and condition, so that video and sound rows take turns."""
    torch.manual_seed(2)
    condition, sound, video = rows
    segments = [("text", text), ("video", condition), ("audio", sound), ("video", video)]
    if mixed:
        segments[1:1] = [("audio", 5), ("video", 9)]
    kinds = [kind for kind, length in segments for _ in range(length)]
    length = len(kinds)
    places = {kind: torch.tensor([i for i, k in enumerate(kinds) if k == kind], dtype=torch.long) for kind in ("text", "video", "audio")}
    tags = torch.tensor([{"video": 0, "text": 1, "audio": 2}[kind] for kind in kinds])
    tags[3:5] = 0
    target = torch.arange(length) >= length - video
    return {
        "hidden_states": torch.randn(batch, len(places["video"]), 16),
        "audio_hidden_states": torch.randn(batch, len(places["audio"]), 8),
        "encoder_hidden_states": torch.randn(batch, text, 24),
        "timestep": torch.tensor([0.0, 0.35, 0.7]),
        "timestep_indices": torch.where(target, 2, torch.where(tags == 2, 1, 0)),
        "token_tags": tags,
        "position_ids": torch.cat([torch.arange(length)[:, None] * 0.25, torch.randint(0, 9, (length, 2))], 1).double(),
        "video_indices": places["video"],
        "audio_indices": places["audio"],
        "text_indices": places["text"],
    }


def vace(**config):
    return wan(kind=WanVACETransformer3DModel, vace_layers=[0, 1], vace_in_channels=6, **config)


def vace_inputs(scale=True):
    inputs = wan_inputs()
    inputs["control_hidden_states"] = torch.randn(2, 6, 3, 10, 14)
    inputs["control_hidden_states_scale"] = torch.tensor([0.7, 1.3]) if scale else None
    return inputs


def animate():
    """Two blocks, each with an adapter of the face."""
    torch.manual_seed(1)
    return disturbed(
        WanAnimateTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=12,
            latent_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
            image_dim=16,
            added_kv_proj_dim=32,
            rope_max_seq_len=32,
            motion_encoder_channel_sizes={"4": 8, "8": 8},
            motion_encoder_size=8,
            motion_style_dim=8,
            motion_dim=4,
            motion_encoder_dim=8,
            face_encoder_hidden_dim=8,
            face_encoder_num_heads=2,
            inject_face_latents_blocks=1,
        )
    )


def animate_inputs():
    """A frame for the person and three of the video, whose face has 9 pictures."""
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(2, 12, 4, 6, 10),
        "timestep": torch.tensor([700, 700]),
        "encoder_hidden_states": torch.randn(2, 512, 16),
        "encoder_hidden_states_image": torch.randn(2, 257, 16),
        "pose_hidden_states": torch.randn(2, 4, 3, 6, 10),
        "face_pixel_values": torch.randn(2, 3, 9, 8, 8),
        "motion_encode_batch_size": 4,
    }


def helios(heads=2, **config):
    torch.manual_seed(1)
    return disturbed(
        HeliosTransformer3DModel(
            num_attention_heads=heads,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
            rope_dim=(4, 6, 6),
            **config,
        )
    )


def helios_inputs(history=True, frames=3):
    """3 x 35 new tokens after a history of 16 + 12 + 70."""
    torch.manual_seed(2)
    inputs = {
        "hidden_states": torch.randn(2, 4, frames, 10, 14),
        "timestep": torch.tensor([700, 700]),
        "encoder_hidden_states": torch.randn(2, 12, 16),
    }
    if history:
        indices = torch.arange(20 + frames)[None]
        inputs |= {
            "indices_hidden_states": indices[:, 20:],
            "indices_latents_history_long": indices[:, 1:17],
            "indices_latents_history_mid": indices[:, 17:19],
            "indices_latents_history_short": indices[:, [0, 19]],
            "latents_history_long": torch.randn(2, 4, 16, 10, 14),
            "latents_history_mid": torch.randn(2, 4, 2, 10, 14),
            "latents_history_short": torch.randn(2, 4, 2, 10, 14),
        }
    return inputs


def cosmos3(**config):
    torch.manual_seed(1)
    return disturbed(
        Cosmos3OmniTransformer(
            head_dim=16,
            hidden_size=32,
            intermediate_size=48,
            latent_channel=4,
            latent_patch_size=2,
            num_attention_heads=4,
            num_hidden_layers=2,
            num_key_value_heads=2,
            patch_latent_dim=16,
            action_dim=5,
            action_gen=True,
            num_embodiment_domains=3,
            sound_dim=6,
            sound_gen=True,
            vocab_size=64,
            rope_axes_dim=[4, 2, 2],
            **config,
        )
    )


def cosmos3_inputs(text=13, sound=0, action=0):
    """Text, then 4 x 3 x 4 tokens of a video whose first frame is given, then sound, then actions of which the first two are given."""
    torch.manual_seed(2)
    first, frame = text, 12
    length = text + 4 * frame + sound + action
    inputs = {
        "input_ids": torch.randint(0, 64, (text,)),
        "text_indexes": torch.arange(text),
        "position_ids": torch.cat([torch.arange(length)[None] * 0.5, torch.randint(0, 9, (2, length))]),
        "und_len": text,
        "sequence_length": length,
        "vision_tokens": [torch.randn(1, 4, 4, 5, 8)],
        "vision_token_shapes": [(4, 3, 4)],
        "vision_sequence_indexes": torch.arange(first, first + 4 * frame),
        "vision_mse_loss_indexes": torch.arange(first + frame, first + 4 * frame),
        "vision_timesteps": torch.full((3 * frame,), 700.0),
        "vision_noisy_frame_indexes": [torch.arange(1, 4)],
    }
    first += 4 * frame
    if sound:
        inputs |= {
            "sound_tokens": [torch.randn(6, sound)],
            "sound_token_shapes": [(sound, 1, 1)],
            "sound_sequence_indexes": torch.arange(first, first + sound),
            "sound_mse_loss_indexes": torch.arange(first, first + sound),
            "sound_timesteps": torch.full((sound,), 700.0),
            "sound_noisy_frame_indexes": [torch.arange(sound)],
        }
    first += sound
    if action:
        inputs |= {
            "action_tokens": [torch.randn(action, 5)],
            "action_token_shapes": [(action, 1, 1)],
            "action_sequence_indexes": torch.arange(first, first + action),
            "action_mse_loss_indexes": torch.arange(first + 2, first + action),
            "action_timesteps": torch.full((action - 2,), 700.0),
            "action_noisy_frame_indexes": [torch.arange(2, action)],
            "action_domain_ids": [torch.tensor(1)],
        }
    return inputs


class Single(CosmosLearnablePositionalEmbed):
    """It computes in float32 only."""

    def _apply(self, *_):
        return self


def cosmos(**config):
    # The padding mask is resized by torchvision, before anything is split.
    config.setdefault("concat_padding_mask", importlib.util.find_spec("torchvision") is not None)
    torch.manual_seed(1)
    model = disturbed(
        CosmosTransformer3DModel(
            in_channels=5,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            mlp_ratio=2.0,
            text_embed_dim=16,
            adaln_lora_dim=8,
            max_size=(8, 16, 16),
            **config,
        )
    )
    if model.learnable_pos_embed is not None:
        model.learnable_pos_embed.__class__ = Single
    return model


def cosmos_inputs(per_frame_time=False, controlnet=False, image=False, fps=None, text_mask=False):
    torch.manual_seed(2)
    text = torch.randn(2, 12, 16)
    inputs = {
        "hidden_states": torch.randn(2, 4, 3, 10, 14),
        "timestep": torch.rand(2, 1, 3, 1, 1) if per_frame_time else torch.tensor([0.7, 0.7]),
        "encoder_hidden_states": (text, torch.randn(2, 9, 24)) if image else text,
        "condition_mask": torch.cat([torch.ones(2, 1, 1, 10, 14), torch.zeros(2, 1, 2, 10, 14)], 2),
        "padding_mask": torch.zeros(1, 1, 10, 14),
        "fps": fps,
    }
    if text_mask:
        inputs["attention_mask"] = torch.arange(12)[None] < torch.tensor([[12], [7]])
    if controlnet:
        inputs["block_controlnet_hidden_states"] = [torch.randn(2, 105, 32)]
    return inputs


def krea():
    torch.manual_seed(1)
    return disturbed(
        Krea2Transformer2DModel(
            in_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            timestep_embed_dim=16,
            text_hidden_dim=32,
            num_text_layers=3,
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=32,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 6, 6),
        )
    )


def krea_inputs(masked=True, text=17, height=5, width=7):
    """The prompts have 17 and 6 tokens."""
    torch.manual_seed(2)
    places = torch.zeros(text + height * width, 3)
    places[text:, 1] = torch.arange(height).repeat_interleave(width)
    places[text:, 2] = torch.arange(width).repeat(height)
    return {
        "hidden_states": torch.randn(2, height * width, 16),
        "encoder_hidden_states": torch.randn(2, text, 3, 32),
        "timestep": torch.tensor([0.7, 0.7]),
        "position_ids": places,
        "encoder_attention_mask": torch.arange(text)[None] < torch.tensor([[text], [6]]) if masked else None,
    }


CASES = {
    "MiniMax H3": lambda: Case(minimax(), minimax_inputs()),
    "MiniMax H3, a long video": lambda: Case(minimax(), minimax_inputs((63, 97, 811), text=38, batch=1)),
    "MiniMax H3, references": lambda: Case(minimax(), minimax_inputs(mixed=True)),
    "MiniMax H3, no sound": lambda: Case(minimax(), minimax_inputs((7, 0, 30))),
    "Wan VACE": lambda: Case(vace(), vace_inputs()),
    "Wan VACE, the usual scale": lambda: Case(vace(), vace_inputs(scale=False)),
    "Wan Animate": lambda: Case(animate(), animate_inputs()),
    "Helios": lambda: Case(helios(), helios_inputs()),
    "Helios, no history": lambda: Case(helios(), helios_inputs(history=False)),
    "Helios, amplified history": lambda: Case(
        helios(6, is_amplify_history=True, guidance_cross_attn=False, zero_history_timestep=False), helios_inputs()
    ),
    "Cosmos 3": lambda: Case(cosmos3(), cosmos3_inputs()),
    "Cosmos 3, sound and actions": lambda: Case(cosmos3(), cosmos3_inputs(sound=11, action=9)),
    "Cosmos 3 of Nemotron": lambda: Case(
        cosmos3(hidden_act="relu2", qk_norm_for_text=False, use_und_k_norm_for_gen=True), cosmos3_inputs(sound=11)
    ),
    "Cosmos": lambda: Case(cosmos(), cosmos_inputs(fps=16)),
    "Cosmos, a time for each frame": lambda: Case(
        cosmos(extra_pos_embed_type=None, use_crossattn_projection=True, crossattn_proj_in_channels=16, encoder_hidden_states_channels=16),
        cosmos_inputs(per_frame_time=True),
    ),
    "Cosmos with ControlNet": lambda: Case(
        cosmos(controlnet_block_every_n=2, img_context_dim_in=24, img_context_num_tokens=9, img_context_dim_out=32),
        cosmos_inputs(controlnet=True, image=True),
    ),
    "Cosmos, text masks": lambda: Case(cosmos(), cosmos_inputs(text_mask=True)),
    "Krea 2": lambda: Case(krea(), krea_inputs(masked=False)),
    "Krea 2, text masks": lambda: Case(krea(), krea_inputs()),
}

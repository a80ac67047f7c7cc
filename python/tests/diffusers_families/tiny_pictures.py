"""Tiny transformers of pictures, and inputs for them."""

import torch
from diffusers import (
    BriaFibo2Transformer2DModel,
    CogView3PlusTransformer2DModel,
    DiTTransformer2DModel,
    ErnieImageTransformer2DModel,
    Flux3Transformer2DModel,
    GlmImageTransformer2DModel,
    HiDreamImageTransformer2DModel,
    Ideogram4Transformer2DModel,
    JoyImageEditPlusTransformer3DModel,
    JoyImageEditTransformer3DModel,
    OmniGenTransformer2DModel,
    PRXTransformer2DModel,
)
from tiny_single import mask_of
from tiny_transformers import Case
from tiny_video import disturbed


def dit():
    torch.manual_seed(1)
    return DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=14, num_embeds_ada_norm=10
    )


def dit_inputs(size=14, batch=2):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(batch, 4, size, size),
        "timestep": torch.full((batch,), 7),
        "class_labels": torch.arange(batch) + 3,
    }


def cogview3():
    torch.manual_seed(1)
    return CogView3PlusTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=12,
        time_embed_dim=16,
        condition_dim=4,
        pos_embed_max_size=16,
        sample_size=16,
    )


def cogview3_inputs(height=10, width=14, text=13, batch=2):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(batch, 4, height, width),
        "encoder_hidden_states": torch.randn(batch, text, 12),
        "timestep": torch.full((batch,), 700),
        "original_size": torch.full((batch, 2), 80.0),
        "target_size": torch.full((batch, 2), 112.0),
        "crop_coords": torch.zeros(batch, 2),
    }


def omnigen():
    torch.manual_seed(1)
    return OmniGenTransformer2DModel(
        in_channels=4,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=48,
        num_layers=2,
        pad_token_id=0,
        vocab_size=60,
        rope_scaling={"long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
        pos_embed_max_size=16,
        time_step_dim=16,
    )


def omnigen_inputs(text=19, height=10, width=14, batch=2):
    """Prompts with padding before them and a picture to be changed; a token sees those before it, and those of its own picture."""
    torch.manual_seed(2)
    given, size = height // 2 * (width // 2), height // 2 * (width // 2) + text + 1
    length = given + size
    mask = torch.ones(length, length).tril().repeat(batch, 1, 1)
    mask[:, 5 : 5 + given, 5 : 5 + given] = 1
    mask[:, -(size - text) :, -(size - text) :] = 1
    mask[-1, :, :4] = 0
    return {
        "hidden_states": torch.randn(batch, 4, height, width),
        "timestep": torch.full((batch,), 0.7),
        "input_ids": torch.randint(1, 60, (batch, given + text)),
        "input_img_latents": [torch.randn(1, 4, height, width) for _ in range(batch)],
        "input_image_sizes": {entry: [[5, 5 + given]] for entry in range(batch)},
        "attention_mask": mask,
        "position_ids": torch.arange(length).repeat(batch, 1),
    }


def ernie():
    torch.manual_seed(1)
    return disturbed(
        ErnieImageTransformer2DModel(
            hidden_size=32,
            num_attention_heads=2,
            num_layers=2,
            ffn_hidden_size=48,
            in_channels=4,
            out_channels=4,
            text_in_dim=12,
            rope_axes_dim=(4, 6, 6),
        )
    )


def ernie_inputs(height=5, width=7, lengths=(13, 6)):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(len(lengths), 4, height, width),
        "timestep": torch.full((len(lengths),), 700.0),
        "text_bth": torch.randn(len(lengths), max(lengths), 12),
        "text_lens": torch.tensor(lengths),
    }


def glm():
    torch.manual_seed(1)
    return GlmImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=12,
        time_embed_dim=16,
        condition_dim=4,
        prior_vq_quantizer_codebook_size=30,
    )


def glm_inputs(height=10, width=14, text=13, batch=2):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(batch, 4, height, width),
        "encoder_hidden_states": torch.randn(batch, text, 12),
        "prior_token_id": torch.randint(0, 30, (batch, height // 2 * (width // 2))),
        "prior_token_drop": torch.arange(batch) % 2 == 1,
        "timestep": torch.full((batch,), 700),
        "target_size": torch.full((batch, 2), 112.0),
        "crop_coords": torch.zeros(batch, 2),
    }


def ideogram():
    torch.manual_seed(1)
    return Ideogram4Transformer2DModel(
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        intermediate_size=48,
        adaln_dim=16,
        llm_features_dim=12,
        mrope_section=(4, 2, 2),
    )


def ideogram_inputs(text=13, image=35, batch=2, per_token_time=False):
    """Prompt and picture in one row, whose last entry begins with padding of another segment."""
    torch.manual_seed(2)
    length = text + image
    segments, indicator = torch.ones(batch, length, dtype=torch.long), torch.full((batch, length), 3)
    indicator[:, text:] = 2
    segments[-1, :4], indicator[-1, :4] = 0, 0
    return {
        "hidden_states": torch.randn(batch, length, 4),
        "timestep": torch.rand(batch, length) if per_token_time else torch.full((batch,), 0.7),
        "encoder_hidden_states": torch.randn(batch, length, 12),
        "position_ids": torch.randint(0, 9, (batch, length, 3)),
        "segment_ids": segments,
        "indicator": indicator,
    }


def prx(**config):
    torch.manual_seed(1)
    return disturbed(
        PRXTransformer2DModel(in_channels=4, context_in_dim=12, hidden_size=32, num_heads=2, depth=2, axes_dim=[8, 8], **config)
    )


def prx_inputs(height=10, width=14, text=13, batch=2, masked=True):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(batch, 4, height, width),
        "timestep": torch.full((batch,), 0.7),
        "encoder_hidden_states": torch.randn(batch, text, 12),
        "attention_mask": mask_of(text, *[text] * (batch - 1), 6).bool() if masked else None,
    }


def fibo2():
    torch.manual_seed(1)
    return disturbed(
        BriaFibo2Transformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=3,
            n_refiner_layers=1,
            n_heads=2,
            cap_feat_dim=12,
            injection_layer_ids=(1,),
            perceiver_num_layers=1,
            min_num_gist_tokens=4,
            max_num_gist_tokens=12,
            gist_step=4,
            gist_min_text_len=4,
            gist_max_text_len=12,
            axes_dims=(4, 6, 6),
            axes_lens=(32, 32, 32),
        )
    )


def fibo2_inputs(lengths=(13, 13), height=10, width=14, context=False):
    torch.manual_seed(2)
    batch = len(lengths)
    return {
        "hidden_states": torch.randn(batch, 4, height, width),
        "timestep": torch.full((batch,), 0.7),
        "encoder_hidden_states": torch.randn(batch, 2, max(lengths), 12),
        "encoder_attention_mask": mask_of(max(lengths), *lengths).bool(),
        "context_latents": [torch.randn(batch, 4, 6, 8)] if context else None,
    }


def flux3(**config):
    torch.manual_seed(1)
    return Flux3Transformer2DModel(
        in_channels=8,
        cond_in_channels=6,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        timestep_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        **config,
    )


def flux3_inputs(image=35, text=13, reference=None, batch=2, target=False):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(batch, image, 8),
        "encoder_hidden_states": torch.randn(batch, text, 12),
        "timestep": torch.full((batch,), 0.7),
        "img_ids": torch.randint(0, 9, (image, 4)).float(),
        "txt_ids": torch.randint(0, 9, (text, 4)).float(),
        "image_cond_hidden_states": None if reference is None else torch.randn(batch, reference, 6),
        "image_cond_ids": None if reference is None else torch.randint(0, 9, (reference, 4)).float(),
        "target_timestep": torch.full((batch,), 0.4) if target else None,
    }


_JOY = {
    "in_channels": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "text_dim": 12,
    "num_layers": 2,
    "rope_dim_list": [4, 6, 6],
}


def joy(**config):
    torch.manual_seed(1)
    return disturbed(JoyImageEditTransformer3DModel(**_JOY, **config))


def joy_inputs(items=2, height=10, width=14, text=13, batch=2):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(batch, items, 4, 1, height, width),
        "timestep": torch.full((batch,), 700),
        "encoder_hidden_states": torch.randn(batch, text, 12),
    }


def joy_plus():
    torch.manual_seed(1)
    return disturbed(JoyImageEditPlusTransformer3DModel(**_JOY))


def joy_plus_inputs(shapes=([(1, 5, 7), (1, 3, 2)], [(1, 5, 7)]), text=13, masked=True):
    """Of pictures of unlike sizes, padded to the longest row."""
    torch.manual_seed(2)
    patches = max(sum(t * h * w for t, h, w in each) for each in shapes)
    return {
        "hidden_states": torch.randn(len(shapes), patches, 4, 1, 2, 2),
        "timestep": torch.full((len(shapes),), 700),
        "encoder_hidden_states": torch.randn(len(shapes), text, 12),
        "encoder_hidden_states_mask": mask_of(text, *[text] * (len(shapes) - 1), 6).float() if masked else None,
        "shape_list": [list(each) for each in shapes],
    }


def hidream(**config):
    torch.manual_seed(1)
    return disturbed(
        HiDreamImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            caption_channels=[12, 10],
            text_emb_dim=8,
            num_routed_experts=2,
            num_activated_experts=1,
            axes_dims_rope=(4, 6, 6),
            max_resolution=(14, 14),
            llama_layers=[0, 2, 1],
            **config,
        )
    )


def hidream_inputs(height=10, width=14, text=13, batch=2):
    """A picture that is no square is padded to the largest one."""
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(batch, 4, height, width),
        "timesteps": torch.full((batch,), 700),
        "encoder_hidden_states_t5": torch.randn(batch, 9, 12),
        "encoder_hidden_states_llama3": [torch.randn(batch, text, 10) for _ in range(3)],
        "pooled_embeds": torch.randn(batch, 8),
    }


#: As in tiny_transformers.py.
CASES = {
    "DiT": lambda: Case(dit(), dit_inputs()),
    "CogView 3 Plus": lambda: Case(cogview3(), cogview3_inputs()),
    "OmniGen": lambda: Case(omnigen(), omnigen_inputs()),
    "ERNIE-Image": lambda: Case(ernie(), ernie_inputs()),
    "GLM-Image": lambda: Case(glm(), glm_inputs()),
    "GLM-Image without a text to be drawn": lambda: Case(glm(), glm_inputs(text=0)),
    "Ideogram 4": lambda: Case(ideogram(), ideogram_inputs()),
    "Ideogram 4, a time for each token": lambda: Case(ideogram(), ideogram_inputs(per_token_time=True)),
    "PRX": lambda: Case(prx(), prx_inputs(masked=False)),
    "PRX, text masks": lambda: Case(prx(resolution_embeds=True), prx_inputs()),
    "Bria Fibo 2": lambda: Case(fibo2(), fibo2_inputs()),
    "Bria Fibo 2, prompts of other lengths, a picture to be changed": lambda: Case(fibo2(), fibo2_inputs((13, 5), context=True)),
    "Flux 3": lambda: Case(flux3(), flux3_inputs()),
    "Flux 3 with a picture to be changed": lambda: Case(flux3(flow_map=True), flux3_inputs(reference=11, target=True)),
    "JoyImage Edit": lambda: Case(joy(), joy_inputs()),
    "JoyImage Edit, positions of text": lambda: Case(joy(rope_type="mrope"), joy_inputs(items=3)),
    "JoyImage Edit Plus": lambda: Case(joy_plus(), joy_plus_inputs(masked=False)),
    "JoyImage Edit Plus, text masks": lambda: Case(joy_plus(), joy_plus_inputs()),
    "HiDream": lambda: Case(hidream(), hidream_inputs(12, 12)),
    "HiDream, no square": lambda: Case(hidream(), hidream_inputs()),
}

"""Tiny transformers of relatives of Flux, of SD3, CogVideoX, Mochi, AuraFlow and Hunyuan, and inputs for them."""

import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    BriaTransformer2DModel,
    ChromaTransformer2DModel,
    CogVideoXTransformer3DModel,
    HunyuanImageTransformer2DModel,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoTransformer3DModel,
    LongCatImageTransformer2DModel,
    MochiTransformer3DModel,
    OvisImageTransformer2DModel,
    SD3Transformer2DModel,
)
from tiny_transformers import Case

_FLUX = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}


def chroma():
    torch.manual_seed(1)
    return ChromaTransformer2DModel(
        **_FLUX, approximator_num_channels=8, approximator_hidden_dim=32, approximator_layers=2
    )


def bria():
    torch.manual_seed(1)
    return BriaTransformer2DModel(**_FLUX)


def ovis():
    torch.manual_seed(1)
    return OvisImageTransformer2DModel(**_FLUX, out_channels=16)


def longcat():
    torch.manual_seed(1)
    return LongCatImageTransformer2DModel(**_FLUX, pooled_projection_dim=32)


def ids_inputs(image=35, text=33, time=0.5, **others):
    """What all relatives of Flux are called with."""
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(2, image, 16),
        "encoder_hidden_states": torch.randn(2, text, 32),
        "timestep": torch.tensor([time, time]),
        "img_ids": torch.randint(0, 9, (image, 3)).float(),
        "txt_ids": torch.randint(0, 9, (text, 3)).float(),
        **others,
    }


def chroma_inputs(controlnet=False, image=35, text=33):
    """The pipeline passes a mask of float, 1 for the tokens of the prompt and one more."""
    inputs = ids_inputs(image, text)
    mask = torch.ones(2, text + image)
    mask[0, 20:text] = 0
    mask[1, 7:text] = 0
    if controlnet:
        inputs["controlnet_block_samples"] = [torch.randn(2, image, 32)]
        inputs["controlnet_single_block_samples"] = [torch.randn(2, image, 32) for _ in range(2)]
    return {**inputs, "attention_mask": mask}


def bria_inputs(controlnet=False):
    inputs = ids_inputs(time=500.0)
    if controlnet:
        inputs["controlnet_block_samples"] = [torch.randn(2, 35, 32)]
    return inputs


def sd3(dual=False):
    """With two kinds of attention in the first block, as SD 3.5."""
    torch.manual_seed(1)
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=20,
        pos_embed_max_size=16,
        dual_attention_layers=(0,) if dual else (),
        qk_norm="rms_norm" if dual else None,
    )


def sd3_inputs(controlnet=False):
    torch.manual_seed(2)
    inputs = {
        "hidden_states": torch.randn(2, 4, 10, 14),
        "encoder_hidden_states": torch.randn(2, 33, 24),
        "pooled_projections": torch.randn(2, 20),
        "timestep": torch.tensor([700.0, 700.0]),
    }
    if controlnet:
        inputs["block_controlnet_hidden_states"] = [torch.randn(2, 35, 32)]
    return inputs


def cogvideox(rope=False, frames_of_patches=None, ofs=None):
    """The 2B model has sums of sines as positions, the 5B model has RoPE, and version 1.5 has patches of two frames."""
    torch.manual_seed(1)
    return CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        ofs_embed_dim=ofs,
        text_embed_dim=24,
        num_layers=2,
        sample_width=14,
        sample_height=10,
        sample_frames=9,
        patch_size_t=frames_of_patches,
        max_text_seq_length=33,
        use_rotary_positional_embeddings=rope,
        patch_bias=frames_of_patches is None,
    )


def cogvideox_inputs(rope=False, frames=3, of_patches=1, ofs=None):
    torch.manual_seed(2)
    inputs = {
        "hidden_states": torch.randn(2, frames, 4, 10, 14),
        "encoder_hidden_states": torch.randn(2, 33, 24),
        "timestep": torch.tensor([700, 700]),
    }
    if rope:
        angles = 3 * torch.randn(frames // of_patches * 5 * 7, 12).repeat_interleave(2, 1)
        inputs["image_rotary_emb"] = (angles.cos(), angles.sin())
    if ofs:
        inputs["ofs"] = torch.tensor([2.0])
    return inputs


def auraflow():
    torch.manual_seed(1)
    return AuraFlowTransformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pos_embed_max_size=144,
    )


def auraflow_inputs():
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(2, 4, 10, 14),
        "encoder_hidden_states": torch.randn(2, 31, 24),
        "timestep": torch.tensor([0.7, 0.7]),
    }


def mochi():
    torch.manual_seed(1)
    model = MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=3,
        pooled_projection_dim=24,
        in_channels=4,
        text_embed_dim=16,
        time_embed_dim=16,
        max_sequence_length=33,
    )
    # Zeros until they are trained.
    torch.nn.init.normal_(model.pos_frequencies)
    return model


def padded(*lengths, tokens=33, dtype=torch.bool):
    """A mask of texts with these numbers of tokens."""
    return (torch.arange(tokens)[None] < torch.tensor(lengths)[:, None]).to(dtype)


def mochi_inputs(lengths=(20, 7)):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(2, 4, 3, 10, 14),
        "encoder_hidden_states": torch.randn(2, 33, 16),
        "timestep": torch.tensor([700, 700]),
        "encoder_attention_mask": padded(*lengths),
    }


_HUNYUAN = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_refiner_layers": 1,
}


def hunyuan_video(**config):
    torch.manual_seed(1)
    return HunyuanVideoTransformer3DModel(
        **_HUNYUAN,
        num_single_layers=2,
        text_embed_dim=24,
        pooled_projection_dim=20,
        rope_axes_dim=(4, 4, 8),
        **config,
    )


def hunyuan_video_inputs(guidance=True):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(2, 4, 3, 10, 14),
        "timestep": torch.tensor([700, 700]),
        "encoder_hidden_states": torch.randn(2, 33, 24),
        "encoder_attention_mask": padded(20, 7, dtype=torch.int64),
        "pooled_projections": torch.randn(2, 20),
        "guidance": torch.tensor([6000.0, 6000.0]) if guidance else None,
    }


def hunyuan_video_15(**config):
    torch.manual_seed(1)
    return HunyuanVideo15Transformer3DModel(
        **_HUNYUAN, text_embed_dim=24, text_embed_2_dim=12, image_embed_dim=8, rope_axes_dim=(4, 4, 8), **config
    )


def hunyuan_video_15_inputs(image=False):
    """Without an image its embeddings are zeros."""
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(2, 4, 3, 5, 7),
        "timestep": torch.tensor([700.0, 700.0]),
        "encoder_hidden_states": torch.randn(2, 33, 24),
        "encoder_attention_mask": padded(20, 7, dtype=torch.int64),
        "encoder_hidden_states_2": torch.randn(2, 11, 12),
        "encoder_attention_mask_2": padded(0, 5, tokens=11, dtype=torch.float32),
        "image_embeds": torch.randn(2, 9, 8) if image else torch.zeros(2, 9, 8),
    }


def hunyuan_image(refiner=False, **config):
    torch.manual_seed(1)
    sizes = (
        {"patch_size": (1, 1, 1), "rope_axes_dim": (4, 4, 8)}
        if refiner
        else {"patch_size": (1, 1), "rope_axes_dim": (8, 8)}
    )
    return HunyuanImageTransformer2DModel(**_HUNYUAN, num_single_layers=2, text_embed_dim=24, **sizes, **config)


def hunyuan_image_inputs(refiner=False, glyphs=True):
    """``glyphs``: with the second text encoder, which sees what is to be written."""
    torch.manual_seed(2)
    inputs = {
        "hidden_states": torch.randn(2, 4, *((3, 5, 7) if refiner else (5, 7))),
        "timestep": torch.tensor([700.0, 700.0]),
        "encoder_hidden_states": torch.randn(2, 33, 24),
        "encoder_attention_mask": padded(20, 7, dtype=torch.int64),
    }
    if glyphs:
        inputs["encoder_hidden_states_2"] = torch.randn(2, 11, 12)
        inputs["encoder_attention_mask_2"] = padded(0, 5, tokens=11, dtype=torch.int64)
    return inputs


def fused(model):
    """With one projection for queries, keys and values, and other processors."""
    model.fuse_qkv_projections()
    return model


#: A name, and how to make the model and its inputs.
CASES = {
    "Chroma": lambda: Case(chroma(), chroma_inputs()),
    "Chroma without mask": lambda: Case(chroma(), {**chroma_inputs(), "attention_mask": None}),
    "Chroma with ControlNet": lambda: Case(chroma(), chroma_inputs(controlnet=True)),
    "Bria": lambda: Case(bria(), bria_inputs()),
    "Bria with ControlNet": lambda: Case(bria(), bria_inputs(controlnet=True)),
    "Ovis": lambda: Case(ovis(), ids_inputs()),
    "LongCat": lambda: Case(longcat(), ids_inputs(guidance=torch.tensor([4.0, 4.0]))),
    "SD 3": lambda: Case(sd3(), sd3_inputs()),
    "SD 3.5": lambda: Case(sd3(dual=True), sd3_inputs()),
    "SD 3 with ControlNet": lambda: Case(sd3(), sd3_inputs(controlnet=True)),
    "SD 3, fused projections": lambda: Case(fused(sd3()), sd3_inputs()),
    "CogVideoX 2B": lambda: Case(cogvideox(), cogvideox_inputs()),
    "CogVideoX 5B": lambda: Case(cogvideox(rope=True), cogvideox_inputs(rope=True)),
    "CogVideoX 1.5": lambda: Case(cogvideox(True, 2, 16), cogvideox_inputs(True, 4, 2, ofs=True)),
    "CogVideoX 5B, fused projections": lambda: Case(fused(cogvideox(rope=True)), cogvideox_inputs(rope=True)),
    "AuraFlow": lambda: Case(auraflow(), auraflow_inputs()),
    "AuraFlow, fused projections": lambda: Case(fused(auraflow()), auraflow_inputs()),
    "Mochi": lambda: Case(mochi(), mochi_inputs()),
    "Mochi, an empty prompt": lambda: Case(mochi(), mochi_inputs((0, 33))),
    "HunyuanVideo": lambda: Case(hunyuan_video(), hunyuan_video_inputs()),
    "HunyuanVideo I2V": lambda: Case(
        hunyuan_video(guidance_embeds=False, image_condition_type="latent_concat"), hunyuan_video_inputs(False)
    ),
    "HunyuanVideo 1.5": lambda: Case(hunyuan_video_15(), hunyuan_video_15_inputs()),
    "HunyuanVideo 1.5 I2V": lambda: Case(hunyuan_video_15(), hunyuan_video_15_inputs(image=True)),
    "HunyuanVideo 1.5, two times": lambda: Case(
        hunyuan_video_15(use_meanflow=True), {**hunyuan_video_15_inputs(), "timestep_r": torch.tensor([650.0, 650.0])}
    ),
    "HunyuanImage": lambda: Case(hunyuan_image(text_embed_2_dim=12), hunyuan_image_inputs()),
    "HunyuanImage, distilled": lambda: Case(
        hunyuan_image(text_embed_2_dim=12, guidance_embeds=True, use_meanflow=True),
        {
            **hunyuan_image_inputs(),
            "guidance": torch.tensor([3500.0, 3500.0]),
            "timestep_r": torch.tensor([650.0, 650.0]),
        },
    ),
    "HunyuanImage Refiner": lambda: Case(
        hunyuan_image(refiner=True, guidance_embeds=True),
        {**hunyuan_image_inputs(refiner=True, glyphs=False), "guidance": torch.tensor([3500.0, 3500.0])},
    ),
}

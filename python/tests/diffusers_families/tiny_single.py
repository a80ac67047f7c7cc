"""More tiny transformers of diffusers with random weights, and inputs for them as their pipelines make them."""

import torch
from diffusers import (
    AllegroTransformer3DModel,
    CogView4Transformer2DModel,
    EasyAnimateTransformer3DModel,
    HunyuanDiT2DModel,
    LatteTransformer3DModel,
    Lumina2Transformer2DModel,
    PixArtTransformer2DModel,
    ZImageTransformer2DModel,
)
from diffusers.models.embeddings import get_2d_rotary_pos_embed, get_3d_rotary_pos_embed_allegro
from diffusers.models.transformers import transformer_kandinsky
from diffusers.models.transformers.transformer_bria_fibo import BriaFiboTransformer2DModel
from tiny_transformers import Case


class _Unrounded:
    """PyTorch for the module of Kandinsky 5, whose attention rounds queries and keys to bfloat16: that would hide errors."""

    bfloat16 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


transformer_kandinsky.torch = _Unrounded()


def shaken(model):
    """With weights for those that begin as zeros, which would hide blocks and their gradients."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.2)
    return model


def mask_of(text, *lengths):
    """``[batch, text]``, of the first tokens of each entry."""
    return (torch.arange(text) < torch.tensor(lengths)[:, None]).long()


def z_image(**config):
    torch.manual_seed(1)
    return shaken(
        ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=3,
            n_refiner_layers=2,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[4, 6, 6],
            axes_lens=[256, 32, 32],
            **config,
        )
    )


def z_image_inputs(text=(21, 40), controlnet=False):
    """Prompts of other lengths, each padded to a multiple of 32 tokens."""
    torch.manual_seed(2)
    joint = 64 + max(-(-length // 32) * 32 for length in text)
    samples = {block: torch.randn(2, joint, 32) for block in (0, 2)}
    return {
        "x": [torch.randn(4, 1, 10, 14) for _ in text],
        "t": torch.tensor([0.5, 0.5]),
        "cap_feats": [torch.randn(length, 16) for length in text],
        "controlnet_block_samples": samples if controlnet else None,
    }


def z_image_omni_inputs(siglip=False):
    """One picture to be changed beside the one to be made, and none."""
    torch.manual_seed(2)
    views = [[torch.randn(2, 3, 12), None], [None]]
    return {
        "x": [[torch.randn(4, 1, 6, 10), torch.randn(4, 1, 10, 14)], [torch.randn(4, 1, 10, 14)]],
        "t": torch.tensor([0.5, 0.5]),
        "cap_feats": [[torch.randn(21, 16), torch.randn(5, 16), torch.randn(3, 16)], [torch.randn(33, 16)]],
        "siglip_feats": views if siglip else [None, None],
        "image_noise_mask": [[0, 1], [1]],
    }


def kandinsky5(**config):
    torch.manual_seed(1)
    model = shaken(
        transformer_kandinsky.Kandinsky5Transformer3DModel(
            in_visual_dim=4,
            out_visual_dim=4,
            in_text_dim=16,
            in_text_dim2=16,
            time_dim=32,
            model_dim=32,
            ff_dim=64,
            num_text_blocks=2,
            num_visual_blocks=2,
            axes_dims=(4, 6, 6),
            **config,
        )
    )
    # It makes times in float32, also in float64.
    model.time_embeddings.in_layer.register_forward_pre_hook(lambda layer, inputs: (inputs[0].to(layer.weight),))
    return model


def kandinsky5_inputs(conditioned=False):
    torch.manual_seed(2)
    text, frames, rows, columns = 13, 3, 5, 7
    return {
        "hidden_states": torch.randn(2, frames, 2 * rows, 2 * columns, 9 if conditioned else 4),
        "encoder_hidden_states": torch.randn(2, text, 16),
        "timestep": torch.tensor([700.0, 700.0]),
        "pooled_projections": torch.randn(2, 16),
        "visual_rope_pos": [torch.arange(frames), torch.arange(rows), torch.arange(columns)],
        "text_rope_pos": torch.arange(text),
        "scale_factor": (1.0, 2.0, 2.0),
    }


def pixart(large=False):
    """``large``: of 1024 pixels, which has the size of the picture as a condition."""
    torch.manual_seed(1)
    return PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=18,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=36,
        caption_channels=16,
        sample_size=128 if large else 16,
    )


def pixart_inputs(large=False, masked=False):
    torch.manual_seed(2)
    sizes = {"resolution": torch.tensor([[80.0, 112.0]] * 2), "aspect_ratio": torch.tensor([[0.7]] * 2)}
    inputs = {
        "hidden_states": torch.randn(2, 4, 10, 14),
        "encoder_hidden_states": torch.randn(2, 20, 16),
        "encoder_attention_mask": mask_of(20, 13, 4),
        "timestep": torch.tensor([700, 700]),
        "added_cond_kwargs": sizes if large else {"resolution": None, "aspect_ratio": None},
    }
    return {**inputs, "attention_mask": mask_of(35, 30, 11)} if masked else inputs


def lumina2():
    torch.manual_seed(1)
    return shaken(
        Lumina2Transformer2DModel(
            in_channels=4,
            hidden_size=48,
            num_layers=2,
            num_refiner_layers=2,
            num_attention_heads=4,
            num_kv_heads=2,
            multiple_of=16,
            axes_dim_rope=(4, 4, 4),
            axes_lens=(64, 32, 32),
            cap_feat_dim=16,
        )
    )


def lumina2_inputs(*lengths):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(2, 4, 10, 14),
        "timestep": torch.tensor([0.5, 0.5]),
        "encoder_hidden_states": torch.randn(2, 23, 16),
        "encoder_attention_mask": mask_of(23, *lengths),
    }


def cogview4():
    torch.manual_seed(1)
    return CogView4Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=16,
        condition_dim=8,
        rope_axes_dim=(32, 32),
    )


def cogview4_inputs(positions=False):
    torch.manual_seed(2)
    size = torch.tensor([[80.0, 112.0]] * 2)
    inputs = {
        "hidden_states": torch.randn(2, 4, 10, 14),
        "encoder_hidden_states": torch.randn(2, 16, 16),
        "timestep": torch.tensor([700, 700]),
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros(2, 2),
    }
    angles = torch.randn(35, 16)
    return {**inputs, "image_rotary_emb": (angles.cos(), angles.sin())} if positions else inputs


def bria_fibo(**config):
    torch.manual_seed(1)
    return BriaFiboTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=[4, 6, 6],
        text_encoder_dim=16,
        **config,
    )


def bria_fibo_inputs(masked=True, guidance=False):
    torch.manual_seed(2)
    text, picture = 21, 35
    mask = torch.cat([mask_of(text, 21, 9), torch.ones(2, picture)], 1).bool()
    return {
        "hidden_states": torch.randn(2, picture, 16),
        "encoder_hidden_states": torch.randn(2, text, 16),
        "text_encoder_layers": [torch.randn(2, text, 16) for _ in range(4)],
        "timestep": torch.tensor([700.0, 700.0]),
        "guidance": torch.tensor([5.0, 5.0]) if guidance else None,
        "txt_ids": torch.zeros(2, text, 3),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(5.0), torch.arange(7.0)),
        "joint_attention_kwargs": {"attention_mask": mask[:, None, None, :]} if masked else {},
    }


def hunyuan_dit(**config):
    torch.manual_seed(1)
    return HunyuanDiT2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        patch_size=2,
        sample_size=16,
        hidden_size=32,
        num_layers=6,
        cross_attention_dim=16,
        cross_attention_dim_t5=16,
        pooled_projection_dim=16,
        text_len=8,
        text_len_t5=12,
        **config,
    )


def hunyuan_dit_inputs(controlnet=False):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(2, 4, 10, 14),
        "timestep": torch.tensor([700.0, 700.0]),
        "encoder_hidden_states": torch.randn(2, 8, 16),
        "text_embedding_mask": mask_of(8, 8, 3),
        "encoder_hidden_states_t5": torch.randn(2, 12, 16),
        "text_embedding_mask_t5": mask_of(12, 5, 12),
        "image_meta_size": torch.tensor([[80.0, 112.0, 80.0, 112.0, 0.0, 0.0]] * 2),
        "style": torch.tensor([0, 0]),
        "image_rotary_emb": get_2d_rotary_pos_embed(16, ((0, 0), (5, 7)), (5, 7), output_type="pt"),
        "controlnet_block_samples": [torch.randn(2, 35, 32) for _ in range(2)] if controlnet else None,
    }


def allegro():
    torch.manual_seed(1)
    return AllegroTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=48,
        caption_channels=16,
    )


def allegro_inputs(masked=False):
    torch.manual_seed(2)
    *tables, frames, rows, columns = get_3d_rotary_pos_embed_allegro(
        24, crops_coords=((0, 0), (5, 7)), grid_size=(5, 7), temporal_size=3, interpolation_scale=(2.2, 2.0, 2.0)
    )
    places = torch.cartesian_prod(frames.long(), rows.long(), columns.long()).T.reshape(3, 1, -1)
    inputs = {
        "hidden_states": torch.randn(2, 4, 3, 10, 14),
        "encoder_hidden_states": torch.randn(2, 20, 16),
        "encoder_attention_mask": mask_of(20, 13, 4),
        "timestep": torch.tensor([700, 700]),
        "image_rotary_emb": (tuple(tables), tuple(places)),
    }
    if masked:
        inputs["attention_mask"] = (torch.arange(10) < torch.tensor([10, 6])[:, None])[:, None, :, None].expand(2, 3, 10, 14)
    return inputs


def latte():
    torch.manual_seed(1)
    return LatteTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=32,
        sample_size=16,
        patch_size=2,
        activation_fn="gelu-approximate",
        norm_type="ada_norm_single",
        caption_channels=16,
        video_length=3,
    )


def latte_inputs(**options):
    """Two entries with times of their own, which a row of another entry would show."""
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(2, 4, 3, 10, 14),
        "timestep": torch.tensor([700, 300]),
        "encoder_hidden_states": torch.randn(2, 20, 16),
        **options,
    }


def easyanimate(**config):
    torch.manual_seed(1)
    return EasyAnimateTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        out_channels=4,
        patch_size=2,
        num_layers=3,
        mmdit_layers=2,
        time_embed_dim=16,
        text_embed_dim=16,
        **config,
    )


def easyanimate_inputs(**extra):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(2, 4, 3, 10, 14),
        "timestep": torch.tensor([700.0, 700.0]),
        "encoder_hidden_states": torch.randn(2, 21, 16),
        **{name: torch.randn(shape) for name, shape in extra.items()},
    }


#: As in tiny_transformers.py.
CASES = {
    "Z-Image": lambda: Case(z_image(), z_image_inputs((21, 30))),
    "Z-Image, prompts of other lengths": lambda: Case(z_image(), z_image_inputs()),
    "Z-Image with ControlNet": lambda: Case(z_image(), z_image_inputs(controlnet=True)),
    "Z-Image Omni": lambda: Case(z_image(), z_image_omni_inputs()),
    "Z-Image Omni with SigLIP": lambda: Case(z_image(siglip_feat_dim=12), z_image_omni_inputs(True)),
    "Kandinsky 5": lambda: Case(kandinsky5(), kandinsky5_inputs()),
    "Kandinsky 5 I2V": lambda: Case(kandinsky5(visual_cond=True), kandinsky5_inputs(True)),
    "PixArt": lambda: Case(pixart(), pixart_inputs()),
    "PixArt of 1024 pixels": lambda: Case(pixart(True), pixart_inputs(True)),
    "PixArt, a mask of the picture": lambda: Case(pixart(), pixart_inputs(masked=True)),
    "Lumina 2": lambda: Case(lumina2(), lumina2_inputs(20, 20)),
    "Lumina 2, text masks": lambda: Case(lumina2(), lumina2_inputs(23, 9)),
    "CogView 4": lambda: Case(cogview4(), cogview4_inputs()),
    "CogView 4, given positions": lambda: Case(cogview4(), cogview4_inputs(True)),
    "Bria Fibo": lambda: Case(bria_fibo(), bria_fibo_inputs(masked=False)),
    "Bria Fibo, text masks": lambda: Case(bria_fibo(), bria_fibo_inputs()),
    "Bria Fibo, guidance": lambda: Case(bria_fibo(guidance_embeds=True), bria_fibo_inputs(guidance=True)),
    "HunyuanDiT": lambda: Case(hunyuan_dit(), hunyuan_dit_inputs()),
    "HunyuanDiT with ControlNet": lambda: Case(hunyuan_dit(), hunyuan_dit_inputs(True)),
    "HunyuanDiT 1.2": lambda: Case(hunyuan_dit(use_style_cond_and_image_meta_size=False), hunyuan_dit_inputs()),
    "Allegro": lambda: Case(allegro(), allegro_inputs()),
    "Allegro, a mask of the video": lambda: Case(allegro(), allegro_inputs(True)),
    "Latte": lambda: Case(latte(), latte_inputs()),
    "Latte without attention over time": lambda: Case(latte(), latte_inputs(enable_temporal_attentions=False)),
    "EasyAnimate": lambda: Case(easyanimate(in_channels=4), easyanimate_inputs()),
    "EasyAnimate, inpainting": lambda: Case(
        easyanimate(in_channels=9, after_norm=True, add_norm_text_encoder=True),
        easyanimate_inputs(inpaint_latents=(2, 5, 3, 10, 14)),
    ),
    "EasyAnimate, control, text of T5": lambda: Case(
        easyanimate(in_channels=8, text_embed_dim_t5=12),
        easyanimate_inputs(control_latents=(2, 4, 3, 10, 14), encoder_hidden_states_t5=(2, 9, 12)),
    ),
}

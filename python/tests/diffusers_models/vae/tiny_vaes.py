"""Tiny VAEs with random weights."""

import copy
import functools

import diffusers
import torch
from diffusers.models import autoencoders

import kyklos
from kyklos.diffusers import split_vae

# A kind of blocks, twice.
DOWN, UP = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
IMAGE = {"down_block_types": DOWN, "up_block_types": UP, "block_out_channels": (8, 16), "latent_channels": 4, "norm_num_groups": 4}
WAN = {"z_dim": 4, "num_res_blocks": 1, "dim_mult": [1, 2, 2]}
LTX = {
    "latent_channels": 8,
    "block_out_channels": (8, 8),
    "decoder_block_out_channels": (8, 8),
    "layers_per_block": (1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1),
    "spatio_temporal_scaling": (True, False),
    "decoder_spatio_temporal_scaling": (True, False),
    "decoder_inject_noise": (False, False, False),
    "down_block_types": ("LTXVideoDownBlock3D",) * 2,
    "upsample_residual": (False, False),
    "upsample_factor": (1, 1),
    "patch_size": 2,
}

#: The class, its configuration, and frames of latents; none for images.
VAES = {
    "AutoencoderKL": (IMAGE, None),
    "AutoencoderKL without attention": (
        IMAGE | {"mid_block_add_attention": False, "use_quant_conv": False, "use_post_quant_conv": False},
        None,
    ),
    "AutoencoderKLFlux2": (IMAGE, None),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (8,) * 3,
            "decoder_block_out_channels": (8,) * 3,
            "num_encoder_blocks": (1,) * 3,
            "num_decoder_blocks": (1,) * 3,
        },
        None,
    ),
    "AutoencoderKLTemporalDecoder": (
        {"down_block_types": DOWN, "block_out_channels": (32, 32), "latent_channels": 4},
        None,
    ),
    "AsymmetricAutoencoderKL": (
        {
            "down_block_types": DOWN,
            "up_block_types": UP,
            "down_block_out_channels": (8, 16),
            "up_block_out_channels": (8, 16),
            "latent_channels": 4,
            "norm_num_groups": 4,
        },
        None,
    ),
    "AutoencoderKLHunyuanImage": (
        {
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 8,
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "spatial_compression_ratio": 2,
            "sample_size": 64,
        },
        None,
    ),
    "AutoencoderKLKVAE": ({"channels": 32, "num_enc_blocks": 1, "num_dec_blocks": 1, "z_channels": 4, "ch_mult": (1, 2)}, None),
    "AutoencoderKLWan": ({"base_dim": 8, "temperal_downsample": [False, True], **WAN}, 4),
    "AutoencoderKLWan 2.2": (
        {
            "base_dim": 8,
            "temperal_downsample": [False, True],
            "is_residual": True,
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
            **WAN,
        },
        3,
    ),
    "AutoencoderKLQwenImage": ({"base_dim": 8, "temperal_downsample": [False, True], **WAN}, 1),
    "AutoencoderKLQwenImage21": (
        {"base_dim": 8, "decoder_base_dim": 8, "temperal_downsample": [False, True], "in_channels": 3, "out_channels": 3, **WAN},
        1,
    ),
    "AutoencoderKLLTXVideo": (LTX, 3),
    "AutoencoderKLLTXVideo at a time": (LTX | {"timestep_conditioning": True}, 3),
    "AutoencoderKLLTX2Video": (
        LTX
        | {
            "block_out_channels": (8,),
            "layers_per_block": (1, 1),
            "down_block_types": ("LTX2VideoDownBlock3D",),
            "decoder_block_out_channels": (8,),
            "decoder_layers_per_block": (1, 1),
            "spatio_temporal_scaling": (True,),
            "decoder_spatio_temporal_scaling": (True,),
            "decoder_inject_noise": (False, False),
            "downsample_type": ("spatiotemporal",),
            "upsample_type": ("spatiotemporal",),
            "upsample_residual": (True,),
            "upsample_factor": (2,),
        },
        3,
    ),
    "AutoencoderKLHunyuanVideo": (
        {
            "latent_channels": 4,
            "down_block_types": ("HunyuanVideoDownBlock3D",) * 4,
            "up_block_types": ("HunyuanVideoUpBlock3D",) * 4,
            "block_out_channels": (8,) * 4,
            "layers_per_block": 1,
            "norm_num_groups": 4,
        },
        3,
    ),
    "AutoencoderKLHunyuanVideo15": (
        {
            "latent_channels": 4,
            "block_out_channels": (16, 16),
            "layers_per_block": 1,
            "spatial_compression_ratio": 2,
            "temporal_compression_ratio": 1,
        },
        3,
    ),
    "AutoencoderKLHunyuanImageRefiner": (
        {
            "latent_channels": 4,
            "block_out_channels": (16, 16),
            "layers_per_block": 1,
            "spatial_compression_ratio": 2,
            "temporal_compression_ratio": 1,
        },
        3,
    ),
    "AutoencoderKLCogVideoX": (
        {
            "down_block_types": ("CogVideoXDownBlock3D",) * 3,
            "up_block_types": ("CogVideoXUpBlock3D",) * 3,
            "block_out_channels": (8, 8, 8),
            "latent_channels": 4,
            "layers_per_block": 1,
            "norm_num_groups": 2,
            "temporal_compression_ratio": 4,
        },
        3,
    ),
    "AutoencoderKLMochi": (
        {
            "encoder_block_out_channels": (32, 32),
            "decoder_block_out_channels": (32, 32),
            "latent_channels": 4,
            "layers_per_block": (1, 1, 1),
            "temporal_expansions": (2,),
            "spatial_expansions": (2,),
            "add_attention_block": (True, True, True),
        },
        3,
    ),
    "AutoencoderKLCosmos": (
        {
            "latent_channels": 4,
            "encoder_block_out_channels": (8, 8),
            "decode_block_out_channels": (8, 8),
            "attention_resolutions": (8,),
            "resolution": 16,
            "num_layers": 1,
            "patch_size": 2,
            "spatial_compression_ratio": 4,
            "temporal_compression_ratio": 4,
        },
        3,
    ),
    "AutoencoderKLMagvit": (
        {
            "latent_channels": 4,
            "block_out_channels": [8, 8],
            "down_block_types": ["SpatialDownBlock3D", "SpatialTemporalDownBlock3D"],
            "up_block_types": ["SpatialUpBlock3D", "SpatialTemporalUpBlock3D"],
            "layers_per_block": 1,
            "norm_num_groups": 4,
        },
        3,
    ),
    "AutoencoderKLKVAEVideo": ({"ch": 32, "ch_mult": (1, 2), "num_res_blocks": 1, "z_channels": 4, "temporal_compress_times": 2}, 3),
    "AutoencoderVidTok": ({"ch": 32, "ch_mult": [1, 1], "z_channels": 4, "num_res_blocks": 1}, 3),
}
# Attention without a softmax sums over all pixels; a loss is a mean over them.
UNKNOWN = {
    "AutoencoderDC": (
        {
            "latent_channels": 4,
            "attention_head_dim": 8,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 16),
            "decoder_block_out_channels": (8, 16),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
        },
        None,
    ),
    "VQModel": (IMAGE | {"num_vq_embeddings": 16}, None),
}


@functools.cache
def vae(name):
    """In float32, with weights that keep the size of what goes through them."""
    kind = name.partition(" ")[0]
    config, _ = (VAES | UNKNOWN)[name]
    made = getattr(autoencoders, kind, None) or getattr(diffusers, kind)
    model = made(**config)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for where, x in model.named_parameters():
            normal = torch.randn(x.shape, generator=random)
            if x.squeeze().dim() > 1:
                x.copy_(normal / max(1, x[0].numel()) ** 0.5)
            else:
                x.copy_(normal * 0.3 + (1 if "weight" in where or "gamma" in where else 0))
    return model.eval()


@functools.cache
def wanted(name):
    """Latents and what they decode to; a picture and what it encodes to; all in float64 on one process, and the errors of float32 there."""
    whole = copy.deepcopy(vae(name)).double()
    z = latents(name, batch=3 if name == "AutoencoderKLTemporalDecoder" else 1)
    picture = decoded(whole, z.double())
    x = picture.float()
    code = encoded(whole, x.double())
    return z, picture, (decoded(vae(name), z) - picture).abs().max(), x, code, (encoded(vae(name), x) - code).abs().max()


def latents(name, rows=9, columns=5, batch=1):
    config, frames = VAES[name]
    channels = vae(name).config.get("latent_channels") or config.get("z_dim") or config["z_channels"]
    shape = (batch, channels, *[frames] * (frames is not None), rows, columns)
    height = torch.linspace(0.2, 1, rows)[:, None]
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)) * height + height


def decoded(model, z, **options):
    if isinstance(model, autoencoders.AutoencoderKLTemporalDecoder):
        options["num_frames"] = len(z)
    if model.config.get("timestep_conditioning"):
        options["temb"] = z.new_tensor([0.3])
    with torch.no_grad():
        found = model.decode(z, **options)
    return found if isinstance(found, torch.Tensor) else found[0]


def encoded(model, x):
    """The parameters of the distribution of latents, or latents."""
    with torch.no_grad():
        found = model.encode(x)[0]
    return getattr(found, "parameters", found)


def split(name, shares, call, model=None):
    """What ``call(model, handle)`` gives on each rank, where ``model`` is split."""
    copies = [copy.deepcopy(model or vae(name)) for _ in shares]

    def run(group):
        with split_vae(copies[group.rank], group, shares=shares) as handle:
            return call(copies[group.rank], handle)

    return kyklos.run_local(len(shares), run, device="cpu")

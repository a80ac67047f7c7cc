"""Tiny transformers of diffusers with random weights, and inputs for them."""

import copy

import torch
from diffusers import (
    ChronoEditTransformer3DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    LTX2VideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    SkyReelsV2Transformer3DModel,
    WanTransformer3DModel,
)


class Case:
    """A model, inputs of its forward, and what it computes unsplit: in float32, and in float64 as the exact result."""

    def __init__(self, model, inputs):
        self.model, self.inputs = model.eval(), inputs
        self.dense = call(self.model, inputs)
        self.exact = call(copy.deepcopy(self.model).double(), _double(inputs))
        # A split model rounds as often as the unsplit one, in another order: its error is of the same size. The maximum of
        # different samples of the same rounding differs, by less than 2 for this many elements; 1e-6 is 8 units in the last
        # place of 1, for outputs whose dense error happens to be nearly 0.
        self.tolerance = 2 * self.error(self.dense) + 1e-6

    def error(self, output):
        """Largest difference from the exact result."""
        return (output.double() - self.exact).abs().max().item()

    def copies(self, size):
        return [copy.deepcopy(self.model) for _ in range(size)]


def call(model, inputs):
    """All outputs in one row."""
    with torch.no_grad():
        return torch.cat([output.flatten() for output in outputs_of(model, inputs)])


def outputs_of(model, inputs):
    """Of the model, as tensors. Lists of inputs are copied, since some models empty them."""
    given = {name: list(value) if isinstance(value, list) else value for name, value in inputs.items()}
    return tensors(model(**given, return_dict=False))


def tensors(outputs):
    """Those of a tuple of tensors, lists of them, and None."""
    if isinstance(outputs, (list, tuple)):
        return [tensor for output in outputs for tensor in tensors(output)]
    return [] if outputs is None else [outputs]


def _double(value):
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _double(item) for name, item in value.items()}
    return type(value)(map(_double, value)) if isinstance(value, (list, tuple)) else value


def wan(image=False, kind=WanTransformer3DModel, **config):
    torch.manual_seed(1)
    extra = {"image_dim": 16, "added_kv_proj_dim": 32} if image else {}
    return kind(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
        **extra,
        **config,
    )


def wan_inputs(image=False, per_token_time=False, frames=3):
    torch.manual_seed(2)
    tokens = frames * 5 * 7
    inputs = {
        "hidden_states": torch.randn(2, 4, frames, 10, 14),
        "timestep": torch.randint(0, 999, (2, tokens)) if per_token_time else torch.tensor([700, 700]),
        "encoder_hidden_states": torch.randn(2, 512 if image else 12, 16),
    }
    if image:
        inputs["encoder_hidden_states_image"] = torch.randn(2, 257, 16)
    return inputs


def flux():
    torch.manual_seed(1)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


def flux_inputs(controlnet=False, image=35, text=33):
    torch.manual_seed(2)
    inputs = {
        "hidden_states": torch.randn(2, image, 16),
        "encoder_hidden_states": torch.randn(2, text, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.5, 0.5]),
        "img_ids": torch.randint(0, 9, (image, 3)).float(),
        "txt_ids": torch.zeros(text, 3),
    }
    if controlnet:
        inputs["controlnet_block_samples"] = [torch.randn(2, image, 32)]
        inputs["controlnet_single_block_samples"] = [torch.randn(2, image, 32) for _ in range(2)]
    return inputs


def flux2():
    torch.manual_seed(1)
    return Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )


def flux2_inputs(image=35, text=33):
    torch.manual_seed(2)
    return {
        "hidden_states": torch.randn(2, image, 16),
        "encoder_hidden_states": torch.randn(2, text, 32),
        "timestep": torch.tensor([0.5, 0.5]),
        "guidance": torch.tensor([1.0, 1.0]),
        "img_ids": torch.randint(0, 9, (1, image, 4)).float().expand(2, -1, -1),
        "txt_ids": torch.randint(0, 9, (1, text, 4)).float().expand(2, -1, -1),
    }


def qwen(heads=3, **config):
    torch.manual_seed(1)
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=heads,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
        **config,
    )


def qwen_inputs(text=33, masked=True, shapes=((1, 6, 8),), image=None):
    """The text of the entries has 20 tokens, and 7 with a hole, of ``text``."""
    torch.manual_seed(2)
    image = image or sum(t * h * w for t, h, w in shapes)
    mask = torch.ones(2, text, dtype=torch.bool)
    mask[0, 20:] = False
    mask[1, 7:] = False
    mask[1, 3] = False
    return {
        "hidden_states": torch.randn(2, image, 16),
        "encoder_hidden_states": 3 * torch.randn(2, text, 16),
        "encoder_hidden_states_mask": mask if masked else None,
        "timestep": torch.tensor([0.5, 0.5]),
        "img_shapes": [[tuple(shape) for shape in shapes]] * 2,
    }


def ltx():
    torch.manual_seed(1)
    return LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=16,
    )


def ltx_inputs(per_token_time=False):
    torch.manual_seed(2)
    tokens = 3 * 4 * 5
    mask = torch.ones(2, 33)
    mask[0, 21:] = 0
    mask[1, :9] = 0
    return {
        "hidden_states": torch.randn(2, tokens, 8),
        "encoder_hidden_states": 3 * torch.randn(2, 33, 16),
        "timestep": torch.randint(0, 999, (2, tokens)).float() if per_token_time else torch.tensor([[700.0], [700.0]]),
        "encoder_attention_mask": mask,
        "num_frames": 3,
        "height": 4,
        "width": 5,
    }


def ltx2(rope="split"):
    torch.manual_seed(1)
    return LTX2VideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        num_layers=2,
        caption_channels=16,
        rope_double_precision=False,
        rope_type=rope,
    )


def ltx2_inputs(per_token_time=False):
    torch.manual_seed(2)
    video, sound = 3 * 4 * 5, 9
    mask = torch.ones(2, 33)
    mask[0, 21:] = 0
    inputs = {
        "hidden_states": torch.randn(2, video, 8),
        "audio_hidden_states": torch.randn(2, sound, 4),
        "encoder_hidden_states": 3 * torch.randn(2, 33, 16),
        "audio_encoder_hidden_states": 3 * torch.randn(2, 33, 16),
        "timestep": torch.tensor([700.0, 700.0]),
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "num_frames": 3,
        "height": 4,
        "width": 5,
        "audio_num_frames": sound,
    }
    if per_token_time:
        inputs["timestep"] = torch.randint(0, 999, (2, video)).float()
        inputs["audio_timestep"] = torch.tensor([700.0, 700.0])
    return inputs


#: What the manual says is supported: a name, and how to make the model and its inputs.
CASES = {
    "Wan": lambda: Case(wan(), wan_inputs()),
    "Wan, a time for each token": lambda: Case(wan(), wan_inputs(per_token_time=True)),
    "Wan I2V": lambda: Case(wan(True), wan_inputs(True)),
    "ChronoEdit": lambda: Case(wan(True, ChronoEditTransformer3DModel), wan_inputs(True)),
    "Flux": lambda: Case(flux(), flux_inputs()),
    "Flux with ControlNet": lambda: Case(flux(), flux_inputs(controlnet=True)),
    "Flux 2": lambda: Case(flux2(), flux2_inputs()),
    "QwenImage": lambda: Case(qwen(), qwen_inputs(masked=False)),
    "QwenImage, text masks": lambda: Case(qwen(), qwen_inputs()),
    "QwenImage Edit": lambda: Case(qwen(zero_cond_t=True), qwen_inputs(shapes=((1, 6, 8), (1, 3, 4)))),
    "LTX": lambda: Case(ltx(), ltx_inputs()),
    "LTX, a time for each token": lambda: Case(ltx(), ltx_inputs(True)),
    "LTX 2": lambda: Case(ltx2(), ltx2_inputs()),
    "LTX 2, a time for each token": lambda: Case(ltx2("interleaved"), ltx2_inputs(True)),
    "SkyReels V2": lambda: Case(wan(kind=SkyReelsV2Transformer3DModel), wan_inputs()),
    "SkyReels V2, a time for each frame": lambda: Case(
        wan(kind=SkyReelsV2Transformer3DModel),
        {**wan_inputs(), "timestep": torch.tensor([[700, 300, 20], [40, 999, 5]]), "enable_diffusion_forcing": True},
    ),
}

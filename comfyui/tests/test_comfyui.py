"""The pack in a ComfyUI that is installed here: its attention functions, and models of its own classes with made-up weights.

``KYKLOS_COMFYUI`` is its folder. Its requirements are installed in the Python that runs this.
"""

from __future__ import annotations

import os
import sys

import pytest

torch = pytest.importorskip("torch")
FOLDER = os.environ.get("KYKLOS_COMFYUI")
if not FOLDER:
    pytest.skip("KYKLOS_COMFYUI is not the folder of a ComfyUI", allow_module_level=True)

sys.path.insert(0, FOLDER)
import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True
import comfy.ldm.modules.attention as attention  # noqa: E402
import comfy.ops  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
from conftest import pack, truth  # noqa: E402
from kyklos_pack.sharing import open_helpers  # noqa: E402

HEADS, DIM = 4, 32


def node(model):
    (got,) = pack.NODE_CLASS_MAPPINGS["KyklosHelpers"]().apply(model, enabled=True, smallest_tokens=8, wire="same")
    return got


def overridden(helpers):
    class Model:
        model_options = {"transformer_options": {}}

        def clone(self):
            return self

    return node(Model()).model_options["transformer_options"]


def weights(model):
    """Weights of moderate size, so that every layer matters."""
    made = torch.Generator().manual_seed(3)
    for name, weight in sorted(model.state_dict().items()):
        spread = weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.1
        weight.copy_(torch.randn(weight.shape, generator=made) * spread + (1 if "norm" in name and name.endswith("weight") else 0))
    return model


@pytest.mark.parametrize("name", ["basic", "split", "sub_quad", "pytorch"])
@pytest.mark.parametrize("takes_heads", [False, True])
@pytest.mark.parametrize("gives_heads", [False, True])
@pytest.mark.parametrize("mask_axes", [0, 2, 3, 4])
def test_functions(helpers, name, takes_heads, gives_heads, mask_axes):
    made = torch.Generator().manual_seed(4)
    shapes = [(2, HEADS, 48, DIM), (2, HEADS, 64, DIM), (2, HEADS, 64, DIM)]
    q, k, v = (torch.randn(shape, generator=made) for shape in shapes)
    shape = {0: None, 2: (48, 64), 3: (2, 48, 64), 4: (2, HEADS, 48, 64)}[mask_axes]
    mask = None if shape is None else torch.randn(shape, generator=made)
    axes = mask if mask_axes in (0, 4) else mask.reshape(-1, 1, 48, 64)
    given = (q, k, v) if takes_heads else [t.transpose(1, 2).flatten(2) for t in (q, k, v)]
    function = getattr(attention, f"attention_{name}")
    layout = {"mask": mask, "skip_reshape": takes_heads, "skip_output_reshape": gives_heads}
    got = function(*given, HEADS, **layout, transformer_options=overridden(helpers))
    plain = function(*given, HEADS, **layout)
    want = truth(q, k, v, axes)
    torch.testing.assert_close(got, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.double(), want if gives_heads else want.transpose(1, 2).flatten(2), atol=1e-5, rtol=1e-5)
    assert len(helpers.calls) == 1 and open_helpers().counts.shared == 1 and not open_helpers().counts.error


def wan():
    from comfy.ldm.wan.model import WanModel

    options = {"dim": 512, "in_dim": 16, "out_dim": 16, "ffn_dim": 256, "text_dim": 4096, "num_heads": HEADS, "num_layers": 2}
    model = weights(WanModel(model_type="t2v", **options, dtype=torch.float32, operations=comfy.ops.manual_cast))
    return comfy.sd.load_diffusion_model_state_dict(dict(model.state_dict()))


def picture(model):
    made = torch.Generator().manual_seed(5)
    conditions = [[[torch.randn(1, 20, 4096, generator=made), {}]] for _ in range(2)]
    latent = torch.zeros(1, 16, 2, 16, 16)
    noise = torch.randn(latent.shape, generator=made)
    return comfy.sample.sample(model, noise, 3, 4.0, "euler", "simple", *conditions, latent)


@torch.inference_mode()
def test_a_picture_of_the_sampler(helpers):
    model = wan()
    alone = picture(model)
    assert alone.std() > 0.1 and not helpers.calls
    shared = node(model)
    got = picture(shared)
    # Three steps, two blocks, self and cross attention (20 keys), both conditions in one batch or after each other.
    assert len(helpers.calls) >= 12 and not open_helpers().counts.error
    torch.testing.assert_close(got, alone, atol=2e-4, rtol=2e-4)
    # A negative control: a helper that sends zeros is seen.
    helpers.attention = lambda original, q, k, v, **options: torch.zeros_like(q)
    assert (picture(shared) - alone).abs().max() > 0.02
    # A helper that fails is not.
    helpers.attention = lambda *args, **options: 1 / 0
    assert torch.equal(picture(shared), alone)
    assert "ZeroDivisionError" in open_helpers().counts.error
    # Nor is the node of the model that it was made from.
    assert torch.equal(picture(model), alone)


@torch.inference_mode()
def test_blocks_that_give_heads(helpers):
    from comfy.ldm.flux.model import Flux

    options = {"in_channels": 4, "out_channels": 4, "vec_in_dim": 32, "context_in_dim": 32, "hidden_size": HEADS * DIM, "mlp_ratio": 2.0}
    options |= {"num_heads": HEADS, "depth": 2, "depth_single_blocks": 2, "axes_dim": [8, 12, 12], "theta": 10000, "patch_size": 2}
    options |= {"qkv_bias": True, "guidance_embed": False}
    model = weights(Flux(**options, dtype=torch.float32, operations=comfy.ops.manual_cast))
    made = torch.Generator().manual_seed(6)
    x, context, y = (torch.randn(shape, generator=made) for shape in [(1, 4, 16, 16), (1, 12, 32), (1, 32)])
    given = (x, torch.tensor([0.5]), context, y)
    alone = model(*given, transformer_options={})
    got = model(*given, transformer_options=overridden(helpers))
    assert len(helpers.calls) == 4 and open_helpers().counts.shared == 4
    torch.testing.assert_close(got, alone, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_blocks_of_a_unet(helpers):
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    options = {"image_size": 16, "in_channels": 4, "out_channels": 4, "model_channels": 32}
    options |= {"num_res_blocks": [1, 1], "channel_mult": (1, 2)}
    options |= {"transformer_depth": [1, 1], "transformer_depth_output": [1, 1, 1, 1], "transformer_depth_middle": 1, "num_heads": 4}
    options |= {"use_spatial_transformer": True, "context_dim": 32, "use_linear_in_transformer": True}
    model = weights(UNetModel(**options, dtype=torch.float32, operations=comfy.ops.manual_cast))
    made = torch.Generator().manual_seed(7)
    given = (torch.randn(2, 4, 16, 16, generator=made), torch.tensor([10.0, 10.0]), torch.randn(2, 12, 32, generator=made))
    alone = model(*given, transformer_options={})
    got = model(*given, transformer_options=overridden(helpers))
    # Self and cross attention of each block, all of them shared.
    assert len(helpers.calls) == 14 and open_helpers().counts.shared == 14
    torch.testing.assert_close(got, alone, atol=1e-4, rtol=1e-4)

"""VAEs whose rows are split over uneven ranks, against themselves on one process in float64."""

import copy

import pytest
import tiny_vaes as tiny
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import kyklos
from kyklos.diffusers import split_vae, timed
from kyklos.diffusers._vae import layers
from kyklos.diffusers._vae import split as splits

SHARES = pytest.mark.parametrize("shares", [(3, 7), (2, 1, 5)], ids=lambda shares: ":".join(map(str, shares)))


@SHARES
@pytest.mark.parametrize("name", tiny.VAES)
def test_a_split_vae_computes_what_the_whole_one_does(name, shares):
    z, picture, of_picture, x, code, of_code = tiny.wanted(name)

    def call(model, handle):
        assert handle.methods == ("decode", "encode"), handle.whole
        return tiny.decoded(model, z), tiny.encoded(model, x)

    for found, parameters in tiny.split(name, shares, call):
        assert (found - picture).abs().max() <= 2 * of_picture + 1e-6 * picture.abs().max()
        assert (parameters - code).abs().max() <= 2 * of_code + 1e-6 * code.abs().max()


# What looks at other rows, in a VAE that has it.
FUNCTIONS = {
    F.conv2d: "AutoencoderKL",
    F.group_norm: "AutoencoderKL",
    F.scaled_dot_product_attention: "AutoencoderKL",
    F.pad: "AutoencoderKLWan",
    F.conv3d: "AutoencoderKLLTXVideo",
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_control_of_the_test_above(function, monkeypatch):
    """Without any of its layers a VAE is refused; and without the comparison its result is far off, or has other rows."""
    name = FUNCTIONS[function]
    z, picture, *_ = tiny.wanted(name)
    monkeypatch.delitem(layers._RUN, function)
    with pytest.raises(kyklos.RequestError, match=f"{name}.decode in parts is not what it is whole|do not keep the proportion"):
        tiny.split(name, (3, 7), lambda model, handle: None)
    monkeypatch.setattr(splits, "_difference", lambda *_: "")
    try:
        found, *_ = tiny.split(name, (3, 7), lambda model, handle: tiny.decoded(model, z))
    except kyklos.RequestError:
        return
    assert (found - picture).abs().max() > 1e-2 * picture.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["AutoencoderKL", "AutoencoderKLWan"])
def test_types_of_16_bits(name, dtype):
    model = copy.deepcopy(tiny.vae(name)).to(dtype)
    z = tiny.latents(name).to(dtype)
    picture = tiny.decoded(copy.deepcopy(model).double(), z.double())
    alone = (tiny.decoded(model, z) - picture).square().mean().sqrt()
    for found in tiny.split(name, (2, 1, 5), lambda part, _: tiny.decoded(part, z), model):
        assert found.dtype == dtype and (found - picture).square().mean().sqrt() <= 1.5 * alone


def test_batches_slices_and_plain_results():
    z = tiny.latents("AutoencoderKL", batch=2)
    picture = tiny.decoded(copy.deepcopy(tiny.vae("AutoencoderKL")).double(), z.double())

    def call(model, handle):
        together = model.decode(z=z, return_dict=False)
        assert isinstance(together, tuple)
        model.enable_slicing()
        return (
            together[0].detach(),
            tiny.decoded(model, z),
            model.encode(picture.float()).latent_dist.sample(torch.Generator().manual_seed(3)),
        )

    first, second = tiny.split("AutoencoderKL", (3, 7), call)
    for together, apart, _ in (first, second):
        assert (together - picture).abs().max() <= 1e-5 and (apart - picture).abs().max() <= 1e-5
    # The same bits on all ranks, so that they go on alike.
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_one_rank_and_other_columns():
    """Columns, frames and batches are free: only rows are split."""
    z = tiny.latents("AutoencoderKLHunyuanVideo", rows=5, columns=2)[:, :, :2]
    whole = tiny.vae("AutoencoderKLHunyuanVideo")
    for shares in [(1,), (1, 4)]:
        for found in tiny.split("AutoencoderKLHunyuanVideo", shares, lambda model, _: tiny.decoded(model, z)):
            assert (found - tiny.decoded(whole, z)).abs().max() <= 2e-5


class Largest(TorchFunctionMode):
    """Elements of the largest tensor that a convolution makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func in (F.conv2d, F.conv3d):
            self.elements = max(self.elements, found.numel())
        return found


@pytest.mark.parametrize("name", ["AutoencoderKL", "AutoencoderKLWan"])
def test_a_rank_has_its_rows_of_each_layer(name):
    z = tiny.latents(name, rows=16)

    def largest(model, handle=None):
        with Largest() as mode:
            tiny.decoded(model, z)
        return mode.elements

    whole = largest(tiny.vae(name))
    assert tiny.split(name, (4, 1, 3), largest) == [whole // 2, whole // 8, whole * 3 // 8]


def test_a_vae_is_whole_again_without_its_handle():
    models = [copy.deepcopy(tiny.vae("AutoencoderKL")) for _ in range(2)]
    z, picture, *_ = tiny.wanted("AutoencoderKL")

    def run(group):
        model = models[group.rank]
        handle = split_vae(model, group, shares=(3, 7))
        assert repr(handle) == "kyklos.diffusers.VaeHandle(AutoencoderKL, decode and encode)"
        copied = copy.deepcopy(model)
        kept = model.decode
        handle.remove()
        handle.remove()
        assert "decode" not in vars(model) and "encode" not in vars(model) and repr(handle).endswith("removed)")
        if group.rank == 0:
            # No other rank computes.
            assert torch.equal(tiny.decoded(model, z), tiny.decoded(tiny.vae("AutoencoderKL"), z))
            assert torch.equal(kept(z).sample, tiny.decoded(model, z))
        return tiny.decoded(copied, z)

    for found in kyklos.run_local(2, run, device="cpu"):
        assert (found - picture).abs().max() <= 1e-5


def test_times_of_a_split_vae():
    def call(model, handle):
        pipe = type("Pipeline", (), {"components": {"vae": model}})()
        with timed(pipe, handle._split.group) as times:
            tiny.decoded(model, tiny.latents("AutoencoderKL"))
        assert "decode" in vars(model)
        return list(times.parts)

    assert tiny.split("AutoencoderKL", (1, 1), call) == [["vae decode"]] * 2

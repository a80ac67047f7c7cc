"""What a split VAE refuses, on all ranks."""

import copy

import pytest
import tiny_vaes as tiny
import torch
from split_models import all_raise

import kyklos
from kyklos.diffusers import split_vae

NAME = "AutoencoderKL"


def refused(pattern, change=None, call=None, name=NAME, size=2, **options):
    """All ranks get a request error: in the call of a split VAE, or when it is split. ``change(model, rank)`` comes before that."""
    models = [copy.deepcopy(tiny.vae(name)) for _ in range(size)]

    def run(group):
        model = models[group.rank]
        if change is not None:
            change(model, group.rank)
        handle = split_vae(model, group, **options)
        call(model, group.rank)
        handle.remove()

    return all_raise(size, run, pattern)


@pytest.mark.parametrize("name", tiny.UNKNOWN)
def test_vaes_that_mix_rows_in_ways_that_are_not_known(name):
    refused(f"{name}.decode in parts is not|do not keep the proportion|which is not one of rows", name=name)


def test_a_vae_that_draws_noise():
    def noisy(model, rank):
        model.decoder.conv_act.register_forward_hook(lambda module, args, output: output + torch.randn_like(output))

    refused("AutoencoderKL.decode in parts is not what it is whole: row .* differs by", noisy)


def test_an_encoder_that_is_not_known_stays_whole():
    model = copy.deepcopy(tiny.vae(NAME))
    # The mean over all pixels, which no layer says.
    model.encoder.conv_act.register_forward_hook(lambda module, args, output: output - output.mean((2, 3), keepdim=True))
    z, picture, *_, x, _, _ = tiny.wanted(NAME)
    code = tiny.encoded(copy.deepcopy(model).double(), x.double())

    def call(part, handle):
        assert handle.methods == ("decode",) and "encode in parts is not what it is whole" in handle.whole["encode"]
        return tiny.decoded(part, z), tiny.encoded(part, x)

    for found, parameters in tiny.split(NAME, (3, 7), call, model):
        assert (found - picture).abs().max() <= 1e-5 and (parameters - code).abs().max() <= 1e-5


def test_how_it_is_split():
    refused("3 shares for 2 ranks", shares=(1, 1, 1))
    refused("shares 'auto' of a VAE are not known", shares="auto")
    refused("AutoencoderKL.decode was replaced", lambda model, rank: setattr(model, "decode", lambda z: z))
    refused("compiled parts", lambda model, rank: model.decoder.compile())
    refused("has tiling", lambda model, rank: model.enable_tiling())
    refused("rank 1 has other weights", lambda model, rank: model.decoder.conv_in.weight.data.add_(rank))
    refused("not finite in torch.float16; convert", lambda model, rank: model.half().decoder.conv_in.weight.data.fill_(6e4))


def test_it_is_split_once():
    models = [copy.deepcopy(tiny.vae(NAME)) for _ in range(2)]

    def run(group):
        split_vae(models[group.rank], group)
        split_vae(models[group.rank], group)

    all_raise(2, run, "AutoencoderKL is split by kyklos already")


def test_inputs():
    z = tiny.latents(NAME)
    refused("rank 1 has other values of latents", call=lambda model, rank: model.decode(z + rank))
    refused("rank 1 has latents of shape", call=lambda model, rank: model.decode(z[..., rank:]))
    refused("decode of 2 rows on 3 ranks", call=lambda model, rank: model.decode(z[..., :2, :]), size=3)
    refused("encode of 7 rows on 2 ranks, each with a multiple of 2", call=lambda model, rank: model.encode(torch.zeros(1, 3, 7, 8)))
    refused("3 axes", call=lambda model, rank: model.decode(z[0]))
    refused("without a tensor", call=lambda model, rank: model.decode("z"))
    asymmetric = "AsymmetricAutoencoderKL"
    refused(
        "second image",
        call=lambda model, rank: model.decode(z, image=torch.zeros(1, 3, 18, 10), mask=torch.zeros(1, 1, 18, 10)),
        name=asymmetric,
    )


def test_settings_of_later():
    z = tiny.latents(NAME)
    refused("has tiling", call=lambda model, rank: (model.enable_tiling(), model.decode(z)))
    refused("compiled parts", call=lambda model, rank: (model.decoder.compile(), model.decode(z)))

    def dropout(model, rank):
        model.decoder.mid_block.resnets[0].dropout.p = 0.1
        model.train()
        model.decode(z)

    refused("has dropout", call=dropout)


def test_layers_that_need_more_rows_than_a_rank_has():
    def wide(model, rank):
        old = model.decoder.conv_in
        model.decoder.conv_in = torch.nn.Conv2d(old.in_channels, old.out_channels, 5, padding=2)
        torch.nn.init.constant_(model.decoder.conv_in.weight, 0.01)
        torch.nn.init.zeros_(model.decoder.conv_in.bias)

    refused(
        "needs 2 rows of its neighbours, and the ranks have \\[1, 8\\]",
        wide,
        lambda model, rank: model.decode(tiny.latents(NAME)),
        shares=(1, 9),
    )


def test_tokens_that_may_be_those_of_an_image_or_of_a_pixel():
    x = torch.randn(1, 3, 7, 8, 4, generator=torch.Generator().manual_seed(0))
    refused("as many pixels as there are frames", call=lambda model, rank: tiny.encoded(model, x), name="AutoencoderKLMochi")


def test_gradients():
    models = [copy.deepcopy(tiny.vae(NAME)) for _ in range(2)]

    def run(group):
        with split_vae(models[group.rank], group):
            found = models[group.rank].decode(tiny.latents(NAME)).sample
            assert found.requires_grad
            with pytest.raises(NotImplementedError, match="a split VAE has no gradients"):
                found.sum().backward()
            with torch.no_grad():
                assert not models[group.rank].decode(tiny.latents(NAME)).sample.requires_grad

    kyklos.run_local(2, run, device="cpu")


def test_an_exception_in_a_layer_of_one_rank_reaches_the_others():
    models = [copy.deepcopy(tiny.vae(NAME)) for _ in range(3)]

    def run(group):
        model = models[group.rank]
        with split_vae(model, group):
            hook = None
            if group.rank == 1:
                hook = model.decoder.up_blocks[0].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError if group.rank == 1 else kyklos.RequestError, match="division by zero"):
                tiny.decoded(model, tiny.latents(NAME))
            if hook is not None:
                hook.remove()
            # The group and the VAE stay usable.
            return tiny.decoded(model, tiny.latents(NAME))

    for found in kyklos.run_local(3, run, device="cpu"):
        assert (found - tiny.wanted(NAME)[1]).abs().max() <= 1e-5

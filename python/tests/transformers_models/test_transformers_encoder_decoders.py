"""Split encoder-decoders, and encoders of them alone, against one process."""

import copy

import pytest
import torch
import transformers
from tiny_encoder_decoders import ENCODER_DECODERS, encoder_alone, encoder_decoder, source, targets
from tiny_models import on_ranks

import kyklos
import kyklos.torch
import kyklos.transformers
from kyklos.transformers import _stack_pass

SHARES = [[3, 7], [2, 1, 5]]


def in_double(inputs):
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def learned(model, **inputs):
    """The loss, the logits and the gradients of a model."""
    output = model(**inputs)
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return output.loss.detach(), output.logits.detach(), gradients


def close(got, exact, plain, rest=3e-6):
    """Within twice the rounding of one process in float32, which may happen to be exact."""
    return (got - exact).abs().max() <= 2 * (plain - exact).abs().max() + rest * exact.abs().max()


def check(results, model, **inputs):
    """Loss, logits and the sums of gradients of each rank against float64."""
    exact = learned(copy.deepcopy(model).double(), **in_double(inputs))
    plain = learned(copy.deepcopy(model), **inputs)
    for loss, logits, gradients in results:
        assert close(loss, exact[0], plain[0], 1e-6)
        assert close(logits, exact[1], plain[1])
        assert gradients.keys() == exact[2].keys()
        for name, ours in gradients.items():
            assert torch.equal(ours, results[0][2][name]), name
            assert close(ours, exact[2][name], plain[2][name]), name


def step(**inputs):
    """A rank's step: loss, logits, and the gradients summed over the ranks."""

    def work(model, handle, group):
        output = model(**inputs)
        (output.loss / group.size).backward()
        kyklos.torch.sum_gradients(model.parameters(), group)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        return output.loss.detach(), output.logits.detach(), gradients

    return work


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_loss_logits_and_gradients(name, shares):
    model, inputs = encoder_decoder(name), {**source(name), "labels": targets()}
    check(on_ranks(model, len(shares), step(**inputs), shares=shares), model, **inputs)


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_greedy_texts_are_those_of_one_process(name, shares):
    model, inputs = encoder_decoder(name), source(name)
    # Without it random models repeat a few tokens.
    options = {"max_new_tokens": 20, "do_sample": False, "no_repeat_ngram_size": 1}
    want = model.generate(**inputs, **options)

    def work(model, handle, group):
        return model.generate(**inputs, **options), model.generate(**inputs, **options, use_cache=False)

    for cached, whole in on_ranks(model, len(shares), work, shares=shares):
        assert torch.equal(cached, want) and torch.equal(whole, want)

"""Split models that take images beside text: their language model is split, with the rest on every rank."""

import copy

import pytest
import torch
from tiny_models import error, on_ranks, output
from tiny_vision import image_inputs, vision

import kyklos
import kyklos.torch
import kyklos.transformers

NAMES = ["Llava", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5", "Mistral3", "InternVL", "SmolVLM", "Llama4"]


def exact_of(model, inputs):
    """The logits in float64, those that mean something, and the error that a split model may have."""
    double = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    seen = inputs["attention_mask"].bool()
    exact, plain = output(copy.deepcopy(model).double(), **double), output(model, **inputs)
    return exact, 2 * error(plain, exact, seen) + 1e-6 * exact.abs().max().item(), seen


@pytest.mark.parametrize("shares", [[1, 1], [2, 1, 4]], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_pass_and_a_text(name, shares):
    model, inputs = vision(name), image_inputs(name)
    exact, bound, seen = exact_of(model, inputs)
    with torch.no_grad():
        text = model.generate(**inputs, max_new_tokens=10, do_sample=False)

    def work(split, handle, group):
        return (
            output(split, **inputs, use_cache=False),
            output(split, **inputs),
            split.generate(**inputs, max_new_tokens=10, do_sample=False),
        )

    for alone, cached, got in on_ranks(model, len(shares), work, shares=shares):
        assert error(alone, exact, seen) <= bound and error(cached, exact, seen) <= bound
        assert torch.equal(got, text)


def test_images_matter():
    """The control of the test above: other images are other logits."""
    model, inputs = vision("Qwen3VL"), image_inputs("Qwen3VL")
    exact, bound, seen = exact_of(model, inputs)
    assert error(output(model, **{**inputs, "pixel_values": inputs["pixel_values"].flip(0)}), exact, seen) > 1000 * bound


def test_masks_that_the_model_around_the_language_model_makes():
    model, inputs = vision("Gemma3"), image_inputs("Gemma3", False)
    exact, bound, seen = exact_of(model, inputs)
    with torch.no_grad():
        text = model.generate(**inputs, max_new_tokens=10, do_sample=False)

    def work(split, handle, group):
        return output(split, **inputs), split.generate(**inputs, max_new_tokens=10, do_sample=False)

    for got, written in on_ranks(model, 2, work, shares=[1, 3]):
        assert error(got, exact, seen) <= bound and torch.equal(written, text)


def test_rank_0_chooses_the_tokens_of_the_whole_model():
    model, inputs = vision("Qwen2VL"), image_inputs("Qwen2VL")
    torch.manual_seed(7)
    with torch.no_grad():
        text = model.generate(**inputs, max_new_tokens=10, do_sample=True)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def work(group):
        kyklos.transformers.parallelize(copies[group.rank], group)
        # The generator is that of all threads: rank 1 does not use it, and would choose other tokens.
        if group.rank == 0:
            torch.manual_seed(7)
        return copies[group.rank].generate(**inputs, max_new_tokens=10, do_sample=group.rank == 0)

    for got in kyklos.run_local(2, work, device="cpu"):
        assert torch.equal(got, text)


@pytest.mark.parametrize("gather", ["auto", "none"])
def test_gradients_also_of_what_is_whole(gather):
    model, inputs = vision("Qwen3VL").train(), image_inputs("Qwen3VL")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    alone = copy.deepcopy(model)
    alone(**inputs, labels=labels, use_cache=False).loss.backward()

    def work(split, handle, group):
        loss = split(**inputs, labels=labels, use_cache=False).loss
        (loss / (group.size if gather == "auto" else 1)).backward()
        kyklos.torch.sum_gradients(split.parameters(), group)
        return {name: parameter.grad for name, parameter in split.named_parameters()}

    for gradients in on_ranks(model, 2, work, shares=[2, 3], gather=gather):
        for name, parameter in alone.named_parameters():
            if parameter.grad is not None:
                scale = parameter.grad.abs().max()
                assert (gradients[name] - parameter.grad).abs().max() <= 2e-4 * scale + 1e-7, name


def test_positions_of_images_that_do_not_fit():
    model, inputs = vision("Qwen2VL"), image_inputs("Qwen2VL")
    positions = torch.arange(34).expand(3, 2, 34)

    def work(split, handle, group):
        for wrong in (positions[:, :, :-1], positions[:2], positions[None]):
            with pytest.raises(kyklos.RequestError, match="position_ids of shape"):
                split.model.language_model(input_ids=inputs["input_ids"], position_ids=wrong)

    on_ranks(model, 2, work)

"""Adapters of the library peft on split models."""

import copy

import pytest
import torch
from split_models import case
from tiny_models import build, error, output, reference, texts
from tiny_transformers import Case, call

import kyklos
import kyklos.diffusers
import kyklos.transformers

peft = pytest.importorskip("peft", reason="peft is not installed")


def lora(seed, *targets):
    """A configuration with random weights for both factors, so that the adapter changes the output."""
    torch.manual_seed(seed)
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), init_lora_weights=False)


def decoder(seed=3):
    model = build("llama")
    model.add_adapter(lora(seed, "q_proj", "v_proj", "down_proj"))
    return model


def on_ranks(models, work):
    """``work(model, group)`` on each rank with its own model."""
    return kyklos.run_local(len(models), lambda group: work(models[group.rank], group), device="cpu")


def test_adapters_of_a_decoder():
    model = decoder()
    ids = texts(2, 31)
    exact, bound, seen = reference(model, input_ids=ids)
    text = model.generate(ids, max_new_tokens=20, do_sample=False)
    # The adapter matters.
    assert error(output(build("llama"), input_ids=ids), exact, seen) > 100 * bound

    def work(model, group):
        kyklos.transformers.parallelize(model, group, shares=[3, 7])
        return output(model, input_ids=ids), model.generate(ids, max_new_tokens=20, do_sample=False)

    for logits, tokens in on_ranks([copy.deepcopy(model) for _ in range(2)], work):
        assert error(logits, exact, seen) <= bound
        assert torch.equal(tokens, text)


def test_adapters_that_come_after_parallelize():
    models = [build("llama") for _ in range(2)]
    ids = texts(2, 31)
    whole = decoder()
    exact, bound, seen = reference(whole, input_ids=ids)

    def work(model, group):
        handle = kyklos.transformers.parallelize(model, group)
        group.attend(*[torch.ones(1, 1, 1, 8)] * 3, layout="bshd", label="all models are split")
        if group.rank == 0:
            # The seed is global, and ranks are threads: one after the other.
            for each in models:
                each.add_adapter(lora(3, "q_proj", "v_proj", "down_proj"))
        group.attend(*[torch.ones(1, 1, 1, 8)] * 3, layout="bshd", label="adapters are there")
        with_adapter = output(model, input_ids=ids)
        group.attend(*[torch.ones(1, 1, 1, 8)] * 3, layout="bshd", label="all ranks have used them")
        model.disable_adapters()
        without = output(model, input_ids=ids)
        handle.remove()
        return with_adapter, without

    plain, bound_plain, _ = reference(build("llama"), input_ids=ids)
    for with_adapter, without in on_ranks(models, work):
        assert error(with_adapter, exact, seen) <= bound
        assert error(without, plain, seen) <= bound_plain


def test_a_model_that_peft_wraps_is_refused_and_the_one_inside_is_taken():
    wrapped = peft.get_peft_model(build("llama"), lora(3, "q_proj", "v_proj"))
    ids = texts(1, 23)
    want = wrapped.generate(input_ids=ids, max_new_tokens=20, do_sample=False)

    def work(model, group):
        with pytest.raises(kyklos.RequestError, match="a PeftModel is no model of transformers"):
            kyklos.transformers.parallelize(model, group)
        kyklos.transformers.parallelize(model.get_base_model(), group)
        return model.generate(input_ids=ids, max_new_tokens=20, do_sample=False)

    for got in on_ranks([copy.deepcopy(wrapped) for _ in range(2)], work):
        assert torch.equal(got, want)


def test_ranks_with_other_adapters_are_refused():
    def work(model, group):
        with pytest.raises(kyklos.RequestError, match="rank 1 has other weights"):
            kyklos.transformers.parallelize(model, group)

    on_ranks([decoder(seed=3), decoder(seed=4)], work)


def denoiser(scale=1.0):
    model = copy.deepcopy(case("Wan").model)
    model.add_adapter(lora(3, "to_q", "to_v", "ffn.net.2"), adapter_name="style")
    model.set_adapters("style", scale)
    return model


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_of_a_denoiser(when):
    made = Case(denoiser(0.7), case("Wan").inputs)
    assert made.error(case("Wan").dense) > 100 * made.tolerance
    models = [denoiser(0.7 if when == "before" else 0.2) for _ in range(2)]

    def work(model, group):
        with kyklos.diffusers.parallelize(model, group, shares=(3, 7)):
            if when == "after":
                call(model, made.inputs)
                model.set_adapters("style", 0.7)
            return call(model, made.inputs)

    for got in on_ranks(models, work):
        assert made.error(got) <= made.tolerance

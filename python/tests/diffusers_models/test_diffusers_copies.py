"""Copies of split transformers of diffusers, weights that learn, and errors of one rank."""

import copy
import gc
import io
import pickle

import pytest
import tiny_transformers as tiny
import torch
from split_models import case
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import kyklos
import kyklos.torch
from kyklos.diffusers import _attention, parallelize


def halve(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def halved(made):
    model = copy.deepcopy(made.model)
    halve(model)
    return tiny.Case(model, made.inputs)


@pytest.mark.parametrize("name", ["Flux", "QwenImage, text masks", "LTX 2"])
def test_a_copy_computes_with_its_own_weights_on_all_ranks(name):
    made = case(name)
    half, models = halved(made), made.copies(3)

    def run(group):
        model = models[group.rank]
        with parallelize(model, group, shares=(2, 1, 5)) as handle:
            kept = copy.deepcopy(model)
            halve(model)
            counts = []
            attend = group.attend
            group.attend = lambda *args, **options: counts.append(options["label"]) or attend(*args, **options)
            outputs = [tiny.call(one, made.inputs) for one in (kept, model, kept)]
            calls = [sum(f"model {number}, " in label and "attention" in label for label in counts) for number in (1, 2)]
            # Without those that gather masks.
            assert calls[0] >= handle._split.calls.always and calls[1] >= 2 * handle._split.calls.always
        return outputs, tiny.call(kept, made.inputs)

    for (whole, of_half, again), after in kyklos.run_local(3, run, device="cpu"):
        assert half.error(of_half) <= half.tolerance
        assert all(made.error(output) <= made.tolerance for output in (whole, again, after))


def test_the_copy_of_a_handle_makes_the_copy_whole():
    made = case("Flux")
    models = made.copies(2)

    def run(group):
        kept, of_kept = copy.deepcopy((models[group.rank], handles[group.rank]))
        handles[group.rank].remove()
        assert torch.equal(tiny.call(models[group.rank], made.inputs), made.dense)
        split = tiny.call(kept, made.inputs)
        of_kept.remove()
        assert not kept._forward_pre_hooks and not kept.proj_out._forward_hooks
        return split, tiny.call(kept, made.inputs)

    handles = {}

    def work(group):
        handles[group.rank] = parallelize(models[group.rank], group)
        return run(group)

    for split, whole in kyklos.run_local(2, work, device="cpu"):
        assert made.error(split) <= made.tolerance and not torch.equal(split, made.dense)
        assert torch.equal(whole, made.dense)
    gc.collect()
    assert not _attention._splits


def loss_of(model, inputs):
    (output,) = model(**inputs, return_dict=False)
    return output.square().mean()


def test_averages_of_weights_are_those_of_one_process():
    made = case("Flux")

    def train(model, group=None):
        learner = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (loss_of(model, made.inputs) / (group.size if group else 1)).backward()
            if group is not None:
                kyklos.torch.sum_gradients(model.parameters(), group)
            optimizer.step()
            learner.update_parameters(model)
        return tiny.call(learner.module, made.inputs), tiny.call(model, made.inputs)

    want, last = train(copy.deepcopy(made.model))
    assert (want - last).abs().max() > 1e-3 * want.abs().max()
    models = made.copies(2)

    def run(group):
        with parallelize(models[group.rank], group, shares=(3, 7)):
            return train(models[group.rank], group)[0]

    for got in kyklos.run_local(2, run, device="cpu"):
        assert (got - want).abs().max() < 1e-5


def test_pickles_are_refused_and_weights_are_saved():
    made = case("Flux")
    model = made.copies(1)[0]
    with kyklos.Group.local(1, device="cpu")[0] as group, parallelize(model, group):
        for save in (pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
            with pytest.raises(TypeError, match=r"split over it: save model.state_dict\(\), or the model after remove\(\)"):
                save(model)
        assert model.state_dict().keys() == made.model.state_dict().keys()
        torch.save(model.state_dict(), io.BytesIO())


def test_steps_with_gradients_of_one_rank_are_an_error_of_all():
    made = case("Flux")
    models = made.copies(2)

    def run(group):
        model = models[group.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with parallelize(model, group, shares=(3, 7)):
            loss_of(model, made.inputs).backward()
            optimizer.step()
            with pytest.raises(kyklos.RequestError, match="since the last pass.*sum_gradients") as raised:
                loss_of(model, made.inputs)
            return str(raised.value)

    first, second = kyklos.run_local(2, run, device="cpu")
    assert first == second and "rank 1 has other weights of FluxTransformer2DModel" in first


REFUSED = {
    "argument": ("Flux 2", {"kv_cache_mode": "extract"}, "called with kv_cache_mode"),
    "axes": ("Flux", {"img_ids": torch.zeros(1, 35, 3)}, "img_ids has 3 axes|has img_ids of shape"),
    "tokens": ("Flux", {"txt_ids": torch.zeros(1, 3), "encoder_hidden_states": torch.ones(2, 1, 32)}, "tokens for 2 ranks|of shape"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_one_rank_refuses_is_an_error_of_all(what):
    name, change, says = REFUSED[what]
    made = case(name)
    models = made.copies(2)

    def run(group):
        model = models[group.rank]
        with parallelize(model, group):
            with pytest.raises(kyklos.RequestError, match=says):
                tiny.call(model, {**made.inputs, **(change if group.rank else {})})
            return tiny.call(model, made.inputs)

    for output in kyklos.run_local(2, run, device="cpu"):
        assert made.error(output) <= made.tolerance


def test_a_transformer_that_one_rank_cannot_split_and_attention_that_one_rank_refuses():
    made = case("Flux")
    models = made.copies(2)

    def run(group):
        model = models[group.rank]
        with pytest.raises(kyklos.RequestError, match="2 shares|shares for 2 ranks"):
            parallelize(model, group, shares=(1, 1, 1) if group.rank else None)
        with parallelize(model, group) as handle:
            if group.rank:
                hook = model.transformer_blocks[1].attn.register_forward_pre_hook(
                    lambda *_: _attention.attention(handle._split, *torch.ones(3, 2, 8, 2, 16), is_causal=True)
                )
            with pytest.raises(kyklos.RequestError, match="attends with is_causal"):
                tiny.call(model, made.inputs)
            if group.rank:
                hook.remove()
            return tiny.call(model, made.inputs)

    for output in kyklos.run_local(2, run, device="cpu"):
        assert made.error(output) <= made.tolerance

"""Copies of split models compute with their own weights, over the ranks of the same group."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from tiny_models import build, error, on_ranks, output, reference, texts
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import kyklos
import kyklos.torch
import kyklos.transformers

IDS = texts(2, 19)


def halve(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def halved(model):
    halve(model := copy.deepcopy(model))
    return model


@pytest.mark.parametrize("family", ["llama", "opt", "bert"])
def test_a_copy_keeps_its_weights_when_the_original_learns(family):
    """The pooler of BERT has a hook; of OPT the decoder inside of the body is split."""
    model = build(family)
    whole, half = (reference(one, input_ids=IDS) for one in (model, halved(model)))

    def work(model, handle, group):
        kept = copy.deepcopy(model)
        halve(model)
        seen = []
        attend = group.attend
        group.attend = lambda *args, **options: seen.append(args[0].shape) or attend(*args, **options)
        outputs = [output(one, input_ids=IDS) for one in (kept, model, kept)]
        # Layers of both got this rank's tokens.
        assert any(shape[1] < 19 for shape in seen)
        return outputs

    for outputs in on_ranks(model, 3, work, shares=[2, 1, 5]):
        for got, (exact, bound, visible) in zip(outputs, (whole, half, whole), strict=True):
            assert error(got, exact, visible) <= bound


def test_averages_of_weights_have_the_loss_of_one_process():
    model = build("llama")

    def train(model, group=None):
        learner = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for batch in texts(3, 31).split(1):
            optimizer.zero_grad()
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
            if group is not None:
                kyklos.torch.sum_gradients(model.parameters(), group)
            optimizer.step()
            learner.update_parameters(model)
        with torch.no_grad():
            return [one(input_ids=IDS, labels=IDS, use_cache=False).loss for one in (learner.module, model)]

    want, last = train(copy.deepcopy(model))
    assert abs(want - last) > 1e-3 * want
    parts = on_ranks(model, 2, lambda model, handle, group: train(model, group), shares=[3, 7], gather="none")
    assert abs(sum(part for part, _ in parts) - want) < 1e-5 * want


def test_a_copy_generates_with_its_own_weights():
    model = build("mistral")
    want, want_half = (one.generate(IDS, max_new_tokens=20, do_sample=False) for one in (model, halved(model)))
    assert not torch.equal(want, want_half)

    def work(model, handle, group):
        kept = copy.deepcopy(model)
        halve(model)
        return [one.generate(IDS, max_new_tokens=20, do_sample=False) for one in (kept, model)]

    for got, got_half in on_ranks(model, 2, work, shares=[3, 7]):
        assert torch.equal(got, want) and torch.equal(got_half, want_half)


def test_the_copy_of_a_handle_restores_the_copy():
    model = build("bert")

    def work(model, handle, group):
        kept, of_kept = copy.deepcopy((model, handle))
        handle.remove()
        # The original is whole, on this rank alone, and the copy is split.
        alone = output(model, input_ids=IDS) if group.rank == 0 else None
        got = output(kept, input_ids=IDS)
        of_kept.remove()
        for one in (model, kept):
            assert "forward" not in one.__dict__ and one.config._attn_implementation == "sdpa"
            assert not one.pooler._forward_pre_hooks
        return alone, got, output(kept, input_ids=IDS)

    results = on_ranks(model, 2, work)
    want = output(model, input_ids=IDS)
    assert torch.equal(results[0][0], want)
    for _, got, whole in results:
        assert torch.equal(whole, want) and (got - want).abs().max() < 1e-4


def test_a_copy_that_one_rank_keeps_for_itself_disturbs_no_call():
    model = build("llama")
    others = [build("llama") for _ in range(2)]
    want = output(model, input_ids=IDS)

    def work(model, handle, group):
        best = copy.deepcopy(model) if group.rank == 1 else None
        outputs = [output(model, input_ids=IDS)]
        with kyklos.transformers.parallelize(others[group.rank], group):
            outputs.append(output(others[group.rank], input_ids=IDS))
        another = copy.deepcopy(model)
        return *outputs, output(another, input_ids=IDS), best

    for *outputs, _ in on_ranks(model, 2, work):
        assert all((got - want).abs().max() < 1e-4 for got in outputs)


def test_a_copy_and_its_original_in_another_order_are_refused():
    def work(model, handle, group):
        kept = copy.deepcopy(model)
        with pytest.raises(kyklos.RequestError, match="model 1, first pass.*model 1"):
            output(kept if group.rank else model, input_ids=IDS, use_cache=False)
        return [output(one, input_ids=IDS) for one in (model, kept, model)]

    want = output(build("llama"), input_ids=IDS)
    for outputs in on_ranks(build("llama"), 2, work):
        assert all((got - want).abs().max() < 1e-4 for got in outputs)


def test_copies_with_other_weights_on_a_rank_are_refused():
    def work(model, handle, group):
        kept = copy.deepcopy(model)
        if group.rank == 1:
            halve(kept)
        with pytest.raises(kyklos.RequestError, match="rank 1 has other weights of Llama"):
            output(kept, input_ids=IDS)
        return output(model, input_ids=IDS)

    on_ranks(build("llama"), 2, work)


def test_shallow_copies_share_weights_and_group():
    def work(model, handle, group):
        shallow = copy.copy(model)
        halve(model)
        return output(shallow, input_ids=IDS), output(model, input_ids=IDS)

    for got, want in on_ranks(build("llama"), 2, work):
        assert torch.equal(got, want)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_pickles_are_refused_and_weights_are_saved(family):
    model = build(family)

    def work(model, handle, group):
        for save in (pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
            with pytest.raises(TypeError, match=r"split over it: save model.state_dict\(\), or the model after remove\(\)"):
                save(model)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        handle.remove()
        torch.save(model, io.BytesIO())
        return file.getvalue()

    for saved in on_ranks(model, 2, work):
        found = torch.load(io.BytesIO(saved))
        assert found.keys() == model.state_dict().keys()
        assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_caches_with_tokens_are_not_copied():
    def work(model, handle, group):
        cache = handle.cache()
        empty = copy.deepcopy(cache)
        for one in (cache, empty):
            output(model, input_ids=IDS, past_key_values=one)
            assert one.length == 19
        with pytest.raises(TypeError, match="a cache over ranks cannot be copied"):
            copy.deepcopy(cache)

    on_ranks(build("llama"), 2, work)


def test_the_signatures_of_a_split_model_are_those_of_the_model():
    model = build("llama")
    before = [inspect.signature(function) for function in (model.forward, model.model.forward, model.generate)]

    def work(model, handle, group):
        for one in (model, copy.deepcopy(model)):
            assert [inspect.signature(function) for function in (one.forward, one.model.forward, one.generate)] == before

    on_ranks(model, 1, work)

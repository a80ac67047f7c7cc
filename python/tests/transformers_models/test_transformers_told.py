"""Errors that one rank of a split model finds alone are those of all ranks, and the next call of all is right."""

import functools

import pytest
import torch
import transformers
from test_transformers_agreement import IDS, usable
from tiny_models import build, on_ranks, output

import kyklos
import kyklos.transformers


def on_rank_1(model, size, call, says, right, **options):
    """All ranks get the error of ``call(model, handle, other)`` where ``other`` is true on rank 1 only; and the next call of all is right."""

    def work(model, handle, group):
        with pytest.raises(Exception, match=says) as raised:
            call(model, handle, group.rank == 1)
        assert group.rank == 1 or isinstance(raised.value, kyklos.RequestError)
        return right(model)

    return on_ranks(model, size, work, **options)


FORWARD = {
    "shape of the mask": {"attention_mask": torch.ones(2, 18)},
    "attentions": {"output_attentions": True},
    "shape of positions": {"position_ids": torch.zeros(3, 2, 19, dtype=torch.long)},
    "cache": {"past_key_values": transformers.DynamicCache()},
    "unknown": {"surprise": 3},
    "unknown tensor": {"indices": torch.tensor([0, 12])},
    "tokens": {"input_ids": None},
}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_inputs_that_one_rank_refuses(name, family):
    model = build(family)
    want = output(model, input_ids=IDS)

    def call(model, handle, other):
        output(model, **{"input_ids": IDS, **(FORWARD[name] if other else {})})

    says = {"shape of the mask": "attention_mask of shape", "tokens": "needs input_ids", "shape of positions": "position_ids of"}
    results = on_rank_1(model, 3, call, says.get(name, "split model|surprise"), functools.partial(output, input_ids=IDS))
    assert all((got - want).abs().max() < 1e-4 for got in results)


class Deaf:
    """A streamer."""

    def put(self, value):
        pass

    end = put


GENERATE = {
    "streamer": ({"streamer": Deaf()}, "a streamer on rank 1"),
    "beams": ({"num_beams": 2}, "beam_search on a split model"),
    "unknown": ({"surprise": 3}, "surprise"),
    "criteria": ({"stopping_criteria": [lambda ids, scores, **_: 1 / 0]}, "division by zero"),
}


@pytest.mark.parametrize("name", GENERATE)
def test_ways_to_generate_that_one_rank_refuses(name):
    model = build("llama")
    options, says = GENERATE[name]
    want = model.generate(IDS, max_new_tokens=4, do_sample=False)
    rank = 0 if name == "criteria" else 1

    def work(model, handle, group):
        mine = options if group.rank == rank else {}
        with pytest.raises(Exception, match=says) as raised:
            model.generate(IDS, max_new_tokens=4, do_sample=False, **mine)
        assert group.rank == rank or isinstance(raised.value, kyklos.RequestError)
        return model.generate(IDS, max_new_tokens=4, do_sample=False)

    assert all(torch.equal(got, want) for got in on_ranks(model, 2, work))


def test_labels_heads_and_caches_that_one_rank_refuses():
    model = build("mistral")
    right = lambda model: model(input_ids=IDS, labels=IDS).loss.detach()  # noqa: E731

    def labels(model, handle, other):
        model(input_ids=IDS, labels=IDS, **({"logits_to_keep": 1} if other else {}))
        # Rank 0 has its loss by now.
        usable(handle._split.group)

    on_rank_1(model, 2, labels, "leave out logits_to_keep", right, gather="none")

    def head(model, handle, other):
        if other:
            hook = model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            output(model, input_ids=IDS)
            usable(handle._split.group)
        finally:
            if other:
                hook.remove()

    on_rank_1(model, 2, head, "division by zero", right)

    def crop(model, handle, other):
        cache = handle.cache()
        output(model, input_ids=IDS, past_key_values=cache)
        if other:
            cache.crop(-12)
        output(model, input_ids=IDS)

    on_rank_1(model, 2, crop, r"crop\(-12\) of a cache", right)


def test_a_model_that_one_rank_cannot_split():
    models = [(build("llama"), build("llama", attention_dropout=0.0)) for _ in range(2)]

    def work(group):
        model, next_one = models[group.rank]
        with pytest.raises(ValueError, match="shares|could not convert"):
            kyklos.transformers.parallelize(model, group, shares=["fast", "slow"] if group.rank else None)
        # The ranks number their models alike, although one of them has failed on rank 1 only.
        kyklos.transformers.parallelize(next_one, group)
        return output(next_one, input_ids=IDS)

    want = output(models[0][1], input_ids=IDS)
    assert all((got - want).abs().max() < 1e-4 for got in kyklos.run_local(2, work, device="cpu"))

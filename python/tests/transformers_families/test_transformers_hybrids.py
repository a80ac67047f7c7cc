"""Hybrid models: layers that attend are split, and recurrences and convolutions are computed whole by every rank."""

import pytest
import torch
import transformers
from test_transformers_training import check, step
from tiny_hybrids import HYBRIDS, build
from tiny_models import error, in_float64, on_ranks, output, reference, texts

import kyklos
import kyklos.transformers
from kyklos._models.pace import Pace
from kyklos.transformers import _mixers

# Those that keep what they remember in a cache of a class of their own, or in their modules.
OWN_CACHE = {"MiniMax", "RecurrentGemma"}
SHARES = [[3, 7], [2, 1, 5]]
# Each step of a recurrence rounds what the one before it has rounded, so sums in another order differ more than elsewhere.
TIMES = 4
TOKENS = 19


def padded():
    ids, mask = texts(2, TOKENS), torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, :6] = 0
    # Padding that is not 0 after the embedding.
    return {"input_ids": ids, "attention_mask": mask}


def whole(model, **inputs):
    """As :func:`reference`, of a model that does not leave out padding: of the padded texts themselves."""
    exact, plain = (output(one, **inputs).double() for one in (in_float64(model), model))
    seen = inputs["attention_mask"].bool()
    return exact, float(2 * (plain - exact)[seen].abs().max() + 1e-6 * exact[seen].abs().max()), seen


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("name", HYBRIDS)
def test_outputs_texts_and_gradients_are_those_of_one_process(name, shares):
    model, ids = build(name), texts(2, TOKENS)
    inputs, packed = padded(), {"input_ids": ids[:1], "position_ids": torch.cat([torch.arange(7), torch.arange(12)])[None]}
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": name not in OWN_CACHE}
    wanted = [reference(model, **given, use_cache=False) for given in ({"input_ids": ids}, packed)] + [whole(model, **inputs, use_cache=False)]
    text = model.generate(**inputs, **options)

    def work(model, handle, group):
        outputs = [output(model, **given, use_cache=False) for given in ({"input_ids": ids}, packed, inputs)]
        return outputs, model.generate(**inputs, **options), step(True, input_ids=ids, labels=ids, use_cache=False)(model, handle, group)

    results = on_ranks(model, len(shares), work, shares=shares)
    for outputs, got, _ in results:
        assert torch.equal(got, text)
        for (exact, bound, seen), found in zip(wanted, outputs, strict=True):
            assert error(found, exact, seen) <= bound
    check([gradients for *_, gradients in results], model, TIMES, input_ids=ids, labels=ids)


@pytest.mark.parametrize("name", ["Jamba", "Lfm2", "FalconH1"])
def test_losses_of_own_tokens_with_checkpoints(name):
    model, ids = build(name).train(), texts(2, TOKENS)
    model.gradient_checkpointing_enable()
    results = on_ranks(model, 2, step(input_ids=ids, labels=ids, use_cache=False), shares=[3, 7], gather="none")
    check(results, model, TIMES, input_ids=ids, labels=ids)


def test_types_of_16_bits():
    model, ids = build("Bamba").to(torch.bfloat16), texts(2, TOKENS)
    results = on_ranks(model, 2, step(input_ids=ids, labels=ids, use_cache=False), shares=[3, 7], gather="none")
    check(results, model, TIMES, input_ids=ids, labels=ids)


def test_mixers_that_see_the_tokens_of_one_rank_are_found(monkeypatch):
    model, ids = build("Jamba"), texts(2, TOKENS)
    exact, bound, seen = reference(model, input_ids=ids, use_cache=False)
    monkeypatch.setattr(_mixers, "_has_other_tokens", lambda forward: False)
    with pytest.raises(kyklos.RequestError, match="JambaForCausalLM does not compute the same when it is split"):
        on_ranks(model, 2, lambda *_: None)
    for got in on_ranks(model, 2, lambda model, *_: output(model, input_ids=ids, use_cache=False), check=False):
        assert error(got, exact, seen) > 1000 * bound


@pytest.mark.parametrize("name", ["Jamba", "Lfm2", "Qwen3Next"])
def test_mixers_that_take_padding_for_tokens_exceed_the_bound(monkeypatch, name):
    model, inputs = build(name), padded()
    exact, bound, seen = whole(model, **inputs, use_cache=False)
    all_tokens = _mixers._all_tokens

    def without_mask(module, args, kwargs):
        given = all_tokens(module, args, kwargs)
        return given and (given[0], {**given[1], "attention_mask": None})

    monkeypatch.setattr(_mixers, "_all_tokens", without_mask)
    for got in on_ranks(model, 2, lambda model, *_: output(model, **inputs, use_cache=False), check=False):
        assert error(got, exact, seen) > 1000 * bound


@pytest.mark.parametrize("what", ["states of one rank", "no states"])
def test_gradients_without_those_of_other_ranks_are_found(monkeypatch, what):
    """The backward pass of what mixers gather: without the parts of other ranks, and without any."""
    gathered = _mixers.gather

    def gather(group, rows, label):
        everything = gathered(group, rows, label).detach()
        if what == "no states":
            return everything
        first = int(sum(gathered(group, torch.full((1, 1, 1), float(rows.shape[1])), f"{label} rows").flatten()[: group.rank]))
        return torch.cat([everything[:, :first], rows, everything[:, first + rows.shape[1] :]], 1)

    monkeypatch.setattr(_mixers, "gather", gather)
    model, ids = build("Jamba"), texts(2, TOKENS)
    results = on_ranks(model, 2, step(True, input_ids=ids, labels=ids, use_cache=False), shares=[3, 7])
    with pytest.raises(AssertionError):
        check(results, model, TIMES, input_ids=ids, labels=ids)


def test_a_conversation_and_what_states_cannot_forget():
    model, first, second = build("Qwen3Next"), texts(1, 17), texts(1, 9, seed=3)

    def talk(model, cache):
        one = model.generate(first, past_key_values=cache, max_new_tokens=5, do_sample=False)
        return model.generate(torch.cat([one, second], 1), past_key_values=cache, max_new_tokens=5, do_sample=False)

    want = talk(model, transformers.DynamicCache(config=model.config))

    def work(model, handle, group):
        cache = handle.cache()
        got = [talk(model, cache)]
        with pytest.raises(kyklos.RequestError, match="states cannot forget a part of 35 tokens"):
            cache.crop(-3)
        cache.reset()
        got.append(talk(model, cache))
        return got

    for got in on_ranks(model, 2, work, shares=[3, 7]):
        assert all(torch.equal(text, want) for text in got)


def test_layers_that_are_replaced_are_found():
    model, ids = build("Lfm2"), texts(1, TOKENS)

    def work(model, handle, group):
        class Other(torch.nn.Module):
            def forward(self, hidden_states, **_):
                return hidden_states

        model.model.layers[2].conv = Other()
        with pytest.raises(kyklos.RequestError, match=r"1 calls of recurrences or convolutions in a pass over 2 layers; layers\.2\.conv"):
            model(ids)

    on_ranks(model, 2, work)


def test_prompts_in_chunks():
    model, ids = build("Bamba"), texts(2, 23)
    options = {"max_new_tokens": 6, "do_sample": False, "prefill_chunk_size": 8}
    want = model.generate(ids, **options)
    for got in on_ranks(model, 3, lambda model, *_: model.generate(ids, **options), shares=[2, 1, 5]):
        assert torch.equal(got, want)


def test_a_cache_is_not_used_after_a_call_that_failed():
    model, ids = build("Lfm2"), texts(1, 17)

    def work(model, handle, group):
        cache = handle.cache()
        with torch.no_grad():
            model(ids, past_key_values=cache)
            with pytest.raises(kyklos.RequestError, match="inputs"):
                # Ranks with other tokens.
                model(texts(1, 1, seed=group.rank), past_key_values=cache)
            with pytest.raises(kyklos.RequestError, match="states a call that failed has changed"):
                model(texts(1, 1), past_key_values=cache)
            cache.reset()
            return model(ids, past_key_values=cache).logits

    want = output(model, input_ids=ids)
    for got in on_ranks(model, 2, work):
        assert (got - want).abs().max() < 1e-4


def test_shares_by_pace_count_what_every_rank_computes(monkeypatch):
    model, ids = build("Zamba2", max_position_embeddings=64), texts(2, 31)
    exact, bound, seen = reference(model, input_ids=ids, use_cache=False)
    measured, tokens = [], []
    model.model.layers[0].mamba.in_proj.register_forward_pre_hook(lambda module, args: tokens.append(args[0].shape[1]))

    def of(*numbers):
        measured.append(numbers)
        return Pace((1, 1), (10**12,) * 2, (0, 0), (3, 1))

    monkeypatch.setattr(Pace, "of", staticmethod(of))
    work = lambda model, handle, group: (output(model, input_ids=ids, use_cache=False), handle.counts(100))
    for got, counts in on_ranks(model, 2, work, shares="auto", check=False):
        assert error(got, exact, seen) <= bound
        # 3 ns for each of 100 tokens, and 1 for each of its own; against 1 and 1.
        assert counts == [1, 99]
    # A time of each rank, with the tokens of a rank and without them.
    assert len(measured) == 2 and all(len(whole) == 2 for *_, whole in measured) and {1, 64} <= set(tokens)


@pytest.mark.parametrize("name", sorted(OWN_CACHE))
def test_caches_of_a_class_of_their_own_are_refused(name):
    ids = texts(1, 12)

    def work(model, handle, group):
        with pytest.raises(kyklos.RequestError, match=f"{name}ForCausalLM makes no cache.*use_cache=False"):
            model.generate(ids, max_new_tokens=2, do_sample=False)
        with pytest.raises(kyklos.RequestError, match=f"a cache for {name}ForCausalLM, .*: pass use_cache=False"):
            handle.cache()
        return output(model, input_ids=ids)

    model = build(name)
    want = output(model, input_ids=ids)
    for got in on_ranks(model, 2, work):
        assert (got - want).abs().max() < 1e-4


def test_hybrids_without_attention_are_refused():
    model = build("GraniteMoeHybrid", layer_types=["linear_attention"] * 4)
    with pytest.raises(kyklos.RequestError, match="GraniteMoeHybridForCausalLM cannot be split over ranks: none of its layers attends"):
        on_ranks(model, 2, lambda *_: None)


def test_mixers_that_are_not_known_are_refused(monkeypatch):
    monkeypatch.setattr(_mixers, "_MIXERS", {"BambaMixer"})
    with pytest.raises(kyklos.RequestError, match="JambaForCausalLM.*layers of the kinds linear_attention"):
        on_ranks(build("Jamba"), 2, lambda *_: None)

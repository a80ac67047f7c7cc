"""One vote for the layers of a decode step: the same text with fewer votes, and a mix-up is an error on all ranks."""

import copy

import numpy as np
import pytest
import torch
import transformers
from tiny_models import build, on_ranks, texts

import kyklos
import kyklos.transformers
from kyklos.transformers import _steps

PROMPT, TOKENS = 19, 40


def greedy(model, ids, tokens=TOKENS, **options):
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, **options)


def counted(group):
    """Counts votes on one layer and on several by replacing methods of this rank's group."""
    votes = {"one": 0, "many": []}
    attend, calls = group.attend_cached, group.cached_calls

    def one(*args, **options):
        votes["one"] += 1
        return attend(*args, **options)

    def many(caches, *args, **options):
        votes["many"].append(len(caches))
        return calls(caches, *args, **options)

    group.attend_cached, group.cached_calls = one, many
    return votes


@pytest.mark.parametrize(
    ("family", "changes", "runs"),
    [
        ("llama", {}, [3]),
        ("mistral", {}, [3]),
        ("deepseek-v3", {}, [3]),
        # Five layers with a window, one without, and so on.
        ("gemma3", {"num_hidden_layers": 8}, [5, 2]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_that_are_alike_have_one_vote(family, changes, runs):
    model = build(family, **changes)
    ids = texts(2, PROMPT)
    want = greedy(model, ids)
    layers = model.config.num_hidden_layers

    def work(model, handle, group):
        votes = counted(group)
        return greedy(model, ids), votes

    for got, votes in on_ranks(model, 3, work, shares=[2, 1, 5]):
        assert torch.equal(got, want)
        # The prompt and the first step have a vote for each layer; the 38 steps after them repeat the step before.
        steps = TOKENS - 2
        assert votes["many"] == runs * steps
        assert votes["one"] == 2 * layers + steps * (layers - sum(runs))


def test_padding_and_prompts_of_all_sizes():
    """Between steps a prompt is split, and padding on the left makes a key mask."""
    model = build("llama")
    ids = texts(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    parts = [8, 1, 1, 1, 12, 1, 2, 1, 1, 1, 1]

    def tokens(model, cache):
        logits, end = [], 0
        with torch.no_grad():
            for part in parts:
                own = {"input_ids": ids[:, end : end + part], "attention_mask": mask[:, : end + part]}
                positions = (mask[:, : end + part].cumsum(-1) - 1).clamp(min=0)[:, end:]
                logits.append(model(**own, position_ids=positions, past_key_values=cache).logits)
                end += part
        return torch.cat(logits, 1)

    want = tokens(model, transformers.DynamicCache())

    def work(model, handle, group):
        votes = counted(group)
        return tokens(model, handle.cache()), votes

    for got, votes in on_ranks(model, 3, work):
        assert (got - want)[mask.bool()].abs().max() < 1e-4
        assert set(votes["many"]) == {3}


def errors_of(model, size, disturb, tokens=TOKENS):
    """The exception of each rank where ``disturb(model, group, cache)`` changes something after some steps."""
    ids = texts(1, PROMPT)
    copies = [copy.deepcopy(model) for _ in range(size)]

    def work(group):
        model = copies[group.rank]
        handle = kyklos.transformers.parallelize(model, group)
        cache = handle.cache()
        greedy(model, ids, tokens=5, past_key_values=cache)
        try:
            disturb(model, group, cache)
            with torch.no_grad():
                for token in range(tokens):
                    model(ids[:, token % PROMPT][:, None], past_key_values=cache)
        except (kyklos.RequestError, kyklos.GroupError) as error:
            return error
        return None

    return kyklos.run_local(size, work, device="cpu")


def test_a_rank_with_two_layers_exchanged_is_an_error_on_all_ranks():
    def exchange(model, group, cache):
        if group.rank == 1:
            layers = model.model.layers
            layers[1], layers[2] = layers[2], layers[1]

    first, second = errors_of(build("llama"), 2, exchange)
    assert isinstance(second, kyklos.RequestError)
    assert "attention at layers.2.self_attn, where the step before had layers.1.self_attn" in str(second)
    assert isinstance(first, kyklos.GroupError) and first.peer == 1
    assert "in the middle of a step: attention at layers.2.self_attn" in str(first)


def test_a_rank_without_a_layer_is_an_error_on_all_ranks():
    def drop(model, group, cache):
        if group.rank == 0:
            del model.model.layers[2]

    errors = errors_of(build("llama"), 2, drop)
    assert all(error is not None for error in errors)
    assert "2 attention calls in a pass over 3 layers" in str(errors[0])
    assert errors[1].peer == 0 and "in the middle of a step: 2 attention calls" in str(errors[1])


def test_an_exception_of_the_model_in_the_middle_of_a_step():
    def broken(*_):
        raise ValueError("no memory for experts")

    def disturb(model, group, cache):
        if group.rank == 1:
            model.model.layers[1].mlp.register_forward_pre_hook(broken)
            with pytest.raises(ValueError, match="no memory for experts"), torch.no_grad():
                model(texts(1, 1), past_key_values=cache)
            # The caches are back in their places; the group has ended.
            assert [len(layer.store) for layer in cache.parts] == [cache.length] * 3

    first, second = errors_of(build("llama"), 2, disturb)
    assert isinstance(first, kyklos.GroupError) and first.peer == 1
    assert "ValueError in the middle of a step: no memory for experts" in str(first)
    assert isinstance(second, kyklos.GroupError)


def test_the_same_change_on_all_ranks_is_an_error_and_not_a_hang():
    def exchange(model, group, cache):
        layers = model.model.layers
        layers[1], layers[2] = layers[2], layers[1]

    for error in errors_of(build("llama"), 2, exchange):
        assert error is not None and "where the step before had" in str(error)


def test_a_rank_that_calls_another_model_is_an_error_on_all_ranks():
    models = [build("llama", seed=seed) for seed in range(2)]
    copies = [copy.deepcopy(models) for _ in range(2)]

    def work(group):
        pair = copies[group.rank]
        handles = [kyklos.transformers.parallelize(model, group) for model in pair]
        caches = [handle.cache() for handle in handles]
        ids = texts(1, PROMPT)
        with torch.no_grad():
            for part in (ids, ids[:, :1], ids[:, 1:2], ids[:, 2:3]):
                for model, cache in zip(pair, caches, strict=True):
                    model(part, past_key_values=cache)
            order = [0, 1] if group.rank == 0 else [1, 0]
            with pytest.raises(kyklos.RequestError, match="calls with label `model 2, pass .* 3 layers"):
                pair[order[0]](ids[:, 3:4], past_key_values=caches[order[0]])
            # Nothing was appended, and the group is usable.
            group.attend(ones(), ones(), ones())
            return [[len(layer.store) for layer in cache.parts] for cache in caches]

    held = [PROMPT + 3] * 3
    assert kyklos.run_local(2, work, device="cpu") == [[held, held]] * 2


def test_without_the_comparison_exchanged_layers_give_the_other_rank_a_wrong_number(monkeypatch):
    """A negative control: the tensors fit, and only the names tell the layers apart."""

    class Same(_steps.LayerCall):
        def __eq__(self, other):
            return True

        __hash__ = None

    monkeypatch.setattr("kyklos.transformers._attention.LayerCall", Same)

    def exchange(model, group, cache):
        if group.rank == 1:
            layers = model.model.layers
            layers[1], layers[2] = layers[2], layers[1]

    first, second = errors_of(build("llama"), 2, exchange, tokens=1)
    # Rank 1 counts its calls at the end of the pass. Rank 0 has its output by then.
    assert first is None and "do not change the model's layers" in str(second)


# -- the group's part -------------------------------------------------------------------------------------------------------


def ones(tokens=1, heads=2):
    return np.ones((1, tokens, heads, 8), np.float32)


def decoding(group, caches, **options):
    return group.cached_calls(caches, ones(heads=4), ones(), ones(), mask="causal", same_queries=True, **options)


def test_calls_after_one_vote_are_those_after_a_vote_for_each():
    random = np.random.default_rng(0)
    states = [[random.standard_normal((1, 1, heads, 8), dtype=np.float32) for heads in (4, 2, 2)] for _ in range(12)]

    def work(group):
        together, apart = ([group.kv_cache(2, 8, block=2) for _ in range(3)] for _ in range(2))
        for step in range(4):
            with decoding(group, together) as calls:
                got = [calls.attend(*states[3 * step + layer])[0] for layer in range(3)]
                assert calls.remaining == 0
            assert [len(cache) for cache in together] == [step + 1] * 3
            for layer, cache in enumerate(apart):
                want, _ = group.attend_cached(cache, *states[3 * step + layer], mask="causal", same_queries=True)
                assert np.array_equal(got[layer], want)
        with pytest.raises(kyklos.RequestError, match="a call after all that were announced"):
            calls.attend(*states[0])

    kyklos.run_local(2, work, device="cpu")


def test_what_cannot_be_between_announced_calls():
    def work(group):
        caches = [group.kv_cache(2, 8) for _ in range(3)]
        with pytest.raises(kyklos.RequestError, match="cache 2 of a step is there twice"):
            decoding(group, [caches[0], caches[1], caches[0]])
        with pytest.raises(kyklos.RequestError, match="something else among the caches"):
            decoding(group, [caches[0], "a cache"] if group.rank else caches)
        with pytest.raises(kyklos.RequestError, match="no cache"):
            decoding(group, [])
        with decoding(group, caches) as calls:
            calls.attend(ones(heads=4), ones(), ones())
            for other in (
                lambda: group.attend(ones(), ones(), ones()),
                lambda: group.kv_cache(2, 8),
                lambda: decoding(group, caches),
            ):
                with pytest.raises(kyklos.RequestError, match="announced calls of this group are not all made"):
                    other()
            with pytest.raises(kyklos.RequestError, match="in the middle of calls that were announced"):
                len(caches[0])
            with pytest.raises(kyklos.RequestError, match="prepared with"):
                calls.attend(ones(2, heads=4), ones(2), ones(2))
            with pytest.raises(kyklos.RequestError, match="int64"):
                calls.attend(ones(heads=4).astype(np.int64), ones(), ones())
            calls.attend(ones(heads=4), ones(), ones())
            calls.attend(ones(heads=4), ones(), ones())
        group.attend(ones(), ones(), ones())
        return [len(cache) for cache in caches]

    assert kyklos.run_local(2, work, device="cpu") == [[1, 1, 1]] * 2


@pytest.mark.parametrize("end", ["close", "close the group", "leave the block"])
def test_calls_that_a_rank_does_not_make_end_the_group(end):
    def work(group):
        caches = [group.kv_cache(2, 8) for _ in range(3)]
        calls = decoding(group, caches)
        calls.attend(ones(heads=4), ones(), ones())
        if group.rank == 0:
            if end == "close":
                calls.close()
            elif end == "close the group":
                group.close()
            else:
                with calls:
                    pass
            return [len(cache) for cache in caches]
        with pytest.raises(kyklos.GroupError, match="1 of the 3 calls that it announced") as error:
            calls.attend(ones(heads=4), ones(), ones())
        assert error.value.peer == 0
        calls.close()
        return [len(cache) for cache in caches]

    assert kyklos.run_local(2, work, device="cpu") == [[1, 0, 0]] * 2


def test_ranks_that_announce_other_calls_get_an_error():
    def work(group):
        caches = [group.kv_cache(2, 8) for _ in range(3)]
        with pytest.raises(kyklos.RequestError, match="calls with label `3`"):
            decoding(group, caches[: 2 + group.rank], label=str(2 + group.rank))
        with pytest.raises(kyklos.RequestError, match="a number of calls of 3"):
            decoding(group, caches[: 2 + group.rank])
        with pytest.raises(kyklos.RequestError, match="another cache"):
            decoding(group, caches[:2] if group.rank else caches[1:])
        with pytest.raises(kyklos.RequestError, match="different operations: rank 0 `attend.*, rank 1 `cache"):
            group.kv_cache(2, 8) if group.rank else decoding(group, caches)

    kyklos.run_local(2, work, device="cpu")

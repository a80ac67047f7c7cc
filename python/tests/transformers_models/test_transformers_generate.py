"""generate() and caches of split models against one process."""

import copy

import pytest
import torch
import transformers
from test_transformers import left_padded, right_padded
from tiny_models import build, error, on_ranks, output, reference, texts

import kyklos
import kyklos.transformers
from kyklos.transformers import _cache, _generate, _masks

DECODERS = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt-oss"]


def greedy(model, *ids, tokens=40, **inputs):
    return model.generate(*ids, **inputs, max_new_tokens=tokens, do_sample=False)


@pytest.mark.parametrize("family", DECODERS)
def test_200_greedy_tokens_are_those_of_one_process(family):
    """Windows of 6 keys: the caches drop nearly all of the text."""
    model = build(family)
    ids = texts(1, 19)
    want = greedy(model, ids, tokens=200)
    for got in on_ranks(model, 2, lambda model, *_: greedy(model, ids, tokens=200), shares=[3, 7]):
        assert torch.equal(got, want)


@pytest.mark.parametrize("family", DECODERS + ["gpt2", "deepseek-v3"])
@pytest.mark.parametrize("make", [left_padded, right_padded])
def test_padded_batches_on_three_ranks(family, make):
    """The library continues a text after its padding on the right, where a row sees a real key if the padding is shorter than the
    window."""
    model = build(family)
    inputs = make(3 if make is left_padded else 2)
    want = greedy(model, **inputs)
    for got in on_ranks(model, 3, lambda model, *_: greedy(model, **inputs), shares=[2, 1, 5]):
        assert torch.equal(got, want)


@pytest.mark.parametrize("shares", [[1, 30], [2, 1, 5]], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_short_prompts(tokens, shares):
    model = build("gemma3")
    ids = texts(2, tokens)
    want = greedy(model, ids)
    for got in on_ranks(model, len(shares), lambda model, *_: greedy(model, ids), shares=shares):
        assert torch.equal(got, want)


def test_logits_of_each_step():
    """Greedy tokens could hide an error; these are the numbers behind them."""
    model = build("mistral")
    ids = texts(2, 19)
    many = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    tokens = model.generate(ids, **many).sequences[:, :-1]
    exact, bound, seen = reference(model, input_ids=tokens)
    steps = slice(18, None)
    for logits in on_ranks(
        model, 3, lambda model, *_: torch.stack(model.generate(ids, **many).logits, 1), shares=[2, 1, 5]
    ):
        assert error(logits, exact[:, steps], seen[:, steps]) <= bound


def test_cached_calls_without_generate():
    """A prompt, a part of a text, one token; then the last tokens are taken back and others follow."""
    model = build("gemma2")
    ids = texts(2, 40)
    other = torch.cat([ids[:, :28], texts(2, 8, seed=9)], 1)
    exact, bound, seen = reference(model, input_ids=ids)
    exact_other, bound_other, _ = reference(model, input_ids=other)

    def work(model, handle, group):
        cache = handle.cache()
        with torch.no_grad():
            parts = [model(part, past_key_values=cache).logits for part in ids.split([20, 17, 1, 2], 1)]
        assert cache.get_seq_length() == 40 and cache.length == 40
        held = [sum(end - first for first, end in cache.tokens(rank, layer=1)) for rank in range(3)]
        assert sum(held) == 40 and min(held) > 0
        assert cache.bytes > 0
        return torch.cat(parts, 1)

    for got in on_ranks(model, 3, work, shares=[2, 1, 5]):
        assert error(got, exact, seen) <= bound

    full = build("llama")
    exact_other, bound_other, seen = reference(full, input_ids=other)

    def again(model, handle, group):
        with torch.no_grad():
            cache = model(ids).past_key_values
            cache.crop(-12)
            return model(other[:, 28:], past_key_values=cache).logits

    for got in on_ranks(full, 3, again, shares=[2, 1, 5]):
        assert error(got, exact_other[:, 28:], seen[:, 28:]) <= bound_other


def test_windows_and_tokens_that_are_taken_back():
    model = build("mistral")
    ids = texts(2, 40)
    other = torch.cat([ids[:, :28], texts(2, 8, seed=9)], 1)
    exact, bound, seen = reference(model, input_ids=other)

    def work(model, handle, group):
        cache = handle.cache()
        output(model, input_ids=ids, past_key_values=cache)
        with pytest.raises(
            kyklos.RequestError, match=r"made to take back 0 tokens: make it with handle.cache\(rollback=12\)"
        ):
            cache.crop(-12)
        last = output(model, input_ids=ids[:, :1], past_key_values=cache)
        assert cache.length == 41 and last.shape[1] == 1
        cache = handle.cache(rollback=12)
        output(model, input_ids=ids, past_key_values=cache)
        cache.crop(-12)
        return output(model, input_ids=other[:, 28:], past_key_values=cache)

    for got in on_ranks(model, 3, work, shares=[2, 1, 5]):
        assert error(got, exact[:, 28:], seen[:, 28:]) <= bound


def test_continued_and_chunked_generation():
    model = build("llama")
    ids = texts(1, 20)
    want = greedy(model, ids, tokens=30)

    def work(model, handle, group):
        cache = handle.cache()
        first = greedy(model, ids, tokens=10, past_key_values=cache)
        assert cache.length == 29
        second = greedy(model, first, tokens=20, past_key_values=cache)
        return second, greedy(model, ids, tokens=30, prefill_chunk_size=6)

    for second, chunked in on_ranks(model, 2, work):
        assert torch.equal(second, want) and torch.equal(chunked, want)


def test_generation_without_a_cache():
    model = build("qwen3")
    ids = texts(2, 9)
    want = greedy(model, ids, tokens=12)
    for got in on_ranks(model, 2, lambda model, *_: greedy(model, ids, tokens=12, use_cache=False)):
        assert torch.equal(got, want)


def test_a_model_that_makes_a_cache_only_when_asked():
    model = build("llama", use_cache=False)
    ids = texts(2, 9)
    want = greedy(model, ids, tokens=12, use_cache=True)

    def work(model, handle, group):
        with torch.no_grad():
            assert model(ids).past_key_values is None
            assert model(ids, use_cache=True).past_key_values.length == 9
        return greedy(model, ids, tokens=12, use_cache=True), greedy(model, ids, tokens=12)

    for texts_of_rank in on_ranks(model, 2, work):
        assert all(torch.equal(got, want) for got in texts_of_rank)


def test_samples_are_the_same_on_all_ranks():
    """The threads of this process share one random generator, so each rank would choose other tokens."""
    model = build("llama")
    ids = texts(3, 11)
    sample = {"max_new_tokens": 40, "do_sample": True, "temperature": 1.5, "top_k": 0, "num_return_sequences": 2}
    texts_of_ranks = on_ranks(model, 3, lambda model, *_: model.generate(ids, **sample))
    assert texts_of_ranks[0].shape == (6, 51)
    assert all(torch.equal(text, texts_of_ranks[0]) for text in texts_of_ranks)


def test_without_the_choice_of_rank_0_samples_differ(monkeypatch):
    monkeypatch.setattr(_generate.RankZeroDecides, "__call__", transformers.StoppingCriteriaList.__call__)
    model = build("llama")
    ids = texts(3, 11)
    sample = {"max_new_tokens": 40, "do_sample": True, "temperature": 1.5, "top_k": 0}
    with pytest.raises((kyklos.RequestError, AssertionError)):
        texts_of_ranks = on_ranks(model, 2, lambda model, *_: model.generate(ids, **sample))
        assert torch.equal(*texts_of_ranks)


def test_all_ranks_stop_where_rank_0_stops():
    model = build("llama")
    ids = texts(2, 11)
    first = greedy(model, ids, tokens=20)
    end = int(first[0, 11 + 7])
    want = greedy(model, ids, tokens=20, eos_token_id=end)

    class Clock(transformers.StoppingCriteria):
        """Stops rank 0 after 5 tokens; the others would go on."""

        def __init__(self, rank):
            self.rank = rank

        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((2,), self.rank == 0 and input_ids.shape[1] >= 16)

    def work(model, handle, group):
        clock = transformers.StoppingCriteriaList([Clock(group.rank)])
        return greedy(model, ids, tokens=20, eos_token_id=end), greedy(model, ids, tokens=20, stopping_criteria=clock)

    for by_token, by_clock in on_ranks(model, 2, work):
        assert torch.equal(by_token, want)
        assert torch.equal(by_clock, first[:, :16])


def test_streamers_belong_to_rank_0():
    model = build("llama")
    ids = texts(1, 11)

    class Streamer:
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            pass

    def work(model, handle, group):
        streamer = Streamer() if group.rank == 0 else None
        tokens = greedy(model, ids, tokens=6, streamer=streamer)
        return tokens, streamer

    (tokens, streamer), _ = on_ranks(model, 2, work)
    assert streamer.tokens == tokens.flatten().tolist()
    with pytest.raises(kyklos.RequestError, match="a streamer on rank 1"):
        on_ranks(model, 2, lambda model, *_: greedy(model, ids, tokens=6, streamer=Streamer()))


def test_a_window_that_the_cache_forgets_changes_the_text(monkeypatch):
    """A negative control: the cache keeps one key fewer than the model sees."""
    model = build("mistral")
    ids = texts(1, 19)
    want = greedy(model, ids)
    make = _cache.SplitLayer.make
    monkeypatch.setattr(_cache.SplitLayer, "make", lambda self, key, window: make(self, key, window - 2))
    monkeypatch.setattr(_masks, "mask_text", lambda rule, documents, padding: f"window:{rule.left - 2},0")
    for got in on_ranks(model, 2, lambda model, *_: greedy(model, ids), check=False):
        assert not torch.equal(got, want)


# -- refused ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_beams": 2}, "beam_search on a split model"),
        ({"prompt_lookup_num_tokens": 2}, "assisted_generation on a split model"),
        ({"cache_implementation": "static"}, "cache_implementation 'static' on a split model"),
        ({"past_key_values": transformers.DynamicCache()}, "a DynamicCache as past_key_values"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_other_ways_to_generate_are_refused(options, says):
    model = build("llama")
    ids = texts(1, 9)

    def work(model, handle, group):
        with pytest.raises(kyklos.RequestError, match=says):
            model.generate(ids, max_new_tokens=4, do_sample=False, **copy.copy(options))
        # The group is usable.
        return greedy(model, ids, tokens=4)

    want = greedy(model, ids, tokens=4)
    assert all(torch.equal(got, want) for got in on_ranks(model, 2, work))


def test_padding_that_comes_late_is_refused():
    model = build("mistral")
    ids = texts(2, 20)

    def work(model, handle, group):
        cache = handle.cache()
        output(model, input_ids=ids[:, :12], past_key_values=cache)
        late = torch.ones(2, 20, dtype=torch.long)
        late[0, 3] = 0
        with pytest.raises(kyklos.RequestError, match="padding in a later call"):
            output(model, input_ids=ids[:, 12:], past_key_values=cache, attention_mask=late)
        assert cache.length == 12
        return output(model, input_ids=ids[:, 12:], past_key_values=cache)

    exact, bound, seen = reference(model, input_ids=ids)
    for got in on_ranks(model, 2, work):
        assert error(got, exact[:, 12:], seen[:, 12:]) <= bound


def test_a_cache_after_a_refused_call_is_as_it_was(monkeypatch):
    """The third layer refuses the call; the first two have appended their keys."""
    model = build("llama")
    ids = texts(1, 20)
    exact, bound, seen = reference(model, input_ids=ids)

    def work(model, handle, group):
        cache = handle.cache()
        output(model, input_ids=ids[:, :12], past_key_values=cache)
        attend, calls = group.attend_cached, []

        def refusing(*args, **options):
            calls.append(options)
            return attend(*args, **{**options, "q_offset": 3 if len(calls) == 3 else 0})

        group.attend_cached = refusing
        with pytest.raises(kyklos.RequestError, match="q_offset"):
            output(model, input_ids=ids[:, 12:], past_key_values=cache)
        assert [len(layer.store) for layer in cache.parts] == [12, 12, 12]
        group.attend_cached = attend
        return output(model, input_ids=ids[:, 12:], past_key_values=cache)

    for got in on_ranks(model, 2, work):
        assert error(got, exact[:, 12:], seen[:, 12:]) <= bound


def test_the_cache_refuses_to_be_reordered():
    def work(model, handle, group):
        cache = handle.cache()
        for what in (
            lambda: cache.reorder_cache(torch.tensor([0])),
            lambda: cache.batch_repeat_interleave(2),
            lambda: cache.batch_select_indices(torch.tensor([0])),
        ):
            with pytest.raises(kyklos.RequestError, match="cache that is split over ranks"):
                what()

    on_ranks(build("llama"), 2, work)

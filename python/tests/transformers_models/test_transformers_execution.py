"""How a split model of transformers runs: strategies, formats on the wire, and shares by pace."""

import copy

import numpy as np
import pytest
import torch
from test_cluster import described
from tiny_models import build, error, on_ranks, output, reference, texts

import kyklos
import kyklos.torch
import kyklos.transformers
from kyklos._models.pace import Pace
from kyklos.transformers import _checks


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("options", [{"strategy": "pipelined"}, {"strategy": "pass-q"}, {"mesh": "2x1", "strategy": "chunked"}], ids=str)
def test_strategies_are_exact(monkeypatch, options, use_cache):
    model, inputs = build("gemma3"), {"input_ids": texts(2, 31), "use_cache": use_cache}
    exact, bound, seen = reference(model, **inputs)
    name = "attend_cached" if use_cache else "attend"
    call, used = getattr(kyklos.Group, name), []
    monkeypatch.setattr(kyklos.Group, name, lambda self, *args, **given: used.append(given) or call(self, *args, **given))
    for got in on_ranks(model, 2, lambda split, handle, group: output(split, **inputs), **options):
        assert error(got, exact, seen) <= bound
    assert any(options.items() <= given.items() for given in used)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("wire", ["f16", "int8"])
def test_rounded_keys_and_values(wire, use_cache):
    model, inputs = build("llama"), {"input_ids": texts(2, 31), "use_cache": use_cache}
    exact, bound, seen = reference(model, **inputs)
    for got in on_ranks(model, 2, lambda split, handle, group: output(split, **inputs), wire=wire):
        # Rounded, and still these logits: 8 bits of keys and values leave 3 % of the largest one, 16 bits a tenth of a percent.
        assert bound < error(got, exact, seen) < {"int8": 0.1, "f16": 3e-3}[wire] * exact.abs().max()


def test_gradients_with_a_format_on_the_wire():
    model = build("llama").train()
    ids = texts(1, 20)

    def gradient(split, group):
        split(ids, labels=ids).loss.backward()
        kyklos.torch.sum_gradients(split.parameters(), group)
        return split.model.layers[0].self_attn.k_proj.weight.grad / group.size

    alone = copy.deepcopy(model)
    alone(ids, labels=ids).loss.backward()
    exact = alone.model.layers[0].self_attn.k_proj.weight.grad
    for got in on_ranks(model, 2, lambda split, handle, group: gradient(split, group), wire="f16"):
        assert 1e-7 < (got - exact).abs().max() / exact.abs().max() < 0.02

    def refused(split, handle, group):
        with pytest.raises(kyklos.RequestError, match="int8"):
            gradient(split, group)

    on_ranks(model, 2, refused, wire="int8")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": "fast"}, "strategy `fast` is not known"),
        ({"wire": "f8"}, "`f8` on the wire is not known"),
        ({"mesh": "1x3"}, "mesh 1x3 for 2 ranks"),
        ({"mesh": "2x1", "wire": "int8"}, "use a mesh with a ring"),
        ({"shares": "fast"}, 'use "auto", or a number for each rank'),
        ({"shares": [1, 2, 3]}, "3 shares for 2 ranks: give each rank one"),
        ({"shares": [1, float("nan")]}, "each rank needs a positive one"),
        ({"shares": 5}, "shares 5: give a number for each rank"),
        ({"shares": ["1", "many"]}, "give a number for each rank"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused_before_anything_runs(options, says):
    model = build("llama")
    implementation = model.config._attn_implementation
    models = [copy.deepcopy(model) for _ in range(2)]

    def work(group):
        with pytest.raises(kyklos.RequestError, match=says):
            kyklos.transformers.parallelize(models[group.rank], group, **options)
        assert models[group.rank].config._attn_implementation == implementation

    kyklos.run_local(2, work, device="cpu")


def paced(monkeypatch, pace):
    """Ranks that are so fast, whatever they measure. Returns the tokens for which they measured their layers."""
    measured = []
    token_ns = _checks.token_ns

    def measure(*args):
        measured.append(token_ns(*args)[0])
        return measured[-1], 1

    monkeypatch.setattr(_checks, "token_ns", measure)
    monkeypatch.setattr(Pace, "of", staticmethod(lambda *_: pace))
    return measured


@pytest.mark.parametrize("family", ["llama", "gemma3", "bert"])
def test_shares_by_pace(monkeypatch, family):
    model, inputs = build(family), {"input_ids": texts(2, 31)}
    exact, bound, seen = reference(model, **inputs)
    measured = paced(monkeypatch, Pace((1000, 5000), (10**9, 10**8), (0,) * 2))

    def work(split, handle, group):
        assert handle.counts(1) == [1, 1]
        return output(split, **inputs), handle.counts(31), handle.rows(31)

    results = on_ranks(model, 2, work, shares="auto")
    assert all(error(got, exact, seen) <= bound for got, _, _ in results)
    assert len(measured) == 2 and min(measured) > 0
    (_, counts, first), (_, others, second) = results
    assert counts == others and sum(counts) == 31 and counts[0] > 3 * counts[1]
    assert (first, second) == ((0, counts[0]), (counts[0], 31))


def test_ranks_of_one_pace_level_a_causal_mask(monkeypatch):
    """Later tokens see more keys."""
    paced(monkeypatch, Pace((1, 1), (10**6, 10**6), (0,) * 2))
    for counts in on_ranks(build("llama"), 2, lambda split, handle, group: handle.counts(1000), shares="auto"):
        assert counts[0] == pytest.approx(1000 / 2**0.5, abs=2)


def test_with_other_heads_for_each_rank_attention_does_not_count(monkeypatch):
    paced(monkeypatch, Pace((1000, 1000), (10**9, 1), (0,) * 2))
    for counts in on_ranks(build("llama"), 2, lambda split, handle, group: handle.counts(1000), shares="auto", mesh="2x1"):
        assert counts == [500, 500]


@pytest.mark.parametrize("gather", ["auto", "none"])
def test_ranks_with_other_shares_are_told(gather):
    models = [copy.deepcopy(build("llama")) for _ in range(2)]
    ids = texts(1, 30)

    def work(group):
        kyklos.transformers.parallelize(models[group.rank], group, shares=[[2, 1], [1, 2]][group.rank], gather=gather)
        with pytest.raises(kyklos.RequestError, match="label"):
            models[group.rank](ids, labels=ids, use_cache=False)

    kyklos.run_local(2, work, device="cpu")


@pytest.mark.parametrize("wrong", [{"strategy": "fast"}, {"mesh": "1x3"}, {"mesh": "1x2", "strategy": "ulysses"}, {"shares": "fast"}], ids=str)
def test_options_that_are_wrong_on_one_rank_are_an_error_of_all(wrong):
    models = [copy.deepcopy(build("llama")) for _ in range(2)]

    def work(group):
        with pytest.raises(kyklos.RequestError):
            kyklos.transformers.parallelize(models[group.rank], group, **(wrong if group.rank else {}))
        # The group goes on.
        ones = torch.ones(1, 8, 1, 8)
        group.attend(ones, ones, ones, layout="bshd")

    kyklos.run_local(2, work, device="cpu", deadline_s=20)


def test_shares_that_are_an_array():
    for counts in on_ranks(build("llama"), 2, lambda split, handle, group: handle.counts(1000), shares=np.array([1.0, 3.0])):
        assert counts == [251, 749]


def test_a_text_with_shares_by_pace(monkeypatch):
    model, ids = build("gemma3"), texts(1, 20)
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    paced(monkeypatch, Pace((1000, 9000), (10**9, 10**8), (0,) * 2))

    def work(split, handle, group):
        cache = handle.cache()
        got = split.generate(ids, max_new_tokens=8, do_sample=False, past_key_values=cache)
        return got, [sum(end - first for first, end in cache.tokens(rank)) for rank in range(2)]

    for got, held in on_ranks(model, 2, work, shares="auto"):
        assert torch.equal(got, expected) and held[0] > 2 * held[1]


def test_a_split_that_makes_a_model_slower_is_told(monkeypatch):
    # Alone, a rank would need next to nothing.
    paced(monkeypatch, Pace((1, 1), (10**15, 10**15), (0,) * 2))
    ids = texts(2, 31)

    def work(split, handle, group):
        for _ in range(3):
            output(split, input_ids=ids)

    with pytest.warns(UserWarning, match="a pass over 31 tokens takes .* on 2 ranks, and would take about .* on rank 0 alone"):
        on_ranks(build("llama"), 2, work, shares="auto")


def test_with_shares_by_pace_passes_run_by_the_strategy_of_the_least_predicted_time(monkeypatch):
    model, inputs = build("gemma2"), {"input_ids": texts(2, 31)}
    exact, bound, seen = reference(model, **inputs)
    asked = []
    choices = kyklos.Cluster.choices

    def other(self, counts, **given):
        # Another one than this machine would choose.
        found = choices(self, counts, **given)
        asked.append(given["mask"])
        assert sum(counts) & (sum(counts) - 1) == 0
        return [kyklos.Choice(c.strategy, c.mesh, 1e-9 if c.strategy == "pass-q" else c.seconds, c.sent_bytes, c.memory_bytes) for c in found]

    monkeypatch.setattr(kyklos.Group, "cluster", lambda self, *_, **__: described(1, "f32", 16))
    monkeypatch.setattr(kyklos.Cluster, "choices", other)

    def work(split, handle, group):
        if group.rank == 0:
            # Of one rank alone: no other one waits, or chooses otherwise later.
            handle.way(17, batch=2)
        got = output(split, **inputs)
        return got, handle.way(31, batch=2), handle.way(1), handle.way(31, batch=2, gradients=True)

    for got, *ways in on_ranks(model, 2, work, shares="auto"):
        assert error(got, exact, seen) <= bound
        assert ways == ["pass-q on 1x2", "whole on each rank", "pass-q on 1x2"]
    # Of both kinds of layers: windows and all earlier keys.
    assert {mask.split(",")[1] for mask in asked} == {"0"} and len(set(asked)) == 2


def test_an_option_that_says_the_strategy_leaves_no_choice():
    for way in on_ranks(build("llama"), 2, lambda split, handle, group: handle.way(100), shares="auto", strategy="pipelined"):
        assert way == "pipelined on any mesh"

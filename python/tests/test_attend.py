"""Calls on ranks of this process, against the float64 oracle."""

import numpy as np
import pytest
from oracle import F32, ROUNDED, attention, causal

import kyklos


def split(arrays, cuts, rank):
    return [array[:, cuts[rank] : cuts[rank + 1]] for array in arrays]


def on_ranks(arrays, counts, device="cpu", **options):
    """o and lse of all tokens, computed on one rank for each count; options may be functions of the rank."""
    cuts = np.cumsum([0, *counts])

    def call(group):
        of_rank = {name: value(group.rank) if callable(value) else value for name, value in options.items()}
        return group.attend(*split(arrays, cuts, group.rank), **of_rank)

    results = kyklos.run_local(len(counts), call, device=device)
    return np.concatenate([o for o, _ in results], axis=1), np.concatenate([lse for _, lse in results], axis=1)


def check(got, want, tolerance=F32):
    for name, one, other in zip(("o", "lse"), got, want, strict=True):
        assert one.shape == other.shape
        finite = np.isfinite(other)
        assert np.array_equal(np.isfinite(one), finite), name
        worst = np.abs(one[finite] - other[finite]).max(initial=0)
        assert worst <= tolerance * max(1, np.abs(other[finite]).max(initial=1)), f"{name}: {worst}"


@pytest.mark.parametrize("counts", [[40], [25, 15], [1, 39], [20, 0, 20], [7, 11, 3, 19]])
@pytest.mark.parametrize("mask", ["full", "causal", "window:5,0"])
def test_any_counts_equal_the_oracle(tensors, counts, mask):
    arrays = tensors(40)
    visible = {"full": None, "causal": causal(40, 40), "window:5,0": causal(40, 40) & ~causal(40, 40, -6)}[mask]
    check(on_ranks(arrays, counts, mask=mask), attention(*arrays, visible=visible))


def test_scale_softcap_and_sinks_are_honoured(tensors):
    arrays, sinks = tensors(24), [0.5, -1.0, 2.0, 0.0]
    got = on_ranks(arrays, [10, 14], scale=0.3, softcap=5.0, sinks=sinks)
    check(got, attention(*arrays, scale=0.3, softcap=5.0, sinks=sinks))
    with pytest.raises(AssertionError):  # The comparison sees an option that is not honoured.
        check(got, attention(*arrays, scale=0.3, softcap=5.0))


def test_key_masks_of_any_pattern_for_each_batch_entry(tensors):
    arrays = tensors(24)
    visible = np.random.default_rng(1).random((2, 24)) > 0.4
    got = on_ranks(arrays, [9, 15], key_bias=visible)
    check(got, attention(*arrays, visible=visible[:, None, None]))
    # A query that sees no key: o is 0 and lse is minus infinity.
    visible[1] = False
    o, lse = on_ranks(arrays, [9, 15], key_bias=visible)
    assert not o[1].any() and np.isneginf(lse[1]).all()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_bias_for_each_query_in_both_layouts(tensors, layout):
    arrays = tensors(24)
    bias = np.random.default_rng(2).standard_normal((1, 4, 24, 24), dtype=np.float32)  # [batch, heads, q, k]
    want = attention(*arrays, bias=bias)
    cuts = [0, 10, 24]

    def call(group):
        rows = bias[:, :, cuts[group.rank] : cuts[group.rank + 1]]
        local = split(arrays, cuts, group.rank)
        if layout == "bshd":
            return group.attend(*local, bias=rows.transpose(0, 2, 1, 3))
        o, lse = group.attend(*(array.transpose(0, 2, 1, 3) for array in local), bias=rows, layout="bhsd")
        return o.transpose(0, 2, 1, 3), lse.transpose(0, 2, 1)

    results = kyklos.run_local(2, call, device="cpu")
    check([np.concatenate(parts, axis=1) for parts in zip(*results, strict=True)], want)


def test_a_bool_bias_hides_pairs(tensors):
    arrays = tensors(24)
    visible = np.random.default_rng(3).random((2, 1, 24, 24)) > 0.5
    cuts = [0, 10, 24]
    rows = lambda rank: visible[:, :, cuts[rank] : cuts[rank + 1]].transpose(0, 2, 1, 3)  # noqa: E731
    check(on_ranks(arrays, [10, 14], bias=rows), attention(*arrays, visible=visible))


def test_float16(tensors):
    arrays = [array.astype(np.float16) for array in tensors(24)]
    o, lse = on_ranks(arrays, [10, 14], mask="causal")
    assert o.dtype == np.float16 and lse.dtype == np.float32
    check((o, lse), attention(*arrays, visible=causal(24, 24)), ROUNDED["float16"])


def test_strided_and_repeated_arrays(tensors):
    q, k, v = tensors(24, kv_heads=1)
    wide = np.zeros((2, 24, 4, 64), dtype=np.float32)
    wide[..., ::2] = q
    # Every second element, one head shown four times, and tokens backwards, which must be refused.
    heads = [np.broadcast_to(array, (2, 24, 4, 32)) for array in (k, v)]
    group = kyklos.Group.local(1, device="cpu")[0]
    check(group.attend(wide[..., ::2], *heads), attention(q, k, v))
    with pytest.raises(kyklos.RequestError, match="negative stride"):
        group.attend(q[:, ::-1], k, v)
    read_only = q.copy()
    read_only.flags.writeable = False
    check(group.attend(read_only, k, v), attention(q, k, v))


def test_ranks_hold_the_tokens_that_they_say(tensors):
    arrays = tensors(32)
    lists = [[(0, 8), (24, 32)], [(8, 24)]]
    index = [np.concatenate([np.arange(*run) for run in runs]) for runs in lists]

    def call(group):
        local = [array[:, index[group.rank]] for array in arrays]
        return group.attend(*local, mask="causal", q_tokens=lists, kv_tokens=lists)

    results = kyklos.run_local(2, call, device="cpu")
    want = attention(*arrays, visible=causal(32, 32))
    for rank, got in enumerate(results):
        check(got, [array[:, index[rank]] for array in want])


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ring"},
        {"mesh": "2x1"},
        {"mesh": "2x2", "placement": "zigzag"},
        {"strategy": "pass-q"},
        pytest.param({"fixed_order": True, "mesh": "1x2"}, marks=pytest.mark.kyklos_cpu),
        {"results": "all"},
        {"results": 1},
    ],
)
def test_how_ranks_share_a_call_changes_no_result(tensors, options):
    counts = [16] * (4 if options.get("mesh") == "2x2" else 2)
    if options.get("fixed_order"):
        counts = [256, 8]
    arrays = tensors(sum(counts))
    total, cuts = sum(counts), np.cumsum([0, *counts])
    order = np.arange(total)
    if options.get("placement") == "zigzag":
        # Shards of 32 tokens: the first and the last quarter, then the middle. Each rank has half of its shard.
        order = np.concatenate([np.arange(0, 16), np.arange(48, 64), np.arange(16, 48)])
    arrays_in_order = [array[:, order] for array in arrays]

    def call(group):
        return group.attend(*split(arrays_in_order, cuts, group.rank), mask="causal", **options)

    results = kyklos.run_local(len(counts), call, device="cpu")
    want = [array[:, order] for array in attention(*arrays, visible=causal(total, total))]
    match options.get("results"):
        case "all":
            for got in results:
                check(got, want)
        case 1:
            assert results[0][0].shape[1] == 0
            check(results[1], want)
        case _:
            check([np.concatenate(parts, axis=1) for parts in zip(*results, strict=True)], want)


def test_int8_on_the_wire_rounds(tensors):
    arrays = tensors(64)
    want = attention(*arrays)
    o, lse = on_ranks(arrays, [32, 32], wire="int8", strategy="ring")
    check((o, lse), want, 2e-2)
    with pytest.raises(AssertionError):
        check((o, lse), want)


def test_outputs_are_the_callers(tensors):
    group = kyklos.Group.local(1, device="cpu")[0]
    arrays = tensors(8)
    first, _ = group.attend(*arrays)
    kept = first.copy()
    first += 1  # Writable, and nothing else's memory.
    second, _ = group.attend(*arrays)
    assert np.array_equal(second, kept)
    group.close()
    assert np.array_equal(first, kept + 1)


def test_inputs_may_change_after_the_call(tensors):
    """A slow rank of the process still reads the keys of a fast one: the call of the fast one ends when it has done so."""
    arrays = tensors(2048, batch=1)
    want = attention(*arrays)
    cuts = [0, 16, 2048]  # Rank 0 has few queries, and its keys go to rank 1.

    def call(group):
        local = [array.copy() for array in split(arrays, cuts, group.rank)]
        results = group.attend(*local, strategy="ring")
        for array in local:
            array.fill(np.nan)
        return results

    for _ in range(5):
        results = kyklos.run_local(2, call, device="cpu")
        check([np.concatenate(parts, axis=1) for parts in zip(*results, strict=True)], want)


def test_wrong_arrays_are_refused_on_all_ranks(tensors):
    q, k, v = tensors(8)
    wrong = {
        "float64": (q, k.astype(np.float64), v),
        "four axes": (q[0], k, v),
        "bool": (q, k > 0, v > 0),
        "does not give its elements": (q, "text", v),
        "shape": (q, k[:, :3], v),
    }
    for text, arrays in wrong.items():

        def call(group, arrays=arrays):
            own = arrays if group.rank == 1 else (q, k, v)
            with pytest.raises(kyklos.RequestError) as raised:
                group.attend(*own)
            group.attend(q, k, v)  # The group stays usable.
            return raised.value

        first, second = kyklos.run_local(2, call, device="cpu")
        assert text in str(first) and text in str(second)
        assert (first.rank, second.rank) == (1, None)


def test_wrong_options_are_refused_on_all_ranks(tensors):
    arrays = tensors(8)
    wrong = [
        ({"mask": "sideways"}, "sideways"),
        ({"layout": "hsbd"}, "layout"),
        ({"strategy": "teleport"}, "teleport"),
        ({"mesh": "3x1"}, "mesh"),
        ({"results": "nobody"}, "nobody"),
        ({"wire": "int3"}, "int3"),
        ({"q_tokens": [[(0, 8)], [(8, 16)]]}, "q_tokens"),
        ({"bias": np.zeros((1, 8, 1, 16), np.float16)}, "f16"),
        ({"bias": np.zeros((1, 16), np.float32)}, "axes"),
        ({"bias": np.zeros((1, 8, 1, 16), bool), "key_bias": np.ones((1, 16), bool)}, "key_bias"),
        ({"sinks": [0.0]}, "sinks"),
    ]
    for options, text in wrong:

        def call(group, options=options):
            with pytest.raises(kyklos.RequestError) as raised:
                group.attend(*arrays, **options)
            return raised.value

        for error in kyklos.run_local(2, call, device="cpu"):
            assert text in str(error), (options, str(error))
    group = kyklos.Group.local(1, device="cpu")[0]
    group.attend(*arrays, mask=None)


def test_options_of_a_wrong_type_are_refused_on_all_ranks(tensors):
    """Raised on one rank alone, they would pair its next call with this one of the others."""
    arrays = tensors(8)
    wrong = [
        ({"scale": "0.1"}, "scale"),
        ({"colour": "red"}, "unknown options: colour"),
        ({"mask": 5}, "mask"),
        ({"sinks": "many"}, "string to float"),
        ({"replicated": 2}, "replicated"),
        ({"results": True}, "results"),
        ({"q_offset": -1}, "q_offset"),
        ({"key_bias": object()}, "key_bias"),
    ]
    for options, text in wrong:

        def call(group, options=options):
            with pytest.raises(kyklos.RequestError) as raised:
                group.attend(*arrays, **(options if group.rank == 1 else {}))
            o, _ = group.attend(*arrays, label="the next call")
            return str(raised.value)

        for error in kyklos.run_local(2, call, device="cpu"):
            assert text in error, (options, error)

    def cached(group):
        cache = group.kv_cache(2, 32, batch=2)
        with pytest.raises(kyklos.RequestError, match="NoneType as cache"):
            group.attend_cached(None if group.rank == 0 else cache, *arrays)

    kyklos.run_local(2, cached, device="cpu")


def test_arrays_that_repeat_more_than_memory_holds_are_refused():
    one = np.ones((1, 1, 1, 8), np.float32)
    many = np.broadcast_to(one, (1, 1 << 40, 1, 8))
    group = kyklos.Group.local(1, device="cpu")[0]
    with pytest.raises(kyklos.RequestError, match="no memory for a copy"):
        group.attend(one, many, many)


def test_a_rank_can_refuse_the_next_call(tensors):
    arrays = tensors(8)

    def call(group):
        if group.rank == 1:
            error = group.refuse("a layer that cannot be split", "use another model")
        else:
            with pytest.raises(kyklos.RequestError) as raised:
                group.attend(*arrays)
            error = raised.value
        group.attend(*arrays)
        return error

    for error in kyklos.run_local(2, call, device="cpu"):
        assert isinstance(error, kyklos.RequestError)
        assert "a layer that cannot be split: use another model" in str(error)


def test_ranks_that_differ_get_one_error(tensors):
    arrays = tensors(8)

    def call(group, **options):
        with pytest.raises(kyklos.RequestError) as raised:
            group.attend(*arrays, **options)
        return str(raised.value)

    masks = kyklos.run_local(2, lambda group: call(group, mask=["full", "causal"][group.rank]), device="cpu")
    assert masks[0] == masks[1] and "mask" in masks[0]
    labels = kyklos.run_local(2, lambda group: call(group, label=f"layer {group.rank}"), device="cpu")
    assert labels[0] == labels[1] and "layer 1" in labels[0]


def test_a_cache_over_two_ranks(tensors):
    q, k, v = tensors(40)
    want, _ = attention(q, k, v, visible=causal(40, 40))
    cuts = [0, 20, 30]

    def call(group):
        cache = group.kv_cache(2, 32, batch=2, block=4)
        s = slice(cuts[group.rank], cuts[group.rank + 1])
        prompt, _ = group.attend_cached(cache, q[:, s], k[:, s], v[:, s], mask="causal")
        steps = []
        for token in range(30, 40):
            s = slice(token, token + 1)
            o, _ = group.attend_cached(cache, q[:, s], k[:, s], v[:, s], mask="causal", same_queries=True)
            steps.append(o)
        assert len(cache) == 40 and cache.bytes > 0
        held = [cache.tokens(rank) for rank in range(2)]
        cache.truncate(35)
        assert len(cache) == 35
        return prompt, np.concatenate(steps, axis=1), held

    (first, steps, held), (second, others, same) = kyklos.run_local(2, call, device="cpu")
    assert np.abs(np.concatenate([first, second, steps], axis=1) - want).max() < F32 * 2
    assert np.array_equal(steps, others) and held == same
    assert sorted(token for ranges in held for run in ranges for token in range(*run)) == list(range(40))


def test_plans_explain(tensors):
    plan = kyklos.plan([25, 15], heads=8, kv_heads=2, dim=64, mask="causal", strategy="ring")
    assert "strategy   ring" in str(plan) and plan.steps["ranks"] == 2
    with pytest.raises(kyklos.RequestError, match="mask"):
        kyklos.plan([4], heads=1, dim=8, mask="no mask")
    with pytest.raises(kyklos.RequestError, match="rank 3"):
        kyklos.plan([4], heads=1, dim=8, rank=3)
    group = kyklos.Group.local(1, device="cpu")[0]
    assert str(group.plan([8], heads=4, dim=32)) == str(kyklos.plan([8], heads=4, dim=32))
    group.attend(*tensors(8))
    assert group.report["tokens"] == 8 and group.report["bytes_sent"] == 0


@pytest.mark.parametrize("of", ["k", "v"])
def test_elements_beyond_the_wire_format_are_an_error_of_all_ranks(of):
    def work(group):
        x = np.full((1, 8, 2, 8), 0.25, np.float32)
        beyond = x.copy()
        beyond[0, 3, 1, 5] = -70000 if group.rank == 1 else 1
        k, v = (beyond, x) if of == "k" else (x, beyond)
        with pytest.raises(kyklos.RequestError, match="rank 1 that are beyond ±65504, the range of f16"):
            group.attend(x, k, v, wire="f16")
        assert np.isfinite(group.attend(x, k, v, wire="int8")[0]).all()
        return group.attend(x, x, x, wire="f16")[0]

    assert all((o == 0.25).all() for o in kyklos.run_local(2, work, device="cpu"))

"""Arrays that do not fit their call: refused by the names of their axes, before an element is read. And how their elements are read."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from oracle import F32, attention

import kyklos

BATCH, TOKENS, HEADS, KV_HEADS, KEYS, DIM = 2, 5, 4, 2, 37, 16
#: What each rank of two passes: 5 queries, and 20 or 17 keys.
CUT = 20


def made(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


@pytest.fixture(scope="module")
def states():
    return made(BATCH, 2 * TOKENS, HEADS, DIM), made(BATCH, KEYS, KV_HEADS, DIM), made(BATCH, KEYS, KV_HEADS, DIM) + 1


@pytest.fixture(scope="module")
def groups():
    """One group of two ranks for the whole table."""
    pair = kyklos.Group.local(2, device="cpu")
    yield pair
    for group in pair:
        group.close()


def both(groups, call):
    """What ``call(group, rank)`` raises on each of the two ranks, or None."""
    import threading

    raised = [None, None]

    def run(rank):
        try:
            call(groups[rank], rank)
        except Exception as error:
            raised[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def part(states, rank):
    q, k, v = states
    keys = slice(0, CUT) if rank == 0 else slice(CUT, KEYS)
    return q[:, TOKENS * rank : TOKENS * (rank + 1)], k[:, keys], v[:, keys]


def refused(groups, states, words, **options):
    """Both ranks refuse a call in which rank 1 has these options, with all ``words``; options are the same on both ranks, or of each."""

    def call(group, rank):
        own = {name: value[rank] if isinstance(value, list) else value for name, value in options.items()}
        group.attend(*part(states, rank), **own)

    for error in both(groups, call):
        assert isinstance(error, kyklos.RequestError), (words, error)
        for word in words:
            assert word in str(error), (word, str(error))


# Name, shape, and which axis is wrong: [batch, tokens, heads, keys] of a bias, [batch, heads, keys] or [batch, keys] of a key_bias.
WRONG = [
    ("bias", (BATCH + 1, TOKENS, HEADS, KEYS), "batch"),
    ("bias", (BATCH, TOKENS - 1, HEADS, KEYS), "tokens"),
    ("bias", (BATCH, TOKENS + 1, HEADS, KEYS), "tokens"),
    ("bias", (BATCH, TOKENS, HEADS - 1, KEYS), "heads"),
    ("bias", (BATCH, TOKENS, HEADS + 1, KEYS), "heads"),
    ("bias", (BATCH, TOKENS, KV_HEADS, KEYS), "heads"),
    ("bias", (BATCH, TOKENS, HEADS, KEYS - 1), "keys"),
    ("bias", (BATCH, TOKENS, HEADS, KEYS + 1), "keys"),
    # The same number of 4-byte words in 16-bit rows and rows of bits.
    ("bias", (1, TOKENS, 1, KEYS + 1), "keys"),
    ("bias", (1, TOKENS, 1, 33), "keys"),
    ("bias", (1, TOKENS, 1, 64), "keys"),
    # The keys of this rank instead of all.
    ("bias", (1, TOKENS, 1, CUT), "keys"),
    # Exchanged axes, and others of the same number of elements.
    ("bias", (1, KEYS, 1, TOKENS), "tokens"),
    ("bias", (BATCH, HEADS, TOKENS, KEYS), "heads"),
    ("bias", (TOKENS, BATCH, 1, KEYS), "batch"),
    ("bias", (1, 2 * TOKENS, 1, KEYS), "tokens"),
    # One row for all queries, and one key for all.
    ("bias", (BATCH, 1, HEADS, KEYS), "tokens"),
    ("bias", (BATCH, TOKENS, HEADS, 1), "keys"),
    ("key_bias", (BATCH + 1, KEYS), "batch"),
    ("key_bias", (BATCH, KEYS - 1), "keys"),
    ("key_bias", (BATCH, KEYS + 1), "keys"),
    ("key_bias", (BATCH, 64), "keys"),
    ("key_bias", (1, CUT), "keys"),
    ("key_bias", (KEYS, BATCH), "batch"),
    ("key_bias", (BATCH, HEADS + 1, KEYS), "heads"),
    ("key_bias", (BATCH, KEYS, HEADS), "heads"),
]


@pytest.mark.parametrize("dtype", [bool, np.float32, np.float16])
@pytest.mark.parametrize(("name", "shape", "axis"), WRONG)
def test_a_bias_of_other_axes_is_refused_by_the_name_of_the_axis(groups, states, dtype, name, shape, axis):
    given = [array.astype(dtype) for array in states] if dtype != bool else states
    size = shape[{"batch": 0, "tokens": 1, "heads": 2 if name == "bias" else 1, "keys": -1}[axis]]
    # Both axes with names, or the axis of the array with that of the call.
    words = [name if axis != "keys" else name.replace("_", " "), axis, f"{axis} {size}"]
    refused(groups, given, words, **{name: np.ones(shape, dtype)})
    # The group goes on, and the right shape is taken.
    right = (1, TOKENS, 1, KEYS) if name == "bias" else (1, KEYS)
    assert both(groups, lambda group, rank: group.attend(*part(given, rank), **{name: np.ones(right, dtype)})) == [None, None]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_the_shape_is_told_in_the_layout_of_the_call(groups, states, layout):
    bias = np.zeros((1, TOKENS, HEADS, KEYS), np.float32)
    other = np.zeros((1, HEADS, TOKENS, KEYS), np.float32)

    def call(group, rank, bias):
        arrays = part(states, rank)
        if layout == "bhsd":
            arrays = [array.swapaxes(1, 2) for array in arrays]
        group.attend(*arrays, bias=bias, layout=layout)

    right, wrong = (bias, other) if layout == "bshd" else (other, bias)
    assert both(groups, lambda group, rank: call(group, rank, right)) == [None, None]
    for error in both(groups, lambda group, rank: call(group, rank, wrong)):
        names = "batch 1, tokens 4, heads 5, keys 37" if layout == "bshd" else "batch 1, heads 5, tokens 4, keys 37"
        assert names in str(error) and ("heads 5, q of shape" in str(error)), str(error)


def test_types_of_a_bias_are_compared(groups, states):
    refused(groups, states, ["bias of f16 for q of f32"], bias=np.ones((1, TOKENS, 1, KEYS), np.float16))
    refused(groups, states, ["key_bias of f16 for q of f32"], key_bias=np.ones((1, KEYS), np.float16))
    refused(groups, states, ["bias has elements of uint8"], bias=np.ones((1, TOKENS, 1, KEYS), np.uint8))
    refused(groups, states, ["bias has elements of float64"], bias=np.ones((1, TOKENS, 1, KEYS)))


def test_one_rank_with_a_wrong_bias_is_named(groups, states):
    right, short = (np.ones((1, TOKENS, 1, keys), bool) for keys in (KEYS, KEYS - 1))
    refused(groups, states, ["the bias of rank 1", "keys 36", "the call has 37 keys"], bias=[right, short])
    few = np.ones((1, TOKENS - 1, 1, KEYS), bool)
    refused(groups, states, ["tokens 4", "tokens 5"], bias=[right, few])


def test_a_key_bias_forgets_no_token_of_a_cache():
    random = np.random.default_rng(0)
    group = kyklos.Group.local(1, device="cpu")[0]
    cache = group.kv_cache(heads=2, dim=16)
    group.attend_cached(cache, *(random.standard_normal((1, 40, 2, 16), dtype=np.float32) for _ in range(3)), mask="causal")
    token = [random.standard_normal((1, 1, 2, 16), dtype=np.float32) for _ in range(3)]
    for keys in (40, 42, 64):
        with pytest.raises(kyklos.RequestError, match=f"has {keys} keys, and the call has 41"):
            group.attend_cached(cache, *token, same_queries=True, key_bias=np.ones((1, keys), bool))
    o, _ = group.attend_cached(cache, *token, same_queries=True, key_bias=np.ones((1, 41), bool))
    assert len(cache) == 41
    group.close()


def changed(shape):
    """Shapes with one extent less or more, and with two axes exchanged."""
    for axis, by in itertools.product(range(len(shape)), (-1, 1)):
        yield tuple(extent + by * (axis == index) for index, extent in enumerate(shape)), axis
    for a, b in itertools.combinations(range(len(shape)), 2):
        if shape[a] != shape[b]:
            other = list(shape)
            other[a], other[b] = other[b], other[a]
            yield tuple(other), a


def test_q_k_v_and_the_outputs_of_a_backward_pass_are_compared():
    shapes = {"q": (2, 9, 4, 16), "k": (2, 7, 2, 16), "v": (2, 7, 2, 16)}
    shapes |= {"o": shapes["q"], "lse": shapes["q"][:3], "d_o": shapes["q"], "d_lse": shapes["q"][:3]}
    names = ("batch", "tokens", "heads", "dim")
    group = kyklos.Group.local(1, device="cpu")[0]
    arrays = {name: made(*shape) for name, shape in shapes.items()}
    group.backward(**arrays)
    count = 0
    for name in ("k", "v", "o", "lse", "d_o", "d_lse"):
        for shape, axis in changed(shapes[name]):
            # The queries decide about nothing but batch and dim of keys.
            if name == "k" and axis in (1, 2) and shape[0] == 2 and shape[3] == 16:
                continue
            with pytest.raises(kyklos.RequestError) as raised:
                group.backward(**{**arrays, name: np.zeros(shape, np.float32)})
            assert any(f"{names[index]} {extent}" in str(raised.value) for index, extent in enumerate(shape)), str(raised.value)
            assert f"{name} of shape [" in str(raised.value) and " of shape [" in str(raised.value).split(" has ")[1]
            count += 1
    assert count > 60
    for name, dtype in itertools.product(("k", "v", "o", "d_o", "lse", "d_lse"), (np.float16, bool)):
        with pytest.raises(kyklos.RequestError, match=f"{name} has elements of (f16|bool)"):
            group.backward(**{**arrays, name: arrays[name].astype(dtype)})
    group.close()


def test_a_plan_compares_the_keys_of_a_bias():
    shape = {"heads": 4, "dim": 16, "batch": 2}
    for name, right, wrong in [("bias", (1, 5, 1, 37), (1, 5, 1, 36)), ("key_bias", (2, 4, 37), (2, 4, 64))]:
        plain = kyklos.plan([5, 5], [20, 17], **shape)
        assert str(kyklos.plan([5, 5], [20, 17], **shape, **{name: np.ones(right, bool)})) != str(plain)
        with pytest.raises(kyklos.RequestError, match=f"has {wrong[-1]} keys, and the call has 37"):
            kyklos.plan([5, 5], [20, 17], **shape, **{name: np.ones(wrong, bool)})


def ways(array):
    """The same elements with other strides. Axes of equal elements are repeated."""
    yield "dense", np.ascontiguousarray(array)
    for order in itertools.permutations(range(array.ndim)):
        if list(order) != sorted(order):
            yield f"axes {order}", np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))
    for axis in range(array.ndim):
        wide = np.zeros([extent * (3 if axis == index else 1) for index, extent in enumerate(array.shape)], array.dtype)
        part = wide[tuple(slice(None, None, 3) if axis == index else slice(None) for index in range(array.ndim))]
        part[...] = array
        yield f"every third of axis {axis}", part
        wide = np.zeros([extent + (2 if axis == index else 0) for index, extent in enumerate(array.shape)], array.dtype)
        part = wide[tuple(slice(1, -1) if axis == index else slice(None) for index in range(array.ndim))]
        part[...] = array
        yield f"a part of axis {axis}", part
    for axes in itertools.chain.from_iterable(itertools.combinations(range(array.ndim), n) for n in (1, 2, 3)):
        one = array[tuple(slice(0, 1) if index in axes else slice(None) for index in range(array.ndim))]
        if one.shape != array.shape and (np.broadcast_to(one, array.shape) == array).all():
            yield f"axes {axes} repeated", np.broadcast_to(one, array.shape)


@pytest.mark.parametrize("dtype", [bool, np.float32, np.float16])
@pytest.mark.parametrize("equal", [(), (0,), (2,), (1,), (0, 2), (3,)])
def test_the_strides_of_a_bias_change_nothing(dtype, equal):
    """36 and 37 keys: whole words, and rows with padding. ``equal``: axes along which all elements are the same."""
    group = kyklos.Group.local(1, device="cpu")[0]
    for keys in (36, 37):
        q, k, v = (made(2, tokens, 4, 16) for tokens in (19, keys, keys))
        random = np.random.default_rng(keys)
        shape = [1 if axis in equal else extent for axis, extent in enumerate((2, 19, 4, keys))]
        numbers = random.standard_normal(shape, dtype=np.float32)
        bias = np.broadcast_to(numbers > -0.5 if dtype == bool else numbers.astype(dtype), (2, 19, 4, keys))
        if dtype == np.float16:
            q, k, v = (array.astype(np.float16) for array in (q, k, v))
        rows = bias.transpose(0, 2, 1, 3)
        want = attention(q, k, v, **({"visible": rows} if dtype == bool else {"bias": rows}))
        first = None
        for name, given in ways(bias):
            got = group.attend(q, k, v, bias=given)
            swapped = [array.swapaxes(1, 2) for array in (q, k, v, given)]
            other = group.attend(*swapped[:3], bias=swapped[3], layout="bhsd")
            first = first or got
            assert np.array_equal(got[0], first[0]) and np.array_equal(got[1], first[1]), name
            assert np.array_equal(other[0].swapaxes(1, 2), first[0]), name
        assert np.abs(first[0] - want[0]).max() < (F32 if dtype != np.float16 else 3e-3) * 4
    group.close()


def test_the_strides_of_keys_change_nothing():
    group = kyklos.Group.local(1, device="cpu")[0]
    q, k, v = made(1, 3, 4, 16), made(1, 40, 1, 16), made(1, 40, 1, 16)
    k, v = (np.broadcast_to(array, (1, 40, 4, 16)).copy() for array in (k, v))
    want = group.attend(q, k, v)[0]
    for name, given in ways(k):
        assert np.array_equal(group.attend(q, given, v)[0], want), name
    group.close()


def test_bools_are_packed_by_truth_and_position():
    """Every length up to three words, with one key visible, against the value of that key."""
    group = kyklos.Group.local(1, device="cpu")[0]
    for keys in (1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 96):
        q, k = np.ones((1, keys, 1, 8), np.float32), np.ones((1, keys, 1, 8), np.float32)
        v = np.broadcast_to(np.arange(keys, dtype=np.float32)[None, :, None, None], (1, keys, 1, 8))
        only = np.eye(keys, dtype=bool)[None, :, None]
        assert np.array_equal(group.attend(q, k, v, bias=only)[0], v), keys
        # A byte that is true without being 1.
        odd = (np.eye(keys, dtype=np.uint8) * 6).view(bool)[None, :, None]
        assert np.array_equal(group.attend(q, k, v, bias=odd)[0], v), keys
    group.close()


@pytest.mark.parametrize("dtype", [bool, np.float32])
def test_memory_of_an_earlier_copy_is_used_again(dtype):
    """Copies of more than 1 MiB: of the same size, and of others, after each other."""
    group = kyklos.Group.local(1, device="cpu")[0]
    for tokens in (2200, 2200, 2300, 1500, 2200):
        states = [made(1, tokens, 2, 8) for _ in range(3)]
        whole = np.random.default_rng(tokens).standard_normal((1, tokens, 2, tokens + 64), dtype=np.float32)
        bias = (whole > 0 if dtype == bool else whole)[..., :tokens]
        # Rows with a gap, and queries that follow each other in memory.
        got = group.attend(*states, bias=bias)[0]
        exchanged = np.ascontiguousarray(bias.transpose(0, 3, 2, 1)).transpose(0, 3, 2, 1)
        assert np.array_equal(group.attend(*states, bias=exchanged)[0], got)
        rows = bias[:, :5].transpose(0, 2, 1, 3)
        few = [states[0][:, :5], *states[1:]]
        want = attention(*few, **({"visible": rows} if dtype == bool else {"bias": rows}))[0]
        assert np.abs(got[:, :5] - want).max() < 4 * F32
    group.close()


def test_a_bias_may_change_after_the_call_also_between_calls_of_one_step():
    """Numbers are read in place: a call ends when no rank reads them, and calls after one vote have a copy."""
    group = kyklos.Group.local(1, device="cpu")[0]
    states = [made(1, 4, 2, 16) for _ in range(3)]
    for dtype in (np.float32, bool):
        bias = np.random.default_rng(5).standard_normal((1, 4, 1, 4)).astype(np.float32)
        bias = bias > 0 if dtype == bool else bias
        # As calls with a cache, for which no gradients follow.
        want = group.attend(*states, bias=bias, inference=True)[0]
        caches = [group.kv_cache(heads=2, dim=16) for _ in range(2)]
        with group.cached_calls(caches, *states, bias=bias) as calls:
            bias[...] = ~bias if dtype == bool else 9
            for _ in caches:
                assert np.array_equal(calls.attend(*states)[0], want)
    group.close()


def test_masks_that_are_no_text_and_options_of_pytorch_are_refused_by_name():
    group = kyklos.Group.local(1, device="cpu")[0]
    states = [made(1, 4, 2, 16) for _ in range(3)]
    for options, text in [
        ({"mask": np.ones((4, 4), bool)}, "mask is a text .* not a ndarray"),
        ({"is_causal": True}, 'pass mask="causal"'),
        ({"attn_mask": None, "dropout_p": 0.0}, "pass bools as mask or bias.*there is no dropout"),
    ]:
        with pytest.raises(kyklos.RequestError, match=text):
            group.attend(*states, **options)
    group.close()


def test_the_page_of_errors_quotes_what_python_raises():
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^- `RequestError: (.*)`<br>$", page, re.MULTILINE)
    x = np.zeros((1, 4, 2, 8), np.float32)
    calls = [(x, x, x[:, 1:]), (x.astype(np.float64), x, x)]
    try:
        import torch
    except ImportError:
        quoted = [message for message in quoted if "PyTorch" not in message]
    else:
        calls.append([torch.from_numpy(x)] * 3)
    group = kyklos.Group.local(1, device="cpu")[0]
    for message, arrays in zip(quoted, calls, strict=True):
        with pytest.raises(kyklos.RequestError, match=".*".join(map(re.escape, message.split("…")))):
            group.attend(*arrays)
    group.close()

"""Calls of ComfyUI's attention: shared ones give what it would have given, others reach it as they came."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from conftest import Helpers, called, comfy_attention, truth  # noqa: E402
from kyklos_pack.override import CALLS_OF_REST, MOST_FAILURES, make_override, previous_of  # noqa: E402
from kyklos_pack.sharing import Opened  # noqa: E402

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 4, 24, 40, 16


def tensors(kv_heads=HEADS, keys=KEYS, dtype=torch.float32, seed=1):
    made = torch.Generator().manual_seed(seed)
    shapes = [(BATCH, HEADS, QUERIES, DIM), (BATCH, kv_heads, keys, DIM), (BATCH, kv_heads, keys, DIM)]
    return [torch.randn(shape, generator=made).to(dtype) for shape in shapes]


def flat(*given):
    return [t.transpose(1, 2).flatten(2) for t in given]


class Run:
    """A model with the override, and what reached its attention."""

    def __init__(self, helpers=None, **settings):
        self.opened = Opened(helpers or Helpers())
        self.override = make_override(self.opened, **{"smallest_tokens": 8, **settings})
        self.reached = []

    def original(self, *args, **kwargs):
        self.reached.append((args, kwargs))
        return comfy_attention(*args, **kwargs)

    def __call__(self, *args, **kwargs):
        return called(self.original, *args, transformer_options={"optimized_attention_override": self.override}, **kwargs)

    def was_shared(self):
        return self.opened.counts.shared == 1 and not self.opened.counts.alone

    def was_untouched(self, args):
        (got, _), = self.reached
        return all(one is other for one, other in zip(got, args)) and not self.opened.counts.shared


@pytest.mark.parametrize("takes_heads", [False, True])
@pytest.mark.parametrize("gives_heads", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_layout_is_shared(takes_heads, gives_heads, dtype):
    q, k, v = tensors(dtype=dtype)
    run = Run()
    given = (q, k, v) if takes_heads else flat(q, k, v)
    got = run(*given, HEADS, skip_reshape=takes_heads, skip_output_reshape=gives_heads)
    want = truth(q, k, v)
    want = want if gives_heads else flat(want)[0]
    assert got.shape == want.shape and got.dtype == dtype
    error = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got.double(), want, atol=error, rtol=0)
    assert run.was_shared()
    # The model's own attention computed the other heads.
    (args, kwargs), = run.reached
    assert args[3] == HEADS - 1 and kwargs["_inside_attn_wrapper"]


MASKS = {
    "queries, keys": (QUERIES, KEYS),
    "batch, queries, keys": (BATCH, QUERIES, KEYS),
    "one batch, queries, keys": (1, QUERIES, KEYS),
    "batch, one query, keys": (BATCH, 1, KEYS),
    "batch, heads, queries, keys": (BATCH, HEADS, QUERIES, KEYS),
    "one of each, keys": (1, 1, 1, KEYS),
    "heads of one batch": (1, HEADS, QUERIES, KEYS),
}


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("takes_heads", [False, True])
def test_each_mask_is_shared(shape, kind, takes_heads):
    q, k, v = tensors()
    made = torch.Generator().manual_seed(2)
    mask = torch.randn(shape, generator=made)
    if kind == "bool":
        mask = mask > -1
    run = Run()
    got = run(*((q, k, v) if takes_heads else flat(q, k, v)), HEADS, mask, skip_reshape=takes_heads)
    axes = mask if len(shape) == 4 else mask[:, None] if len(shape) == 3 else mask[None, None]
    torch.testing.assert_close(got.double(), flat(truth(q, k, v, axes))[0], atol=1e-5, rtol=0)
    assert run.was_shared()
    # A negative control: the mask matters by far more than the tolerance.
    assert (got.double() - flat(truth(q, k, v))[0]).abs().max() > 0.05


class RowHelpers(Helpers):
    """Two parts are computed here: whole heads, and some queries of the other heads."""

    def attention(self, original, q, k, v, *, mask=None, scale=None, causal=False, gqa=False):
        def part(function, heads, rows, *more):
            keys, all_of_it = slice(heads.start // group, heads.stop // group), slice(None)
            seen = mask
            if mask is not None:
                seen = mask[:, heads if mask.shape[1] > 1 else all_of_it, rows if mask.shape[2] > 1 else all_of_it]
            return function(q[:, heads, rows], k[:, keys], v[:, keys], seen, *more)

        group, half, middle = q.shape[1] // k.shape[1], q.shape[1] // 2, q.shape[2] // 2
        here = part(original, slice(0, half), slice(None))
        rows = part(original, slice(half, q.shape[1]), slice(0, middle))
        there = part(truth, slice(half, q.shape[1]), slice(middle, None), scale).to(q.dtype)
        return torch.cat([here, torch.cat([rows, there], 2)], 1)


@pytest.mark.parametrize("takes_heads", [False, True])
@pytest.mark.parametrize("shape", [None, (QUERIES, KEYS), (BATCH, 1, KEYS), (BATCH, HEADS, QUERIES, KEYS)])
@pytest.mark.parametrize("kv_heads", [2, HEADS])
def test_parts_of_heads_and_of_queries(takes_heads, shape, kv_heads):
    q, k, v = tensors(kv_heads=kv_heads)
    mask = None if shape is None else torch.randn(shape, generator=torch.Generator().manual_seed(2))
    run = Run(RowHelpers())
    got = run(*((q, k, v) if takes_heads else flat(q, k, v)), HEADS, mask, skip_reshape=takes_heads, enable_gqa=kv_heads < HEADS)
    axes = mask if shape is None or len(shape) == 4 else mask.reshape(-1, 1, *shape[-2:])
    torch.testing.assert_close(got.double(), flat(truth(q, k, v, axes))[0], atol=1e-5, rtol=0)
    assert len(run.reached) == 2 and run.was_shared()


@pytest.mark.parametrize("takes_heads", [False, True])
def test_fewer_heads_of_keys_and_a_scale_are_shared(takes_heads):
    q, k, v = tensors(kv_heads=2)
    run = Run()
    got = run(*((q, k, v) if takes_heads else flat(q, k, v)), HEADS, skip_reshape=takes_heads, enable_gqa=True, scale=0.4)
    torch.testing.assert_close(got.double(), flat(truth(q, k, v, scale=0.4))[0], atol=1e-5, rtol=0)
    assert run.was_shared()
    assert run.opened.helpers.calls[0]["scale"] == 0.4 and run.opened.helpers.calls[0]["gqa"]


def test_a_call_that_helpers_leave_here_is_the_original_one():
    given = flat(*tensors())
    run = Run(Helpers(heads=0))
    got = run(*given, HEADS)
    assert torch.equal(got, comfy_attention(*given, HEADS))
    assert run.was_untouched(given) and run.opened.counts.alone == {"no helper pays for it": 1}


def _not_understood():
    q, k, v = tensors()
    gradient = q.clone().requires_grad_()
    yield "an unknown argument", flat(q, k, v), {"dropout": 0.1}
    yield "few keys", flat(*tensors(keys=7)), {}
    yield "queries with gradients", flat(gradient, k, v), {}
    yield "a mask with gradients", flat(q, k, v), {"mask": torch.zeros(QUERIES, KEYS, requires_grad=True)}
    yield "f64", flat(*(t.double() for t in (q, k, v))), {}
    yield "a subclass", [torch.nn.Parameter(t, requires_grad=False) for t in flat(q, k, v)], {}


@pytest.mark.parametrize("given, options", [case[1:] for case in _not_understood()], ids=[case[0] for case in _not_understood()])
def test_other_calls_reach_the_original_untouched(given, options):
    run = Run()
    got = run(*given, HEADS, **options)
    want = comfy_attention(*given, HEADS, **options)
    assert torch.equal(got, want)
    assert run.was_untouched(given) and not run.opened.helpers.calls
    assert sum(run.opened.counts.alone.values()) == 1


@pytest.mark.parametrize("name", ["attention_basic", "attention_split", "attention_sub_quad"])
def test_bool_masks_of_functions_that_add_them_are_left_alone(name):
    def function(*args, **kwargs):
        return "its own way"

    function.__name__ = name
    run = Run()
    mask = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    assert run.override(function, *flat(*tensors()), HEADS, mask=mask) == "its own way"


@pytest.mark.parametrize("shape", [(3, QUERIES, KEYS), (QUERIES, KEYS + 1), (BATCH * HEADS, QUERIES, KEYS), (1, 1, 1, QUERIES, KEYS)])
def test_masks_of_other_shapes_are_left_alone(shape):
    run = Run()
    given = flat(*tensors())
    assert run.override(lambda *args, **kwargs: "left", *given, HEADS, mask=torch.zeros(shape)) == "left"
    assert not run.opened.helpers.calls


def test_a_failure_of_helpers_is_no_failure_of_the_picture():
    given = flat(*tensors())
    run = Run()
    run.opened.helpers.error = RuntimeError("the network is down")
    for _ in range(MOST_FAILURES + 2):
        assert torch.equal(run(*given, HEADS), comfy_attention(*given, HEADS))
    # They are left in peace for a while, then tried again.
    assert len(run.opened.helpers.calls) == MOST_FAILURES
    assert run.opened.counts.error == "RuntimeError: the network is down"
    run.opened.helpers.error = None
    for _ in range(CALLS_OF_REST - 2):
        run(*given, HEADS)
    assert run.opened.counts.shared == 0
    run(*given, HEADS)
    assert run.opened.counts.shared == 1 and not run.opened.counts.error


@pytest.mark.parametrize("wrong", [lambda o: o[:, :1], lambda o: o.double(), lambda o: None])
def test_a_result_of_another_kind_is_not_used(wrong):
    class Wrong(Helpers):
        def attention(self, *args, **options):
            return wrong(super().attention(*args, **options))

    given = flat(*tensors())
    run = Run(Wrong())
    assert torch.equal(run(*given, HEADS), comfy_attention(*given, HEADS))
    assert run.opened.counts.alone == {"helpers failed": 1}


def test_an_error_of_the_original_is_the_callers():
    class Stop(Exception):
        pass

    calls = []

    def original(*args, **kwargs):
        calls.append(1)
        raise Stop

    run = Run()
    with pytest.raises(Stop):
        run.override(original, *flat(*tensors()), HEADS)
    assert len(calls) == 1 and not run.opened.counts.error


def test_too_little_memory_with_helpers_is_tried_without_them():
    calls = []

    def original(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no memory")
        return "without helpers"

    assert Run().override(original, *flat(*tensors()), HEADS) == "without helpers"


def test_functions_that_ignore_the_layout_of_the_result_are_understood():
    def original(*args, skip_output_reshape=False, **kwargs):
        return comfy_attention(*args, **kwargs)

    q, k, v = tensors()
    run = Run()
    got = run.override(original, *flat(q, k, v), HEADS)
    torch.testing.assert_close(got.double(), flat(truth(q, k, v))[0], atol=1e-5, rtol=0)
    assert run.was_shared()


def test_another_override_keeps_its_calls_unless_the_user_says_otherwise():
    def sage(original, *args, **kwargs):
        return original(*args, **kwargs) * 2

    given = flat(*tensors())
    run = Run(previous=sage)
    assert torch.equal(run(*given, HEADS), comfy_attention(*given, HEADS) * 2)
    assert not run.opened.helpers.calls and "sage" in next(iter(run.opened.counts.alone))
    # Shared: the other override computes what is computed here, which is seen by its factor of two.
    run = Run(previous=sage, over_others=True)
    got = run(*given, HEADS).unflatten(2, (HEADS, DIM))
    want = comfy_attention(*given, HEADS).unflatten(2, (HEADS, DIM))
    torch.testing.assert_close(got[:, :, :-1], want[:, :, :-1] * 2)
    torch.testing.assert_close(got[:, :, -1:], want[:, :, -1:], atol=1e-5, rtol=0)
    # ComfyUI's own node only chooses a kernel.
    sage.__module__ = "comfy.model_patcher"
    run = Run(previous=sage)
    run(*given, HEADS)
    assert run.was_shared()
    assert previous_of(run.override) is sage and previous_of(sage) is sage and previous_of(None) is None


def test_precision_that_is_asked_for_is_kept():
    given = flat(*tensors())
    for wire in ("f16", "int8"):
        run = Run(wire=wire)
        run(*given, HEADS, low_precision_attention=False)
        assert not run.opened.helpers.calls
        run(*given, HEADS)
        assert run.opened.counts.shared == 1
    run = Run(wire="same")
    run(*given, HEADS, low_precision_attention=False)
    assert run.was_shared()


def test_compiled_models_compute_here():
    run = Run()
    given = flat(*tensors())

    @torch.compile(backend="eager", fullgraph=True)
    def block(q, k, v):
        return run.override(comfy_attention, q, k, v, HEADS)

    torch.testing.assert_close(block(*given), comfy_attention(*given, HEADS))
    assert not run.opened.helpers.calls


def test_calls_of_another_thread_do_not_wait():
    import threading

    given = flat(*tensors())
    run = Run()
    inner = []

    class Busy(Helpers):
        def attention(self, *args, **options):
            thread = threading.Thread(target=lambda: inner.append(run(*given, HEADS)))
            thread.start()
            thread.join()
            return super().attention(*args, **options)

    busy = Busy()
    run.override = make_override(Opened(busy, run.opened.counts), smallest_tokens=8)
    run(*given, HEADS)
    assert torch.equal(inner[0], comfy_attention(*given, HEADS))
    assert len(busy.calls) == 1 and run.opened.counts.alone == {"another call is being shared": 1}

"""The override with Kyklos itself: a helper on the cores of this machine computes half of each call."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
kyklos = pytest.importorskip("kyklos")

from conftest import called, comfy_attention, truth  # noqa: E402
from kyklos_pack.override import make_override  # noqa: E402
from kyklos_pack.sharing import Opened  # noqa: E402

BATCH, HEADS, QUERIES, KEYS, DIM = 1, 4, 96, 128, 40


@pytest.fixture(scope="module")
def opened():
    # Shared whether that pays or not.
    helpers = kyklos.helpers(names=[], devices=["cpu"], _always=True)
    yield Opened(helpers)
    helpers.close()


@pytest.mark.parametrize("takes_heads", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [2, HEADS])
@pytest.mark.parametrize("mask_shape", [None, (QUERIES, KEYS), (BATCH, 1, KEYS), (BATCH, HEADS, QUERIES, KEYS)])
@torch.inference_mode()
def test_calls(opened, takes_heads, dtype, kv_heads, mask_shape):
    made = torch.Generator().manual_seed(1)
    shapes = [(BATCH, HEADS, QUERIES, DIM), (BATCH, kv_heads, KEYS, DIM), (BATCH, kv_heads, KEYS, DIM)]
    q, k, v = (torch.randn(shape, generator=made).to(dtype) for shape in shapes)
    mask = None if mask_shape is None else torch.randn(mask_shape, generator=made).to(dtype)
    axes = mask if mask_shape is None or len(mask_shape) == 4 else mask.reshape(-1, 1, *mask_shape[-2:])
    options = {"optimized_attention_override": make_override(opened, smallest_tokens=8)}
    given = (q, k, v) if takes_heads else [t.transpose(1, 2).flatten(2) for t in (q, k, v)]
    shared = opened.counts.shared
    # The first calls of a kind are computed here, while their time is measured.
    for _ in range(8):
        more = {"enable_gqa": kv_heads < HEADS, "transformer_options": options}
        got = called(comfy_attention, *given, HEADS, mask, skip_reshape=takes_heads, **more)
        error = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(got.double(), truth(q, k, v, axes).transpose(1, 2).flatten(2), atol=error, rtol=0)
        if opened.counts.shared > shared:
            break
        opened.helpers.settle()
    assert opened.counts.shared > shared and not opened.counts.error
    (helper,) = opened.helpers.status()
    assert helper["calls"] > 0 and 0 < helper["share"] <= 1

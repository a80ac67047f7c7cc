"""A file of a user, for type checkers: everything here is right, and types are what they say. It is not run."""

from typing import Any

import numpy as np
from typing_extensions import assert_type

import kyklos


def work(group: kyklos.Group) -> tuple[int, ...]:
    assert_type(group.rank, int)
    assert_type(group.device, str)
    assert_type(group.gpu, int | None)
    q = np.zeros((1, 10, 4, 64), dtype=np.float32)
    o, lse = group.attend(q, q, q, mask="causal", scale=0.5, wire="f16", results="all")
    options: kyklos.CallOptions = {"mask": "window:100,0", "sinks": [0.0] * 4, "label": "layer 3"}
    o, lse = group.attend(q, q, q, **options)
    gradients = group.backward(o, q, q, q, o, lse)
    assert_type(gradients, kyklos.Gradients)
    tokens: kyklos.TokenRanges = [[(0, 10)], [(10, 20)]]
    group.attend(q, q, q, q_tokens=tokens, kv_tokens=tokens)
    shape: tuple[int, ...] = o.shape
    return shape


assert_type(kyklos.__version__, str)
assert_type(kyklos.run_local(2, work, device=["cpu", "wgpu:0"]), list[tuple[int, ...]])
assert_type(kyklos.Group.local(2), list[kyklos.Group])
assert_type(kyklos.identities(3), list[str])
with kyklos.Group.from_env(device="auto", link="wan") as alone:
    assert_type(alone, kyklos.Group)
try:
    kyklos.run_local(2, work)
except kyklos.GroupError as error:
    assert_type(error.peer, int | None)
except (kyklos.RequestError, kyklos.DeviceError) as error:
    assert_type(error.rank, int | None)
report: dict[str, Any] = kyklos.Group.local(1)[0].report

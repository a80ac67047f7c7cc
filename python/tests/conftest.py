import os
import sys
from pathlib import Path

import numpy as np
import pytest

# Tests of both kinds of models import helpers from these folders. No folder has the name of a library: where the library is not
# installed, Python would take the folder for it.
sys.path += [str(Path(__file__).parent / folder) for folder in ("diffusers_models", "diffusers_families", "transformers_models", "transformers_families")]


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than 20 seconds")
    config.addinivalue_line("markers", "kyklos_cpu: holds on the device cpu, and not on one of PyTorch")
    if DEVICE:
        from kyklos import _kyklos

        local = _kyklos.local
        _kyklos.local = lambda names, *rest: local([DEVICE if name == "cpu" else name for name in names], *rest)


#: Stands in for the device ``cpu`` of groups of one process: the same tests on another device.
DEVICE = os.environ.get("KYKLOS_TEST_DEVICE")


def pytest_collection_modifyitems(items):
    for item in items:
        if DEVICE and item.get_closest_marker("kyklos_cpu"):
            item.add_marker(pytest.mark.skip(reason=f"holds on cpu, not on {DEVICE}"))


@pytest.fixture
def tensors():
    """``make(tokens, heads, kv_heads, dim)`` gives q, k and v of a batch of 2, the same each time."""

    def make(tokens, heads=4, kv_heads=2, dim=32, batch=2, kv_tokens=None):
        random = np.random.default_rng(tokens * 1000 + heads)
        normal = lambda count, of: random.standard_normal((batch, count, of, dim), dtype=np.float32)  # noqa: E731
        keys = tokens if kv_tokens is None else kv_tokens
        return normal(tokens, heads), normal(keys, kv_heads), normal(keys, kv_heads)

    return make

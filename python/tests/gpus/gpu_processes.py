"""Processes that find fake GPUs: the driver and the NCCL of ``cuda-backend/fake``."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_PREFIX = """
import sys, threading
import numpy as np
import fake_cuda as fake
import kyklos

def made(rank, heads, tokens=None, dtype=np.float32, dim=32):
    tokens = [9, 5][rank] if tokens is None else tokens
    return np.random.default_rng(10 * rank + heads).standard_normal((1, tokens, heads, dim)).astype(dtype)

def states(rank, dtype=np.float32):
    q, k = made(rank, 4, dtype=dtype), made(rank, 2, dtype=dtype)
    return q, k, k + np.ones_like(k)

def same(found, wanted):
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, (found.shape, wanted.shape)
    assert found.tobytes() == np.ascontiguousarray(wanted).tobytes()

def refused(words, work):
    try:
        work()
    except kyklos.RequestError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")

def on_gpu(work, gpu=0):
    gpu = fake.Gpu(gpu)
    stream = fake.Stream(gpu)
    work(gpu, stream)
    stream.close()
    gpu.close()
"""


# A failed check must not wait for what it left on the device.
_END = """
try:
    main()
except BaseException:
    import os, traceback
    traceback.print_exc()
    os._exit(1)
"""


def start(script, cuda="", nccl=""):
    """A process that finds fake GPUs, and runs ``main()`` of a script."""
    folder = os.environ.get("KYKLOS_FAKE_LIBRARIES")
    if folder is None:
        why = "KYKLOS_FAKE_LIBRARIES names no folder of the fake driver; scripts/test-python.sh sets it"
        assert os.environ.get("KYKLOS_REQUIRE_GPU") != "1", why
        pytest.skip(why)
    script = f"{_PREFIX}\n{textwrap.dedent(script)}\n{_END}"
    here = str(Path(__file__).parent)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join([folder, os.environ.get("LD_LIBRARY_PATH", "")]),
        "KYKLOS_FAKE_CUDA": ",".join(filter(None, ["memory_mb=256", cuda])),
        "KYKLOS_FAKE_NCCL": nccl,
        "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]),
    }
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=pipe, stderr=pipe, text=True)


def ended(process, seconds=60):
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += "\nkilled: it did not end"
    return process.returncode, out, err


def run(script, cuda="", nccl=""):
    code, out, err = ended(start(script, cuda, nccl))
    assert code == 0, err
    return out

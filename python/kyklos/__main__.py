"""``python -m kyklos``: a small attention over two ranks on each device of this machine, compared with NumPy in float64.

Exit codes: 0 every device that can be used is right; 1 a device failed or was wrong; 2 the test cannot run.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
import time
from typing import Any

from . import DeviceError, Group, GroupError, RequestError, __version__, _kyklos, run_local

#: Tokens of the two ranks.
_TOKENS = (150, 106)
_HEADS, _KV_HEADS, _DIM = 4, 2, 64
#: Largest error of float32: numbers of size 1, some roundings, and exponentials of a GPU. Errors of a broken device are of size 1.
_ALLOWED = 1e-5


def main(arguments: list[str] | None = None) -> int:
    """The test as a program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m kyklos", description="tests the devices of this machine with a small attention")
    parser.add_argument("device", nargs="*", help='names as in device=, such as "cpu" or "wgpu:0"; by default all that are found')
    parser.add_argument("--version", action="version", version=f"kyklos {__version__}")
    devices = parser.parse_args(arguments).device
    print(f"kyklos {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    try:
        import numpy
    except ImportError:
        print("the test needs NumPy, which the package itself does not: pip install numpy", file=sys.stderr)
        return 2
    inputs = _inputs(numpy)
    expected = _reference(numpy, *inputs)
    verdicts = [_tried(numpy, name, inputs, expected) for name in devices or _found()]
    if not verdicts:
        print("no device was tested", file=sys.stderr)
        return 2
    print("OK" if all(verdicts) else "NOT OK: the lines above say what is wrong")
    return 0 if all(verdicts) else 1


def _found() -> list[str]:
    """The devices that can be used; prints why others cannot."""
    usable = []
    for name, refused in _kyklos.devices():
        if refused is None:
            usable.append(name)
        else:
            print(f"{name:8} not used  {refused}")
    if importlib.util.find_spec("torch") is None:
        print(f"{'torch':8} not used  PyTorch is not installed")
    else:
        usable.append("torch")
    return usable


def _tried(numpy: Any, name: str, inputs: tuple[Any, Any, Any], expected: tuple[Any, Any]) -> bool:
    """Whether a device is right; prints a line about it."""
    ends = (0, _TOKENS[0], sum(_TOKENS))

    def work(group: Group) -> tuple[str, Any, Any]:
        own = [array[:, ends[group.rank] : ends[group.rank + 1]] for array in inputs]
        o, lse = group.attend(*own, mask="causal")
        return group.device, numpy.asarray(o), numpy.asarray(lse)

    start = time.perf_counter()
    try:
        first, second = run_local(2, work, device=name)
    except (DeviceError, GroupError, RequestError) as error:
        print(f"{name:8} FAILED    {error}")
        return False
    seconds = time.perf_counter() - start
    results = [numpy.concatenate(parts, axis=1) for parts in zip(first[1:], second[1:], strict=True)]
    errors = [float(numpy.abs(got - wanted).max()) for got, wanted in zip(results, expected, strict=True)]
    # A comparison with NaN is false.
    right = all(error <= _ALLOWED for error in errors)
    verdict = "OK    " if right else "WRONG "
    print(f"{name:8} {verdict}    {first[0]}: largest error {max(errors):.1e}, allowed {_ALLOWED:.0e}, {seconds:.1f} s")
    return right


def _inputs(numpy: Any) -> tuple[Any, Any, Any]:
    """q, k and v of all ranks, ``[1, tokens, heads, dim]``."""
    random = numpy.random.default_rng(0)
    tokens = sum(_TOKENS)
    q, k, v = (random.standard_normal((1, tokens, heads, _DIM), dtype=numpy.float32) for heads in (_HEADS, _KV_HEADS, _KV_HEADS))
    return q, k, v


def _reference(numpy: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Causal attention in float64 from its definition: o ``[1, tokens, heads, dim]`` and lse ``[1, tokens, heads]``."""
    q, k, v = (array.astype(numpy.float64) for array in (q, k, v))
    k, v = (numpy.repeat(array, _HEADS // _KV_HEADS, axis=2) for array in (k, v))
    logits = numpy.einsum("bqhd,bkhd->bhqk", q, k) / numpy.sqrt(_DIM)
    position = numpy.arange(q.shape[1])
    logits = numpy.where(position[None] <= position[:, None], logits, -numpy.inf)
    largest = logits.max(axis=-1, keepdims=True)
    weights = numpy.exp(logits - largest)
    total = weights.sum(axis=-1, keepdims=True)
    lse = (largest + numpy.log(total))[..., 0].transpose(0, 2, 1)
    return numpy.einsum("bhqk,bkhd->bqhd", weights / total, v), lse


if __name__ == "__main__":
    sys.exit(main())

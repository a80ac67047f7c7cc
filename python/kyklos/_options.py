"""The options of a call, as keyword arguments."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:  # Type checkers know this module even where it is not installed.
    from typing_extensions import Unpack as Unpack
elif sys.version_info >= (3, 11):
    from typing import Unpack
else:  # Only for annotations, which are not evaluated.
    Unpack = tuple

#: For each rank, the tokens that it holds, as half-open ranges ``(first, end)``.
TokenRanges = Sequence[Sequence[tuple[int, int]]]


class CallOptions(TypedDict, total=False):
    """Keyword arguments of :meth:`kyklos.Group.attend`. All ranks give the same ones, except for ``bias``."""

    mask: str | None
    scale: float | None
    softcap: float | None
    sinks: Sequence[float] | None
    bias: Any
    key_bias: Any
    bias_gradient: bool
    q_offset: int
    layout: str
    label: str
    strategy: str | None
    mesh: str | None
    placement: str | None
    q_tokens: TokenRanges | None
    kv_tokens: TokenRanges | None
    wire: str | None
    fixed_order: bool
    inference: bool
    replicated: tuple[int, int] | None
    same_queries: bool
    results: str | int


_DEFAULTS: dict[str, Any] = {
    "mask": "full",
    "scale": None,
    "softcap": None,
    "sinks": None,
    "bias": None,
    "key_bias": None,
    "bias_gradient": False,
    "q_offset": 0,
    "layout": "bshd",
    "label": "",
    "strategy": None,
    "mesh": None,
    "placement": None,
    "q_tokens": None,
    "kv_tokens": None,
    "wire": None,
    "fixed_order": False,
    "inference": False,
    "replicated": None,
    "same_queries": False,
    "results": "owner",
}


# What to do for options of PyTorch's attention.
_INSTEAD = {
    "attn_mask": "pass bools as mask or bias, numbers as bias",
    "dropout_p": "there is no dropout",
    "enable_gqa": "leave it out, k and v may have fewer heads than q",
    "is_causal": 'pass mask="causal"',
}


def complete(options: Mapping[str, Any]) -> dict[str, Any]:
    """All options, with defaults for those that are not given."""
    unknown = sorted(options.keys() - _DEFAULTS.keys())
    if unknown:
        instead = [f"{name}: {_INSTEAD[name]}" for name in unknown if name in _INSTEAD]
        known = "; ".join(instead) or f"known are {', '.join(_DEFAULTS)}"
        raise TypeError(f"unknown options: {', '.join(unknown)}; {known}")
    whole = {**_DEFAULTS, **options}
    if isinstance(whole["results"], bool):
        raise TypeError('results is "owner", "all" or the number of a rank')
    if whole["mask"] is None:
        whole["mask"] = "full"
    if not isinstance(whole["mask"], str):
        kind = type(whole["mask"]).__name__
        raise TypeError(f'mask is a text such as "causal", not a {kind}; arrays are for bias and key_bias')
    if whole["sinks"] is not None:
        whole["sinks"] = [float(sink) for sink in whole["sinks"]]
    return whole

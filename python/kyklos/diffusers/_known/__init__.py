"""The plans of the transformers of diffusers that the tests verify, by the name of their class."""

from __future__ import annotations

from .._plan import Known
from . import flux, ltx, qwen, wan

KNOWN: dict[str, Known] = {**wan.KNOWN, **flux.KNOWN, **qwen.KNOWN, **ltx.KNOWN}

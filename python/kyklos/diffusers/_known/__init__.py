"""The plans of the transformers of diffusers that the tests verify, by the name of their class."""

from __future__ import annotations

from .._plan import Known
from . import cogvideox, flux, hunyuan, ltx, mochi, qwen, sd3, wan

KNOWN: dict[str, Known] = {
    **wan.KNOWN,
    **flux.KNOWN,
    **qwen.KNOWN,
    **ltx.KNOWN,
    **sd3.KNOWN,
    **cogvideox.KNOWN,
    **mochi.KNOWN,
    **hunyuan.KNOWN,
}

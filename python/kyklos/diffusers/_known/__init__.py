"""The plans of the transformers of diffusers that the tests verify, by the name of their class."""

from __future__ import annotations

from .._plan import Known
from . import cog, cosmos, dit, flux, hunyuan, kandinsky, ltx, lumina, qwen, sd3, video, wan

_FAMILIES = (wan, flux, qwen, ltx, sd3, cog, hunyuan, lumina, kandinsky, dit, video, cosmos)
KNOWN: dict[str, Known] = {name: known for family in _FAMILIES for name, known in family.KNOWN.items()}

"""The plans of the transformers of diffusers that the tests verify, by the name of their class."""

from __future__ import annotations

from .._plan import Known
from . import bria, cog, dit, easyanimate, flux, hunyuan, kandinsky, ltx, lumina, mochi, qwen, sd3, wan

_FAMILIES = (wan, flux, qwen, ltx, sd3, cog, mochi, hunyuan, lumina, kandinsky, dit, bria, easyanimate)
KNOWN: dict[str, Known] = {name: known for family in _FAMILIES for name, known in family.KNOWN.items()}

"""The plans of the transformers of diffusers that the tests verify, by the name of their class."""

from __future__ import annotations

from .._plan import Known
from . import audio, cog, cosmos, dit, flux, hunyuan, kandinsky, ltx, lumina, mmdit, sana, video, wan

_FAMILIES = (wan, flux, mmdit, ltx, cog, hunyuan, lumina, kandinsky, dit, sana, video, cosmos, audio)
KNOWN: dict[str, Known] = {name: known for family in _FAMILIES for name, known in family.KNOWN.items()}

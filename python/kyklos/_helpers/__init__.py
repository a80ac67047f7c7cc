"""Helpers without weights: other devices compute a share of this process' attention."""

from __future__ import annotations

from ._help_out import help_out
from ._invitation import Invitation
from ._owner import Helpers, helpers

__all__ = ["Helpers", "Invitation", "help_out", "helpers"]

"""How the tokens of a transformer of diffusers are split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Joined:
    """For ``SplitPlan.modules``: an input, such as a mask, along whose axis ``dim`` the tokens of other inputs lie one after the other. Each
    part is cut as the input of that name was, which the plan splits in the same forward.
    """

    dim: int
    parts: tuple[str, ...]


@dataclass(frozen=True)
class SplitPlan:
    """Where a transformer's tokens are split and gathered.

    :param modules: as ``_cp_plan`` of diffusers: for the name of a module (``""`` is the transformer, one ``*`` stands for all
        entries of a list) the inputs or outputs that are split, or the outputs that are gathered. Inputs may also be :class:`Joined`.
    :param attention: patterns of the attention modules whose keys are split over the ranks. Each makes one call in a forward.
        Attention to tokens that every rank has, such as an unsplit prompt, is not among them.
    :param whole: inputs that stay whole where they have another number of axes than ``modules`` says, or one token.
    """

    modules: Mapping[str, Any]
    attention: tuple[str, ...] = ("*",)
    whole: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Known:
    """What the tests have verified of one class."""

    plan: SplitPlan
    #: Classes of processors of the attention modules that the plan names.
    processors: frozenset[str]
    #: Arguments of ``forward`` that must be absent or ``None``, with the reason.
    refused: Mapping[str, str] = field(default_factory=dict)

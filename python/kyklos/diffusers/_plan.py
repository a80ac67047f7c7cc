"""How the tokens of a transformer of diffusers are split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Joined:
    """For ``SplitPlan.modules``: an input, such as a mask, along whose axis ``dim`` the tokens of other inputs lie one after the other. Each
    part is cut as the input of that name was, which the plan splits in the same forward. One part may be ``None``: the tokens that are left,
    possibly none. An axis that is a multiple as long has such a sequence for each entry of the batch.

    :param keys: of a mask with a row for each query: the axis of its keys, which all stay, in the order in which the ranks have them.
    :param whole: the part ``None`` is not cut.
    """

    dim: int
    parts: tuple[str | None, ...]
    keys: int | None = None
    whole: bool = False


@dataclass(frozen=True)
class Count:
    """For ``SplitPlan.modules``: an input that is a number of tokens. The module gets the number of those of this rank, and :class:`Joined` may
    name it as a part.
    """


@dataclass(frozen=True)
class Extent:
    """For ``SplitPlan.modules``: an input that is the extent of a grid of tokens along one of its axes, rows being along axis 0. The module gets those of
    a grid that has the tokens of this rank along axis 0.

    :param tokens: the input of that name, which the plan splits in the same forward, has these tokens.
    """

    axis: int
    tokens: str


@dataclass(frozen=True)
class Grid:
    """For ``SplitPlan.modules``: an input and the output of a module in which cells of a grid see their direct neighbours alone, such as a convolution of
    3x3. The cells are tokens, and :class:`Extent` has named the extents. The module gets the rows of this rank's tokens and those beside them, with
    tokens of other ranks; of its output the tokens of this rank are taken.

    :param dims: the axes of the grid, which follow each other.
    """

    dims: tuple[int, ...]


@dataclass(frozen=True)
class SplitPlan:
    """Where a transformer's tokens are split and gathered.

    :param modules: as ``_cp_plan`` of diffusers: for the name of a module (``""`` is the transformer, one ``*`` stands for all
        entries of a list and ``-1`` for the last) the inputs or outputs that are split, or the outputs that are gathered. Inputs may also be
        :class:`Joined`, :class:`Count`, :class:`Extent` or :class:`Grid`, and a dict or list of these for an input that is a dict or list, with ``None`` for an entry that
        stays whole.
    :param attention: patterns of the attention modules whose keys are split over the ranks. Each makes one call in a forward.
        Attention to tokens that every rank has, such as an unsplit prompt, is not among them.
    :param whole: inputs that stay whole where they have fewer axes than ``modules`` says, or one token.
    :param rows_alike: attention makes masks of its queries and keys, so of this rank's ones only, whose rows are alike but for those of
        padding, which no other token sees. The first row of each rank, of no padding, becomes the mask of its keys.
    :param each_entry: attention modules make one call for each entry of the batch, which is the first axis of ``hidden_states``.
    :param common_keys: whether these attention modules have keys of tokens that every rank has, before those of the split ones: as many as they
        have more keys than queries. Their causal calls, which do not count, are of such tokens alone.
    :param common_behind: the same of keys behind those of the tokens of the split input of this name. Every rank has their queries, too.
    :param sums: patterns of modules of linear attention: of these functions of PyTorch, called on a rank's tokens, the first call of each is a sum over
        tokens, which is summed over the ranks.
    :param where_given: modules of ``attention`` that make their calls only in forwards that are given the input of this name.
    :param least: tokens of each split input that each rank has at least.
    """

    modules: Mapping[str, Any]
    attention: tuple[str, ...] = ("*",)
    whole: frozenset[str] = frozenset()
    rows_alike: bool = False
    each_entry: bool = False
    common_keys: bool = False
    common_behind: str | None = None
    sums: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    where_given: Mapping[str, str] = field(default_factory=dict)
    least: int = 1


@dataclass(frozen=True)
class Known:
    """What the tests have verified of one class."""

    plan: SplitPlan
    #: Classes of processors of the attention modules that the plan names.
    processors: frozenset[str]
    #: Arguments of ``forward`` that must be absent or ``None``, with the reason.
    refused: Mapping[str, str] = field(default_factory=dict)
    #: Masks whose padding must follow the tokens, without holes.
    padded_behind: frozenset[str] = frozenset()
    #: Values of the configuration; others are refused, with the reason.
    config: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)

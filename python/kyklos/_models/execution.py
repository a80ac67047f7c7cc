"""How the split attention calls of a model run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from .._errors import RequestError
from .._group import Group
from .._arrays.torch import is_sharded


def execution(group: Group, mesh: str | None, strategy: str | None, wire: str | None, shares: object) -> dict[str, Any]:
    """Options of :meth:`Group.attend`. Shares by pace want a ring, on which a rank attends from its own tokens.

    :raises RequestError: options that do not fit the group or each other.
    """
    mesh = None if mesh == "auto" else mesh
    if isinstance(shares, str) and mesh is None and strategy is None:
        mesh = f"1x{group.size}"
    options: dict[str, Any] = {"mesh": mesh, "strategy": strategy, "wire": wire}
    has_ring(group, options)
    return options


def has_ring(group: Group, options: dict[str, Any]) -> bool:
    """Whether ranks attend from other tokens, and not only with other heads. In the plan of a small call: those of the model are not known
    yet."""
    call: dict[str, Any] = {"q_counts": [16] * group.size, "heads": 8 * group.size, "dim": 64}
    try:
        plan = group.plan(**call, **options)
    except RequestError as error:
        text = str(error)
        if options["mesh"] is None:
            # A ring takes most requests, so its refusal says most; nobody has named a mesh.
            ring = f"1x{group.size}"
            try:
                group.plan(**call, **{**options, "mesh": ring})
            except RequestError as of_ring:
                text = str(of_ring).replace(f" on mesh {ring}", "")
        # No vote has told the others.
        raise RequestError(text) from None
    return not plan.steps["mesh"].endswith("x1")


def checked_shares(shares: str | Sequence[float] | None, size: int) -> list[float]:
    """A number for each rank. Without shares, and until those by pace are known, all are equal."""
    if shares is None or isinstance(shares, str) and shares == "auto":
        return [1.0] * size
    if isinstance(shares, str):
        raise RequestError(f'shares {shares!r} are not known: use "auto", or a number for each rank')
    try:
        given = [float(share) for share in shares]
    except (TypeError, ValueError):
        raise RequestError(f"shares {shares!r}: give a number for each rank") from None
    if len(given) != size:
        raise RequestError(f"{len(given)} shares for {size} ranks: give each rank one")
    if not all(math.isfinite(share) and share > 0 for share in given):
        raise RequestError(f"shares {given}: each rank needs a positive one; form a group without ranks that shall compute nothing")
    return given


def refuse_sharded(module: torch.nn.Module) -> None:
    """Refuses weights that ``fully_shard`` has spread over processes: the model runs and is compared here without the hooks that gather them.

    :raises RequestError: on this rank.
    """
    if any(map(is_sharded, module.parameters())):
        raise RequestError(f"the weights of {type(module).__name__} are sharded (DTensor): call parallelize() first, then fully_shard()")


def share_out(tokens: int, shares: Sequence[float]) -> list[int]:
    """``tokens`` in the proportions of ``shares``, at least one for each: models fail on none."""
    total = sum(shares)
    exact = [(tokens - len(shares)) * share / total for share in shares]
    counts = [int(part) for part in exact]
    by_rest = sorted(range(len(shares)), key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in by_rest[: tokens - len(shares) - sum(counts)]:
        counts[rank] += 1
    return [count + 1 for count in counts]


def warn_of_copies(group: Group, module: torch.nn.Module) -> None:
    """Warns if the module is on an accelerator, and attention on another device."""
    device = next((parameter.device for parameter in module.parameters() if parameter.device.type != "meta"), torch.device("cpu"))
    if device.type != "cpu" and group.torch_device != str(device) and not (device.type == "cuda" and group.gpu == device.index):
        warnings.warn(
            f"rank {group.rank}: the model is on {device}, and its attention on {group.device}: each call copies its tensors; form the group "
            f'with device="torch:{device}"',
            stacklevel=4,
        )


def drops(model: torch.nn.Module) -> bool:
    """Whether a model drops numbers or layers, or adds noise, in training: by modules, or by probabilities that modules hold."""
    for module in model.modules():
        if not module.training:
            continue
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p:
            return True
        if any(("drop" in name or "jitter" in name) and isinstance(value, float) and value for name, value in vars(module).items()):
            return True
    return False

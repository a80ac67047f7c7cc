"""The plan of a transformer of diffusers, and which transformers are refused."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .._errors import RequestError
from ._calls import Calls
from ._known import KNOWN
from ._plan import Known, SplitPlan


def attention_modules(transformer: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules that have an attention processor, by name."""
    return {
        name: module for name, module in transformer.named_modules() if getattr(module, "processor", None) is not None
    }


def choose(transformer: torch.nn.Module, plan: SplitPlan | Mapping[str, Any] | None) -> Known:
    """The plan of this transformer.

    :raises RequestError: a transformer that is not known and has no ``plan``, or whose attention is out of reach.
    """
    name = type(transformer).__name__
    if isinstance(plan, SplitPlan):
        return Known(plan, frozenset())
    if plan is not None:
        return Known(SplitPlan(plan), frozenset())
    known = KNOWN.get(name)
    if known is None:
        also = "has a _cp_plan that is not verified" if getattr(transformer, "_cp_plan", None) else "has no plan"
        raise RequestError(
            f"{name} {also}, verified are {', '.join(KNOWN)}: pass plan=kyklos.diffusers.SplitPlan(...) and compare with the unsplit model"
        )
    config: Any = transformer.config if known.config else {}
    for option, (values, why) in known.config.items():
        if config[option] not in values:
            raise RequestError(f"{name} has {option}={config[option]!r}, which is not split, since {why}: use another checkpoint")
    for place, module in attention_modules(transformer).items():
        processor = type(module.processor).__name__
        if processor not in known.processors and _is_named(place, known.plan):
            raise RequestError(
                f"{place} of {name} has the processor {processor}, verified are {', '.join(sorted(known.processors))}: "
                "unload the adapter that set it, or pass plan=kyklos.diffusers.SplitPlan(...)"
            )
    return known


def split_attention_modules(transformer: torch.nn.Module, plan: SplitPlan) -> dict[str, torch.nn.Module]:
    """The attention modules that ``plan.attention`` and ``plan.sums`` name, in the order of the model."""
    modules = attention_modules(transformer)
    chosen = {name: module for name, module in modules.items() if _is_named(name, plan)}
    for pattern in (*plan.attention, *plan.sums):
        if not fnmatch.filter(modules, pattern):
            raise RequestError(
                f"no attention module of {type(transformer).__name__} matches {pattern!r}, it has {_some(modules)}: mend plan.attention"
            )
    others = {id(m.processor): name for name, m in modules.items() if name not in chosen}
    for name, module in chosen.items():
        if id(module.processor) in others:
            raise RequestError(
                f"{name} and {others[id(module.processor)]} share one processor, but only the keys of the first are split: "
                "give each module a processor of its own"
            )
    return chosen


def sums_of(place: str, plan: SplitPlan) -> tuple[Any, ...]:
    """The functions of a module of linear attention whose first results are sums over tokens."""
    return next((functions for pattern, functions in plan.sums.items() if fnmatch.fnmatchcase(place, pattern)), ())


def calls(name: str, modules: Iterable[str], plan: SplitPlan) -> Calls:
    """Those that a forward makes with these modules of split attention."""
    counts: Counter[str | None] = Counter()
    for place in modules:
        where = next((given for pattern, given in plan.where_given.items() if fnmatch.fnmatchcase(place, pattern)), None)
        counts[where] += len(sums_of(place, plan)) or 1
    always = counts.pop(None, 0)
    return Calls(name, always, {where: count for where, count in counts.items() if where is not None}, plan.each_entry)


def _is_named(place: str, plan: SplitPlan) -> bool:
    return any(fnmatch.fnmatchcase(place, pattern) for pattern in (*plan.attention, *plan.sums))


def find(transformer: torch.nn.Module, pattern: str) -> list[torch.nn.Module]:
    """The modules with this name, in which ``*`` stands for all entries of a list, and ``-1`` for the last one."""
    if pattern == "":
        return [transformer]
    modules = dict(transformer.named_modules())
    found = [module for name, module in modules.items() if name and _same_path(name, pattern, modules)]
    if not found:
        raise RequestError(
            f"{type(transformer).__name__} has no module {pattern!r}, which the plan names: mend the plan"
        )
    return found


def _same_path(name: str, pattern: str, modules: Mapping[str, Any]) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    if len(parts) != len(wanted):
        return False
    return all(
        w in ("*", p) or (w == "-1" and p.isdigit() and ".".join([*parts[:index], str(int(p) + 1)]) not in modules)
        for index, (p, w) in enumerate(zip(parts, wanted, strict=True))
    )


def _some(names: Mapping[str, Any]) -> str:
    first = list(names)[:4]
    return (", ".join(first) + (" ..." if len(names) > 4 else "")) or "none"
